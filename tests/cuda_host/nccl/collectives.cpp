// Collectives of the NCCL on the host: messages, and on what has arrived sums in float32, in the order of the ranks.
#include <algorithm>
#include <bit>
#include <cstring>

#include "communicator.hpp"
#include "front/request.hpp"

using nccl_host::add;
using zcomm::front::bytes_of_type;
using zcomm::nccl::CollConfig;

namespace {

constexpr std::size_t kLargeBytes = std::size_t{1} << 20;  // of all slots of a gather
constexpr unsigned kInt32 = 2;
constexpr unsigned kFloat32 = 7;
constexpr unsigned kBfloat16 = 9;
constexpr unsigned kMax = 2;

std::byte* writable(const void* data) { return static_cast<std::byte*>(const_cast<void*>(data)); }

float value_at(const std::byte* data, std::size_t i, unsigned type) {
  std::uint32_t bits = 0;
  if (type == kBfloat16) {
    std::memcpy(reinterpret_cast<std::byte*>(&bits) + 2, data + 2 * i, 2);
  } else {
    std::memcpy(&bits, data + 4 * i, 4);
  }
  return type == kInt32 ? static_cast<float>(static_cast<int>(bits)) : std::bit_cast<float>(bits);
}

void set_at(std::byte* data, std::size_t i, unsigned type, float value) {
  const auto bits =
      type == kInt32 ? static_cast<std::uint32_t>(static_cast<int>(value)) : std::bit_cast<std::uint32_t>(value);
  if (type == kBfloat16) {
    std::memcpy(data + 2 * i, reinterpret_cast<const std::byte*>(&bits) + 2, 2);
  } else {
    std::memcpy(data + 4 * i, &bits, 4);
  }
}

// The kind of messages of a call by the bytes of its slots.
int kind_of(std::size_t num_bytes, Comm comm) {
  const bool is_small = num_bytes * static_cast<std::size_t>(comm->size) < kLargeBytes;
  return is_small ? nccl_host::kSmallAllGather : nccl_host::kLargeAllGather;
}

// Sends a part to each peer, and calls `after` on the stream when theirs have arrived in `arrived`, one part after the
// other. `parts`: the first one that is sent; `stride`: to the next peer's.
Result exchange_parts(const std::byte* parts, std::size_t stride, std::byte* arrived, std::size_t num_bytes,
                      const char* function, Comm comm, Stream stream, std::function<void()> after) {
  if (comm->size == 1) return Result::invalid_usage;
  const int kind = kind_of(num_bytes, comm);
  ncclGroupStart();
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) continue;
    const auto p = static_cast<std::size_t>(peer);
    add(comm, stream, {true, kind, peer, writable(parts + p * stride), num_bytes}, function);
    add(comm, stream, {false, kind, peer, arrived + p * num_bytes, num_bytes, std::exchange(after, {})}, function);
  }
  return ncclGroupEnd();
}

Result reduce(const void* from, std::size_t stride, void* to, std::size_t count, unsigned type, unsigned op,
              const char* function, Comm comm, Stream stream) {
  const bool is_known = (type == kInt32 || type == kFloat32 || type == kBfloat16) &&
                        (op == zcomm::front::kSum || op == zcomm::front::kAverage || op == kMax);
  if (!is_known) return Result::invalid_argument;
  const std::size_t bytes = count * bytes_of_type(type);
  const auto arrived = std::make_shared<std::vector<std::byte>>(bytes * static_cast<std::size_t>(comm->size));
  const std::byte* const own = writable(from) + static_cast<std::size_t>(comm->rank) * stride;
  return exchange_parts(
      writable(from), stride, arrived->data(), bytes, function, comm, stream,
      [=, rank = comm->rank, size = comm->size] {
        std::memcpy(arrived->data() + static_cast<std::size_t>(rank) * bytes, own, bytes);
        for (std::size_t i = 0; i < count; ++i) {
          float sum = value_at(arrived->data(), i, type);
          for (int peer = 1; peer < size; ++peer) {
            const float value = value_at(arrived->data() + static_cast<std::size_t>(peer) * bytes, i, type);
            sum = op == kMax ? std::max(sum, value) : sum + value;
          }
          set_at(writable(to), i, type, op == zcomm::front::kAverage ? sum / static_cast<float>(size) : sum);
        }
      });
}

// Sends parts of the root to all others, or theirs to the root: parts that are a stride apart.
Result with_root(bool root_sends, void* parts, std::size_t stride, std::size_t num_bytes, int root,
                 const char* function, Comm comm, Stream stream) {
  if (root < 0 || root >= comm->size) return Result::invalid_argument;
  ncclGroupStart();
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank || (comm->rank != root && peer != root)) continue;
    std::byte* const part = writable(parts) + (comm->rank == root ? static_cast<std::size_t>(peer) * stride : 0);
    add(comm, stream, {root_sends == (comm->rank == root), kind_of(num_bytes, comm), peer, part, num_bytes}, function);
  }
  return ncclGroupEnd();
}

