// Kernels that bench/one_gpu measures or tries out: what memory bounds the codec's kernels by, and a meeting of ranks
// in each other's memory. nvcc compiles them, and g++ over tests/cuda_host.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "codec/cuda/memory.cuh"
#include "probes.hpp"

namespace {

using zcomm::gpu::kGroup;

constexpr unsigned kThreads = 128;  // of a CTA, as the codec has them
constexpr unsigned kGroups = 4;     // of a thread, as a decoder has them
constexpr std::int64_t kCtaBytes = kThreads * kGroups * kGroup * 4;

// What a decoder to kWords * 4 / 16 bytes a value stores: two lanes fill a sector.
template <int kWords>
__global__ void __launch_bounds__(kThreads) store_pairs(std::byte* data) {
  constexpr std::uint32_t kLaneBytes = kWords * 4;
  std::uint32_t words[kWords];
  for (int i = 0; i < kWords; ++i) words[i] = threadIdx.x + static_cast<std::uint32_t>(i);
  std::byte* const own = data + static_cast<std::int64_t>(blockIdx.x) * kCtaBytes;
  for (unsigned group = 0; group < kCtaBytes / (kThreads * kLaneBytes); ++group) {
    zcomm::gpu::store_words_in_pairs(words, own + (group * kThreads + threadIdx.x) * kLaneBytes, kLaneBytes);
  }
}

// The same bytes, each store of a warp in one piece.
__global__ void __launch_bounds__(kThreads) store_rows(std::byte* data) {
  auto* const own = reinterpret_cast<uint4*>(data + static_cast<std::int64_t>(blockIdx.x) * kCtaBytes);
  for (unsigned i = 0; i < kCtaBytes / (kThreads * 16); ++i) {
    own[i * kThreads + threadIdx.x] = {threadIdx.x, i, 0, 0};
  }
}

// Stores nothing unless every word of a lane's is the same as `never`, so that no load can be left out.
__global__ void __launch_bounds__(kThreads) read_rows(std::byte* data, unsigned never) {
  auto* const own = reinterpret_cast<uint4*>(data + static_cast<std::int64_t>(blockIdx.x) * kCtaBytes);
  unsigned all = ~0u;
  for (unsigned i = 0; i < kCtaBytes / (kThreads * 16); ++i) {
    const uint4 quad = own[i * kThreads + threadIdx.x];
    all &= ~((quad.x ^ never) | (quad.y ^ never) | (quad.z ^ never) | (quad.w ^ never));
  }
  if (all == ~0u) own[threadIdx.x] = {0, 0, 0, 0};
}

__host__ __device__ unsigned pattern_of(std::int64_t word, unsigned seed) {
  return (static_cast<unsigned>(word) + seed) * 2654435761u;
}

__global__ void write_pattern(unsigned* words, std::int64_t num_words, unsigned seed) {
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < num_words; i += std::int64_t{gridDim.x} * kThreads) {
    words[i] = pattern_of(i, seed);
  }
}

__global__ void count_differences(const unsigned* words, std::int64_t num_words, unsigned seed,
                                  unsigned long long* differences) {
  unsigned long long own = 0;
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < num_words; i += std::int64_t{gridDim.x} * kThreads) {
    own += words[i] != pattern_of(i, seed);
  }
  if (own > 0) atomicAdd(differences, own);
}

// Between processes of one GPU as between GPUs: visible to whoever acquires.
#ifdef __CUDACC__
__device__ void store_release(unsigned* word, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}
__device__ unsigned load_acquire(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ void rest() { __nanosleep(32); }
#else
void store_release(unsigned* word, unsigned value) { std::atomic_ref(*word).store(value, std::memory_order_release); }
unsigned load_acquire(const unsigned* word) {
  return std::atomic_ref(*const_cast<unsigned*>(word)).load(std::memory_order_acquire);
}
std::uint64_t nanoseconds() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
void rest() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
#endif

// Whether a peer has arrived for the `want`-th time, within the limit. It may be one ahead, never two.
__device__ bool wait_for(const unsigned* word, unsigned want, std::uint64_t limit_ns) {
  const std::uint64_t start = nanoseconds();
  for (unsigned polls = 1; static_cast<int>(load_acquire(word) - want) < 0; ++polls) {
    if (polls % 64 == 0 && nanoseconds() - start > limit_ns) return false;
    rest();
  }
  return true;
}

// One warp, a lane for each peer. All ranks launch it with as many rounds. Stops at a round that a peer did not come
// to.
__global__ void __launch_bounds__(32) meet(const __grid_constant__ Meeting meeting) {
  const int lane = static_cast<int>(threadIdx.x);
  const bool is_peer = lane < meeting.size && lane != meeting.rank;
  const unsigned first = load_acquire(meeting.epoch) + 1;  // all lanes read before lane 0 writes
  unsigned round = 0, missing = 0;
  for (; round < meeting.rounds && missing == 0; ++round) {
    if (is_peer) store_release(meeting.theirs[lane] + meeting.rank * kWordsApart, first + round);
    __syncwarp();  // all arrivals are out before anybody waits
    const unsigned* const arrived = meeting.arrived + lane * kWordsApart;
    if (is_peer && !wait_for(arrived, first + round, meeting.limit_ns)) missing = 1u << lane;
    for (int distance = 16; distance > 0; distance /= 2) missing |= __shfl_xor_sync(0xffffffffu, missing, distance);
  }
  if (lane == 0) {
    store_release(meeting.epoch, first + round - 1);
    store_release(meeting.missing, missing);
  }
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), std::int64_t num_ctas, unsigned threads, void* stream,
                   const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_ctas));
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

constexpr std::int64_t kPatternCtas = 256;

}  // namespace

cudaError_t run_floor(int floor, std::byte* data, std::int64_t num_bytes, void* stream) {
  if (num_bytes <= 0 || num_bytes % kCtaBytes != 0) return cudaErrorInvalidValue;
  const std::int64_t num_ctas = num_bytes / kCtaBytes;
  switch (floor) {
    case 0:
      return cudaMemsetAsync(data, 1, static_cast<std::size_t>(num_bytes), static_cast<cudaStream_t>(stream));
    case 1:
      return launch(store_pairs<16>, num_ctas, kThreads, stream, data);
    case 2:
      return launch(store_pairs<8>, num_ctas, kThreads, stream, data);
    case 3:
      return launch(store_rows, num_ctas, kThreads, stream, data);
    case 4:
      return launch(read_rows, num_ctas, kThreads, stream, data, 0xfeedbeefu);
  }
  return cudaErrorInvalidValue;
}

cudaError_t run_write_pattern(void* data, std::int64_t num_bytes, unsigned seed, void* stream) {
  return launch(write_pattern, kPatternCtas, kThreads, stream, static_cast<unsigned*>(data), num_bytes / 4, seed);
}

cudaError_t run_count_differences(const void* data, std::int64_t num_bytes, unsigned seed,
                                  unsigned long long* differences, void* stream) {
  return launch(count_differences, kPatternCtas, kThreads, stream, static_cast<const unsigned*>(data), num_bytes / 4,
                seed, differences);
}

cudaError_t run_meet(const Meeting& meeting, void* stream) { return launch(meet, 1, 32, stream, meeting); }
