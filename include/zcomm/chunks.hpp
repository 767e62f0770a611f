// Segments: a shard whose parts are sent in different formats. Chunks: slots cut into runs of whole blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/block_format.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm {

// Consecutive elements of every slot that are sent in one format.
//
// The segments of a plan partition the longest slot from its first element on; shorter slots end earlier. Each segment
// starts a new block, so that no scale spans two. All segments of a slot share the same messages.
//
// Segments exist because norms and biases are next to weights in flat buffers. Models are far more sensitive to these
// few elements, and sending them uncompressed costs almost nothing.
template <class Format>
struct Segment {
  std::int64_t num_elements = 0;  // in the longest slot, 0 or more
  Format format;                  // BlockFormat of a gather, HopFormats of a reduction
};

// Segments as callers outside of C++ name them: pairs of a number of elements and the text of a format.
using NamedSegments = std::vector<std::pair<std::int64_t, std::string>>;

// Parses named segments. Throws ArgumentError if Format::parse() refuses a text.
template <class Format>
std::vector<Segment<Format>> parse_segments(const NamedSegments& named) {
  std::vector<Segment<Format>> segments;
  segments.reserve(named.size());
  for (const auto& [num_elements, format] : named) segments.push_back({num_elements, Format::parse(format)});
  return segments;
}

// Segments of a gather and of a reduction, borrowed. The constructor of a plan copies them.
using GatherSegments = std::span<const Segment<BlockFormat>>;
using ReduceSegments = std::span<const Segment<HopFormats>>;

// Returns the upper bound of a chunk, in elements of one slot.
// `num_slots` is the number of ranks, and `length` the length of the longest slot. `parts` is the number of chunks of a
// long call: enough for its hops and its codec to overlap.
//
// A chunk of 128 MiB over all slots fills every link. Longer calls have `parts` chunks, not more: beside matrix
// products each kernel and each group of NCCL waits until a product ends, and every chunk adds some. 2^30 / `parts`
// elements over all slots bound scratch memory. Starting a message has a cost, too: 512 KiB of each slot are never too
// many. A call of one part needs no scratch, and is never cut.
constexpr std::int64_t max_chunk(int num_slots, std::int64_t length, DType dtype, int parts) {
  const std::int64_t part = std::max<std::int64_t>((length + parts - 1) / parts, 1);
  if (parts == 1) return part;
  const auto in_elements = [&](std::int64_t num_bytes) {
    return num_bytes / static_cast<std::int64_t>(element_size(dtype));
  };
  const std::int64_t most = std::max((std::int64_t{1} << 30) / parts / num_slots, in_elements(std::int64_t{512} << 10));
  return std::clamp(part, std::min(in_elements((std::int64_t{128} << 20) / num_slots), most), most);
}

// Chunks of a long call, for each of its hops.
inline constexpr int kPartsPerHop = 2;

// Default World::chunk_bytes on GPUs: none. A call there is cut by max_chunk() alone.
inline constexpr std::size_t kDefaultGpuChunkBytes = std::size_t{1} << 40;

// --- Internal: plans cut slots with these. A caller needs nothing below.

// Returns the elements of `chunk_bytes`, at least one and at most `most`.
constexpr std::int64_t bounded_chunk(std::size_t chunk_bytes, std::int64_t most, DType dtype) {
  const std::size_t asked = std::max<std::size_t>(chunk_bytes / element_size(dtype), 1);
  return static_cast<std::int64_t>(std::min(asked, static_cast<std::size_t>(most)));
}

// Elements [begin, begin + count) of every slot, sent in one format as one wire.
template <class Format>
struct Piece {
  std::int64_t begin;       // first element in the slot
  std::int64_t count;       // elements in the longest slot
  Format format;            // of the piece's segment
  std::size_t segment;      // index of the segment
  std::int64_t in_segment;  // first element in the segment
};

// Returns the smallest number of elements that whole blocks of every given format fill.
inline std::int64_t granule_of(BlockFormat format) { return std::max(format.block_size, 1); }
inline std::int64_t granule_of(HopFormats formats) {
  return std::lcm(granule_of(formats.intra_node), granule_of(formats.inter_node));
}

// Chunks of slots. A chunk is a run of pieces, and is sent as the wires of its pieces, back to back.
// Blocks never straddle pieces, so chunking does not change a bit.
template <class Format>
class Chunks {
 public:
  // Cuts `segments`, which cover the longest slot, so that all ranks have the same chunks.
  // `chunk_bytes` is the wanted size in bytes of values of one slot; max_chunk() bounds it, with these `parts`.
  // A piece that does not end its segment has a multiple of `granule` elements.
  Chunks(std::size_t chunk_bytes, int num_slots, std::span<const Segment<Format>> segments, DType dtype,
         std::int64_t granule, int parts) {
    std::int64_t total = 0;
    for (const Segment<Format>& segment : segments) total += segment.num_elements;
    if (total == 0) return;
    const std::int64_t wanted = bounded_chunk(chunk_bytes, max_chunk(num_slots, total, dtype, parts), dtype);
    const std::int64_t wanted_count = (total + wanted - 1) / wanted;
    const std::int64_t enough = (total + wanted_count - 1) / wanted_count;  // makes chunks of about the same size
    std::int64_t filled = enough;
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const Segment<Format>& segment = segments[i];
      const std::int64_t blocks = std::lcm(granule, granule_of(segment.format));
      const std::int64_t first = begin;
      const std::int64_t end = begin + segment.num_elements;
      while (begin < end) {
        if (filled >= enough) {
          first_pieces_.push_back(pieces_.size());
          filled = 0;
        }
        const std::int64_t room = (enough - filled + blocks - 1) / blocks * blocks;
        pieces_.push_back({begin, std::min(room, end - begin), segment.format, i, begin - first});
        begin += pieces_.back().count;
        filled += pieces_.back().count;
      }
    }
  }

  // Returns the number of chunks; 0 if the slots have no elements.
  std::int64_t count() const { return static_cast<std::int64_t>(first_pieces_.size()); }

  // Returns the index of a chunk's first piece among the pieces of all chunks.
  std::size_t first_piece(std::int64_t chunk) const { return first_pieces_[static_cast<std::size_t>(chunk)]; }

  // Returns the pieces of a chunk. The span stays valid as long as this object.
  std::span<const Piece<Format>> operator[](std::int64_t chunk) const {
    const auto i = static_cast<std::size_t>(chunk);
    const std::size_t end = i + 1 < first_pieces_.size() ? first_pieces_[i + 1] : pieces_.size();
    return std::span(pieces_).subspan(first_pieces_[i], end - first_pieces_[i]);
  }

 private:
  std::vector<Piece<Format>> pieces_;
  std::vector<std::size_t> first_pieces_;  // indices, by chunk
};

}  // namespace zcomm
