// Encodes a tile in two passes: the first finds all changes and their sizes, which give `c`; the second writes bits.

inline bool has_changed(const std::uint16_t* base, const std::uint16_t* values) {
  for (int i = 0; i < kTileValues; i += kWidth) {
    if (differ(load_words(base + i), load_words(values + i))) return true;
  }
  return false;
}

// Finds differences z and the exponents of the base; returns the sum of these. Copies the values to the base and hashes
// them in the same pass.
template <class Values>
inline std::uint32_t look(std::uint16_t* base, const std::uint16_t* values, std::uint8_t* z, std::uint8_t* exponents,
                          std::uint64_t* lanes) {
  Sums exponent_sums = no_sums();
  Words hashes = no_lanes();
  const std::uint32_t* keys = kHashKeys.words;
  for (int i = 0; i < kTileValues; i += kWidth) {
    const Words a = load_words(base + i);
    const Words b = load_words(values + i);
    const Bytes exponents_of_a = Values::exponents(a);
    store(z + i, Values::differences(a, b));
    store(exponents + i, exponents_of_a);
    store_words(base + i, b);
    exponent_sums = add_bytes(exponent_sums, exponents_of_a);
    hashes = add_products(hashes, b, keys + i / 2);
  }
  store_lanes(lanes, hashes.low, hashes.high);
  return total_of(exponent_sums);
}

// Chooses c: roughly the exponent above which updates fall below the last place, from the tile's mean update in 2^E.
template <class Values>
inline int choose_c(const std::uint8_t* z, const std::uint8_t* exponents, std::uint32_t sum_of_exponents, int count) {
  const auto n = static_cast<std::uint32_t>(count);
  const std::uint32_t padding = (kTileValues - n) * static_cast<std::uint32_t>(Values::kExponentOfPadding);
  const int e = static_cast<int>((sum_of_exponents - padding) / n) + 2;
  const int beyond = e > 255 ? e - 255 : 0;  // excess over a byte
  const Bytes top = splat(e - beyond);
  Sums sums = no_sums();
  for (int i = 0; i < kTileValues; i += kWidth) {
    const Bytes below = smaller(subtract_saturated(top, load(exponents + i)), splat(13));
    const Bytes weighed = smaller(load(z + i), splat(Values::kMostWeighed));
    sums = add_weighted_halves(sums, weighed, look_up(kTables.weights, add(below, splat(beyond))));
  }
  const std::uint64_t total = 1 + total_of(sums);
  const int c = e + 63 - __builtin_clzll(kTileValues * total / n) - 15;
  return c < 0 ? 0 : c > 255 ? 255 : c;
}

// Counts the planes in which each value has a bit: z >> k, or all for an escape.
inline Bytes num_planes(Bytes z, Bytes k) {
  const Bytes units = smaller(shift_right(z, look_up(kTables.factors, k)), splat(kPlanes));
  return smaller(add(units, look_up(kTables.planes_of_escape, subtract_saturated(z, splat(254)))), splat(kPlanes));
}

inline void shape_of(const std::uint8_t* z_of_tile, const std::uint8_t* exponents_of_tile, int c, Shape& shape) {
  const int first = first_unlikely(c);
  for (int block = 0; block < kBlocks; ++block) {
    std::uint64_t unlikely = 0;
    std::uint64_t ones = 0, twos = 0, fours = 0;  // number of planes, in binary
    bool any_field = false;
    for (int part = 0; part < kBlock; part += kWidth) {
      const int i = block * kBlock + part;
      const Bytes exponents = load(exponents_of_tile + i);
      const Bytes z = load(z_of_tile + i);
      const Bytes k = widths(exponents, c);
      unlikely |= unlikely_of(exponents, first) << part;
      if (!is_zero(z)) {
        const Bytes count = num_planes(z, k);
        ones |= bits_of<0>(count) << part;
        twos |= bits_of<1>(count) << part;
        fours |= bits_of<2>(count) << part;
      }
      Bytes bits = look_up(kTables.fields, k);
      if (const std::uint64_t escapes = fours & twos; escapes != 0) bits = without(bits, spread(&escapes, part));
      store(shape.fields + i, bits);
      any_field |= !is_zero(bits);
    }
    const std::uint64_t planes[kPlanes] = {ones | twos | fours,   twos | fours, (ones & twos) | fours, fours,
                                           fours & (ones | twos), fours & twos};
    shape.unlikely[block] = unlikely;
    shape.with_fields |= static_cast<std::uint32_t>(any_field) << block;
    shape.touched |= static_cast<std::uint32_t>(planes[0] != 0) << block;
    shape.with_escapes |= static_cast<std::uint32_t>(planes[kPlanes - 1] != 0) << block;
    for (int plane = 0; plane < kPlanes; ++plane) shape.planes[plane][block] = planes[plane];
  }
}

