// Encodes values and their base to a message in three kernels: sizes of tiles and the hash; starts of tiles and the
// header; the tiles. The first and the last compute the same codes: a buffer for the codes of a whole message would
// take as much memory as the values.
#pragma once

#include "codec/cuda/lossless_differences.cuh"

namespace zcomm::gpu {

// --- Layout of a tile, before any bit is written

// Layout of a lane's block in a tile of this c: one bit per value.
class BlockShape {
 public:
  ZCOMM_DEVICE BlockShape(const HalfDifferences& low, const HalfDifferences& high, std::uint32_t c)
      : low_widths(c, low.exponents), high_widths(c, high.exponents) {
    std::uint32_t low_r[3], high_r[3];
    find_r(low.z, low_widths, low_r);
    find_r(high.z, high_widths, high_r);
    ones_ = both_halves(low_r[0], high_r[0]);
    twos_ = both_halves(low_r[1], high_r[1]);
    fours_ = both_halves(low_r[2], high_r[2]);
    unlikely = both_halves(low_widths.is_far_below, high_widths.is_far_below);
    num_unlikely = popcount(unlikely);
    has_unlikely = (plane(0) & unlikely) != 0;
    if (!has_unlikely) return;
    unlikely_bits = gather_bits<BitPlaces>(plane(0), unlikely);
    flags = byte_flags(low_half(unlikely_bits)) | byte_flags(high_half(unlikely_bits)) << 4;
  }

  // Tells whether r > number.
  ZCOMM_DEVICE std::uint64_t plane(std::uint32_t number) const { return numbers_above(number, ones_, twos_, fours_); }
  ZCOMM_DEVICE std::uint64_t escapes() const { return plane(5); }

  Widths low_widths, high_widths;  // 0 for escapes
  std::uint64_t unlikely;
  std::uint32_t num_unlikely;
  bool has_unlikely;                // with a bit in plane 0; if none, the next two are 0
  std::uint64_t unlikely_bits = 0;  // plane 0 of the unlikely values
  std::uint32_t flags = 0;          // groups of unlikely_bits that have ones

 private:
  // Sets the three bits of r, and the widths of escapes to 0.
  ZCOMM_DEVICE static void find_r(Bytes z, Widths& widths, std::uint32_t (&r)[3]) {
    std::uint32_t is_escape = ~0u;
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) is_escape &= z.planes[i];
    shift_down(z.planes, widths.planes);
    is_escape |= z.planes[3] | z.planes[4] | z.planes[5] | z.planes[6] | z.planes[7] | (z.planes[2] & z.planes[1]);
    r[0] = z.planes[0] & ~is_escape, r[1] = z.planes[1] | is_escape, r[2] = z.planes[2] | is_escape;
    widths.clear(is_escape);
  }

  std::uint64_t ones_, twos_, fours_;  // bits of r
};

// Start of a lane's part of each section, and the end of the last section.
struct SectionPlaces {
  ZCOMM_DEVICE explicit SectionPlaces(const BlockShape& shape) {
    place(likely, 64 - shape.num_unlikely, flags, shape.has_unlikely ? (shape.num_unlikely + 7) / 8 : 0);
    place(groups, bits_of_groups(shape.flags, shape.num_unlikely), planes[0], popcount(shape.plane(0)));
    place(planes[1], popcount(shape.plane(1)), planes[2], popcount(shape.plane(2)));
    place(planes[3], popcount(shape.plane(3)), planes[4], popcount(shape.plane(4)));
    place(fields, shape.low_widths.sum() + shape.high_widths.sum(), escapes, 16 * popcount(shape.escapes()));
  }
  ZCOMM_DEVICE std::uint32_t num_words() const { return (end + 31) / 32; }

  std::uint32_t end = kHeadBits;
  std::uint32_t likely, flags, groups, planes[5], fields, escapes;

 private:
  // Places two sections; this lane has `first_bits` and `second_bits` of them. Either total fits 16 bits.
  ZCOMM_DEVICE void place(std::uint32_t& first, std::uint32_t first_bits, std::uint32_t& second,
                          std::uint32_t second_bits) {
    std::uint32_t totals;
    const std::uint32_t before = sum_of_lanes_before(first_bits | second_bits << 16, totals);
    first = end + (before & 0xffffu);
    end = (end + (totals & 0xffffu) + 7) / 8 * 8;
    second = end + (before >> 16);
    end = (end + (totals >> 16) + 7) / 8 * 8;
  }
};

// --- Sizes and hash

