// Seeds of stochastic rounding.
#pragma once

#include <cstdint>

#include "hash.hpp"
#include "zcomm/call.hpp"
#include "zcomm/chunks.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"

namespace zcomm {

// Returns the seed of the next call, different for each call. Those of two first seeds rarely share one.
constexpr std::uint64_t next_seed(std::uint64_t seed) { return seed + kGoldenGamma; }

constexpr std::uint64_t mix_seed(std::uint64_t x) { return mix(x + kGoldenGamma); }

// Returns the random stream of a piece, different for each call, rank, `owner` and segment. `owner` tells a call's
// slots or messages apart: the owner of the sum, or the receiver.
template <class Format>
Rounding rounding_of(const Resources& r, int owner, const Piece<Format>& piece, BlockFormat format) {
  if (!format.stochastic) return {};
  std::uint64_t seed = mix_seed(r.seed);
  seed = mix_seed(seed ^ static_cast<std::uint64_t>(r.transport.rank()));
  seed = mix_seed(seed ^ static_cast<std::uint64_t>(owner));
  return {mix_seed(seed ^ piece.segment), piece.in_segment};
}

// Checks that no CUDA graph captures a stochastic format. The seed of a captured call is the same in all replays, so
// the same values would be rounded up in each.
inline void check_drawn_anew(const BlockFormat& format, StreamView stream) {
  check_argument(!format.stochastic || !is_capturing(stream),
                 "stream: expected one that runs, got one that records a CUDA graph: ", format,
                 " would round with the same random bits in all replays");
}

}  // namespace zcomm
