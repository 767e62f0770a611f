// Replacements for the functions of CUDA and NCCL in a build without CUDA.
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm {
namespace {

[[noreturn]] void throw_cuda_missing() {
  throw Error(
      "this build of zcomm has no CUDA: it was built without nvcc, or with ZCOMM_CUDA=OFF. Put the CUDA toolkit's nvcc "
      "in PATH or CUDACXX, and install zcomm again");
}

}  // namespace

std::string cuda_toolkit() { return {}; }
std::string cuda_targets() { return {}; }
int cuda_device_count() { return 0; }
CudaDeviceGuard::CudaDeviceGuard(int) { throw_cuda_missing(); }
CudaDeviceGuard::~CudaDeviceGuard() = default;
RelaxedCaptureGuard::RelaxedCaptureGuard() : previous_(0) {}
RelaxedCaptureGuard::~RelaxedCaptureGuard() = default;
std::uint64_t capture_of(StreamView) { return 0; }
void wait_for(StreamView, StreamView) { throw_cuda_missing(); }
void copy(std::byte*, const std::byte*, std::size_t, StreamView) { throw_cuda_missing(); }
void synchronize(StreamView) { throw_cuda_missing(); }
std::unique_ptr<Codec> make_cuda_codec(Workspace&) { throw_cuda_missing(); }
std::unique_ptr<Workspace> make_cuda_workspace() { throw_cuda_missing(); }

std::pair<std::string, int> load_nccl(const std::string&) { throw_cuda_missing(); }
NcclUniqueId make_nccl_unique_id() { throw_cuda_missing(); }
NcclBootstrap bootstrap_over_nccl(void*, std::uint64_t, std::chrono::milliseconds, const std::function<void()>&, bool) {
  throw_cuda_missing();
}
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions&) { throw_cuda_missing(); }

}  // namespace zcomm