template <class = void>  // as for encode_any_kernel
__global__ void __launch_bounds__(kTileThreads) measure_kernel(const __grid_constant__ EncodeLosslessTable table) {
  __shared__ Rows all_rows[kTileWarps][2];  // of the base and the values
  const std::uint32_t index = table.find();
  const EncodeLosslessPiece& piece = table.pieces[index];
  const std::uint64_t tile = tile_of_warp(table.first_cta[index]);
  if (tile >= piece.num_tiles()) return;
  const std::uint32_t count = piece.count(tile);
  const std::uint64_t offset = tile * kTileValues * 2;
  Rows &base_rows = all_rows[threadIdx.x / 32][0], &value_rows = all_rows[threadIdx.x / 32][1];
  const bool is_whole = piece.is_whole();
  TileHash hash;
  std::uint32_t changes = 0;
#pragma unroll 1
  for (std::uint32_t group = lane_index(); group < kTileGroups; group += 32) {
    std::uint32_t values[kGroupWords], base[kGroupWords];
    load_filled(piece.values + offset, group, count, values);
    if (!is_whole) load_filled(piece.base + offset, group, count, base);  // both loads overlap
    hash.add(values, group);
    if (is_whole) continue;
    base_rows.put(group, base);
    value_rows.put(group, values);
#pragma unroll
    for (std::uint32_t i = 0; i < kGroupWords; ++i) changes |= base[i] ^ values[i];
  }
  hash.add_to(piece.state, tile);
  if (is_whole) return;
  __syncwarp();
  std::uint32_t size = 0;
  if (sum_of_lanes(static_cast<std::uint32_t>(changes != 0)) != 0) {
    const std::uint32_t *const before = base_rows.of_lane(), *const after = value_rows.of_lane();
    const HalfDifferences low(before, after, piece.dtype);
    const HalfDifferences high(before + kHalfWords, after + kHalfWords, piece.dtype);
    const BlockShape shape(low, high, choose_c(low, high, count, piece.dtype));
    size = smaller_of(SectionPlaces(shape).num_words(), (count + 1) / 2);
  }
  if (lane_index() != 0) return;
  auto* const sizes = reinterpret_cast<std::uint16_t*>(table_of(piece.message));
  sizes[tile] = static_cast<std::uint16_t>(size);
  if (tile % 2 == 0 && tile + 1 == piece.num_tiles()) sizes[tile + 1] = 0;
}

// --- Starts of tiles, and the header

ZCOMM_DEVICE void write_header(const EncodeLosslessPiece& piece, std::uint64_t body_bytes) {
  auto* const fields = reinterpret_cast<std::uint64_t*>(piece.message);
  const std::uint64_t num_bytes = kLosslessHeaderBytes + body_bytes;
  fields[0] = kHeaderStart | static_cast<std::uint64_t>(!piece.is_whole()) << kKindShift;
  fields[1] = num_bytes;
  fields[2] = piece.generation;
  fields[3] = piece.is_whole() ? 0 : *piece.hash;
  fields[4] = piece.state->hash;
  fields[5] = 0, fields[6] = 0, fields[7] = 0;
  *piece.num_bytes = num_bytes;
}

template <class = void>
__global__ void __launch_bounds__(kThreads) seal_kernel(const __grid_constant__ EncodeLosslessTable table) {
  __shared__ WarpSums sums;
  const EncodeLosslessPiece& piece = table.pieces[table.find()];
  std::uint64_t body_bytes = 2 * piece.num_elements;
  if (!piece.is_whole()) {
    const std::uint64_t num_words = piece.table_words() + scan_sizes(piece, table_of(piece.message), sums);
    const std::uint64_t end = (num_words + 3) / 4 * 4;
    if (num_words + threadIdx.x < end) table_of(piece.message)[num_words + threadIdx.x] = 0;
    body_bytes = 4 * end;
  }
  if (threadIdx.x != 0) return;
  if (piece.message != nullptr) write_header(piece, body_bytes);
  *piece.hash = piece.state->hash;
}

// --- Tiles

// Writes section L.
ZCOMM_DEVICE void put_fields(const Bytes& z, const Widths& widths, std::uint32_t& position, std::uint32_t* coded) {
  Bytes field_planes{};
#pragma unroll
  for (std::uint32_t i = 0; i < 7; ++i) field_planes.planes[i] = z.planes[i] & widths.is_above(i);
  std::uint32_t width_words[8], field_words[8];
  widths.to_words(width_words);
  field_planes.to_words(field_words);
#pragma unroll
  for (std::uint32_t i = 0; i < 8; i += 2) {
    const std::uint64_t first = join_fields(field_words[i], width_words[i]);
    const std::uint64_t second = join_fields(field_words[i + 1], width_words[i + 1]);
    const std::uint32_t first_bits = sum_of_bytes(width_words[i]);
    put_bits(first | second << first_bits, position, coded);
    position += first_bits + sum_of_bytes(width_words[i + 1]);
  }
}

