// Codec for host memory: checks every job, splits all jobs into tasks and composes the kernels.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec/checks.hpp"
#include "codec/cpu/isa.hpp"
#include "codec/cpu/tasks.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace cpu {
namespace {

// Calls with more values than this write past the caches: the output would be evicted before it is used. A normal store
// reads the line from memory first, which costs decode a third of its speed.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

// Elements per decode step. A sum takes a whole tile, because it makes more calls per step.
constexpr std::int64_t kDecodeTile = 1024;

constexpr std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }
constexpr std::size_t kFloat32 = index_of(DType::float32), kBfloat16 = index_of(DType::bfloat16);

// --- Tiles of values and wires

constexpr float kMaxFloat32 = std::numeric_limits<float>::max();
constexpr float kLargestFinite[kNumDTypes] = {kMaxFloat32, 0x1.fep127f, 65504.0f};

// Returns the address of element i of a wire without scales.
const std::byte* value_at(const Wire& wire, std::int64_t i) {
  return wire.data + static_cast<std::size_t>(i) * element_size(value_dtype(wire));
}

// Returns blocks of a format; encoding ignores the addresses and the factor.
CodedBlocks blocks_of(BlockFormat format, const std::byte* scales = nullptr, const std::byte* codes = nullptr,
                      float factor = 1.0f) {
  const float max_code = traits(format.kind).max_code, most = format.kind == ElementKind::fp8 ? 480.0f : max_code + 1;
  return {scales, codes, format.block_size, format.kind, max_code, most, factor, format.rotation(), format.stochastic};
}

CodedBlocks coded_blocks(const Wire& wire, std::int64_t num_elements) {
  const WireLayout layout(wire.format, wire.dtype, num_elements);
  return blocks_of(wire.format, wire.data, wire.data + layout.codes_offset, wire.factor);
}

// Returns a bound of the terms of these blocks, from their scales; infinity if there is a NaN.
float largest_term(const CodedBlocks& blocks, std::int64_t begin, std::int64_t count) {
  std::uint16_t largest = 0;  // magnitude; its bits order like its value. Wires that no codec wrote may have a sign
  for (std::int64_t i = begin / blocks.block_size; i * blocks.block_size < begin + count; ++i) {
    std::uint16_t scale;
    std::memcpy(&scale, blocks.scales + kScaleBytes * static_cast<std::size_t>(i), kScaleBytes);
    largest = std::max(largest, static_cast<std::uint16_t>(scale & 0x7fffu));
  }
  const float term = std::bit_cast<float>(std::uint32_t{largest} << 16) * blocks.largest_code;
  return std::isnan(term) ? std::numeric_limits<float>::infinity() : term;
}

// Tells whether a sum can add wires of this kind without buffering their terms.
bool is_plain(const Wire& wire) {
  return wire.format.has_scales() && wire.format.kind != ElementKind::fp8 && wire.factor == 1.0f && !wire.nan_is_zero;
}

// Sets `terms` to elements [begin, begin + count) of a wire of `num_elements`, times its factor. At most a tile.
void load_terms(const Kernels& kernels, const Wire& wire, std::int64_t num_elements, std::int64_t begin,
                std::int64_t count, float* terms) {
  std::byte* bytes = reinterpret_cast<std::byte*>(terms);
  if (wire.format.has_scales()) {
    kernels.decode[kFloat32](coded_blocks(wire, num_elements), begin, count, kMaxFloat32, bytes, false);
  } else {
    kernels.load_values[index_of(value_dtype(wire))](value_at(wire, begin), count, terms);
    if (wire.factor != 1.0f) kernels.store_values[kFloat32](terms, count, wire.factor, bytes, false);
  }
  if (wire.nan_is_zero) std::replace_if(terms, terms + count, [](float term) { return std::isnan(term); }, 0.0f);
}

// Sets `blocks` to wires[0] and the following wires that one pass can add. Returns their number, 0 if wires[0] is not
// plain.
std::size_t plain_blocks(std::span<const Wire> wires, std::int64_t num_elements, CodedBlocks* blocks) {
  std::size_t num_wires = 0;
  for (; num_wires < std::min<std::size_t>(kMaxWires, wires.size()); ++num_wires) {
    if (!is_plain(wires[num_wires]) || wires[num_wires].format != wires[0].format) break;
    blocks[num_wires] = coded_blocks(wires[num_wires], num_elements);
  }
  return num_wires;
}

