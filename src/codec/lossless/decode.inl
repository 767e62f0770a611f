// Decodes a tile section by section; values are written only after the whole tile was found to be complete.

template <class Values>
inline void look(const std::uint16_t* base, int c, Shape& shape) {
  const int first = first_unlikely(c);
  for (int block = 0; block < kBlocks; ++block) {
    std::uint64_t unlikely = 0;
    bool any_field = false;
    for (int part = 0; part < kBlock; part += kWidth) {
      const int i = block * kBlock + part;
      const Bytes exponents = Values::exponents(load_words(base + i));
      const Bytes bits = look_up(kTables.fields, widths(exponents, c));
      unlikely |= unlikely_of(exponents, first) << part;
      store(shape.fields + i, bits);
      any_field |= !is_zero(bits);
    }
    shape.unlikely[block] = unlikely;
    shape.with_fields |= static_cast<std::uint32_t>(any_field) << block;
  }
}

// Reads sections P, F and G.
inline bool take_first_plane(BitReader& in, std::uint32_t z, Shape& shape) {
  std::uint64_t* plane = shape.planes[0];
  for (int block = 0; block < kBlocks; ++block) {
    const std::uint64_t likely = ~shape.unlikely[block];
    plane[block] = scatter_bits(in.take(popcount(likely)), likely);
    if (in.is_beyond()) return false;
  }
  in.align();
  std::uint64_t groups[kBlocks];
  for (std::uint32_t left = z; left != 0; left &= left - 1) {
    const int block = lowest(left);
    const int count = popcount(shape.unlikely[block]);
    groups[block] = bits_of_groups(in.take_few((count + 7) / 8), count);
    if (in.is_beyond()) return false;
  }
  in.align();
  for (std::uint32_t left = z; left != 0; left &= left - 1) {
    const int block = lowest(left);
    const std::uint64_t bits = scatter_bits(in.take(popcount(groups[block])), groups[block]);
    plane[block] |= scatter_bits(bits, shape.unlikely[block]);
    if (in.is_beyond()) return false;
  }
  in.align();
  for (int block = 0; block < kBlocks; ++block) {
    shape.touched |= static_cast<std::uint32_t>(plane[block] != 0) << block;
  }
  return true;
}

// Reads sections T1 to T5.
inline bool take_other_planes(BitReader& in, Shape& shape) {
  std::uint32_t blocks = shape.touched;
  for (int plane = 1; plane < kPlanes; ++plane) {
    __builtin_memset(shape.planes[plane], 0, sizeof shape.planes[plane]);
    std::uint32_t left = blocks;
    for (blocks = 0; left != 0; left &= left - 1) {
      const int block = lowest(left);
      const std::uint64_t above = shape.planes[plane - 1][block];
      const std::uint64_t bits = scatter_bits(in.take(popcount(above)), above);
      if (in.is_beyond()) return false;
      shape.planes[plane][block] = bits;
      blocks |= static_cast<std::uint32_t>(bits != 0) << block;
    }
    in.align();
  }
  shape.with_escapes = blocks;
  return true;
}

// Clears the fields of escapes, which have none.
inline void drop_fields_of_escapes(Shape& shape) {
  for (std::uint32_t left = shape.with_escapes; left != 0; left &= left - 1) {
    const int block = lowest(left);
    bool any_field = false;
    for (int part = 0; part < kBlock; part += kWidth) {
      std::uint8_t* fields = shape.fields + block * kBlock + part;
      const Bytes bits = without(load(fields), spread(&shape.planes[kPlanes - 1][block], part));
      store(fields, bits);
      any_field |= !is_zero(bits);
    }
    if (!any_field) shape.with_fields &= ~(std::uint32_t{1} << block);
  }
}

// Reads section L: the low bits of z, of blocks that have any.
inline bool take_fields(BitReader& in, const Shape& shape, std::uint8_t* low_of_tile) {
  for (std::uint32_t left = shape.with_fields; left != 0; left &= left - 1) {
    const int begin = lowest(left) * kBlock;
    for (int i = begin; i < begin + kBlock; i += 16) {
      std::uint64_t bits[2], low[2];
      __builtin_memcpy(bits, shape.fields + i, 16);
      const int count = popcount(bits[0]), more = popcount(bits[1]);
      if (count + more <= 56) {
        const std::uint64_t next = in.take_few(count + more);
        low[0] = scatter_bits(next, bits[0]);
        low[1] = scatter_bits(next >> count, bits[1]);
      } else {
        low[0] = scatter_bits(in.take_few(count), bits[0]);
        low[1] = scatter_bits(in.take_few(more), bits[1]);
      }
      __builtin_memcpy(low_of_tile + i, low, 16);
    }
    if (in.is_beyond()) return false;
  }
  in.align();
  return true;
}

