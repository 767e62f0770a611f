// Randomized Walsh-Hadamard transform of blocks: the part of kernels.inl between values and encoding. A block of R
// elements x becomes 2^-k H D x with R = 2^k, the Walsh-Hadamard matrix H, and a diagonal D of fixed random signs.

constexpr std::int64_t kRotated = 32;  // the least elements that are rotated together
constexpr std::int64_t kMaxRotated = 512;

// Signs of a block's elements, as sign bits. Each 32 are the bits of MurmurHash3's finalizer.
struct Signs {
  std::uint32_t of[kMaxRotated];

  constexpr Signs() : of() {
    for (std::uint32_t i = 0; i < kMaxRotated; ++i) {
      std::uint32_t bits = i / 32 + 1;
      bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
      bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
      of[i] = (bits ^ (bits >> 16)) >> (i % 32) << 31;
    }
  }
};
alignas(64) constexpr Signs kSigns;

#ifdef ZCOMM_LANES

// Replaces a, b by a + b, a - b, where b is kStep elements after a.
template <int kStep, int kRegisters>
ZCOMM_INLINE void rotate_step(Floats (&row)[kRegisters]) {
  if constexpr (kStep >= kRegisters * ZCOMM_LANES) {
    return;
  } else if constexpr (kStep < ZCOMM_LANES) {
    alignas(64) float signs[ZCOMM_LANES];
    for (int i = 0; i < ZCOMM_LANES; ++i) signs[i] = (i & kStep) != 0 ? -1.0f : 1.0f;
    for (Floats& floats : row)
      floats = multiply_add(floats, load(signs), swapped<kStep>(floats, LaneIndexes{}));  // exact product
  } else {
    constexpr int kDistance = kStep / ZCOMM_LANES;
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) {
      if ((i & kDistance) != 0) continue;
      const Floats first = row[i], second = row[i + kDistance];
      row[i] = first + second;
      row[i + kDistance] = first - second;
    }
  }
}

// Makes the steps inside a row of registers of values, times `factor`. Flips signs before, unless `signs` is null.
template <class Type, int kRegisters>
ZCOMM_INLINE void rotate_registers(const typename Type::Bits* values, float factor, const std::uint32_t* signs,
                                   float* rotated) {
  Floats row[kRegisters];
#pragma GCC unroll 8
  for (int i = 0; i < kRegisters; ++i) {
    row[i] = Type::widen_lanes(values + i * ZCOMM_LANES) * broadcast(factor);
    if (signs != nullptr) {
      const Register bits = reinterpret_cast<Register>(row[i]) ^ load_register(signs + i * ZCOMM_LANES);
      row[i] = reinterpret_cast<Floats>(bits);
    }
  }
  rotate_step<1>(row);
  rotate_step<2>(row);
  rotate_step<4>(row);
  rotate_step<8>(row);
  rotate_step<16>(row);
  rotate_step<32>(row);
  rotate_step<64>(row);
#pragma GCC unroll 8
  for (int i = 0; i < kRegisters; ++i) store(rotated + i * ZCOMM_LANES, row[i]);
}

// Makes the steps inside as many elements as it can at once, from 32 on; returns their number.
template <class Type>
ZCOMM_INLINE std::int64_t rotate_row(const typename Type::Bits* values, std::int64_t count, float factor,
                                     const std::uint32_t* signs, float* rotated) {
  constexpr int kRegisters = 8;
  if (kRegisters * ZCOMM_LANES <= count) {
    rotate_registers<Type, kRegisters>(values, factor, signs, rotated);
    return kRegisters * ZCOMM_LANES;
  }
  rotate_registers<Type, kGroupRegisters>(values, factor, signs, rotated);
  return kRotated;
}
#else
template <int kStep>
ZCOMM_INLINE void rotate_step(float* group) {
  for (int i = 0; i < kRotated; i += 2 * kStep) {
    for (int k = i; k < i + kStep; ++k) {
      const float first = group[k], second = group[k + kStep];
      group[k] = first + second;
      group[k + kStep] = first - second;
    }
  }
}

template <class Type>
ZCOMM_INLINE std::int64_t rotate_row(const typename Type::Bits* values, std::int64_t, float factor,
                                     const std::uint32_t* signs, float* rotated) {
  float group[kRotated];
  for (int i = 0; i < kRotated; ++i) {
    const float value = float_of(Type::widen(values[i])) * factor;
    group[i] = float_of(bits_of(value) ^ (signs == nullptr ? 0u : signs[i]));
  }
  rotate_step<1>(group);
  rotate_step<2>(group);
  rotate_step<4>(group);
  rotate_step<8>(group);
  rotate_step<16>(group);
  for (int i = 0; i < kRotated; ++i) rotated[i] = group[i];
  return kRotated;
}
#endif

