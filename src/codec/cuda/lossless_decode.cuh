// Decodes a message and its base to values in three kernels: header and starts of tiles; the tiles; error status. A
// byte of a message is used only after a check that the message contains it.
#pragma once

#include "codec/cuda/lossless_planes.cuh"

namespace zcomm::gpu {

// --- The header

// Returns bits of LosslessError. A message may be shorter than a header.
ZCOMM_DEVICE std::uint32_t check_header(const DecodeLosslessPiece& piece) {
  if (piece.num_bytes < kLosslessHeaderBytes) return kHeaderError;
  const auto* const fields = reinterpret_cast<const std::uint64_t*>(piece.message);
  const std::uint64_t kind = fields[0] >> kKindShift & 0xffu;
  const bool is_header = (fields[0] ^ kind << kKindShift) == kHeaderStart && kind <= 1 &&
                         fields[1] == piece.num_bytes && (fields[5] | fields[6] | fields[7]) == 0;
  if (!is_header) return kHeaderError;
  std::uint32_t errors = 0;
  if (fields[2] != piece.generation || (kind == 1) != (piece.generation > 0)) errors |= kGenerationError;
  if (piece.generation > 0 && fields[3] != *piece.hash) errors |= kBaseError;
  return errors;
}

// Tells whether a body has the length that its table gives, or that whole values need. Called by all threads of a CTA.
ZCOMM_DEVICE bool is_complete(const DecodeLosslessPiece& piece, WarpSums& sums) {
  const std::uint64_t body_bytes = piece.num_bytes - kLosslessHeaderBytes;
  if (piece.generation == 0) return body_bytes == 2 * piece.num_elements;
  if (body_bytes / 4 < piece.table_words()) return false;
  const std::uint64_t num_words = piece.table_words() + scan_sizes(piece, table_of(piece.message), sums);
  return (num_words + 3) / 4 * 16 == body_bytes;
}

template <class = void>  // as for encode_any_kernel
__global__ void __launch_bounds__(kThreads) begin_kernel(const __grid_constant__ DecodeLosslessTable table) {
  __shared__ WarpSums sums;
  const DecodeLosslessPiece& piece = table.pieces[table.find()];
  std::uint32_t errors = check_header(piece);
  if (errors == 0 && !is_complete(piece, sums)) errors = kBodyError;
  if (threadIdx.x == 0) piece.state->errors = errors;
}

// --- A coded tile

// Cursor over the sections of a coded tile.
class Sections {
 public:
  ZCOMM_DEVICE Sections(const std::uint32_t* words, std::uint32_t num_words) : words_(words), num_words_(num_words) {}

  // Moves on to the next section, in which this lane has `num_bits`. Returns whether the tile holds all of it. Called
  // by all lanes.
  ZCOMM_DEVICE bool next(std::uint32_t num_bits) {
    std::uint32_t total;
    const std::uint32_t before = sum_of_lanes_before(num_bits, total);
    return move(before, total);
  }
  // Moves over two sections, either of at most 16 bits; `second` ends up at the second one.
  ZCOMM_DEVICE bool next(std::uint32_t num_bits, std::uint32_t second_bits, Sections& second) {
    std::uint32_t totals;
    const std::uint32_t before = sum_of_lanes_before(num_bits | second_bits << 16, totals);
    move(before & 0xffffu, totals & 0xffffu);
    second = *this;
    return second.move(before >> 16, totals >> 16);
  }
  // Returns the lane's next bits, at most 64; higher bits are undefined.
  ZCOMM_DEVICE std::uint64_t take(std::uint32_t num_bits) {
    const std::uint64_t bits = take_bits(words_, position_);
    position_ += num_bits;
    return bits;
  }
  ZCOMM_DEVICE bool is_at_end() const { return (end_ + 31) / 32 == num_words_; }

 private:
  ZCOMM_DEVICE bool move(std::uint32_t before, std::uint32_t total) {
    position_ = end_ + before;
    end_ = (end_ + total + 7) / 8 * 8;
    return end_ <= 32 * num_words_;
  }

  const std::uint32_t* words_;
  std::uint32_t num_words_, end_ = kHeadBits, position_ = 0;
};

// Block of a lane: one bit per value.
struct CodedBlock {
  ZCOMM_DEVICE CodedBlock(const Widths& low, const Widths& high)
      : unlikely(both_halves(low.is_far_below, high.is_far_below)) {}

