// Bit-sliced arithmetic: plane i holds bit i of 32 small numbers, so that one instruction works on all of them. A
// lane's block is two halves of 32 values.
#pragma once

#include "codec/cuda/lossless_tile.cuh"

namespace zcomm::gpu {

inline constexpr std::uint32_t kHalfWords = kBlockWords / 2;

// Repeats bit `bit` of `number` in all places.
ZCOMM_DEVICE std::uint32_t plane_of(std::uint32_t number, std::uint32_t bit) { return 0 - (number >> bit & 1u); }

// --- From values to planes and back

// Moves byte i of the four words to word i.
ZCOMM_DEVICE void transpose_bytes(std::uint32_t& a, std::uint32_t& b, std::uint32_t& c, std::uint32_t& d) {
  const std::uint32_t low_ab = __byte_perm(a, b, 0x5140), high_ab = __byte_perm(a, b, 0x7362);
  const std::uint32_t low_cd = __byte_perm(c, d, 0x5140), high_cd = __byte_perm(c, d, 0x7362);
  a = __byte_perm(low_ab, low_cd, 0x5410), b = __byte_perm(low_ab, low_cd, 0x7632);
  c = __byte_perm(high_ab, high_cd, 0x5410), d = __byte_perm(high_ab, high_cd, 0x7632);
}

template <std::uint32_t kDistance, std::uint32_t kLow>
ZCOMM_DEVICE void exchange_bits(std::uint32_t& a, std::uint32_t& b) {
  const std::uint32_t low = (a & kLow) | (b << kDistance & ~kLow);
  b = (a >> kDistance & kLow) | (b & ~kLow);
  a = low;
}

// Planes of up to 8 bits of 32 values.
struct Bytes {
  // Converts between words and planes, in either direction. Byte k of word i is that of value 8 k + i.
  ZCOMM_DEVICE void transpose() {
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) exchange_bits<4, 0x0f0f0f0fu>(planes[i], planes[i + 4]);
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      exchange_bits<2, 0x33333333u>(planes[i + i / 2 * 2], planes[i + i / 2 * 2 + 2]);
    }
#pragma unroll
    for (std::uint32_t i = 0; i < 8; i += 2) exchange_bits<1, 0x55555555u>(planes[i], planes[i + 1]);
  }

  // Converts planes to words: byte k of word i is that of value 4 i + k.
  ZCOMM_DEVICE void to_words(std::uint32_t (&words)[8]) const {
    Bytes bytes = *this;
    bytes.transpose();
#pragma unroll
    for (std::uint32_t i = 0; i < 8; i += 4) {
      std::uint32_t* const four = bytes.planes + i;
      transpose_bytes(four[0], four[1], four[2], four[3]);
#pragma unroll
      for (std::uint32_t k = 0; k < 4; ++k) words[2 * k + i / 4] = four[k];
    }
  }

  std::uint32_t planes[8];
};

// Planes of a half block: kHalfWords words of two values.
struct HalfPlanes {
  ZCOMM_DEVICE explicit HalfPlanes(const std::uint32_t* words) {
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      std::uint32_t a = words[i], b = words[i + 4], c = words[i + 8], d = words[i + 12];
      transpose_bytes(a, b, c, d);
      low.planes[2 * i] = a, high.planes[2 * i] = b, low.planes[2 * i + 1] = c, high.planes[2 * i + 1] = d;
    }
    low.transpose();
    high.transpose();
  }

  ZCOMM_DEVICE std::uint32_t plane(std::uint32_t i) const { return i < 8 ? low.planes[i] : high.planes[i - 8]; }

  ZCOMM_DEVICE Bytes exponents(DType dtype) const {
    Bytes exponents;
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) {
      const std::uint32_t of_float = dtype == DType::bfloat16 ? plane(7 + i) : i < 5 ? plane(10 + i) : 0;
      exponents.planes[i] = dtype == DType::byte_pairs ? plane_of(kPairExponent, i) : of_float;
    }
    return exponents;
  }

  Bytes low, high;
};

// --- Arithmetic

// Tells which numbers of three bits are above `number`.
template <class Bits>
ZCOMM_DEVICE Bits numbers_above(std::uint32_t number, Bits ones, Bits twos, Bits fours) {
  switch (number) {
    case 0:
      return ones | twos | fours;
    case 1:
      return twos | fours;
    case 2:
      return (ones & twos) | fours;
    case 3:
      return fours;
    case 4:
      return (ones | twos) & fours;
    case 5:
      return twos & fours;
    default:
      return ones & twos & fours;
  }
}

// Returns the borrow that a - b - borrow takes from the next bits.
ZCOMM_DEVICE std::uint32_t next_borrow(std::uint32_t a, std::uint32_t b, std::uint32_t borrow) {
  return (~a & (b | borrow)) | (b & borrow);
}

