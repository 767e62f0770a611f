// Replacements for NCCL's functions in a build without CUDA.
#include "cuda/missing.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm {

const NcclLibrary& load_nccl(const std::string&) { throw_cuda_missing(); }
NcclUniqueId make_nccl_unique_id() { throw_cuda_missing(); }
NcclMeeting meet_over_nccl(void*, std::uint64_t, std::chrono::milliseconds, const std::function<void()>&) {
  throw_cuda_missing();
}
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions&) { throw_cuda_missing(); }

}  // namespace zcomm