  // Reads sections P, F and G. Returns whether the tile holds them. Called by all lanes.
  ZCOMM_DEVICE bool take_first_plane(bool has_unlikely, Sections& sections) {
    const std::uint32_t num_unlikely = popcount(unlikely), num_groups = has_unlikely ? (num_unlikely + 7) / 8 : 0;
    Sections likely = sections;
    if (!likely.next(64 - num_unlikely, num_groups, sections)) return false;
    plane = scatter_bits<BitPlaces>(likely.take(64 - num_unlikely), ~unlikely);
    const std::uint32_t flags = low_half(sections.take(num_groups)) & ((1u << num_groups) - 1);
    const std::uint32_t num_bits = bits_of_groups(flags, num_unlikely);
    if (!sections.next(num_bits)) return false;
    if (flags != 0) {
      plane |= scatter_bits<BitPlaces>(scatter_bytes(sections.take(num_bits), flags), unlikely);
    }
    ones = plane;
    return true;
  }
  // Reads sections T1 to T5. r is the number of planes that have a value's bit. Each plane lies within the one before,
  // so in binary each plane toggles the ones, and every other plane the twos.
  ZCOMM_DEVICE bool take_other_planes(Sections& sections) {
    if (!take_plane<BitPlaces>(sections)) return false;
    twos ^= plane;
#pragma unroll
    for (std::uint32_t i = 2; i < kEscape; ++i) {
      if (!take_plane<FewBitPlaces>(sections)) return false;
      if (i % 2 == 1) twos ^= plane;
      if (i == 3) fours = plane;
    }
    return true;
  }
  ZCOMM_DEVICE std::uint64_t escapes() const { return plane; }

  std::uint64_t unlikely;
  std::uint64_t plane = 0;  // the last plane read
  std::uint64_t ones = 0, twos = 0, fours = 0;