// Widths from exponents e: clamp(number - e, 0, 7), and whether e > number + 1. `number` is below 512.
struct Widths {
  ZCOMM_DEVICE Widths(std::uint32_t number, const Bytes& exponents) {
    std::uint32_t borrow = 0, ones = ~0u, high = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 9; ++i) {
      const std::uint32_t a = plane_of(number, i), e = i < 8 ? exponents.planes[i] : 0;
      const std::uint32_t difference = a ^ e ^ borrow;
      borrow = next_borrow(a, e, borrow);
      ones &= difference;
      if (i < 3) {
        planes[i] = difference;
      } else {
        high |= difference;
      }
    }
#pragma unroll
    for (std::uint32_t i = 0; i < 3; ++i) planes[i] = (planes[i] | high) & ~borrow;
    is_far_below = borrow & ~ones;
  }

  ZCOMM_DEVICE void clear(std::uint32_t values) {
#pragma unroll
    for (std::uint32_t i = 0; i < 3; ++i) planes[i] &= ~values;
  }
  ZCOMM_DEVICE std::uint32_t sum() const {
    return popcount(planes[0]) + 2 * popcount(planes[1]) + 4 * popcount(planes[2]);
  }
  ZCOMM_DEVICE std::uint32_t is_above(std::uint32_t number) const {
    return numbers_above(number, planes[0], planes[1], planes[2]);
  }
  ZCOMM_DEVICE void to_words(std::uint32_t (&words)[8]) const {
    Bytes{{planes[0], planes[1], planes[2]}}.to_words(words);
  }

  std::uint32_t planes[3];
  std::uint32_t is_far_below;
};

// Multiplies or divides numbers of `kPlanes` bits by 2^width.
template <std::uint32_t kPlanes>
ZCOMM_DEVICE void shift_up(std::uint32_t (&numbers)[kPlanes], const std::uint32_t (&widths)[3]) {
#pragma unroll
  for (std::uint32_t step = 0; step < 3; ++step) {
#pragma unroll
    for (std::uint32_t i = kPlanes; i-- > 0;) {
      const std::uint32_t moved = i >= 1u << step ? numbers[i - (1u << step)] : 0;
      numbers[i] = (moved & widths[step]) | (numbers[i] & ~widths[step]);
    }
  }
}
template <std::uint32_t kPlanes>
ZCOMM_DEVICE void shift_down(std::uint32_t (&numbers)[kPlanes], const std::uint32_t (&widths)[3]) {
#pragma unroll
  for (std::uint32_t step = 0; step < 3; ++step) {
#pragma unroll
    for (std::uint32_t i = 0; i < kPlanes; ++i) {
      const std::uint32_t moved = i + (1u << step) < kPlanes ? numbers[i + (1u << step)] : 0;
      numbers[i] = (moved & widths[step]) | (numbers[i] & ~widths[step]);
    }
  }
}

// --- Fields, four at a time

// Returns where each of four fields begins, as bytes; `widths` are bytes, 7 at most.
ZCOMM_DEVICE std::uint32_t field_places(std::uint32_t widths) { return widths * 0x01010100u; }
ZCOMM_DEVICE std::uint32_t sum_of_bytes(std::uint32_t bytes) { return bytes * 0x01010101u >> 24; }

// Moves byte `i` of the fields to its place.
ZCOMM_DEVICE std::uint32_t moved_field(std::uint32_t fields, std::uint32_t places, std::uint32_t i) {
  return __funnelshift_l(0, __byte_perm(fields, 0, 0x4440 | i), places >> (8 * i));
}
ZCOMM_DEVICE std::uint32_t join_fields(std::uint32_t fields, std::uint32_t widths) {
  const std::uint32_t places = field_places(widths);
  return (fields & 0xffu) | moved_field(fields, places, 1) | moved_field(fields, places, 2) |
         moved_field(fields, places, 3);
}

// Returns four bytes of 2^width - 1.
ZCOMM_DEVICE std::uint32_t field_masks(std::uint32_t widths) {
  const std::uint32_t nibbles = __byte_perm(widths | widths >> 4, 0, 0x4420);
  return __byte_perm(0x07030100u, 0x7f3f1f0fu, nibbles);
}
// Inverts join_fields; ignores other bits above the fields.
ZCOMM_DEVICE std::uint32_t split_fields(std::uint32_t bits, std::uint32_t widths) {
  const std::uint32_t places = field_places(widths);
  const std::uint32_t low = __byte_perm(bits, __funnelshift_r(bits, 0, places >> 8), 0x0040);
  const std::uint32_t high =
      __byte_perm(__funnelshift_r(bits, 0, places >> 16), __funnelshift_r(bits, 0, places >> 24), 0x0040);
  return __byte_perm(low, high, 0x5410) & field_masks(widths);
}

}  // namespace zcomm::gpu
