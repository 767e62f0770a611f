// What a build without CUDA says.
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm {
namespace {

[[noreturn]] void missing() {
  throw Error(
      "this build of zcomm has no CUDA: no nvcc was found when it was built. Install the CUDA toolkit, or set CUDACXX "
      "to "
      "its nvcc, and install zcomm again");
}

}  // namespace

CudaBuild cuda_build() { return {}; }
int cuda_device_count() { return 0; }
CudaDeviceGuard::CudaDeviceGuard(int) { missing(); }
CudaDeviceGuard::~CudaDeviceGuard() = default;
bool is_capturing(StreamView) { missing(); }
void wait_for(StreamView, StreamView) { missing(); }
void synchronize(StreamView) { missing(); }
std::unique_ptr<Codec> make_cuda_codec(Workspace&) { missing(); }
std::unique_ptr<Workspace> make_cuda_workspace() { missing(); }
const NcclLibrary& load_nccl(const std::string&) { missing(); }
NcclUniqueId make_nccl_unique_id() { missing(); }
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions&) { missing(); }

}  // namespace zcomm
