// Values and their base to a message, in three kernels: sizes of tiles and the hash; where tiles begin and the header;
// the tiles. The first and the last compute the same codes: room for the codes of a whole message, from which they were
// to be copied together, would take as much memory as the values.
#pragma once

#include "codec/cuda/difference_tile.cuh"

namespace zcomm::gpu {

// --- What is known of a tile before any bit is written

// Of a lane's groups.
struct DifferenceLook {
  std::uint32_t exponents = 0;  // their sum
  std::uint32_t changes = 0;    // 0 if there is none
};

// The exponent of a value's base, and above it the difference as a natural number z, at most 255.
ZCOMM_DEVICE std::uint32_t exponent_and_z(std::uint32_t base, std::uint32_t value, HalfType type) {
  const std::int32_t difference = static_cast<std::int16_t>(value - base);
  const auto z = static_cast<std::uint32_t>((2 * difference) ^ (difference >> 31));
  return exponent_of(base, type) | smaller_of(z, 255) << 8;
}

ZCOMM_DEVICE void look_at(const std::uint32_t (&base)[kGroupWords], const std::uint32_t (&values)[kGroupWords],
                          HalfType type, std::uint32_t* row, DifferenceLook& look) {
#pragma unroll
  for (std::uint32_t i = 0; i < kGroupWords; ++i) {
    const std::uint32_t low = exponent_and_z(base[i] & 0xffffu, values[i] & 0xffffu, type);
    const std::uint32_t high = exponent_and_z(base[i] >> 16, values[i] >> 16, type);
    row[i] = low | high << 16;
    look.exponents += (low & 0xffu) + (high & 0xffu);
    look.changes |= base[i] ^ values[i];
  }
}

// The exponent from which on an update is below the last place, about: the tile's mean update in units of 2^e.
ZCOMM_DEVICE std::uint32_t choose_c(const DifferenceLook& look, const std::uint32_t* row, std::uint32_t count,
                                    HalfType type) {
  const std::uint32_t padding = (kTileValues - count) * exponent_of(kPadding, type);
  const std::uint32_t e = (sum_of_lanes(look.exponents) - padding) / count + 2;
  std::uint32_t sum = 0;
#pragma unroll 4
  for (std::uint32_t i = 0; i < 2 * kBlockWords; ++i) {
    const std::uint32_t value = row[i / 2] >> (i % 2 * 16);
    const std::uint32_t exponent = value & 0xffu, z = value >> 8 & 0xffu;
    sum += (z + 1) / 2 * (64u >> (e > exponent ? smaller_of(e - exponent, 7) : 0));
  }
  const std::uint64_t mean = kTileValues * static_cast<std::uint64_t>(1 + sum_of_lanes(sum)) / count;
  const std::int32_t c = static_cast<std::int32_t>(e) + 63 - __clzll(static_cast<long long>(mean)) - 15;
  return c < 0 ? 0 : smaller_of(static_cast<std::uint32_t>(c), 255);
}

// A lane's block: a bit for each value.
class BlockShape {
 public:
  ZCOMM_DEVICE BlockShape(const std::uint32_t* row, std::uint32_t c) {
#pragma unroll 4
    for (std::uint32_t i = 0; i < 2 * kBlockWords; ++i) {
      const std::uint32_t value = row[i / 2] >> (i % 2 * 16);
      const std::uint32_t exponent = value & 0xffu, z = value >> 8 & 0xffu;
      const std::uint32_t width = field_width(exponent, c);
      const std::uint32_t r = z >= 255 ? kEscape : smaller_of(z >> width, kEscape);
      unlikely |= static_cast<std::uint64_t>(is_unlikely(exponent, c)) << i;
      ones_ |= static_cast<std::uint64_t>(r & 1u) << i;
      twos_ |= static_cast<std::uint64_t>(r >> 1 & 1u) << i;
      fours_ |= static_cast<std::uint64_t>(r >> 2) << i;
      if (r < kEscape) field_bits += width;
    }
    num_unlikely = popcount(unlikely);
    if ((plane(0) & unlikely) == 0) return;
    has_unlikely = true;
    unlikely_bits = gather_bits(plane(0), unlikely);
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) {
      flags |= static_cast<std::uint32_t>((unlikely_bits >> (8 * i) & 0xffu) != 0) << i;
    }
    groups = bits_of_groups(flags, num_unlikely);
  }