// Adds to `terms` elements [begin, begin + count) of a wire that is not plain. At most a tile.
void add_terms(const Kernels& kernels, const Wire& wire, std::int64_t num_elements, std::int64_t begin,
               std::int64_t count, float* terms) {
  if (!wire.format.has_scales() && wire.factor == 1.0f && !wire.nan_is_zero) {
    kernels.add_values[index_of(value_dtype(wire))](value_at(wire, begin), count, terms);
    return;
  }
  alignas(64) float others[kTileElements];
  load_terms(kernels, wire, num_elements, begin, count, others);
  kernels.add_values[kFloat32](reinterpret_cast<const std::byte*>(others), count, terms);
}

// Decodes elements [begin, begin + values.num_elements) of a wire of `num_elements`, saturated. At most a tile.
// `stream`: see Kernels.
void decode_tile(const Kernels& kernels, const Wire& wire, std::int64_t num_elements, std::int64_t begin,
                 TensorView values, bool stream) {
  const std::size_t dtype = index_of(values.dtype);
  const int rotation = wire.format.rotation();
  if (wire.format.has_scales() && rotation == 0) {
    kernels.decode[dtype](coded_blocks(wire, num_elements), begin, values.num_elements, kLargestFinite[dtype],
                          values.data, stream);
    return;
  }
  alignas(64) float terms[kTileElements];
  if (rotation != 0) {
    const CodedBlocks blocks = coded_blocks(wire, num_elements);
    kernels.decode[kFloat32](blocks, begin, values.num_elements, kMaxFloat32, reinterpret_cast<std::byte*>(terms),
                             false);
    const float largest = largest_term(blocks, begin, values.num_elements);
    const bool is_in_place = values.dtype == DType::float32 && !stream;
    float* rotated = is_in_place ? reinterpret_cast<float*>(values.data) : terms;
    kernels.rotate_back(terms, values.num_elements, rotation, largest < kLargeTerm, rotated);
    if (is_in_place) return;
    // Saturates if a sum of terms, with its rounding, may exceed the limit.
    if (largest * static_cast<float>(rotation + 1) > kLargestFinite[dtype])
      kernels.saturate(terms, values.num_elements, kLargestFinite[dtype]);
  } else {
    kernels.load_values[index_of(value_dtype(wire))](value_at(wire, begin), values.num_elements, terms);
    kernels.saturate(terms, values.num_elements, kLargestFinite[dtype]);
  }
  kernels.store_values[dtype](terms, values.num_elements, 1.0f, values.data, stream);
}

// Adds elements [begin, begin + count) of the wires with this rotation to `terms`. If `is_empty`, the first wire
// overwrites `terms`. Returns true if no wire has. At most a tile.
bool add_rotated_alike(const Kernels& kernels, std::span<const Wire> wires, int rotation, std::int64_t num_elements,
                       std::int64_t begin, std::int64_t count, bool is_empty, float* terms) {
  for (std::size_t i = 0, added; i < wires.size(); i += added) {
    added = 1;
    if (wires[i].format.rotation() != rotation) continue;
    CodedBlocks blocks[kMaxWires];
    if (const std::size_t num_plain = plain_blocks(wires.subspan(i), num_elements, blocks)) {
      const auto add_codes = is_empty ? kernels.sum_codes : kernels.add_codes;
      add_codes(blocks, static_cast<int>(num_plain), begin, count, kMaxFloat32, terms);
      added = num_plain;
    } else if (is_empty && !wires[i].format.has_scales()) {
      load_terms(kernels, wires[i], num_elements, begin, count, terms);
    } else {
      if (is_empty) std::fill_n(terms, count, 0.0f);
      add_terms(kernels, wires[i], num_elements, begin, count, terms);
    }
    is_empty = false;
  }
  return is_empty;
}

// Sums elements [begin, begin + count) of wires of `num_elements` into `terms`. At most a tile.
void sum_tile(const Kernels& kernels, std::span<const Wire> wires, std::int64_t num_elements, std::int64_t begin,
              std::int64_t count, float* terms) {
  bool is_empty = true;
  for (const int rotation : Rotations(wires)) {
    alignas(64) float others[kTileElements];
    float* const rotated = is_empty ? terms : others;
    add_rotated_alike(kernels, wires, rotation, num_elements, begin, count, true, rotated);
    kernels.rotate_back(rotated, count, rotation, false, rotated);
    if (!is_empty) kernels.add_values[kFloat32](reinterpret_cast<const std::byte*>(others), count, terms);
    is_empty = false;
  }
  add_rotated_alike(kernels, wires, 0, num_elements, begin, count, is_empty, terms);
}

