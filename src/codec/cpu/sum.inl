// Sums values of several wires. Part of kernels.inl.

template <class Type, bool kAdd>
void load_values(const std::byte* value_bytes, std::int64_t count, float* terms) {
  const typename Type::Bits* values = reinterpret_cast<const typename Type::Bits*>(value_bytes);
  std::int64_t done = 0;
#ifdef ZCOMM_LANES
  for (; done + ZCOMM_LANES <= count; done += ZCOMM_LANES) {
    const Floats widened = Type::widen_lanes(values + done);
    store(terms + done, kAdd ? load(terms + done) + widened : widened);
  }
#endif
#pragma omp simd
  for (std::int64_t i = done; i < count; ++i) {
    const float term = float_of(Type::widen(values[i]));
    terms[i] = kAdd ? terms[i] + term : term;
  }
}

// Sets or adds to `terms` a part of a block of each wire, in order, where the fast loop does not apply. `codes` and
// `scale` have one entry per wire.
template <bool kNibbles, bool kAdd>
__attribute__((noinline)) void add_rest(const std::int8_t* const* codes, const float* scale, int num_wires,
                                        std::int64_t first, std::int64_t count, float limit, float* terms) {
  alignas(64) Word32 bits[kTileElements];
  if (!kAdd) __builtin_memset(terms, 0, static_cast<std::size_t>(count) * sizeof(float));
  for (int w = 0; w < num_wires; ++w) {
    dequantize_rest<Float32, kNibbles>(codes[w] + (kNibbles ? first / 2 : first), count, scale[w], limit, bits);
    for (std::int64_t i = 0; i < count; ++i) terms[i] += float_of(bits[i]);
  }
}

#ifdef ZCOMM_LANES
// Adds a group of finite terms of each wire. The product of code and scale is exact, so a fused multiply-add gives the
// same bits. Groups of nibbles are not in order: see load_codes.
template <int kWires, bool kNibbles>
ZCOMM_INLINE void add_group(const std::int8_t* const* codes, const Floats* scale, std::int64_t first, Group& sum) {
  for (int w = 0; w < kWires; ++w) {
    Group group;
    load_codes<kNibbles>(codes[w] + (kNibbles ? first / 2 : first), group);
    for (int k = 0; k < kGroupRegisters; ++k) sum[k] = multiply_add(group[k], scale[w], sum[k]);
  }
}
#endif

// Sets or adds to `terms` whole groups of finite terms of each wire, in order.
template <int kWires, bool kNibbles, bool kAdd>
ZCOMM_INLINE void add_groups(const std::int8_t* const* codes, const float* scale, std::int64_t first,
                             std::int64_t count, float* terms) {
#ifdef ZCOMM_LANES
  Floats scales[kWires];
  for (int w = 0; w < kWires; ++w) scales[w] = broadcast(scale[w]);
  for (std::int64_t i = 0; i < count; i += kGroup) {
    Group sum = {};
    if (kAdd) {
      for (int k = 0; k < kGroupRegisters; ++k) sum[k] = load(terms + i + k * ZCOMM_LANES);
      from_order<kNibbles>(sum);
    }
    add_group<kWires, kNibbles>(codes, scales, first + i, sum);
    to_order<kNibbles>(sum);
    for (int k = 0; k < kGroupRegisters; ++k) store(terms + i + k * ZCOMM_LANES, sum[k]);
  }
#else
  for (int w = 0; w < kWires; ++w) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      const float sum = kAdd || w != 0 ? terms[i] : 0.0f;
      terms[i] = sum + static_cast<float>(codes[w][first + i]) * scale[w];
    }
  }
#endif
}

