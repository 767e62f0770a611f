// Host side of the tables: splits jobs into pieces, fills tables, launches kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <span>
#include <vector>

#include "codec/checks.hpp"
#include "codec/cuda/tables.cuh"
#include "cuda/owned.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm::gpu {

template <class Table>
using Kernel = void (*)(Table);

// Tells whether memory lies `count` strides after other memory. A stride of 0 is not known yet: this sets it.
inline bool follows(const std::byte* first, const std::byte* next, std::uint32_t& stride, std::uint32_t count) {
  const std::uint64_t step = reinterpret_cast<std::uintptr_t>(next) - reinterpret_cast<std::uintptr_t>(first);
  if (stride == 0) stride = static_cast<std::uint32_t>(step / 2);
  return step > 0 && step == std::uint64_t{stride} * 2 * count;
}

// Tells whether `next` is repeat `count` of `first`, a wire of `piece`. The first repeat sets the strides.
inline bool continues(WirePart& first, const WirePart& next, SumEncodePiece& piece, std::uint32_t count) {
  const bool has_scales = first.source >= Source::int8;
  if (!has_scales && count == 1) first.magic = 0;
  std::uint32_t& of_codes = first.source == Source::any ? piece.any_stride : piece.codes_stride;
  return next.source == first.source && next.run == first.run && next.kind == first.kind && next.phase == first.phase &&
         next.factor == first.factor && next.nan_is_zero == first.nan_is_zero &&
         follows(first.data, next.data, has_scales ? of_codes : first.magic, count) &&
         (!has_scales || (next.magic == first.magic && next.scales - first.scales == next.data - first.data));
}
inline bool continues(SumEncodePiece& first, WirePart* wires, const SumEncodePiece& next, const WirePart* next_wires,
                      std::uint32_t count) {
  const BlocksOut &a = first.out, &b = next.out;
  if (count == 1) first.codes_stride = first.any_stride = first.out_stride = 0;
  const bool is_alike = b.num_elements == a.num_elements && b.block_size == a.block_size && b.is_end == a.is_end &&
                        next.any == first.any && next.rotated_end == first.rotated_end &&
                        next.rotation == first.rotation && next.end_of_wires == first.end_of_wires &&
                        b.codes - a.codes == b.scales - a.scales;
  return is_alike && follows(a.scales, b.scales, first.out_stride, count) &&
         std::equal(wires, wires + first.end_of_wires, next_wires,
                    [&](WirePart& part, const WirePart& other) { return continues(part, other, first, count); });
}

// Sums of rotated wires that take several launches: one passes its sum to the next one as the first wire.
struct Rotated {
  bool is_first = false;  // whether the first wire is a sum of rotated wires
  bool stays = false;     // whether this sum is one; otherwise it is rotated back
};

// Collects pieces and launches a kernel whenever a table is full.
template <class Table>
class Launcher {
  using Piece = typename Table::Piece;
  static_assert(sizeof(Table) <= kMaxParameterBytes);

 public:
  // Kernels have `threads` per CTA. `action` is for error texts.
  Launcher(StreamView stream, const char* action, Kernel<Table> kernel, std::uint32_t threads = kThreads)
      : stream_(stream), action_(action), kernel_(kernel), threads_(threads) {}

  // Selects the kernel for the pieces that follow.
  void use(Kernel<Table> kernel) {
    launch();
    kernel_ = kernel;
  }

  void add(const Piece& piece, std::int64_t num_ctas) {
    if (table_.num_pieces == Table::kCapacity) launch_table();
    table_.first_cta[table_.num_pieces] = num_ctas_;
    table_.pieces[table_.num_pieces] = piece;
    table_.num_pieces += 1;
    num_ctas_ += static_cast<std::uint32_t>(num_ctas);
  }

