// Detection of changed shards: a hash in host memory, kernels in GPU memory.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <optional>

#include "bind.hpp"
#include "tensors.hpp"
#include "torch_workspace.hpp"
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

// Runs on torch's current stream of the device.
class BoundMark {
 public:
  explicit BoundMark(at::Device device) : device_(device) {
    const c10::DeviceGuard on_device(device);
    mark_.emplace(std::make_unique<TorchWorkspace>(device.type()));
  }

  void note(const at::Tensor& shard) {
    check_shard(shard, device_);
    const c10::DeviceGuard on_device(device_);
    mark_->note(view_of(shard), current_view(device_));
  }

  void check(const at::Tensor& shard, const at::Tensor& kept) {
    check_shard(shard, device_);
    TORCH_CHECK_VALUE(kept.device() == device_ && kept.is_contiguous() && kept.scalar_type() == at::kByte,
                      "zcomm: kept: expected contiguous Byte on ", device_, ", got ", kept.scalar_type(), " on ",
                      kept.device());
    const c10::DeviceGuard on_device(device_);
    mark_->check(view_of(shard), {static_cast<std::byte*>(kept.data_ptr()), kept.nbytes()}, current_view(device_));
  }

  bool has_changed() const { return mark_->has_changed(); }

 private:
  at::Device device_;
  std::optional<ShardMark> mark_;
};

}  // namespace

void bind_shard_mark(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def("hash_of", &hash_of, py::arg("shard"), NoGil());
  module.def(
      "capture_of", [](at::Device device) { return device.is_cpu() ? 0 : capture_of(current_view(device)); },
      py::arg("device"));
  py::class_<BoundMark>(module, "ShardMark")
      .def(py::init<at::Device>(), py::arg("device"), NoGil())
      .def("note", &BoundMark::note, py::arg("shard"), NoGil())
      .def("check", &BoundMark::check, py::arg("shard"), py::arg("kept"), NoGil())
      .def_property_readonly("has_changed", &BoundMark::has_changed);
}

}  // namespace zcomm::c10d_binding
