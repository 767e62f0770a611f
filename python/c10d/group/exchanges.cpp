// Exchanges and broadcasts, which are compressed if the options name a format for them.
#include <numeric>

#include "c10d/base/tensors.hpp"
#include "process_group.hpp"

namespace zcomm::c10d_binding {
namespace {

using Lengths = std::vector<std::int64_t>;

void check_same_dtype(at::TensorList tensors, const char* name, const at::Tensor& like, const char* like_name) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type(), "zcomm: ", name, ": expected dtype ",
                      like.scalar_type(), " as in ", like_name, ", got ", tensor.scalar_type());
  }
}

// Refuses tensors that only this rank would send exactly: peers compress the call, whatever the layout is here.
void check_layout(const Request& request, int size) {
  const Call& call = request.call;
  Call elsewhere = call;
  elsewhere.contiguous = true;
  TORCH_CHECK_VALUE(call.contiguous || decide(request.settings.policy, elsewhere, size) != Verdict::compressed,
                    "zcomm: tensors: expected contiguous ones on one device, as ", to_string(call.collective),
                    " is compressed, got others");
}

// Returns the elements of each rank in a tensor that is split along its first dimension: equally without `splits`.
Lengths split_lengths(const at::Tensor& tensor, const Lengths& splits, int size, const char* name) {
  const std::int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  const std::int64_t row_elements = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, "zcomm: ", name, ": expected a multiple of ", size, " rows, got ", rows);
    return Lengths(static_cast<std::size_t>(size), rows / size * row_elements);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(size), "zcomm: ", name,
                    "_split_sizes: expected one for each of ", size, " ranks, got ", splits.size());
  Lengths lengths;
  for (const std::int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, "zcomm: ", name, "_split_sizes: expected 0 or more rows for each rank, got ", split);
    lengths.push_back(split * row_elements);
  }
  const std::int64_t total = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  TORCH_CHECK_VALUE(total == rows, "zcomm: ", name, "_split_sizes: expected a sum of the ", rows, " rows of ", name,
                    ", got ", total);
  return lengths;
}

Lengths lengths_of(const std::vector<at::Tensor>& tensors) {
  Lengths lengths;
  for (const at::Tensor& tensor : tensors) lengths.push_back(tensor.numel());
  return lengths;
}

}  // namespace

WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& given, std::vector<std::int64_t>& output_splits,
                                    std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) {
  at::Tensor input = in_order(given);
  if (getSize() > 1) check_in_order(output, "output");
  const Call call = describe(Collective::all_to_all, Form::single, output, {&input, 1});
  Request request = request_of(call, ::c10d::OpType::ALLTOALL_BASE, {input}, {output}, opts);
  check_layout(request, getSize());
  const auto check = [&] {
    check_same_dtype(output, "output", input, "input");
    request.sent = split_lengths(input, input_splits, getSize(), "input");
    request.received = split_lengths(output, output_splits, getSize(), "output");
  };
  return enter(std::move(request), check, [&](::c10d::Backend& inner) {
    return inner.alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

WorkPtr ProcessGroup::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                               const ::c10d::AllToAllOptions& opts) {
  check_count(inputs, getSize(), "input_tensor_list");
  check_count(outputs, getSize(), "output_tensor_list");
  put_in_order(inputs);
  Call call = describe(Collective::all_to_all, Form::list, inputs[0], inputs);
  const Call received = describe(Collective::all_to_all, Form::list, inputs[0], outputs);
  call.contiguous = call.contiguous && received.contiguous;
  if (!call.dtype) call.dtype = received.dtype;  // empty of complex tensors, too
  Request request = request_of(call, ::c10d::OpType::ALLTOALL, inputs, outputs, opts);
  check_layout(request, getSize());
  const auto check = [&] {
    check_same_dtype(inputs, "input_tensor_list", inputs[0], "the first tensor");
    check_same_dtype(outputs, "output_tensor_list", inputs[0], "input_tensor_list");
    request.sent = lengths_of(inputs);
    request.received = lengths_of(outputs);
  };
  return enter(std::move(request), check,
               [&](::c10d::Backend& inner) { return inner.alltoall(outputs, inputs, opts); });
}

WorkPtr ProcessGroup::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                             const ::c10d::GatherOptions& opts) {
  check_one(inputs);
  put_in_order(inputs);
  const bool is_root = opts.rootRank == getRank();
  const std::vector<at::Tensor> gathered = is_root && outputs.size() == 1 ? outputs[0] : std::vector<at::Tensor>();
  Call call = describe(Collective::gather, Form::list, inputs[0], gathered);
  call.num_bytes = static_cast<std::int64_t>(inputs[0].nbytes()) * getSize();
  Request request = request_of(call, ::c10d::OpType::GATHER, inputs, gathered, opts);
  check_layout(request, getSize());
  const auto check = [&] {
    if (is_root) check_list(gathered, inputs[0], getSize(), "gather_list", "tensor");
  };
  return enter(std::move(request), check, [&](::c10d::Backend& inner) { return inner.gather(outputs, inputs, opts); });
}

#if ZCOMM_HAS_GATHER_SINGLE
// Gathers into the parts of one tensor, because Gloo has no gather_single.
WorkPtr ProcessGroup::gather_single(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts) {
  std::vector<std::vector<at::Tensor>> outputs;
  if (opts.rootRank == getRank()) {
    check_shapes(output, input, getSize(), "output", "input");
    check_contiguous(output, "output", input.device());
    const at::NoGradGuard no_grad;
    outputs.emplace_back();
    for (const at::Tensor& part : output.view({getSize(), input.numel()}).unbind()) {
      outputs[0].push_back(part.view(input.sizes()));
    }
  }
  std::vector<at::Tensor> inputs{input};
  return gather(outputs, inputs, opts);
}
#endif

WorkPtr ProcessGroup::scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                              const ::c10d::ScatterOptions& opts) {
  check_one(outputs);
  if (getSize() > 1) check_in_order(outputs, "tensor");
  if (!inputs.empty()) put_in_order(inputs[0]);
  const bool is_root = opts.rootRank == getRank();
  const std::vector<at::Tensor> scattered = is_root && inputs.size() == 1 ? inputs[0] : std::vector<at::Tensor>();
  Call call = describe(Collective::scatter, Form::list, outputs[0], scattered);
  call.num_bytes = static_cast<std::int64_t>(outputs[0].nbytes()) * getSize();
  Request request = request_of(call, ::c10d::OpType::SCATTER, scattered, outputs, opts);
  check_layout(request, getSize());
  const auto check = [&] {
    if (is_root) check_list(scattered, outputs[0], getSize(), "scatter_list", "tensor");
  };
  return enter(std::move(request), check, [&](::c10d::Backend& inner) { return inner.scatter(outputs, inputs, opts); });
}

WorkPtr ProcessGroup::broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& opts) {
  check_one(tensors);
  if (getSize() > 1) check_no_gaps(tensors[0]);
  const Call call = describe(Collective::broadcast, Form::single, tensors[0], tensors);
  Request request = request_of(call, ::c10d::OpType::BROADCAST, tensors, tensors, opts);
  check_layout(request, getSize());
  return enter(std::move(request), [] {}, [&](::c10d::Backend& inner) { return inner.broadcast(tensors, opts); });
}

}  // namespace zcomm::c10d_binding