  // Adds a piece whose wires are part(wire) of each of `wires`, the rotated ones first; they must fit a table.
  template <class Part>
  void add(Piece piece, std::int64_t num_ctas, std::span<const Wire> wires, const Part& part, Rotated rotated = {}) {
    const std::size_t first_wire = wires_.size();
    wires_.resize(first_wire + wires.size());
    WirePart* const parts = wires_.data() + first_wire;
    std::size_t num_rotated = 0, num_parts = 0;
    for (const bool now : {true, false}) {
      for (const Wire& wire : wires) {
        const bool is_rotated = wire.format.rotation() != 0 || (rotated.is_first && &wire == wires.data());
        if (is_rotated != now) continue;
        parts[num_parts++] = part(wire);
        piece.rotation = std::max(piece.rotation, static_cast<std::uint16_t>(wire.format.rotation()));
      }
      if (now) num_rotated = num_parts;
    }
    for (std::size_t i = num_parts; i-- > 0;) {
      const bool is_last = i + 1 == num_parts || i + 1 == num_rotated || parts[i + 1].source != parts[i].source;
      parts[i].run = static_cast<std::uint8_t>(is_last ? 1 : parts[i + 1].run + 1);
    }
    piece.rotated_end = rotated.stays ? kStaysRotated : static_cast<std::uint16_t>(num_rotated);
    piece.end_of_wires = static_cast<std::uint16_t>(num_parts);
    if constexpr (kRepeats) {
      piece.num_ctas = static_cast<std::uint16_t>(num_ctas);
      waiting_.push_back(piece);
      first_wires_.push_back(first_wire);
    } else {
      add_with_wires(piece, num_ctas, first_wire);
      wires_.clear();
    }
  }

  void launch() {
    if constexpr (kRepeats) add_waiting();
    launch_table();
  }

 private:
  static constexpr bool kRepeats = requires(Piece piece) { piece.num_ctas; };
  static constexpr std::uint32_t kLongestRound = 16;

  // Adds a piece whose wires are in wires_ from `first_wire` on.
  void add_with_wires(Piece piece, std::int64_t num_ctas, std::size_t first_wire) {
    const std::size_t num_wires = piece.end_of_wires;
    if (table_.num_pieces == Table::kCapacity || num_wires_ + num_wires > Table::kWireCapacity) launch_table();
    std::copy_n(wires_.data() + first_wire, num_wires, table_.wires + num_wires_);
    const auto begin = static_cast<std::uint16_t>(num_wires_);
    piece.begin_of_wires = begin;
    piece.end_of_wires += begin;
    if (piece.rotated_end != kStaysRotated) piece.rotated_end += begin;
    num_wires_ += num_wires;
    add(piece, num_ctas);
  }

  // Adds all waiting pieces. They repeat one by one, or in rounds: several unlike ones for each node.
  void add_waiting() {
    const auto size = static_cast<std::uint32_t>(waiting_.size());
    for (std::uint32_t begin = 0, length, count; begin < size; begin += length * count) {
      length = 1, count = rounds(begin, 1);
      for (std::uint32_t tried = 2; tried <= kLongestRound && begin + length * count < size; ++tried) {
        const std::uint32_t found = rounds(begin, tried);  // any two pieces alike are repeats, three are on purpose
        if (found > 2 && (found - 1) * tried > (count - 1) * length) length = tried, count = found;
      }
      rounds(begin, length);  // sets the strides
      for (std::uint32_t i = begin; i < begin + length; ++i) {
        add_with_wires(waiting_[i], std::int64_t{waiting_[i].num_ctas} * count, first_wires_[i]);
      }
    }
    waiting_.clear();
    first_wires_.clear();
    wires_.clear();
  }

  // Returns the number of rounds of `length` pieces from `begin` on, of which all repeat the first one.
  std::uint32_t rounds(std::uint32_t begin, std::uint32_t length) {
    std::uint32_t i = length;
    for (; begin + i < waiting_.size(); ++i) {
      const std::uint32_t first = begin + i % length, next = begin + i;
      WirePart* const wires = wires_.data();
      if (!continues(waiting_[first], wires + first_wires_[first], waiting_[next], wires + first_wires_[next],
                     i / length)) {
        break;
      }
    }
    return i / length;
  }