// Calls of_groups for the whole groups of each finite block, and of_rest for the remainder. Both get the codes and the
// scale of each wire, and the range of the tile: first element and count.
template <int kWires, bool kNibbles, class OfGroups, class OfRest>
ZCOMM_INLINE void add_blocks(const Tile* tiles, const CodedBlocks& wire, std::int64_t begin, std::int64_t count,
                             float limit, const OfGroups& of_groups, const OfRest& of_rest) {
  const std::int64_t block_size = wire.block_size;
  const float largest_code = wire.largest_code;
  const std::int8_t* codes[kWires];
  const Word16* scales[kWires];
  for (int w = 0; w < kWires; ++w) codes[w] = tiles[w].codes, scales[w] = tiles[w].scales;
  std::int64_t block_end = min_of(block_size - begin % block_size, count);
  for (std::int64_t i = 0; i < count; i = block_end, block_end = min_of(i + block_size, count)) {
    float scale[kWires];
    bool is_finite = true;
    for (int w = 0; w < kWires; ++w) {
      scale[w] = scale_of(*scales[w]++);
      is_finite &= __builtin_fabsf(scale[w]) * largest_code <= limit;
      prefetch(codes[w] + (kNibbles ? i / 2 : i), kPrefetchBytes, kNibbles ? block_size / 2 : block_size);
    }
    const std::int64_t in_groups = is_finite ? (block_end - i) / kGroup * kGroup : 0;
    of_groups(codes, scale, i, in_groups);
    const std::int64_t done = i + in_groups;
    if (done != block_end) of_rest(codes, scale, done, block_end - done);
  }
}

// Adds kWires wires at once, so that terms are loaded and stored once.
template <int kWires, bool kNibbles, bool kAdd>
ZCOMM_INLINE void add_tiles(const Tile* tiles, const CodedBlocks& wire, std::int64_t begin, std::int64_t count,
                            float limit, float* terms) {
  add_blocks<kWires, kNibbles>(
      tiles, wire, begin, count, limit,
      [terms](const std::int8_t* const* codes, const float* scale, std::int64_t i, std::int64_t n) {
        add_groups<kWires, kNibbles, kAdd>(codes, scale, i, n, terms + i);
      },
      [terms, limit](const std::int8_t* const* codes, const float* scale, std::int64_t i, std::int64_t n) {
        add_rest<kNibbles, kAdd>(codes, scale, kWires, i, n, limit, terms + i);
      });
}

template <int kWires, bool kAdd>
__attribute__((noinline)) void add_packed(const CodedBlocks* wires, std::int64_t begin, std::int64_t count, float limit,
                                          float* terms) {
  alignas(64) std::int8_t room[kWires][kTileElements];
  Tile tiles[kWires];
  for (int w = 0; w < kWires; ++w) tiles[w] = Tile::of(wires[w], begin, count, room[w]);
  add_tiles<kWires, false, kAdd>(tiles, wires[0], begin, count, limit, terms);
}

template <int kWires, bool kAdd>
void add_wires(const CodedBlocks* wires, std::int64_t begin, std::int64_t count, float limit, float* terms) {
  const ElementKind kind = wires[0].kind;
  if (!is_bytes(kind) && !has_nibbles(kind)) return add_packed<kWires, kAdd>(wires, begin, count, limit, terms);
  Tile tiles[kWires];
  for (int w = 0; w < kWires; ++w) tiles[w] = Tile::of(wires[w], begin, count, nullptr);
  if (has_nibbles(kind)) {
    add_tiles<kWires, true, kAdd>(tiles, wires[0], begin, count, limit, terms);
  } else {
    add_tiles<kWires, false, kAdd>(tiles, wires[0], begin, count, limit, terms);
  }
}

// Calls call<num_wires>().
template <class Call>
ZCOMM_INLINE void with_num_wires(int num_wires, const Call& call) {
  static_assert(kMaxWires == 4);
  switch (num_wires) {
    case 1:
      return call.template operator()<1>();
    case 2:
      return call.template operator()<2>();
    case 3:
      return call.template operator()<3>();
    default:
      return call.template operator()<4>();
  }
}

template <bool kAdd>
void add_codes(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count, float limit,
               float* terms) {
  with_num_wires(num_wires, [=]<int kWires>() { add_wires<kWires, kAdd>(wires, begin, count, limit, terms); });
}

