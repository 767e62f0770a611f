// Detection of changed shards: a hash in host memory, kernels in GPU memory.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <memory>

#include "bind.hpp"
#include "c10d/base/tensors.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/shard_mark.hpp"

namespace zcomm::c10d_binding {
namespace {

void check_shard(const at::Tensor& shard, at::Device device) {
  TORCH_CHECK_VALUE(shard.device() == device && shard.is_contiguous() && dtype_of(shard),
                    "zcomm: shard: expected contiguous float32, bfloat16, float16 or uint16 on ", device, ", got ",
                    shard.is_contiguous() ? "contiguous " : "", shard.scalar_type(), " on ", shard.device());
}

std::uint64_t hash_of(const at::Tensor& shard) {
  static const HostLosslessCodec codec;
  check_shard(shard, at::kCPU);
  const auto num_halves = static_cast<std::int64_t>(shard.nbytes() / 2);  // any bits can be hashed
  return codec.hash({static_cast<const std::byte*>(shard.data_ptr()), num_halves, DType::bfloat16});
}

// The functions of ShardMark run on torch's current stream of the shard's device.
std::unique_ptr<ShardMark> make_mark(at::Device device) {
  const c10::DeviceGuard on_device(device);
  return std::make_unique<ShardMark>(std::make_unique<TorchWorkspace>(device.type()));
}

void note(ShardMark& mark, const at::Tensor& shard) {
  check_shard(shard, shard.device());
  const c10::DeviceGuard on_device(shard.device());
  mark.note(view_of(shard), current_view(shard.device()));
}

void check(ShardMark& mark, const at::Tensor& shard, const at::Tensor& secondary) {
  check_shard(shard, secondary.device());
  TORCH_CHECK_VALUE(secondary.is_contiguous() && secondary.scalar_type() == at::kByte,
                    "zcomm: secondary: expected contiguous Byte, got ", secondary.scalar_type());
  const c10::DeviceGuard on_device(shard.device());
  mark.check(view_of(shard), {static_cast<std::byte*>(secondary.data_ptr()), secondary.nbytes()},
             current_view(shard.device()));
}

}  // namespace

void bind_shard_mark(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def("hash_of", &hash_of, py::arg("shard"), NoGil());
  module.def(
      "capture_of", [](at::Device device) { return device.is_cpu() ? 0 : capture_of(current_view(device)); },
      py::arg("device"));
  py::class_<ShardMark>(module, "ShardMark")
      .def(py::init(&make_mark), py::arg("device"), NoGil())
      .def("note", &note, py::arg("shard"), NoGil())
      .def("check", &check, py::arg("shard"), py::arg("secondary"), NoGil())
      .def_property_readonly("has_changed", &ShardMark::has_changed);
}

}  // namespace zcomm::c10d_binding