// Decodes and sums elements [begin, begin + values.num_elements) of the job. At most a tile. `stream`: see Kernels.
void decode_sum_tile(const Kernels& kernels, const DecodeSum& job, std::int64_t begin, TensorView values, bool stream) {
  const std::size_t dtype = index_of(values.dtype);
  CodedBlocks blocks[kMaxWires];
  const std::size_t num_plain = plain_blocks(job.wires, job.values.num_elements, blocks);
  if (num_plain == job.wires.size() && job.wires[0].format.rotation() == 0) {
    kernels.sum_values[dtype](blocks, static_cast<int>(num_plain), begin, values.num_elements, kMaxFloat32, job.factor,
                              values.data, stream);
    return;
  }
  alignas(64) float terms[kTileElements];
  sum_tile(kernels, job.wires, job.values.num_elements, begin, values.num_elements, terms);
  kernels.store_values[dtype](terms, values.num_elements, job.factor, values.data, stream);
}

// --- Writing past the caches

template <class Job>
bool writes_past_caches(std::span<const Job> jobs) {
  std::size_t num_bytes = 0;
  for (const Job& job : jobs) num_bytes += job.values.num_bytes();
  return num_bytes >= kStreamBytes;
}

// Calls write(tile, i, stream) for tiles of kElements of `values` that begin at element i.
template <std::int64_t kElements, class Write>
void write_tiles(const Kernels& kernels, TensorView values, bool stream, const Write& write) {
  constexpr std::size_t kLine = 64;
  if (!stream || reinterpret_cast<std::uintptr_t>(values.data) % kLine == 0) {
    for (std::int64_t i = 0; i < values.num_elements; i += kElements) write(values.slice(i, kElements), i, stream);
    if (stream) kernels.end_stream();
    return;
  }
  // Buffers partial lines: a line that is written in parts is slow, so the rest of a tile waits for the next one.
  alignas(kLine) std::byte buffer[kLine + kElements * sizeof(float)];
  std::byte* destination = values.data;
  std::size_t waiting = 0;  // bytes at the front of the buffer
  for (std::int64_t i = 0; i < values.num_elements; i += kElements) {
    const TensorView tile = values.slice(i, kElements);
    write(TensorView{buffer + waiting, tile.num_elements, tile.dtype}, i, false);
    const std::size_t ready = waiting + tile.num_bytes();
    const bool is_last = i + kElements >= values.num_elements;
    waiting = is_last ? 0 : (reinterpret_cast<std::uintptr_t>(destination) + ready) % kLine;
    const std::size_t whole = ready - waiting;
    kernels.stream(buffer, static_cast<std::int64_t>(whole), destination);
    std::memcpy(buffer, buffer + whole, waiting);
    destination += whole;
  }
  kernels.end_stream();
}

// --- Encoding

// Encodes tiles of `values` into a wire with scales; the first tile begins at element `begin` of the wire.
void encode_tiles(const Kernels& kernels, ConstTensorView values, BlockFormat format, const Rounding& rounding,
                  const WireLayout& layout, std::int64_t begin, std::byte* wire) {
  const CodedBlocks blocks = blocks_of(format);
  constexpr std::int64_t kElements = kTileElements / 2;  // leaves room in the L1 cache for copies
  const std::int64_t tile_elements = std::max(kElements / format.block_size, std::int64_t{1}) * format.block_size;
  for (std::int64_t i = 0; i < values.num_elements; i += tile_elements) {
    const ConstTensorView tile = values.slice(i, tile_elements);
    kernels.encode_tile[index_of(values.dtype)](
        tile.data, tile.num_elements, blocks, rounding.seed, rounding.first_element + begin + i,
        wire + layout.scale_offset(begin + i), wire + layout.code_offset(begin + i));
  }
}