  // Whether r > number.
  ZCOMM_DEVICE std::uint64_t plane(std::uint32_t number) const {
    switch (number) {
      case 0:
        return ones_ | twos_ | fours_;
      case 1:
        return twos_ | fours_;
      case 2:
        return (ones_ & twos_) | fours_;
      case 3:
        return fours_;
      case 4:
        return (ones_ | twos_) & fours_;
      default:
        return twos_ & fours_;
    }
  }
  ZCOMM_DEVICE std::uint64_t escapes() const { return plane(5); }

  std::uint64_t unlikely = 0;
  std::uint32_t num_unlikely = 0;
  bool has_unlikely = false;                    // ones with plane 0; if not, the next three are 0
  std::uint64_t unlikely_bits = 0, groups = 0;  // plane 0 of those alone; its bits that are in groups with a flag
  std::uint32_t flags = 0;
  std::uint32_t field_bits = 0;

 private:
  std::uint64_t ones_ = 0, twos_ = 0, fours_ = 0;  // bits of r
};

// Where a lane's part of each section begins, and where the last one ends.
struct SectionPlaces {
  ZCOMM_DEVICE explicit SectionPlaces(const BlockShape& shape) {
    likely = place(64 - shape.num_unlikely);
    flags = place(shape.has_unlikely ? (shape.num_unlikely + 7) / 8 : 0);
    groups = place(popcount(shape.groups));
#pragma unroll
    for (std::uint32_t i = 0; i < 5; ++i) planes[i] = place(popcount(shape.plane(i)));
    fields = place(shape.field_bits);
    escapes = place(16 * popcount(shape.escapes()));
  }
  ZCOMM_DEVICE std::uint32_t num_words() const { return (end + 31) / 32; }

  std::uint32_t end = kHeadBits;
  std::uint32_t likely, flags, groups, planes[5], fields, escapes;

 private:
  // Of the next section, in which this lane has `num_bits`.
  ZCOMM_DEVICE std::uint32_t place(std::uint32_t num_bits) {
    const LaneSums sums(num_bits);
    const std::uint32_t begin = end + sums.before;
    end = (end + sums.total + 7) / 8 * 8;
    return begin;
  }
};

// --- Sizes and hash

template <class = void>  // as of encode_any_kernel
__global__ void __launch_bounds__(kTileThreads) measure_kernel(const __grid_constant__ EncodeDifferenceTable table) {
  __shared__ Rows all_rows[kTileWarps];
  const std::uint32_t index = table.find();
  const EncodeDifferencePiece& piece = table.pieces[index];
  const std::uint64_t tile = tile_of_warp(table.first_cta[index]);
  if (tile >= piece.tiles.num_tiles()) return;
  const std::uint32_t count = piece.tiles.count(tile);
  const HalfType type = piece.tiles.type;
  const std::uint64_t offset = tile * kTileValues * 2;
  Rows& rows = all_rows[threadIdx.x / 32];
  TileHash hash;
  DifferenceLook look;
#pragma unroll 1
  for (std::uint32_t group = lane_index(); group < kTileGroups; group += 32) {
    std::uint32_t values[kGroupWords], base[kGroupWords];
    load_filled(piece.values + offset, group, count, values);
    hash.add(values, group);
    if (piece.is_whole()) continue;
    load_filled(piece.base + offset, group, count, base);
    look_at(base, values, type, rows.group(group), look);
  }
  hash.add_to(piece.tiles.state, tile);
  if (piece.is_whole()) return;
  __syncwarp();
  std::uint32_t size = 0;
  if (sum_of_lanes(static_cast<std::uint32_t>(look.changes != 0)) != 0) {
    const BlockShape shape(rows.of_lane(), choose_c(look, rows.of_lane(), count, type));
    size = smaller_of(SectionPlaces(shape).num_words(), (count + 1) / 2);
  }
  if (lane_index() != 0) return;
  auto* const sizes = reinterpret_cast<std::uint16_t*>(table_of(piece.message));
  sizes[tile] = static_cast<std::uint16_t>(size);
  if (tile % 2 == 0 && tile + 1 == piece.tiles.num_tiles()) sizes[tile + 1] = 0;
}