// Makes the steps of `step` elements and more in a block of `count`.
ZCOMM_INLINE void rotate_rows(std::int64_t step, std::int64_t count, float* block) {
  for (; step < count; step *= 2) {
    for (std::int64_t i = 0; i < count; i += 2 * step) {
      float *first = block + i, *second = first + step;
#pragma omp simd
      for (std::int64_t k = 0; k < step; ++k) {
        const float sum = first[k] + second[k], difference = first[k] - second[k];
        first[k] = sum;
        second[k] = difference;
      }
    }
  }
}

// Rotates a block of `count` elements, a power of two from 32 on, times `factor`. Flips signs before, unless `signs` is
// null.
template <class Type>
ZCOMM_INLINE void rotate_block(const typename Type::Bits* values, std::int64_t count, float factor,
                               const std::uint32_t* signs, float* rotated) {
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < count; i += row) {
    row = rotate_row<Type>(values + i, count, factor, signs == nullptr ? nullptr : signs + i, rotated + i);
  }
  rotate_rows(row, count, rotated);
}

// Converts blocks to float32, and rotates them if blocks.rotation is not 0: the groups of 32 of a short block. Sets
// `largest` to the largest magnitude written per block, as float32 bits.
template <class Type>
ZCOMM_INLINE void widen_blocks(const typename Type::Bits* values, std::int64_t count, const CodedBlocks& blocks,
                               float* widened, std::uint32_t* largest) {
  constexpr std::int64_t kBytes = sizeof(typename Type::Bits);
  for (std::int64_t begin = 0; begin < count; begin += blocks.block_size) {
    const std::int64_t block_count = min_of(blocks.block_size, count - begin);
    prefetch(values + begin, count * kBytes, block_count * kBytes);
    std::int64_t done = 0;
    for (std::int64_t rotation : {blocks.rotation, kRotated}) {
      if (blocks.rotation == 0) break;
      for (; done + rotation <= block_count; done += rotation) {
        const float factor = 1.0f / static_cast<float>(rotation);
        rotate_block<Type>(values + begin + done, rotation, factor, kSigns.of, widened + begin + done);
      }
    }
    widen_row<Type>(values + begin + done, block_count - done, widened + begin + done);
    *largest++ = absmax<Float32>(reinterpret_cast<const Word32*>(widened + begin), block_count);
  }
}

// Makes the steps of a block, in place or not, with the terms times `factor`.
ZCOMM_INLINE void transform(const float* terms, std::int64_t count, float factor, float* transformed) {
  rotate_block<Float32>(reinterpret_cast<const Word32*>(terms), count, factor, nullptr, transformed);
}

// Flips the signs of a block by their positions. Zeros become positive.
ZCOMM_INLINE void flip_signs(std::int64_t count, float* values) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) values[i] = float_of(bits_of(values[i]) ^ kSigns.of[i]) + 0.0f;
}

// Rotates back a block that may overflow or has a NaN, which is rare: scales down before and up after.
__attribute__((noinline)) void rotate_back_large(const float* terms, std::int64_t count, float* rotated) {
  float block[kMaxRotated];
  transform(terms, count, 0x1p-9f, block);
  flip_signs(count, block);
  for (std::int64_t i = 0; i < count; ++i) {
    const bool is_finite = (bits_of(block[i]) & kAbs32) < kInfinity32;
    float value = block[i] * 0x1p9f;
    value = is_finite && value > kLargestFinite ? kLargestFinite : value;
    value = is_finite && value < -kLargestFinite ? -kLargestFinite : value;
    rotated[i] = float_of(Float32::narrow(value));
  }
}

void rotate_back(const float* terms, std::int64_t count, std::int64_t rotation, bool none_is_large, float* rotated) {
  constexpr std::uint32_t kLarge = __builtin_bit_cast(std::uint32_t, kLargeTerm);
  const auto largest = [terms](std::int64_t begin, std::int64_t n) {
    return absmax<Float32>(reinterpret_cast<const Word32*>(terms + begin), n);
  };
  none_is_large = none_is_large || largest(0, count) < kLarge;
  std::int64_t i = 0;
  for (std::int64_t size : {rotation, kRotated}) {
    for (; i + size <= count; i += size) {
      if (none_is_large || largest(i, size) < kLarge) {
        transform(terms + i, size, 1.0f, rotated + i);
        flip_signs(size, rotated + i);
      } else {
        rotate_back_large(terms + i, size, rotated + i);
      }
    }
  }
  for (; i < count; ++i) rotated[i] = float_of(Float32::narrow(terms[i]));
}