// Encodes elements [begin, begin + values.num_elements) of a wire of `num_elements`; `begin` starts a block. The last
// range also writes the padding. `stream`: see Kernels.
void encode_range(const Kernels& kernels, ConstTensorView values, BlockFormat format, const Rounding& rounding,
                  std::int64_t num_elements, std::int64_t begin, std::byte* wire, bool stream) {
  const WireLayout layout(format, values.dtype, num_elements);
  std::byte* scales = wire + layout.scale_offset(begin);
  std::byte* codes = wire + layout.code_offset(begin);
  const std::size_t dtype = index_of(values.dtype);
  if (format.rotation() != 0 || format.stochastic || format.kind == ElementKind::fp8) {
    encode_tiles(kernels, values, format, rounding, layout, begin, wire);
  } else if (format.has_scales()) {
    kernels.encode[dtype](values.data, values.num_elements, blocks_of(format), scales, codes, stream);
    if (stream) kernels.end_stream();
  } else if (format.kind == ElementKind::exact || values.dtype == DType::bfloat16) {
    std::memcpy(codes, values.data, values.num_bytes());
  } else if (values.dtype == DType::float32) {
    kernels.store_values[kBfloat16](reinterpret_cast<const float*>(values.data), values.num_elements, 1.0f, codes,
                                    false);
  } else {
    alignas(64) float terms[kTileElements];
    for (std::int64_t i = 0; i < values.num_elements; i += kTileElements) {
      const ConstTensorView tile = values.slice(i, kTileElements);
      kernels.load_values[dtype](tile.data, tile.num_elements, terms);
      kernels.store_values[kBfloat16](terms, tile.num_elements, 1.0f, codes + 2 * i, false);
    }
  }
  if (begin + values.num_elements == num_elements) {
    std::memset(wire + layout.scales_bytes(), 0, layout.codes_offset - layout.scales_bytes());
    const std::size_t codes_end = layout.codes_offset + layout.codes_bytes;
    std::memset(wire + codes_end, 0, layout.num_bytes - codes_end);
  }
}

// --- The codec

class CpuCodec final : public Codec {
 public:
  explicit CpuCodec(std::string_view isa) : kernels_(find_kernels(isa)), lossless_(isa) {}

  void encode(std::span<const Encode> jobs, StreamView) const override {
    const bool stream = writes_past_caches(jobs);
    run_jobs(jobs, [this, stream](const Encode& job, std::int64_t begin, std::int64_t count) {
      encode_range(kernels_, job.values.slice(begin, count), job.format, job.rounding, job.values.num_elements, begin,
                   job.wire, stream);
    });
  }

  void decode(std::span<const Decode> jobs, StreamView) const override {
    const bool stream = writes_past_caches(jobs);
    run_jobs(jobs, [this, stream](const Decode& job, std::int64_t begin, std::int64_t count) {
      const TensorView values = job.values.slice(begin, count);
      if (!job.wire.format.has_scales() && value_dtype(job.wire) == values.dtype) {
        std::memcpy(values.data, value_at(job.wire, begin), values.num_bytes());
        return;
      }
      write_tiles<kDecodeTile>(kernels_, values, stream, [&](TensorView tile, std::int64_t i, bool past_caches) {
        decode_tile(kernels_, job.wire, job.values.num_elements, begin + i, tile, past_caches);
      });
    });
  }

  void decode_sum(std::span<const DecodeSum> jobs, StreamView) const override {
    const bool all_stream = writes_past_caches(jobs);
    run_jobs(jobs, [this, all_stream](const DecodeSum& job, std::int64_t begin, std::int64_t count) {
      const TensorView values = job.values.slice(begin, count);
      const bool stream = all_stream || job.read_late;
      write_tiles<kTileElements>(kernels_, values, stream, [&](TensorView tile, std::int64_t i, bool past_caches) {
        decode_sum_tile(kernels_, job, begin + i, tile, past_caches);
      });
    });
  }

  void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView) const override {
    run_jobs(jobs, [this](const DecodeSumEncode& job, std::int64_t begin, std::int64_t count) {
      alignas(64) float terms[kTileElements];
      const std::int64_t block_size = job.format.has_scales() ? job.format.block_size : 1;
      const std::int64_t tile_elements = kTileElements / block_size * block_size;
      for (std::int64_t i = 0; i < count; i += tile_elements) {
        const std::int64_t tile_count = std::min(tile_elements, count - i);
        sum_tile(kernels_, job.wires, job.num_elements, begin + i, tile_count, terms);
        TensorView tile{reinterpret_cast<std::byte*>(terms), tile_count, DType::float32};
        alignas(64) std::byte sums[kTileElements * sizeof(float)];
        if (job.format.kind == ElementKind::exact) {  // codes do not preserve a NaN's bits, values do
          kernels_.store_values[kFloat32](terms, tile_count, 1.0f, sums, false);
          tile.data = sums;
        }
        encode_range(kernels_, tile, job.format, job.rounding, job.num_elements, begin + i, job.wire, false);
      }
    });
  }

  const LosslessCodec* lossless() const override { return &lossless_; }

 private:
  const Kernels& kernels_;
  const HostLosslessCodec lossless_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Codec> make_cpu_codec(std::string_view isa) { return std::make_unique<cpu::CpuCodec>(isa); }

}  // namespace zcomm
