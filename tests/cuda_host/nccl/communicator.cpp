#include "communicator.hpp"

#include <algorithm>

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
std::atomic<std::int64_t> num_connections{0};
std::atomic<std::int64_t> connection_bytes{0};

// Per peer, direction and channel: what NCCL takes between eight GPUs (NVIDIA/nccl issue 1685) by these.
constexpr std::int64_t kConnectionBytes = std::int64_t{7} << 20;
// To the next rank and from the one before; those of ncclSend and ncclRecv are others.
constexpr std::int64_t kConnectionsOfRing = 2;

void count_connections(const ncclComm& communicator, std::int64_t change) {
  num_connections += change;
  connection_bytes += change * communicator.num_channels * kConnectionBytes;
}

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

ncclComm& make_communicator(const std::string& name, int rank, int size, bool is_blocking, bool is_of_split) {
  auto* communicator = new ncclComm;
  communicator->name = name;
  communicator->rank = rank;
  communicator->size = size;
  communicator->device = cuda_host::current_device();
  communicator->is_blocking = is_blocking;
  communicator->is_of_split = is_of_split;
  communicator->num_channels = nccl_host_channels_per_pair(is_of_split, 1, size);  // all are on this host
  ++num_live;
  const std::lock_guard lock(registry().mutex);
  registry().communicators.push_back(communicator);
  return *communicator;
}

bool has_running(int device) {
  const std::lock_guard lock(registry().mutex);
  return std::ranges::any_of(registry().communicators, [device](const ncclComm* each) {
    return each->device == device && each->is_running.load(std::memory_order_relaxed) &&
           !each->is_aborted.load(std::memory_order_relaxed);
  });
}

void join(const ncclComm& communicator) {
  if (communicator.background.valid()) communicator.background.wait();
}

void close(ncclComm& communicator) {
  join(communicator);
  if (communicator.is_closed.exchange(true)) return;
  --num_live;
  const std::int64_t num_of_ring = communicator.has_collectives[kLargeAllGather] ? kConnectionsOfRing : 0;
  count_connections(communicator, -num_of_ring - static_cast<std::int64_t>(communicator.connections.size()));
  communicator.detach_if_unused();
}

void meet(ncclComm& communicator, const std::atomic<bool>& is_aborted) {
  Segment& segment = attach(communicator.name);
  communicator.segment = &segment;
  const auto size = static_cast<std::uint32_t>(communicator.size);
  std::uint32_t expected = 0;
  if (!segment.num_ranks.compare_exchange_strong(expected, size) && expected != size) {
    communicator.async_error = Result::invalid_argument;
    return;
  }
  ++segment.num_arrived;
  while (segment.num_arrived < size && !is_aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  unlink(communicator.name);
}

void split(ncclComm& parent, int color, ncclComm*& made, bool is_blocking) {
  cudaSetDevice(parent.device);
  Segment& segment = *parent.segment;
  segment.colors[parent.rank] = color;
  segment.has_color[parent.rank] = true;
  int rank = 0;
  int size = 0;
  for (int peer = 0; peer < parent.size; ++peer) {
    while (!segment.has_color[peer] && !parent.is_aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (segment.colors[peer] != color) continue;
    rank += peer < parent.rank ? 1 : 0;
    ++size;
  }
  if (parent.is_aborted) return;
  ncclComm& communicator =
      make_communicator(parent.name + "-" + std::to_string(color), rank, size, is_blocking, /*is_of_split=*/true);
  while (settings().held[parent.rank] && !parent.is_aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  meet(communicator, parent.is_aborted);
  std::atomic_ref(made).store(&communicator);
}

bool connect_peers(ncclComm& communicator, const std::vector<Message>& messages) {
  Segment& segment = *communicator.segment;
  const auto rank = static_cast<std::size_t>(communicator.rank);
  std::vector<const std::atomic<bool>*> awaited;
  for (const Message& message : messages) {
    const auto peer = static_cast<std::size_t>(message.peer);
    if (message.kind != 0) {
      const auto kind = static_cast<std::size_t>(message.kind);
      segment.has_collectives[rank][kind].store(true, std::memory_order_relaxed);
      if (!communicator.has_collectives[kind]) awaited.push_back(&segment.has_collectives[peer][kind]);
      continue;
    }
    if (!communicator.connections.emplace(message.peer, message.is_send).second) continue;
    count_connections(communicator, 1);
    auto& own = message.is_send ? segment.has_sender[rank][peer] : segment.has_receiver[peer][rank];
    own.store(true, std::memory_order_relaxed);
    awaited.push_back(message.is_send ? &segment.has_receiver[rank][peer] : &segment.has_sender[peer][rank]);
  }
  for (const std::atomic<bool>* other : awaited) {
    while (!other->load(std::memory_order_relaxed) && !communicator.is_aborted.load(std::memory_order_relaxed)) {
      cuda_host::nap(std::chrono::microseconds(200));
    }
  }
  for (std::size_t kind = 1; kind < kKinds; ++kind) {
    if (communicator.has_collectives[kind] || !segment.has_collectives[rank][kind].load(std::memory_order_relaxed)) {
      continue;
    }
    communicator.has_collectives[kind] = true;
    if (kind == kLargeAllGather) count_connections(communicator, kConnectionsOfRing);
  }
  return !awaited.empty();
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

void nccl_host_fail_rank(int is_of_split, int rank, int result) {
  set_last_error("a test let it fail");
  const std::lock_guard lock(registry().mutex);
  for (ncclComm* communicator : registry().communicators) {
    if (communicator->is_of_split == (is_of_split != 0) && communicator->rank == rank && !communicator->is_closed) {
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

void nccl_host_keep_error_queries(int keeps) { settings().keeps_error_queries = keeps != 0; }

int nccl_host_num_kept_error_queries() { return settings().num_kept_error_queries; }

void nccl_host_set_group_cost(int microseconds) { settings().group_cost_us = microseconds; }

void nccl_host_set_kernel_slots(int slots) { settings().kernel_slots = slots; }

void nccl_host_set_version(int version) { settings().version = version; }

long long nccl_host_num_connections() { return num_connections; }

long long nccl_host_connection_bytes() { return connection_bytes; }

}  // extern "C"