// Writes sections P, F and G. Returns Z.
inline std::uint32_t put_first_plane(const Shape& shape, BitWriter& out) {
  std::uint32_t z = 0;
  for (int block = 0; block < kBlocks; ++block) {
    const std::uint64_t likely = ~shape.unlikely[block];
    out.put(gather_bits(shape.planes[0][block], likely), popcount(likely));
    z |= static_cast<std::uint32_t>((shape.planes[0][block] & ~likely) != 0) << block;
  }
  out.align();
  const auto unlikely_bits = [&](int block) { return gather_bits(shape.planes[0][block], shape.unlikely[block]); };
  for (std::uint32_t left = z; left != 0; left &= left - 1) {
    const int block = lowest(left);
    const std::uint64_t flags = gather_bits(nonzero_bytes(unlikely_bits(block)), 0x8080808080808080);
    out.put(flags, (popcount(shape.unlikely[block]) + 7) / 8);
  }
  out.align();
  for (std::uint32_t left = z; left != 0; left &= left - 1) {
    const int block = lowest(left);
    const std::uint64_t bits = unlikely_bits(block);
    const std::uint64_t flags = gather_bits(nonzero_bytes(bits), 0x8080808080808080);
    const std::uint64_t groups = bits_of_groups(flags, popcount(shape.unlikely[block]));
    out.put(gather_bits(bits, groups), popcount(groups));
  }
  out.align();
  return z;
}

// Writes section L.
inline void put_fields(const std::uint8_t* z_of_tile, const Shape& shape, BitWriter& out) {
  for (std::uint32_t left = shape.with_fields; left != 0; left &= left - 1) {
    const int begin = lowest(left) * kBlock;
    for (int i = begin; i < begin + kBlock; i += 16) {
      std::uint64_t z[2], bits[2];
      __builtin_memcpy(z, z_of_tile + i, 16);
      __builtin_memcpy(bits, shape.fields + i, 16);
      const std::uint64_t first = gather_bits(z[0], bits[0]), second = gather_bits(z[1], bits[1]);
      const int count = popcount(bits[0]), more = popcount(bits[1]);
      if (count + more <= 64) {
        out.put(first | second << count, count + more);
      } else {
        out.put(first, count);
        out.put(second, more);
      }
    }
  }
  out.align();
}

// Writes the tile to `coded`, which has kMostCodedBytes. Returns its size.
inline int put_sections(const std::uint8_t* z_of_tile, const Shape& shape, int c, const std::uint16_t* values,
                        std::uint8_t* coded) {
  BitWriter out{coded + 8};
  const std::uint32_t z = put_first_plane(shape, out);
  const std::uint8_t head[4] = {static_cast<std::uint8_t>(c)};
  __builtin_memcpy(coded, head, 4);
  __builtin_memcpy(coded + 4, &z, 4);
  std::uint32_t blocks = shape.touched;
  for (int plane = 1; plane < kPlanes; ++plane) {
    std::uint32_t left = blocks;
    for (blocks = 0; left != 0; left &= left - 1) {
      const int block = lowest(left);
      const std::uint64_t above = shape.planes[plane - 1][block];
      const std::uint64_t bits = shape.planes[plane][block];
      out.put(gather_bits(bits, above), popcount(above));
      blocks |= static_cast<std::uint32_t>(bits != 0) << block;
    }
    out.align();
  }
  put_fields(z_of_tile, shape, out);
  for (std::uint32_t left = shape.with_escapes; left != 0; left &= left - 1) {
    const int block = lowest(left);
    for (std::uint64_t escapes = shape.planes[kPlanes - 1][block]; escapes != 0; escapes &= escapes - 1) {
      __builtin_memcpy(out.next, values + block * kBlock + lowest(escapes), 2);
      out.next += 2;
    }
  }
  __builtin_memset(out.next, 0, 4);
  return static_cast<int>((out.next - coded + 3) / 4);
}

template <class Values>
int encode(const std::byte* new_values, std::byte* base, int count, std::byte* wire, std::uint64_t* lanes) {
  std::uint16_t filled[kTileValues], filled_base[kTileValues];
  const auto* values = reinterpret_cast<const std::uint16_t*>(new_values);
  auto* old = reinterpret_cast<std::uint16_t*>(base);
  const std::size_t num_bytes = 2 * static_cast<std::size_t>(count);
  if (count < kTileValues) {
    fill_up(new_values, count, filled);
    fill_up(base, count, filled_base);
    values = filled;
    old = filled_base;
  }
  if (!has_changed(old, values)) {
    hash_tile(values, lanes);
    return 0;
  }
  alignas(64) std::uint8_t z[kTileValues], exponents[kTileValues];
  const std::uint32_t sum_of_exponents = look<Values>(old, values, z, exponents, lanes);
  const int c = choose_c<Values>(z, exponents, sum_of_exponents, count);
  Shape shape;
  shape_of(z, exponents, c, shape);
  std::uint8_t coded[kMostCodedBytes];
  int size = put_sections(z, shape, c, values, coded);
  if (size < (count + 1) / 2) {
    __builtin_memcpy(wire, coded, 4 * static_cast<std::size_t>(size));
  } else {
    size = (count + 1) / 2;
    __builtin_memcpy(wire, new_values, num_bytes);
    if (count % 2 != 0) __builtin_memset(wire + num_bytes, 0, 2);
  }
  if (count < kTileValues) __builtin_memcpy(base, new_values, num_bytes);
  return size;
}
