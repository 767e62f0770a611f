// Walsh-Hadamard transform of groups of 32: the part of kernels.inl between values and encoding.

constexpr std::int64_t kRotated = 32;

#ifdef ZCOMM_LANES

// Replaces a, b by a + b, a - b, where b is kStep elements after a.
template <int kStep>
ZCOMM_INLINE void rotate_step(Group& group) {
  constexpr int kRegisters = kRotated / ZCOMM_LANES;
  if constexpr (kStep < ZCOMM_LANES) {
    alignas(64) float signs[ZCOMM_LANES];
    for (int i = 0; i < ZCOMM_LANES; ++i) signs[i] = (i & kStep) != 0 ? -1.0f : 1.0f;
    for (Floats& floats : group)
      floats = multiply_add(floats, load(signs), swapped<kStep>(floats, LaneIndexes{}));  // exact product
  } else {
    constexpr int kDistance = kStep / ZCOMM_LANES;
    for (int i = 0; i < kRegisters; ++i) {
      if ((i & kDistance) != 0) continue;
      const Floats first = group[i], second = group[i + kDistance];
      group[i] = first + second;
      group[i + kDistance] = first - second;
    }
  }
}

template <class Type>
ZCOMM_INLINE void rotate_group(const typename Type::Bits* values, float factor, Group& group) {
  for (int i = 0; i < kRotated / ZCOMM_LANES; ++i) {
    group[i] = Type::widen_lanes(values + i * ZCOMM_LANES) * broadcast(factor);
  }
  rotate_step<1>(group);
  rotate_step<2>(group);
  rotate_step<4>(group);
  rotate_step<8>(group);
  rotate_step<16>(group);
}

ZCOMM_INLINE void rotate_group(const float* terms, float factor, float* rotated) {
  Group group;
  rotate_group<Float32>(reinterpret_cast<const Word32*>(terms), factor, group);
  for (int i = 0; i < kRotated / ZCOMM_LANES; ++i) store(rotated + i * ZCOMM_LANES, group[i]);
}

// Rotates whole groups. Returns the largest magnitude written, as float32 bits.
template <class Type>
ZCOMM_INLINE std::uint32_t rotate_groups(const typename Type::Bits* values, std::int64_t count, float* rotated) {
  Floats largest = broadcast(0.0f);
  for (std::int64_t i = 0; i < count; i += kRotated) {
    Group group;
    rotate_group<Type>(values + i, 0x1p-5f, group);
    for (int k = 0; k < kRotated / ZCOMM_LANES; ++k) {
      store(rotated + i + k * ZCOMM_LANES, group[k]);
      largest = larger_magnitude(largest, group[k]);
    }
  }
  alignas(64) float lanes[ZCOMM_LANES];
  store(lanes, largest);
  return absmax<Float32>(reinterpret_cast<const Word32*>(lanes), ZCOMM_LANES);
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

ZCOMM_INLINE void rotate_group(const float* terms, float factor, float* rotated) {
  float group[kRotated];
  for (int i = 0; i < kRotated; ++i) group[i] = terms[i] * factor;
  rotate_step<1>(group);
  rotate_step<2>(group);
  rotate_step<4>(group);
  rotate_step<8>(group);
  rotate_step<16>(group);
  for (int i = 0; i < kRotated; ++i) rotated[i] = group[i];
}

template <class Type>
ZCOMM_INLINE std::uint32_t rotate_groups(const typename Type::Bits* values, std::int64_t count, float* rotated) {
  widen_row<Type>(values, count, rotated);
  for (std::int64_t i = 0; i < count; i += kRotated) rotate_group(rotated + i, 0x1p-5f, rotated + i);
  return absmax<Float32>(reinterpret_cast<const Word32*>(rotated), count);
}
#endif

// Converts blocks to float32, and rotates them if blocks.hadamard; sets `largest` to the largest magnitude written per
// block, as float32 bits.
template <class Type>
ZCOMM_INLINE void widen_blocks(const typename Type::Bits* values, std::int64_t count, const CodedBlocks& blocks,
                               float* widened, std::uint32_t* largest) {
  constexpr std::int64_t kBytes = sizeof(typename Type::Bits);
  for (std::int64_t begin = 0; begin < count; begin += blocks.block_size) {
    const std::int64_t block_count = min_of(blocks.block_size, count - begin);
    const std::int64_t rotated = blocks.hadamard ? block_count / kRotated * kRotated : 0;
    prefetch(values + begin, count * kBytes, block_count * kBytes);
    *largest = rotated == 0 ? 0 : rotate_groups<Type>(values + begin, rotated, widened + begin);
    if (rotated != block_count) {
      const std::int64_t rest = block_count - rotated;
      widen_row<Type>(values + begin + rotated, rest, widened + begin + rotated);
      const std::uint32_t largest_rest = absmax<Type>(values + begin + rotated, rest);
      if (largest_rest > *largest) *largest = largest_rest;
    }
    ++largest;
  }
}

// Rotates back a group that may overflow or has a NaN, which is rare: scales down before and up after.
__attribute__((noinline)) void rotate_back_large(const float* terms, float* rotated) {
  float group[kRotated];
  rotate_group(terms, 0x1p-5f, group);
  for (std::int64_t i = 0; i < kRotated; ++i) {
    const bool is_finite = (bits_of(group[i]) & kAbs32) < kInfinity32;
    float value = group[i] * 32.0f;
    value = is_finite && value > kLargestFinite ? kLargestFinite : value;
    value = is_finite && value < -kLargestFinite ? -kLargestFinite : value;
    rotated[i] = float_of(Float32::narrow(value));
  }
}

void rotate_back(const float* terms, std::int64_t count, bool none_is_large, float* rotated) {
  constexpr std::uint32_t kLarge = __builtin_bit_cast(std::uint32_t, kLargeTerm);
  const auto largest = [terms](std::int64_t begin, std::int64_t n) {
    return absmax<Float32>(reinterpret_cast<const Word32*>(terms + begin), n);
  };
  none_is_large = none_is_large || largest(0, count) < kLarge;
  std::int64_t i = 0;
  for (; i + kRotated <= count; i += kRotated) {
    if (none_is_large || largest(i, kRotated) < kLarge) {
      rotate_group(terms + i, 1.0f, rotated + i);
    } else {
      rotate_back_large(terms + i, rotated + i);
    }
  }
  for (; i < count; ++i) rotated[i] = float_of(Float32::narrow(terms[i]));
}
