#include "communicator.hpp"

#include "nccl_host.hpp"

namespace nccl_host {
namespace {

struct Texts {
  std::mutex mutex;
  std::string last_error;
  std::string misuse;
};
Texts& texts() {
  static auto& all = *new Texts;
  return all;
}

std::atomic<int> num_live{0};

// All that there ever were.
struct Registry {
  std::mutex mutex;
  std::vector<ncclComm*> communicators;
};
Registry& registry() {
  static auto& all = *new Registry;
  return all;
}

}  // namespace

Settings& settings() {
  static auto& all = *new Settings;
  return all;
}

void set_last_error(const std::string& text) {
  const std::lock_guard lock(texts().mutex);
  texts().last_error = text;
}

const char* last_error() {
  thread_local std::string copy;
  const std::lock_guard lock(texts().mutex);
  copy = texts().last_error;
  return copy.c_str();
}

void note_misuse(const std::string& text) {
  const std::lock_guard lock(texts().mutex);
  texts().misuse += text + "; ";
}

ncclComm& make_communicator(const std::string& name, int rank, int size, bool is_blocking) {
  auto* communicator = new ncclComm;
  communicator->name = name;
  communicator->rank = rank;
  communicator->size = size;
  communicator->device = cuda_host::current_device();
  communicator->is_blocking = is_blocking;
  ++num_live;
  const std::lock_guard lock(registry().mutex);
  registry().communicators.push_back(communicator);
  return *communicator;
}

void close(ncclComm& communicator) {
  if (communicator.background.joinable()) communicator.background.join();
  communicator.launch = nullptr;
  if (communicator.is_closed.exchange(true)) return;
  --num_live;
  communicator.detach_if_unused();
}

}  // namespace nccl_host

void ncclComm::detach_if_unused() {
  if (!is_closed.load(std::memory_order_relaxed) || num_leases.load(std::memory_order_relaxed) != 0) return;
  if (segment == nullptr || is_detached.exchange(true, std::memory_order_relaxed)) return;
  nccl_host::detach(name);
}

using namespace nccl_host;

extern "C" {

int nccl_host_live_communicators() { return num_live; }

const char* nccl_host_take_misuse() {
  thread_local std::string copy;
  const std::lock_guard lock(texts().mutex);
  copy = std::exchange(texts().misuse, {});
  return copy.c_str();
}

void nccl_host_fail_rank(int rank, int result) {
  set_last_error("a test let it fail");
  const std::lock_guard lock(registry().mutex);
  for (ncclComm* communicator : registry().communicators) {
    if (communicator->rank == rank && !communicator->is_closed) {
      communicator->async_error = static_cast<Result>(result);
    }
  }
}

void nccl_host_hold_rank(int rank, int held) { settings().held[rank] = held != 0; }

void nccl_host_set_link(double bytes_per_second, double latency_seconds) {
  settings().latency_seconds = latency_seconds;
  settings().bytes_per_second = bytes_per_second;
}

void nccl_host_set_launch_polls(int polls) { settings().launch_polls = polls; }

}  // extern "C"