 private:
  // Reads the next plane, which has bits only where the last one has ones.
  template <class Places>
  ZCOMM_DEVICE bool take_plane(Sections& sections) {
    const std::uint32_t num_bits = popcount(plane);
    if (!sections.next(num_bits)) return false;
    plane = scatter_bits<Places>(sections.take(num_bits), plane);
    ones ^= plane;
    return true;
  }
};

// Adds differences, as natural numbers below 2^8, to two values.
ZCOMM_DEVICE std::uint32_t add_pair(std::uint32_t values, std::uint32_t z) {
  const std::uint32_t differences = (z >> 1 & 0x7fff7fffu) ^ (z & 0x00010001u) * 0xffffu;
  return ((values & 0x7fff7fffu) + (differences & 0x7fff7fffu)) ^ ((values ^ differences) & 0x80008000u);
}

// Adds differences to one byte of each of two byte pairs: the low one if z is odd.
ZCOMM_DEVICE std::uint32_t add_to_bytes(std::uint32_t values, std::uint32_t z) {
  const std::uint32_t size = (z + 0x00010001u) >> 1 & 0x00ff00ffu, low = (z & 0x00010001u) * 0xffffu;
  const std::uint32_t numbers = (size & low) | (size << 8 & ~low);
  const std::uint32_t differences = (numbers >> 1 & 0x7f7f7f7fu) ^ (numbers & 0x01010101u) * 0xffu;
  return ((values & 0x7f7f7f7fu) + (differences & 0x7f7f7f7fu)) ^ ((values ^ differences) & 0x80808080u);
}

// Reads section L of half a block, of which `shifted` has r; all its values but the escapes are then those of the
// message. `widths` are 0 for escapes.
ZCOMM_DEVICE void add_differences(Bytes shifted, const Widths& widths, bool is_pair, Sections& sections,
                                  std::uint32_t* row) {
  std::uint32_t shifted_words[8], width_words[8];
  shift_up(shifted.planes, widths.planes);  // loses bits beyond a byte: no encoder writes them
  shifted.to_words(shifted_words);
  widths.to_words(width_words);
#pragma unroll
  for (std::uint32_t i = 0; i < 8; i += 2) {
    const std::uint32_t first_bits = sum_of_bytes(width_words[i]);
    const std::uint64_t fields = sections.take(first_bits + sum_of_bytes(width_words[i + 1]));
    const std::uint32_t bits[2] = {low_half(fields), low_half(fields >> first_bits)};
#pragma unroll
    for (std::uint32_t k = 0; k < 2; ++k) {
      const std::uint32_t z = shifted_words[i + k] | split_fields(bits[k], width_words[i + k]);
      std::uint32_t* const words = row + 2 * (i + k);
      const std::uint32_t first = __byte_perm(z, 0, 0x4140), second = __byte_perm(z, 0, 0x4342);
      words[0] = is_pair ? add_to_bytes(words[0], first) : add_pair(words[0], first);
      words[1] = is_pair ? add_to_bytes(words[1], second) : add_pair(words[1], second);
    }
  }
}

// Reads section X.
ZCOMM_DEVICE void take_escapes(std::uint64_t escapes, Sections& sections, std::uint32_t* row) {
#pragma unroll 1
  for (; escapes != 0; escapes &= escapes - 1) {
    const std::uint32_t place = lowest_bit(escapes), shift = place % 2 * 16;
    const std::uint32_t value = low_half(sections.take(16)) & 0xffffu;
    row[place / 2] = (row[place / 2] & ~(0xffffu << shift)) | value << shift;
  }
}

// Decodes a tile of `size` words at `source`. `row` holds the lane's block, first of the base, then of the values.
// Returns whether an encoder may have written the tile. Called by all lanes.
ZCOMM_DEVICE bool decode_coded(const std::uint32_t* source, std::uint32_t size, DType dtype, std::uint32_t* words,
                               std::uint32_t* row) {
  if (size < kHeadBits / 32) return false;
#pragma unroll 1
  for (std::uint32_t i = lane_index(); i < size + 3; i += 32) words[i] = i < size ? source[i] : 0;
  __syncwarp();
  const std::uint32_t c = words[0];
  if (c > 255) return false;
  Sections sections(words, size);
  Widths low(c, HalfPlanes(row).exponents(dtype)), high(c, HalfPlanes(row + kHalfWords).exponents(dtype));
  CodedBlock block(low, high);
  if (!block.take_first_plane((words[1] >> lane_index() & 1u) != 0, sections)) return false;
  if (!block.take_other_planes(sections)) return false;
  low.clear(low_half(block.escapes())), high.clear(high_half(block.escapes()));
  Sections escapes = sections;
  const std::uint32_t num_escapes = popcount(block.escapes());
  if (!sections.next(low.sum() + high.sum(), 16 * num_escapes, escapes) || !escapes.is_at_end()) return false;
  const Bytes low_r{{low_half(block.ones), low_half(block.twos), low_half(block.fours)}};
  const Bytes high_r{{high_half(block.ones), high_half(block.twos), high_half(block.fours)}};
  const bool is_pair = dtype == DType::byte_pairs;
  add_differences(low_r, low, is_pair, sections, row);
  add_differences(high_r, high, is_pair, sections, row + kHalfWords);
  take_escapes(block.escapes(), escapes, row);
  return true;
}

// --- Tiles

// Hashes plain values and copies them to `base` unless that is null.
ZCOMM_DEVICE void take_plain(const std::byte* values, std::uint32_t count, std::byte* base, TileHash& hash) {
#pragma unroll 1
  for (std::uint32_t group = lane_index(); group < kTileGroups; group += 32) {
    std::uint32_t words[kGroupWords];
    load_filled(values, group, count, words);
    hash.add(words, group);
    if (base != nullptr) store_group<Bfloat16>(words, group * kGroup, count, base);
  }
}

// Decodes a tile and updates its base; returns as decode_coded().
ZCOMM_DEVICE bool take_coded(const std::uint32_t* source, std::uint32_t size, std::uint32_t count, DType dtype,
                             std::byte* base, Rows& rows, std::uint32_t* coded, TileHash& hash) {
  std::uint32_t words[kGroupWords];
#pragma unroll 1
  for (std::uint32_t group = lane_index(); group < kTileGroups; group += 32) {
    load_filled(base, group, count, words);
    rows.put(group, words);
  }
  __syncwarp();
  if (!decode_coded(source, size, dtype, coded, rows.of_lane())) return false;
  __syncwarp();
#pragma unroll 1
  for (std::uint32_t group = lane_index(); group < kTileGroups; group += 32) {
#pragma unroll
    for (std::uint32_t i = 0; i < kGroupWords; ++i) words[i] = rows.group(group)[i];
    fill_up(group, count, words);
    hash.add(words, group);
    store_group<Bfloat16>(words, group * kGroup, count, base);
  }
  return true;
}

template <class = void>
__global__ void __launch_bounds__(kTileThreads)
    decode_lossless_kernel(const __grid_constant__ DecodeLosslessTable table) {
  __shared__ Rows all_rows[kTileWarps];
  __shared__ std::uint32_t all_coded[kTileWarps][kCodedWords];
  const std::uint32_t index = table.find();
  const DecodeLosslessPiece& piece = table.pieces[index];
  const std::uint64_t tile = tile_of_warp(table.first_cta[index]);
  if (tile >= piece.num_tiles() || piece.state->errors != 0) return;
  const std::uint32_t count = piece.count(tile), warp = threadIdx.x / 32, plain = (count + 1) / 2;
  const std::uint64_t offset = tile * kTileValues * 2;
  std::byte* const base = piece.base + offset;
  TileHash hash;
  bool is_good = true;
  if (piece.generation == 0) {
    take_plain(piece.message + kLosslessHeaderBytes + offset, count, base, hash);
  } else {
    const std::uint32_t* const sizes = table_of(piece.message);
    const std::uint32_t size = size_of(sizes, tile);
    const std::uint32_t* const source = sizes + piece.table_words() + start_of(piece, sizes, tile);
    if (size == 0) {
      take_plain(base, count, nullptr, hash);
    } else if (size == plain) {
      take_plain(reinterpret_cast<const std::byte*>(source), count, base, hash);
    } else {
      is_good =
          size < plain && take_coded(source, size, count, piece.dtype, base, all_rows[warp], all_coded[warp], hash);
    }
  }
  if (is_good) {
    hash.add_to(piece.state, tile);
  } else {
    piece.state->has_bad_tile = 1;
  }
}

// --- Hash alone

template <class = void>
__global__ void __launch_bounds__(kTileThreads) hash_kernel(const __grid_constant__ HashTable table) {
  const std::uint32_t index = table.find();
  const LosslessPiece& piece = table.pieces[index];
  const std::uint64_t tile = tile_of_warp(table.first_cta[index]);
  if (tile >= piece.num_tiles()) return;
  TileHash hash;
  take_plain(piece.base + tile * kTileValues * 2, piece.count(tile), nullptr, hash);
  hash.add_to(piece.state, tile);
}

// --- Error status

inline constexpr std::uint32_t kFinishGroups = 4;  // per thread

template <class = void>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishTable table) {
  const std::uint32_t index = table.find();
  const FinishPiece& piece = table.pieces[index];
  const LosslessState& state = *piece.state;
  const std::uint64_t cta = blockIdx.x - table.first_cta[index];
  std::uint32_t errors = state.errors;
  if (state.has_bad_tile != 0) errors |= kBodyError;
  if (errors == 0 && piece.expected != nullptr && *piece.expected != state.hash) errors = piece.error;
  if (cta == 0 && threadIdx.x == 0) {
    if (errors != 0) {
      atomicOr(piece.status, errors);
    } else if (piece.hash != nullptr) {
      *piece.hash = state.hash;
    }
  }
  if (errors == 0) return;
  std::uint32_t nans[kGroupWords];
#pragma unroll
  for (std::uint32_t i = 0; i < kGroupWords; ++i) nans[i] = piece.nan * 0x10001u;
#pragma unroll 1
  for (std::uint32_t i = 0; i < kFinishGroups; ++i) {
    const std::uint64_t begin = ((cta * kFinishGroups + i) * kThreads + threadIdx.x) * kGroup;
    if (begin >= piece.num_spoiled) return;
    const std::uint64_t rest = piece.num_spoiled - begin;
    store_group<Bfloat16>(nans, 0, static_cast<std::uint32_t>(rest < kGroup ? rest : kGroup),
                          piece.spoiled + 2 * begin);
  }
}

}  // namespace zcomm::gpu