// --- Starts of tiles, and the header

ZCOMM_DEVICE void write_header(const EncodeDifferencePiece& piece, std::uint64_t body_bytes) {
  auto* const fields = reinterpret_cast<std::uint64_t*>(piece.message);
  const std::uint64_t num_bytes = kDifferenceHeaderBytes + body_bytes;
  fields[0] = kHeaderStart | static_cast<std::uint64_t>(!piece.is_whole()) << kKindShift;
  fields[1] = num_bytes;
  fields[2] = piece.generation;
  fields[3] = piece.is_whole() ? 0 : *piece.hash;
  fields[4] = piece.tiles.state->hash;
  fields[5] = 0, fields[6] = 0, fields[7] = 0;
  *piece.num_bytes = num_bytes;
}

template <class = void>
__global__ void __launch_bounds__(kThreads) seal_kernel(const __grid_constant__ EncodeDifferenceTable table) {
  __shared__ WarpSums sums;
  const EncodeDifferencePiece& piece = table.pieces[table.find()];
  std::uint64_t body_bytes = 2 * piece.tiles.num_elements;
  if (!piece.is_whole()) {
    const std::uint64_t num_words = piece.tiles.table_words() + scan_sizes(piece.tiles, table_of(piece.message), sums);
    const std::uint64_t end = (num_words + 3) / 4 * 4;
    if (num_words + threadIdx.x < end) table_of(piece.message)[num_words + threadIdx.x] = 0;
    body_bytes = 4 * end;
  }
  if (threadIdx.x != 0) return;
  if (piece.message != nullptr) write_header(piece, body_bytes);
  *piece.hash = piece.tiles.state->hash;
}

// --- Tiles

// Section L.
ZCOMM_DEVICE void put_fields(const std::uint32_t* row, std::uint32_t c, std::uint64_t escapes, std::uint32_t position,
                             std::uint32_t* coded) {
#pragma unroll 1
  for (std::uint32_t first = 0; first < 2 * kBlockWords; first += 8) {
    std::uint64_t bits = 0;
    std::uint32_t num_bits = 0;
#pragma unroll
    for (std::uint32_t i = first; i < first + 8; ++i) {
      const std::uint32_t value = row[i / 2] >> (i % 2 * 16);
      const std::uint32_t width = (escapes >> i & 1u) != 0 ? 0 : field_width(value & 0xffu, c);
      const std::uint32_t field = value >> 8 & ((1u << width) - 1);
      bits |= static_cast<std::uint64_t>(field) << num_bits;
      num_bits += width;
    }
    put_bits(bits, position, coded);
    position += num_bits;
  }
}

// A coded tile, all words of which are zero. `values` are those of the lane's block.
ZCOMM_DEVICE void put_sections(const BlockShape& shape, const SectionPlaces& places, const std::uint32_t* row,
                               std::uint32_t c, const std::byte* values, std::uint32_t* coded) {
  const std::uint32_t blocks = sum_of_lanes(static_cast<std::uint32_t>(shape.has_unlikely) << lane_index());
  if (lane_index() == 0) coded[0] = c, coded[1] = blocks;
  put_bits(gather_bits(shape.plane(0), ~shape.unlikely), places.likely, coded);
  put_bits(shape.flags, places.flags, coded);
  put_bits(gather_bits(shape.unlikely_bits, shape.groups), places.groups, coded);
#pragma unroll
  for (std::uint32_t i = 0; i < 5; ++i) {
    put_bits(gather_bits(shape.plane(i + 1), shape.plane(i)), places.planes[i], coded);
  }
  put_fields(row, c, shape.escapes(), places.fields, coded);
  std::uint32_t position = places.escapes;
#pragma unroll 1
  for (std::uint64_t escapes = shape.escapes(); escapes != 0; escapes &= escapes - 1, position += 16) {
    put_bits(load_value<Bfloat16>(values + 2 * lowest_bit(escapes)), position, coded);
  }
}