Result copy_own(void* to, const void* from, std::size_t num_bytes, Stream stream) {
  if (to == from) return Result::success;
  const auto kind = cudaMemcpyDeviceToDevice;
  return cudaMemcpyAsync(to, from, num_bytes, kind, static_cast<cudaStream_t>(stream)) == cudaSuccess
             ? Result::success
             : Result::unhandled_cuda_error;
}

// A library's own calls do not go through functions that others may replace.
Result all_to_all(const void* from, void* to, std::size_t count, unsigned type, Comm comm, Stream stream) {
  if (from == to) return Result::invalid_argument;
  const std::size_t bytes = count * bytes_of_type(type);
  const std::size_t own = static_cast<std::size_t>(comm->rank) * bytes;
  return exchange_parts(writable(from), bytes, writable(to), bytes, "ncclAlltoAll", comm, stream,
                        [=] { std::memcpy(writable(to) + own, writable(from) + own, bytes); });
}

Result broadcast(const void* from, void* to, std::size_t count, unsigned type, int root, Comm comm, Stream stream) {
  const std::size_t bytes = count * bytes_of_type(type);
  if (comm->rank == root) {
    if (const Result copied = copy_own(to, from, bytes, stream); copied != Result::success) return copied;
  }
  return with_root(true, to, 0, bytes, root, "ncclBroadcast", comm, stream);
}

}  // namespace

extern "C" {

Result ncclAlltoAll(const void* from, void* to, std::size_t count, unsigned type, Comm comm, Stream stream) {
  return all_to_all(from, to, count, type, comm, stream);
}

Result ncclAlltoAllConfig(const void* from, void* to, std::size_t count, unsigned type, Comm comm, Stream stream,
                          const CollConfig* config) {
  if (config->size != sizeof(CollConfig) || config->magic != zcomm::nccl::kMagic) return Result::invalid_argument;
  return all_to_all(from, to, count, type, comm, stream);
}

Result ncclBroadcast(const void* from, void* to, std::size_t count, unsigned type, int root, Comm comm, Stream stream) {
  return broadcast(from, to, count, type, root, comm, stream);
}

Result ncclBcast(void* data, std::size_t count, unsigned type, int root, Comm comm, Stream stream) {
  return broadcast(data, data, count, type, root, comm, stream);
}

Result ncclGather(const void* from, void* to, std::size_t count, unsigned type, int root, Comm comm, Stream stream) {
  const std::size_t bytes = count * bytes_of_type(type);
  if (comm->rank != root) return with_root(false, writable(from), 0, bytes, root, "ncclGather", comm, stream);
  const std::size_t own = static_cast<std::size_t>(root) * bytes;
  if (const Result copied = copy_own(writable(to) + own, from, bytes, stream); copied != Result::success) return copied;
  return with_root(false, to, bytes, bytes, root, "ncclGather", comm, stream);
}

Result ncclScatter(const void* from, void* to, std::size_t count, unsigned type, int root, Comm comm, Stream stream) {
  const std::size_t bytes = count * bytes_of_type(type);
  if (comm->rank != root) return with_root(true, to, 0, bytes, root, "ncclScatter", comm, stream);
  const std::byte* const own = writable(from) + static_cast<std::size_t>(root) * bytes;
  if (const Result copied = copy_own(to, own, bytes, stream); copied != Result::success) return copied;
  return with_root(true, writable(from), bytes, bytes, root, "ncclScatter", comm, stream);
}

Result ncclAllGather(const void* own, void* slots, std::size_t count, unsigned type, Comm comm, Stream stream) {
  const std::size_t bytes = count * bytes_of_type(type);
  std::byte* const own_slot = writable(slots) + static_cast<std::size_t>(comm->rank) * bytes;
  return exchange_parts(writable(own), 0, writable(slots), bytes, "ncclAllGather", comm, stream,
                        [=] { std::memmove(own_slot, own, bytes); });
}

Result ncclReduceScatter(const void* from, void* to, std::size_t count, unsigned type, unsigned op, Comm comm,
                         Stream stream) {
  return reduce(from, count * bytes_of_type(type), to, count, type, op, "ncclReduceScatter", comm, stream);
}

Result ncclAllReduce(const void* from, void* to, std::size_t count, unsigned type, unsigned op, Comm comm,
                     Stream stream) {
  return reduce(from, 0, to, count, type, op, "ncclAllReduce", comm, stream);
}

Result ncclAllReduceConfig(const void* from, void* to, std::size_t count, unsigned type, unsigned op, Comm comm,
                           Stream stream, const CollConfig* config) {
  if (config->size != sizeof(CollConfig) || config->magic != zcomm::nccl::kMagic) return Result::invalid_argument;
  return reduce(from, 0, to, count, type, op, "ncclAllReduceConfig", comm, stream);
}

}  // extern "C"
