// Encodes rotated blocks as EDEN does (Vargaftik et al., "EDEN: communication-efficient and robust distributed mean
// estimation for federated learning", ICML 2022). Part of kernels.inl.
//
// Rotated values are close to normally distributed. They become integers of at most 1024, so that all sums over a block
// are exact, in any order. Levels are the centroids times the root mean square. The scale makes the block's projection
// on the values right, so that no rank's values shrink. Where codes fit badly, it is at most 1.25 times the scale of
// least error: so an error is never larger than the block.

// Tile of rotated values as integers, and sums over its blocks. Each step runs over the whole tile, so that no block
// waits for the divisions of another.
struct EdenTile {
  alignas(64) std::int16_t magnitudes[kTileElements];  // at most 1024
  alignas(64) std::int16_t levels[kTileElements];      // that the codes stand for, without signs
  alignas(64) std::uint8_t codes[kTileElements];
  float units[kMaxBlocks];          // value of 1
  std::int32_t powers[kMaxBlocks];  // of the magnitudes; 0 if a value is not finite
  float roots[kMaxBlocks];          // of the mean squares
  std::int32_t products[kMaxBlocks];
  std::int32_t squares[kMaxBlocks];  // of the levels
};

// Returns an exact sum of products. Without `omp simd`, GCC multiplies and adds pairs in one instruction.
ZCOMM_INLINE std::int32_t dot(const std::int16_t* a, const std::int16_t* b, std::int64_t count) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += std::int32_t{a[i]} * std::int32_t{b[i]};
  return sum;
}

// Makes magnitudes of a block's finite values, and codes of their signs. `largest` has the float32 bits of the largest
// magnitude. Returns the value of 1.
template <int kBits>
ZCOMM_INLINE float to_magnitudes(const Word32* values, std::int64_t count, std::uint32_t largest,
                                 std::int16_t* magnitudes, std::uint8_t* codes) {
  const std::uint32_t exponent = largest >> 23 < 10 ? 10 : largest >> 23;
  const float up = float_of((263 - exponent) << 23);
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float rounded = float_of(values[i] & kAbs32) * up + kRoundToInteger;
    magnitudes[i] = static_cast<std::int16_t>(bits_of(rounded));
    codes[i] = static_cast<std::uint8_t>(values[i] >> 31 << (kBits - 1));
  }
  return float_of((exponent - 9) << 23);
}

// Chooses the levels of a block for a root mean square of `root`, and adds their numbers to the codes.
template <int kBits>
ZCOMM_INLINE void choose(const EdenLevels& all, const std::int16_t* magnitudes, std::int64_t count, float root,
                         std::int16_t* levels, std::uint8_t* codes) {
  constexpr int kLevels = 1 << (kBits - 1);
  std::int16_t from[kLevels], more[kLevels];  // the least magnitude of a level, and what it adds to the one before
  for (int k = 1; k < kLevels; ++k) {
    const float middle = static_cast<float>(all.of[k - 1] + all.of[k]) / 92.0f;
    from[k] = static_cast<std::int16_t>(bits_of(root * middle + kRoundToInteger));
    more[k] = static_cast<std::int16_t>(all.of[k] - all.of[k - 1]);
  }
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    std::int16_t level = all.of[0], number = 0;
#pragma GCC unroll 8
    for (int k = 1; k < kLevels; ++k) {
      const std::int16_t reaches = magnitudes[i] >= from[k] ? -1 : 0;
      number = static_cast<std::int16_t>(number - reaches);
      level = static_cast<std::int16_t>(level + (more[k] & reaches));
    }
    levels[i] = level;
    codes[i] = static_cast<std::uint8_t>(codes[i] + number);
  }
}

// Writes the blocks' scales as bfloat16 bits. Zero stands for a block of zeros.
ZCOMM_INLINE void make_eden_scales(const EdenTile& tile, const std::uint32_t* largest, std::int64_t num_blocks,
                                   Word16* scales) {
#pragma omp simd
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const float power = static_cast<float>(tile.powers[i]), products = static_cast<float>(tile.products[i]);
    const float unbiased = power / products;
    const float most = 1.25f * (products / static_cast<float>(tile.squares[i]));
    const float scale = (unbiased < most ? unbiased : most) * tile.units[i];
    const bool is_zero = tile.powers[i] == 0 || scale < kMinScale;
    const std::uint16_t of_finite = is_zero ? std::uint16_t{0} : Bfloat16::narrow_finite(scale);
    scales[i] = largest[i] < kInfinity32 ? of_finite : Bfloat16::kNan;
  }
}

// Encodes a tile of rotated values; `largest` holds the largest magnitude of each block.
template <int kBits>
ZCOMM_INLINE void encode_eden(const EdenLevels& levels, const Word32* values, std::int64_t count,
                              const CodedBlocks& blocks, const std::uint32_t* largest, std::byte* scales,
                              std::byte* codes) {
  EdenTile tile;
  Word16* const scale_bits = reinterpret_cast<Word16*>(scales);
  const std::int64_t size = blocks.block_size, num_blocks = (count + size - 1) / size;
  const auto count_of = [size, count](std::int64_t i) { return min_of(size, count - i * size); };
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    tile.powers[i] = 0;
    if (largest[i] >= kInfinity32) continue;
    std::int16_t* const magnitudes = tile.magnitudes + i * size;
    tile.units[i] = to_magnitudes<kBits>(values + i * size, count_of(i), largest[i], magnitudes, tile.codes + i * size);
    tile.powers[i] = dot(magnitudes, magnitudes, count_of(i));
  }
#pragma omp simd
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    tile.roots[i] = __builtin_sqrtf(static_cast<float>(tile.powers[i]) / static_cast<float>(count_of(i)));
  }
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    if (tile.powers[i] == 0) continue;
    std::int16_t *const magnitudes = tile.magnitudes + i * size, *const of_block = tile.levels + i * size;
    choose<kBits>(levels, magnitudes, count_of(i), tile.roots[i], of_block, tile.codes + i * size);
    tile.products[i] = dot(magnitudes, of_block, count_of(i));
    tile.squares[i] = dot(of_block, of_block, count_of(i));
  }
  make_eden_scales(tile, largest, num_blocks, scale_bits);
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    if (scale_bits[i] != 0 && scale_bits[i] != Bfloat16::kNan) continue;
    __builtin_memset(tile.codes + i * size, 0, static_cast<std::size_t>(count_of(i)));
  }
  pack(blocks.kind, tile.codes, count, codes);
}