  void launch_table() {
    if (table_.num_pieces == 0) return;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_ctas_);
    config.blockDim = dim3(threads_);
    config.stream = as_cuda(stream_);
    const RelaxedCaptureGuard relaxed;  // the first launch loads the kernel
    check_cuda(cudaLaunchKernelEx(&config, kernel_, table_), action_);
    table_.num_pieces = 0;
    num_ctas_ = 0;
    num_wires_ = 0;
  }

  const StreamView stream_;
  const char* const action_;
  Kernel<Table> kernel_;
  const std::uint32_t threads_;
  Table table_{};
  std::uint32_t num_ctas_ = 0;
  std::size_t num_wires_ = 0;
  std::vector<Piece> waiting_;            // that may be repeats
  std::vector<std::size_t> first_wires_;  // of waiting pieces, in wires_
  std::vector<WirePart> wires_;
};

inline std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Calls run(begin, count) for ranges that cover num_elements elements; all but the last are whole blocks.
template <class Run>
void for_pieces(std::int64_t num_elements, std::int64_t block_size, const Run& run) {
  const std::int64_t step = kPieceElements / block_size * block_size;
  for (std::int64_t begin = 0; begin < num_elements; begin += step) run(begin, std::min(step, num_elements - begin));
}

// Returns the part of a wire of num_elements elements from element `begin`, a multiple of 32, on.
inline WirePart wire_part(const Wire& wire, std::int64_t num_elements, std::int64_t begin) {
  static_assert(static_cast<Source>(DType::float16) == Source::float16);
  WirePart part{};
  part.factor = wire.factor;
  part.nan_is_zero = wire.nan_is_zero;
  if (!wire.format.has_scales()) {
    part.data = wire.data + static_cast<std::size_t>(begin) * element_size(value_dtype(wire));
    part.source = static_cast<Source>(value_dtype(wire));
    return part;
  }
  const std::int64_t block_size = wire.format.block_size;
  const WireLayout layout(wire.format, wire.dtype, num_elements);
  part.kind = wire.format.kind;
  part.bits = static_cast<std::uint8_t>(traits(wire.format.kind).code_bits);
  part.data = wire.data + layout.code_offset(begin);
  part.scales = wire.data + layout.scale_offset(begin);
  part.magic = static_cast<std::uint32_t>(divide_up(std::int64_t{1} << 32, block_size / kGroup));
  part.phase = static_cast<std::uint16_t>(begin % block_size / kGroup);
  part.source = Source::any;
  const bool is_plain = wire.factor == 1.0f && !wire.nan_is_zero;
  if (is_plain && part.kind == ElementKind::int8) part.source = Source::int8;
  if (is_plain && part.kind == ElementKind::int4) part.source = Source::int4;
  return part;
}

// Describes elements [begin, begin + count) of a wire of num_elements, whole blocks except at its end, for threads that
// write thread_elements each.
inline BlocksOut blocks_out(std::byte* wire, BlockFormat format, std::int64_t num_elements, std::int64_t begin,
                            std::int64_t count, std::uint32_t thread_elements) {
  const WireLayout layout(format, DType::float32, num_elements);
  BlocksOut out{};
  out.scales = wire + layout.scale_offset(begin);
  out.codes = wire + layout.code_offset(begin);
  out.num_elements = static_cast<std::uint32_t>(count);
  out.block_size = static_cast<std::uint16_t>(format.block_size);
  while (static_cast<int>(thread_elements << out.log2_lanes) < format.block_size) out.log2_lanes += 1;
  out.is_end = begin + count == num_elements;
  return out;
}

// Describes elements from `begin` on for the kernel for any codes.
inline AnyOut any_out(BlockFormat format, const Rounding& rounding, std::int64_t begin) {
  const ElementTraits& kind = traits(format.kind);
  AnyOut any{};
  any.seed = rounding.seed;
  any.first_element = static_cast<std::uint64_t>(rounding.first_element + begin);
  any.max_code = kind.max_code;
  any.max_code_reciprocal = 1.0f / kind.max_code;
  any.kind = format.kind;
  any.bits = static_cast<std::uint8_t>(kind.code_bits);
  any.rotation = static_cast<std::uint16_t>(format.rotation());
  any.stochastic = format.stochastic;
  return any;
}

// Returns the number of threads that share the blocks, idle ones included.
inline std::int64_t num_lanes(const BlocksOut& out) {
  return divide_up(out.num_elements, out.block_size) << out.log2_lanes;
}

}  // namespace zcomm::gpu
