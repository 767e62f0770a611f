// Runs CUDA kernels, as they are, on a host: the part of the language that zcomm's kernels use, and an executor whose
// CUDA threads are fibers. Covers indices, tails, packing, shuffles and barriers. Does not cover timing, the order of
// memory accesses between CTAs, and instructions written in PTX, whose C++ twins run here.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)
// One CTA runs at a time on a thread of the host. As on a GPU, values of the CTA before it may be left in there.
#define __shared__ static thread_local

struct dim3 {
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned x, y, z;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) [[gnu::may_alias]] uint2 {
  unsigned x, y;
};
struct alignas(16) [[gnu::may_alias]] uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

[[gnu::visibility("default")]] inline thread_local uint3 threadIdx{};
[[gnu::visibility("default")]] inline thread_local uint3 blockIdx{};
[[gnu::visibility("default")]] inline thread_local dim3 blockDim;
[[gnu::visibility("default")]] inline thread_local dim3 gridDim;

namespace simt {

// Calls kernel(arguments...) once for each thread of each CTA; CTAs run one after another on the calling thread, in
// which any number of threads of the host can do the same. Prints the reason and aborts where a GPU would hang: where
// some threads of a warp or CTA wait for others that do not come.
void run(dim3 grid, dim3 block, const std::function<void()>& thread);

template <class... Parameters, class... Arguments>
void run(dim3 grid, dim3 block, std::size_t shared_bytes, void (*kernel)(Parameters...),
         const Arguments&... arguments) {
  static_cast<void>(shared_bytes);  // `extern __shared__` is not there, so nothing can ask for them
  run(grid, block, [&] { kernel(arguments...); });
}

// Waits until all threads of `mask` that have not exited are here, then returns the value of lane `source`.
std::uint64_t exchange(std::uint32_t mask, std::uint64_t value, unsigned source);
void barrier();
unsigned lane();

template <class T>
T exchange_as(std::uint32_t mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace simt

// What other kernels, and the host, may change at the same time.
inline unsigned atomicOr(unsigned* word, unsigned bits) { return std::atomic_ref(*word).fetch_or(bits); }
inline unsigned long long atomicAdd(unsigned long long* word, unsigned long long number) {
  return std::atomic_ref(*word).fetch_add(number);
}

inline void __syncthreads() { simt::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { simt::exchange(mask, 0, simt::lane()); }

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const unsigned source = simt::lane() ^ static_cast<unsigned>(lane_mask);
  const bool is_inside = source / static_cast<unsigned>(width) <= simt::lane() / static_cast<unsigned>(width);
  return simt::exchange_as(mask, value, is_inside ? source : simt::lane());
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const bool is_inside = simt::lane() % static_cast<unsigned>(width) >= delta;
  return simt::exchange_as(mask, value, is_inside ? simt::lane() - delta : simt::lane());
}

inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

// Files that call these are compiled without contraction.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float value) { return std::sqrt(value); }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t{a} * b) >> 32); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __clzll(long long bits) { return std::countl_zero(static_cast<unsigned long long>(bits)); }
// The place of the lowest bit from 1 on; 0 if there is none.
inline int __ffs(int bits) { return bits == 0 ? 0 : std::countr_zero(static_cast<unsigned>(bits)) + 1; }
inline int __ffsll(long long bits) {
  return bits == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(bits)) + 1;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((((std::uint64_t{high} << 32) | low) << (shift % 32)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((std::uint64_t{high} << 32) | low) >> (shift % 32));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = (std::uint64_t{high} << 32) | low;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned byte = static_cast<unsigned>(bytes >> (8 * ((selector >> (4 * i)) & 7u))) & 0xffu;
    const bool is_sign = (selector >> (4 * i)) & 8u;
    result |= (is_sign ? (byte >= 0x80u ? 0xffu : 0u) : byte) << (8 * i);
  }
  return result;
}