#ifdef ZCOMM_LANES
// Stores round(sum of the wires * factor) for whole groups of finite terms. `factor` is finite and not 0. A sum of
// finite terms may be infinite, but is never NaN.
template <class Type, int kWires, bool kNibbles, bool kStream>
ZCOMM_INLINE void store_sums(const std::int8_t* const* codes, const float* scale, std::int64_t first,
                             std::int64_t count, float factor, typename Type::Bits* values) {
  const Floats factors = broadcast(factor);
  Floats scales[kWires];
  for (int w = 0; w < kWires; ++w) scales[w] = broadcast(scale[w]);
  for (std::int64_t i = 0; i < count; i += kGroup) {
    Group sum = {};
    add_group<kWires, kNibbles>(codes, scales, first + i, sum);
    for (Floats& floats : sum) floats *= factors;
    store_decoded<Type, kNibbles, kStream>(sum, values + i);
  }
}

// Stores the remainder that the fast loop skips. Separate from sum_tiles, to keep this buffer off its stack.
template <class Type, bool kNibbles>
__attribute__((noinline)) void store_rest(const std::int8_t* const* codes, const float* scale, int num_wires,
                                          std::int64_t first, std::int64_t count, float limit, float factor,
                                          typename Type::Bits* values) {
  alignas(64) float terms[kTileElements];
  add_rest<kNibbles, false>(codes, scale, num_wires, first, count, limit, terms);
  store_values<Type, false>(terms, count, factor, reinterpret_cast<std::byte*>(values));
}

template <class Type, int kWires, bool kNibbles, bool kStream>
__attribute__((noinline)) void sum_tiles(const CodedBlocks* wires, std::int64_t begin, std::int64_t count, float limit,
                                         float factor, typename Type::Bits* values) {
  Tile tiles[kWires];
  for (int w = 0; w < kWires; ++w) tiles[w] = Tile::of(wires[w], begin, count, nullptr);
  add_blocks<kWires, kNibbles>(
      tiles, wires[0], begin, count, limit,
      [=](const std::int8_t* const* codes, const float* scale, std::int64_t i, std::int64_t n) {
        store_sums<Type, kWires, kNibbles, kStream>(codes, scale, i, n, factor, values + i);
      },
      [=](const std::int8_t* const* codes, const float* scale, std::int64_t i, std::int64_t n) {
        store_rest<Type, kNibbles>(codes, scale, kWires, i, n, limit, factor, values + i);
      });
}

template <class Type, bool kNibbles>
void sum_wires(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count, float limit,
               float factor, typename Type::Bits* values, bool stream) {
  with_num_wires(num_wires, [=]<int kWires>() {
    if (stream) return sum_tiles<Type, kWires, kNibbles, true>(wires, begin, count, limit, factor, values);
    sum_tiles<Type, kWires, kNibbles, false>(wires, begin, count, limit, factor, values);
  });
}
#endif

template <class Type>
__attribute__((noinline)) void sum_in_memory(const CodedBlocks* wires, int num_wires, std::int64_t begin,
                                             std::int64_t count, float limit, float factor, std::byte* values,
                                             bool stream) {
  alignas(64) float terms[kTileElements];
  add_codes<false>(wires, num_wires, begin, count, limit, terms);
  store_values<Type>(terms, count, factor, values, stream);
}

// Sums in registers if vector instructions exist and no term is NaN: terms are not written and read again.
template <class Type>
void sum_values(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count, float limit,
                float factor, std::byte* value_bytes, bool stream) {
#ifdef ZCOMM_LANES
  typename Type::Bits* values = reinterpret_cast<typename Type::Bits*>(value_bytes);
  if (factor != 0.0f && __builtin_fabsf(factor) <= kLargestFinite) {
    const ElementKind kind = wires[0].kind;
    if (is_bytes(kind)) return sum_wires<Type, false>(wires, num_wires, begin, count, limit, factor, values, stream);
    if (has_nibbles(kind)) return sum_wires<Type, true>(wires, num_wires, begin, count, limit, factor, values, stream);
  }
#endif
  sum_in_memory<Type>(wires, num_wires, begin, count, limit, factor, value_bytes, stream);
}
