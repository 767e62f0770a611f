#include "request.hpp"

#include <algorithm>

#include "c10d/base/tensors.hpp"

namespace zcomm::c10d_binding {
namespace {

// Tells whether a tensor may be complex: torch passes complex tensors as real views with a last dimension of 2. The
// base of such a view may be real, as that of view_as_complex(), and of inference tensors it is not known.
bool may_be_complex(const at::Tensor& tensor) {
  // One dimension of 2 values is no complex tensor's: ranks may hold different lengths of it.
  if (tensor.dim() > 1 && tensor.size(-1) == 2) return true;
  return !tensor.is_inference() && tensor.is_view() && tensor._base().is_complex();
}

bool has_equal_lengths(std::span<const at::Tensor> parts) {
  return std::ranges::all_of(parts, [&](const at::Tensor& part) { return part.numel() == parts[0].numel(); });
}

bool is_dense_on(const at::Tensor& tensor, at::Device device) {
  return tensor.layout() == at::kStrided && tensor.device() == device && tensor.is_contiguous();
}

}  // namespace

Call describe(Collective collective, Form form, const at::Tensor& shard, std::span<const at::Tensor> whole,
              const ::c10d::ReduceOp& op) {
  Call call;
  call.collective = collective;
  call.form = form;
  call.dtype = dtype_of(shard);
  call.floating_point = at::isFloatingType(shard.scalar_type()) || at::isComplexType(shard.scalar_type());
  // Parts of different lengths are no complex tensors, on whatever rank.
  const bool one_decides = collective != Collective::all_to_all || form != Form::list;
  const bool complex = one_decides ? may_be_complex(shard) : std::ranges::all_of(whole, may_be_complex);
  if (call.dtype && (!is_float(*call.dtype) || complex)) call.dtype.reset();
  call.contiguous = is_dense_on(shard, shard.device());
  call.on_host = shard.device().is_cpu();
  call.device = shard.device().index();
  call.linear = is_linear(op);
  for (const at::Tensor& part : whole) {
    call.num_bytes += part.layout() == at::kStrided ? static_cast<std::int64_t>(part.nbytes()) : 0;
    call.contiguous = call.contiguous && is_dense_on(part, shard.device());
  }
  // Every rank has the lengths of all parts, so all ranks find the same. Exchanges know other ways.
  if (form == Form::list && !is_exchange(collective) && !has_equal_lengths(whole)) call.contiguous = false;
  return call;
}

}  // namespace zcomm::c10d_binding