// Adds z to the values of the blocks that have any. Escapes get undefined values.
template <class Values>
inline void add_differences(const Shape& shape, const std::uint8_t* low_of_tile, std::uint16_t* values) {
  // Counts the planes of each value, in binary. Bits spread faster from memory.
  std::uint64_t ones[kBlocks], twos[kBlocks], fours[kBlocks];
  for (int block = 0; block < kBlocks; ++block) {
    const auto plane = [&](int number) { return shape.planes[number][block]; };
    ones[block] = (plane(0) & ~plane(1)) | (plane(2) & ~plane(3)) | (plane(4) & ~plane(5));
    twos[block] = plane(1) & ~plane(3);
    fours[block] = plane(3);
  }
  for (std::uint32_t left = shape.touched | shape.with_fields; left != 0; left &= left - 1) {
    const int block = lowest(left);
    const bool has_low = (shape.with_fields >> block & 1) != 0;
    for (int part = 0; part < kBlock; part += kWidth) {
      const int i = block * kBlock + part;
      const Bytes step = add(load(shape.fields + i), splat(1));
      const Bytes two_steps = add(step, step);
      Bytes z = has_low ? load(low_of_tile + i) : splat(0);
      z = add(z, both(step, spread(&ones[block], part)));
      if ((twos[block] | fours[block]) != 0) {
        z = add(z, both(two_steps, spread(&twos[block], part)));
        z = add(z, both(add(two_steps, two_steps), spread(&fours[block], part)));
      }
      store_words(values + i, Values::successors(load_words(values + i), z));
    }
  }
}

// Reads section X, which begins at the reader's next bit.
inline void take_escapes(const BitReader& in, const Shape& shape, std::uint16_t* values) {
  const std::uint8_t* next = in.bytes + in.position / 8;
  for (std::uint32_t left = shape.with_escapes; left != 0; left &= left - 1) {
    const int block = lowest(left);
    for (std::uint64_t escapes = shape.planes[kPlanes - 1][block]; escapes != 0; escapes &= escapes - 1) {
      __builtin_memcpy(values + block * kBlock + lowest(escapes), next, 2);
      next += 2;
    }
  }
}

template <class Values>
inline bool decode_coded(const std::byte* wire, int size, std::uint16_t* values) {
  if (size < 2) return false;
  std::uint8_t coded[kTileBytes + kReadBeyond];  // the tile, and room for BitReader to read past it
  const std::size_t num_bytes = 4 * static_cast<std::size_t>(size);
  __builtin_memcpy(coded, wire, num_bytes);
  __builtin_memset(coded + num_bytes, 0, kReadBeyond);
  std::uint32_t z;
  __builtin_memcpy(&z, coded + 4, 4);
  if ((coded[1] | coded[2] | coded[3]) != 0) return false;
  Shape shape;
  look<Values>(values, coded[0], shape);
  BitReader in{coded, 32 * static_cast<std::int64_t>(size), 64};
  if (!take_first_plane(in, z, shape) || !take_other_planes(in, shape)) return false;
  drop_fields_of_escapes(shape);
  alignas(64) std::uint8_t low[kTileValues];
  if (!take_fields(in, shape, low)) return false;
  int num_escapes = 0;
  for (const std::uint64_t escapes : shape.planes[kPlanes - 1]) num_escapes += popcount(escapes);
  if ((in.position + 16 * num_escapes + 31) / 32 != size) return false;
  add_differences<Values>(shape, low, values);
  take_escapes(in, shape, values);
  return true;
}

template <class Values>
bool decode(const std::byte* wire, int size, std::byte* base, int count, std::uint64_t* lanes) {
  const std::size_t num_bytes = 2 * static_cast<std::size_t>(count);
  const int plain = (count + 1) / 2;
  if (size > plain) return false;
  if (size == plain) {
    __builtin_memcpy(base, wire, num_bytes);
  } else if (size > 0) {
    std::uint16_t filled[kTileValues];
    const bool is_short = count < kTileValues;
    if (is_short) fill_up(base, count, filled);
    if (!decode_coded<Values>(wire, size, is_short ? filled : reinterpret_cast<std::uint16_t*>(base))) return false;
    if (is_short) __builtin_memcpy(base, filled, num_bytes);
  }
  hash(base, count, lanes);
  return true;
}