// The values as they are.
ZCOMM_DEVICE void write_plain(const std::byte* values, std::uint32_t count, std::byte* base, std::uint32_t* target) {
#pragma unroll 1
  for (std::uint32_t i = lane_index(); 2 * i < count; i += 32) {
    const std::uint32_t low = load_value<Bfloat16>(values + 4 * i);
    const std::uint32_t high = 2 * i + 1 < count ? load_value<Bfloat16>(values + 4 * i + 2) : 0;
    target[i] = low | high << 16;
    auto* const pair = reinterpret_cast<std::uint16_t*>(base + 4 * i);
    pair[0] = static_cast<std::uint16_t>(low);
    if (2 * i + 1 < count) pair[1] = static_cast<std::uint16_t>(high);
  }
}

// Of whole values. `target` may be null.
ZCOMM_DEVICE void copy_tile(const std::byte* values, std::uint32_t count, std::byte* base, std::byte* target) {
#pragma unroll 1
  for (std::uint32_t group = lane_index(); group * kGroup < count; group += 32) {
    std::uint32_t words[kGroupWords];
    load_group<Bfloat16>(values, group * kGroup, count, words);
    store_group<Bfloat16>(words, group * kGroup, count, base);
    if (target != nullptr) store_group<Bfloat16>(words, group * kGroup, count, target);
  }
}

ZCOMM_DEVICE void write_coded(const std::byte* values, std::uint32_t count, HalfType type, std::byte* base,
                              std::uint32_t size, Rows& rows, std::uint32_t* coded, std::uint32_t* target) {
  DifferenceLook look;
#pragma unroll 1
  for (std::uint32_t group = lane_index(); group < kTileGroups; group += 32) {
    std::uint32_t words[kGroupWords], old[kGroupWords];
    load_filled(values, group, count, words);
    load_filled(base, group, count, old);
    look_at(old, words, type, rows.group(group), look);
    store_group<Bfloat16>(words, group * kGroup, count, base);
  }
#pragma unroll 1
  for (std::uint32_t i = lane_index(); i < size; i += 32) coded[i] = 0;
  __syncwarp();
  const std::uint32_t c = choose_c(look, rows.of_lane(), count, type);
  const BlockShape shape(rows.of_lane(), c);
  const SectionPlaces places(shape);
  if (places.num_words() != size) return;  // somebody writes to the values: what was measured is not there any more
  put_sections(shape, places, rows.of_lane(), c, values + lane_index() * (4 * kBlockWords), coded);
  __syncwarp();
#pragma unroll 1
  for (std::uint32_t i = lane_index(); i < size; i += 32) target[i] = coded[i];
}

template <class = void>
__global__ void __launch_bounds__(kTileThreads) write_kernel(const __grid_constant__ EncodeDifferenceTable table) {
  __shared__ Rows all_rows[kTileWarps];
  __shared__ CodedWords all_coded[kTileWarps];
  const std::uint32_t index = table.find();
  const EncodeDifferencePiece& piece = table.pieces[index];
  const std::uint64_t tile = tile_of_warp(table.first_cta[index]);
  if (tile >= piece.tiles.num_tiles()) return;
  const std::uint32_t count = piece.tiles.count(tile), warp = threadIdx.x / 32;
  const std::uint64_t offset = tile * kTileValues * 2;
  const std::byte* const values = piece.values + offset;
  std::byte* const base = piece.base + offset;
  if (piece.is_whole()) {
    copy_tile(values, count, base,
              piece.message == nullptr ? nullptr : piece.message + kDifferenceHeaderBytes + offset);
    return;
  }
  std::uint32_t* const sizes = table_of(piece.message);
  const std::uint32_t size = size_of(sizes, tile);
  if (size == 0) return;
  std::uint32_t* const target = sizes + piece.tiles.table_words() + start_of(piece.tiles, sizes, tile);
  if (size == (count + 1) / 2) {
    write_plain(values, count, base, target);
  } else {
    write_coded(values, count, piece.tiles.type, base, size, all_rows[warp], all_coded[warp].words, target);
  }
}

}  // namespace zcomm::gpu