// Writes a coded tile, all words of which are zero. `values` are those of the lane's block.
ZCOMM_DEVICE void put_sections(const BlockShape& shape, const SectionPlaces& places, std::uint32_t c,
                               const std::byte* values, std::uint32_t* coded) {
  const std::uint32_t blocks = sum_of_lanes(static_cast<std::uint32_t>(shape.has_unlikely) << lane_index());
  if (lane_index() == 0) coded[0] = c, coded[1] = blocks;
  put_bits(gather_bits<BitPlaces>(shape.plane(0), ~shape.unlikely), places.likely, coded);
  put_bits(shape.flags, places.flags, coded);
  put_bits(gather_bytes(shape.unlikely_bits, shape.flags), places.groups, coded);
  put_bits(gather_bits<BitPlaces>(shape.plane(1), shape.plane(0)), places.planes[0], coded);
#pragma unroll
  for (std::uint32_t i = 1; i < 5; ++i) {
    put_bits(gather_bits<FewBitPlaces>(shape.plane(i + 1), shape.plane(i)), places.planes[i], coded);
  }
  std::uint32_t position = places.escapes;
#pragma unroll 1
  for (std::uint64_t escapes = shape.escapes(); escapes != 0; escapes &= escapes - 1, position += 16) {
    put_bits(load_value<Bfloat16>(values + 2 * lowest_bit(escapes)), position, coded);
  }
}

// Writes plain values.
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

// Copies whole values. `target` may be null.
ZCOMM_DEVICE void copy_tile(const std::byte* values, std::uint32_t count, std::byte* base, std::byte* target) {
#pragma unroll 1
  for (std::uint32_t group = lane_index(); group * kGroup < count; group += 32) {
    std::uint32_t words[kGroupWords];
    load_group<Bfloat16>(values, group * kGroup, count, words);
    store_group<Bfloat16>(words, group * kGroup, count, base);
    if (target != nullptr) store_group<Bfloat16>(words, group * kGroup, count, target);
  }
}

ZCOMM_DEVICE void write_coded(const std::byte* values, std::uint32_t count, DType dtype, std::byte* base,
                              std::uint32_t size, Rows& base_rows, Rows& value_rows, std::uint32_t* target) {
#pragma unroll 1
  for (std::uint32_t group = lane_index(); group < kTileGroups; group += 32) {
    std::uint32_t words[kGroupWords], old[kGroupWords];
    load_filled(values, group, count, words);
    load_filled(base, group, count, old);
    base_rows.put(group, old);
    value_rows.put(group, words);
    store_group<Bfloat16>(words, group * kGroup, count, base);
  }
  __syncwarp();
  const std::uint32_t *const before = base_rows.of_lane(), *const after = value_rows.of_lane();
  const HalfDifferences low(before, after, dtype), high(before + kHalfWords, after + kHalfWords, dtype);
  __syncwarp();  // bits overwrite the rows from here on
  std::uint32_t* const coded = value_rows.words;
#pragma unroll 1
  for (std::uint32_t i = lane_index(); i < size; i += 32) coded[i] = 0;
  const std::uint32_t c = choose_c(low, high, count, dtype);
  const BlockShape shape(low, high, c);
  const SectionPlaces places(shape);
  if (places.num_words() != size) return;  // the values changed after their size was measured
  __syncwarp();
  put_sections(shape, places, c, values + lane_index() * (4 * kBlockWords), coded);
  std::uint32_t position = places.fields;
  put_fields(low.z, shape.low_widths, position, coded);
  put_fields(high.z, shape.high_widths, position, coded);
  __syncwarp();
#pragma unroll 1
  for (std::uint32_t i = lane_index(); i < size; i += 32) target[i] = coded[i];
}

template <class = void>
__global__ void __launch_bounds__(kTileThreads) write_kernel(const __grid_constant__ EncodeLosslessTable table) {
  __shared__ Rows all_rows[kTileWarps][2];  // of the base and the values
  const std::uint32_t index = table.find();
  const EncodeLosslessPiece& piece = table.pieces[index];
  const std::uint64_t tile = tile_of_warp(table.first_cta[index]);
  if (tile >= piece.num_tiles()) return;
  const std::uint32_t count = piece.count(tile);
  const std::uint64_t offset = tile * kTileValues * 2;
  const std::byte* const values = piece.values + offset;
  std::byte* const base = piece.base + offset;
  if (piece.is_whole()) {
    copy_tile(values, count, base, piece.message == nullptr ? nullptr : piece.message + kLosslessHeaderBytes + offset);
    return;
  }
  std::uint32_t* const sizes = table_of(piece.message);
  const std::uint32_t size = size_of(sizes, tile);
  if (size == 0) return;
  std::uint32_t* const target = sizes + piece.table_words() + start_of(piece, sizes, tile);
  if (size == (count + 1) / 2) {
    write_plain(values, count, base, target);
  } else {
    Rows(&rows)[2] = all_rows[threadIdx.x / 32];
    write_coded(values, count, piece.dtype, base, size, rows[0], rows[1], target);
  }
}

}  // namespace zcomm::gpu
