// Byte copies: values that are sent exactly, and the zeros that pad a wire.
#pragma once

#include "codec/cuda/memory.cuh"
#include "codec/cuda/tables.cuh"

namespace zcomm::gpu {

inline constexpr std::uint32_t kCopyBytes = 16;  // of the target, written by a thread at once
inline constexpr std::uint32_t kCopyUnroll = 4;  // such writes per thread, all read before any is written

// Copies the piece's part of 16 bytes that are aligned in the target. `begin` is their offset in the piece, negative
// for the first ones. A piece is aligned to 2 bytes and has an even length.
ZCOMM_DEVICE void copy_quad(const CopyPiece& piece, std::int32_t begin) {
  const auto num_bytes = static_cast<std::int32_t>(piece.num_bytes);
  const std::byte* const source = piece.source + begin;
  const bool is_whole = begin >= 0 && begin + 16 <= num_bytes;
  if (is_whole && is_aligned(source)) {
    std::uint32_t words[4];
    load_words(source, words);
    store_words(words, piece.target + begin);
    return;
  }
  if (begin >= 16 && begin + 32 <= num_bytes) {  // the 16-byte words around the source are in the piece, too
    std::uint32_t window[8];
    std::uint32_t words[4];
    const auto offset = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(source) % 16);
    load_words(source - offset, window);
    cut_window(window, offset, words);
    store_words(words, piece.target + begin);
    return;
  }
  const auto end = static_cast<std::int32_t>(piece.num_bytes + piece.num_zeros);
#pragma unroll
  for (std::int32_t i = 0; i < 16; i += 2) {
    const std::int32_t place = begin + i;
    if (place < 0 || place >= end) continue;
    *reinterpret_cast<std::uint16_t*>(piece.target + place) =
        place < num_bytes ? *reinterpret_cast<const std::uint16_t*>(piece.source + place) : std::uint16_t{0};
  }
}

template <class = void>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyTable table) {
  const std::uint32_t index = table.find();
  const CopyPiece& piece = table.pieces[index];
  const std::uint32_t first = (blockIdx.x - table.first_cta[index]) * (kCopyUnroll * kThreads);
  // Bytes before the piece, of the first 16 aligned ones in the target.
  const auto offset = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(piece.target) % kCopyBytes);
  const bool is_whole = (first + kCopyUnroll * kThreads) * kCopyBytes <= piece.num_bytes;
  if (is_whole && offset == 0 && is_aligned(piece.source)) {
    std::uint32_t words[kCopyUnroll][4];
#pragma unroll
    for (std::uint32_t u = 0; u < kCopyUnroll; ++u) {
      load_words(piece.source + (first + u * kThreads + threadIdx.x) * kCopyBytes, words[u]);
    }
#pragma unroll
    for (std::uint32_t u = 0; u < kCopyUnroll; ++u) {
      store_words(words[u], piece.target + (first + u * kThreads + threadIdx.x) * kCopyBytes);
    }
    return;
  }
#pragma unroll 1
  for (std::uint32_t u = 0; u < kCopyUnroll; ++u) {
    copy_quad(piece, static_cast<std::int32_t>((first + u * kThreads + threadIdx.x) * kCopyBytes - offset));
  }
}

}  // namespace zcomm::gpu
