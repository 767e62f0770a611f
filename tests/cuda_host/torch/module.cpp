// What the Python tests use: see tests/gpu/stand_in.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>
//
#include <pybind11/stl.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>

#include "cuda_host.hpp"
#include "host_torch.hpp"

namespace py = pybind11;

namespace cuda_host::torch {
namespace {

void check(cudaError_t error) { TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error)); }

// What was freed while streams may still use it. On a GPU the caching allocator would hand it to later work on the same
// stream only; here it would be the host's at once.
std::mutex freed_mutex;
std::vector<at::Tensor> freed;

void synchronize() {
  check(cudaDeviceSynchronize());
  std::vector<at::Tensor> unused;
  const std::lock_guard lock(freed_mutex);
  unused.swap(freed);
}

// The memory of `tensor` as a tensor on cuda:0, which keeps it alive.
at::Tensor as_cuda(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "expected a contiguous tensor, got another");
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .target_device(at::Device(at::kCUDA, 0))
      .options(tensor.options().device(at::Device(at::kCUDA, 0)))
      .deleter([tensor](void*) {
        const std::lock_guard lock(freed_mutex);
        freed.push_back(tensor);
      })
      .make_tensor();
}

struct Gate {
  std::promise<void> opened;
};
std::vector<std::shared_ptr<Gate>>& gates() {
  static std::vector<std::shared_ptr<Gate>> closed;
  return closed;
}

struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ~Graph() {
    if (exec != nullptr) cudaGraphExecDestroy(exec);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
};

}  // namespace
}  // namespace cuda_host::torch

PYBIND11_MODULE(cuda_host_torch, module) {
  namespace host = cuda_host::torch;
  host::install_allocator();
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("as_cuda", &host::as_cuda);
  module.def("set_stream", &host::set_stream);
  module.def("take_log", &host::take_log);
  module.def("restart_log", &host::restart_log);
  module.def("num_live_pieces", &host::num_live_pieces);
  module.def("num_made_pieces", &host::num_made_pieces);
  module.def("bytes_made", &host::num_made_bytes);
  module.def("set_memory_limit", &host::set_memory_limit);
  module.def("num_creations", &cuda_host::num_creations);
  module.def("num_host_waits", [] { return cuda_host::calls().host_waits; });
  module.def("set_delays", [](std::uint32_t seed, int microseconds) {
    cuda_host::set_delays(seed, std::chrono::microseconds(microseconds));
  });
  module.def("keep_event_queries", &cuda_host::keep_event_queries);
  module.def("num_kept_event_queries", &cuda_host::num_kept_event_queries);
  module.def("synchronize", &host::synchronize, no_gil);
  // A kernel that runs until open_gate().
  module.def("close_gate", [] {
    auto gate = std::make_shared<host::Gate>();
    host::gates().push_back(gate);
    host::check(cuda_host::enqueue(host::stream(host::current_stream()), [gate] { gate->opened.get_future().wait(); }));
  });
  module.def("open_gate", [] {
    for (const auto& gate : host::gates()) gate->opened.set_value();
    host::gates().clear();
  });
  // A kernel: target = source, on the current stream.
  module.def("copy", [](const at::Tensor& target, const at::Tensor& source) {
    host::check(cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes(), cudaMemcpyDeviceToDevice,
                                host::stream(host::current_stream())));
  });
  py::class_<host::Graph>(module, "Graph").def("replay", [](host::Graph& self) {
    host::check(cudaGraphLaunch(self.exec, host::stream(host::current_stream())));
  });
  module.def("begin_capture", [] {
    host::check(cudaStreamBeginCapture(host::stream(host::current_stream()), cudaStreamCaptureModeGlobal));
  });
  module.def("end_capture", [] {
    auto graph = std::make_unique<host::Graph>();
    host::check(cudaStreamEndCapture(host::stream(host::current_stream()), &graph->graph));
    host::check(cudaGraphInstantiate(&graph->exec, graph->graph));
    return graph;
  });
}
