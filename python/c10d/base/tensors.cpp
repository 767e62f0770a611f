#include "tensors.hpp"

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {

namespace {

constexpr std::pair<at::ScalarType, DType> kTypes[] = {{at::kFloat, DType::float32},
                                                       {at::kBFloat16, DType::bfloat16},
                                                       {at::kHalf, DType::float16},
                                                       {at::kUInt16, DType::byte_pairs}};

}  // namespace

std::optional<DType> dtype_of(at::ScalarType type) {
  for (const auto& [scalar_type, dtype] : kTypes) {
    if (scalar_type == type) return dtype;
  }
  return std::nullopt;
}

at::ScalarType scalar_type_of(DType dtype) {
  for (const auto& [scalar_type, known] : kTypes) {
    if (known == dtype) return scalar_type;
  }
  throw ArgumentError("dtype: unknown value");
}

TensorView view_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.numel(), dtype_of(tensor).value()};
}

bool has_gpu() {
  // For fake tensors torch with CUDA replaces the guard by one that counts a device, where it finds no driver.
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  if (hooks.isBuilt()) return hooks.deviceCount() > 0;
  return c10::impl::hasDeviceGuardImpl(at::kCUDA) && c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount() > 0;
}

c10::Stream current_stream(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

StreamView current_view(at::Device device) {
  return device.is_cpu() ? StreamView{} : StreamView{current_stream(device).native_handle()};
}

std::int64_t elements_of(at::TensorList tensors) {
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += tensor.numel();
  return total;
}

void check_shapes(at::TensorList whole, at::TensorList shard, int size, const char* whole_name, const char* shard_name,
                  bool wider) {
  const at::ScalarType expected = shard[0].scalar_type();
  TORCH_CHECK_VALUE(whole[0].scalar_type() == expected || (wider && expected == at::kFloat), "zcomm: ", whole_name,
                    ": expected dtype ", expected, " as in ", shard_name, ", got ", whole[0].scalar_type());
  const std::int64_t total = elements_of(whole), own = elements_of(shard);
  TORCH_CHECK_VALUE(total == own * size, "zcomm: ", whole_name, ": expected ", size, " times the ", own,
                    " elements of ", shard_name, ", got ", total);
}

void check_one(at::TensorList tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "zcomm: ", name, ": expected one, got ", tensors.size());
}

void check_any(at::TensorList tensors, const char* name) {
  TORCH_CHECK_VALUE(!tensors.empty(), "zcomm: ", name, ": expected at least one tensor, got none");
}

void check_count(at::TensorList tensors, int size, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<std::size_t>(size), "zcomm: ", name,
                    ": expected a tensor for each of ", size, " ranks, got ", tensors.size());
}

void check_part(const at::Tensor& part, const at::Tensor& shard, const char* list_name, const char* shard_name) {
  TORCH_CHECK_VALUE(part.scalar_type() == shard.scalar_type() && part.numel() == shard.numel(), "zcomm: ", list_name,
                    ": expected tensors of ", shard.numel(), " ", shard.scalar_type(), " as in ", shard_name,
                    ", got one of ", part.numel(), " ", part.scalar_type());
}

void check_list(const std::vector<at::Tensor>& list, const at::Tensor& shard, int size, const char* list_name,
                const char* shard_name) {
  check_count(list, size, list_name);
  for (const at::Tensor& part : list) check_part(part, shard, list_name, shard_name);
}

void check_contiguous(const at::Tensor& tensor, const char* name, at::Device device) {
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.device() == device, "zcomm: ", name,
                    ": expected a contiguous tensor on ", device, ", got strides ", tensor.strides(), " on ",
                    tensor.device());
}

void check_no_gaps(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided) return;
  TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(),
                    "zcomm: tensor: expected values without gaps in memory, which Gloo would take for values, got ",
                    "strides ", tensor.strides(), " of sizes ", tensor.sizes(), ": pass tensor.contiguous()");
}

void check_in_order(at::TensorList tensors, const char* name) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cpu()) check_contiguous(tensor, name, tensor.device());
  }
}

void put_in_order(std::vector<at::Tensor>& inputs) {
  for (at::Tensor& input : inputs) input = in_order(input);
}

at::Tensor in_order(const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  return input.is_cpu() && input.layout() == at::kStrided ? input.contiguous() : input;
}

double factor_of(const ::c10d::ReduceOp& op, int size) {
  if (op.op_ == ::c10d::ReduceOp::AVG) return 1.0 / size;
  if (!is_premul(op)) return 1.0;
  const auto* supplement = static_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& tensors, double factor) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : tensors) results.push_back(tensor * factor);
  return results;
}

void scale_in_place(std::vector<at::Tensor>& tensors, double factor) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& tensor : tensors) tensor.mul_(factor);
}

}  // namespace zcomm::c10d_binding
