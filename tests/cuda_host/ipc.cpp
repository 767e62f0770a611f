// Memory of other processes: an exported allocation becomes one of a file without a name, which others map.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "runtime.hpp"

namespace {

struct Export {
  int file = -1;
  std::size_t num_bytes = 0;
};
struct Handle {
  pid_t process;
  int file;
  std::size_t num_bytes;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

struct Tables {
  std::mutex mutex;
  std::map<void*, Export> exported;
  std::map<void*, std::size_t> opened;
};
Tables& tables() {
  static auto& all = *new Tables;
  return all;
}

constexpr int kAccess = PROT_READ | PROT_WRITE;

// Puts the bytes of an allocation into a file, and the file in the place of its pages.
Export share(void* data, std::size_t num_bytes) {
  const int file = memfd_create("cuda", MFD_CLOEXEC);
  const auto size = static_cast<ssize_t>(num_bytes);
  if (file >= 0 && write(file, data, num_bytes) == size &&
      mmap(data, num_bytes, kAccess, MAP_SHARED | MAP_FIXED, file, 0) == data) {
    return {file, num_bytes};
  }
  if (file >= 0) close(file);
  return {};
}

}  // namespace

void cuda_host::withdraw(void* data) {
  const std::lock_guard lock(tables().mutex);
  const auto found = tables().exported.find(data);
  if (found == tables().exported.end()) return;
  mmap(data, found->second.num_bytes, kAccess, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  close(found->second.file);
  tables().exported.erase(found);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  const cuda_host::Allocation allocation = cuda_host::find_allocation(data);
  const bool is_whole = allocation.data == data && data != nullptr && allocation.num_bytes % 4096 == 0;
  if (!is_whole) return cuda_host::report(cudaErrorInvalidValue);
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  const std::lock_guard lock(tables().mutex);
  Export& own = tables().exported[data];
  if (own.file < 0) own = share(data, allocation.num_bytes);
  if (own.file < 0) {
    tables().exported.erase(data);
    return cuda_host::report(cudaErrorMapBufferObjectFailed);
  }
  const Handle made{getpid(), own.file, own.num_bytes};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &made, sizeof made);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned flags) {
  Handle given{};
  std::memcpy(&given, &handle, sizeof given);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return cuda_host::report(cudaErrorInvalidValue);
  if (given.process == getpid()) return cuda_host::report(cudaErrorInvalidContext);  // its own
  const std::string path = "/proc/" + std::to_string(given.process) + "/fd/" + std::to_string(given.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return cuda_host::report(cudaErrorMapBufferObjectFailed);
  void* const mapped = mmap(nullptr, given.num_bytes, kAccess, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return cuda_host::report(cudaErrorMapBufferObjectFailed);
  const std::lock_guard lock(tables().mutex);
  tables().opened[mapped] = given.num_bytes;
  *data = mapped;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* data) {
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  const std::lock_guard lock(tables().mutex);
  const auto found = tables().opened.find(data);
  if (found == tables().opened.end()) return cuda_host::report(cudaErrorInvalidValue);
  munmap(data, found->second);
  tables().opened.erase(found);
  return cudaSuccess;
}
