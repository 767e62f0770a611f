#include "segment.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <map>
#include <mutex>
#include <stdexcept>

namespace nccl_host {
namespace {

struct Mapping {
  Segment* segment = nullptr;
  int num_users = 0;
};

std::mutex mutex;
std::map<std::string, Mapping>& mappings() {
  static auto& all = *new std::map<std::string, Mapping>;
  return all;
}

Segment* map_shared(const std::string& name) {
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0) throw std::runtime_error("shm_open " + name);
  void* memory = MAP_FAILED;
  // Sparse, and zero: the initial value of all that is in there.
  if (ftruncate(file, sizeof(Segment)) == 0) {
    memory = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap " + name);
  return static_cast<Segment*>(memory);
}

}  // namespace

void Segment::ring(int rank) {
  doorbells[rank].fetch_add(1, std::memory_order_relaxed);
  syscall(SYS_futex, &doorbells[rank], FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::sleep(int rank, std::uint32_t seen) {
  const timespec longest{0, 2'000'000};
  syscall(SYS_futex, &doorbells[rank], FUTEX_WAIT, seen, &longest, nullptr, 0);
}

Segment& attach(const std::string& name) {
  const std::lock_guard lock(mutex);
  Mapping& mapping = mappings()[name];
  if (mapping.num_users == 0) mapping.segment = map_shared(name);
  ++mapping.num_users;
  return *mapping.segment;
}

void detach(const std::string& name) {
  const std::lock_guard lock(mutex);
  const auto found = mappings().find(name);
  if (--found->second.num_users > 0) return;
  munmap(found->second.segment, sizeof(Segment));
  mappings().erase(found);
}

void unlink(const std::string& name) { shm_unlink(name.c_str()); }

}  // namespace nccl_host
