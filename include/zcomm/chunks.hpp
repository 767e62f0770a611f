// Segments: a shard whose parts are sent in different formats. Chunks: slots cut into runs of whole blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
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

// Returns the upper bound of a chunk, in bytes of values of one slot.
// `num_slots` is the number of ranks; `slot_bytes` are the bytes of the longest slot.
//
// A chunk has at most 128 MiB over all slots, which bounds scratch memory. Starting a message also has a cost. So with
// many ranks a chunk may have 512 KiB of each slot, as long as a call then has at least four chunks.
constexpr std::size_t max_chunk_bytes(int num_slots, std::size_t slot_bytes) {
  const std::size_t share = (std::size_t{128} << 20) / static_cast<std::size_t>(num_slots);
  return std::max(share, std::min(std::size_t{512} << 10, slot_bytes / 4));
}

// Returns the default World::chunk_bytes on GPUs among `size` ranks: the upper bound of a chunk.
// A chunk costs a launch of NCCL there, which takes as long as 20 MiB over NVLink. docs/performance.md has the model.
constexpr std::size_t default_gpu_chunk_bytes(int size) {
  return max_chunk_bytes(size, std::numeric_limits<std::size_t>::max());
}

// --- Internal: plans cut slots with these. A caller needs nothing below.

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
  // `chunk_bytes` is the wanted size in bytes of values of one slot; max_chunk_bytes() bounds it.
  // A piece that does not end its segment has a multiple of `granule` elements.
  Chunks(std::size_t chunk_bytes, int num_slots, std::span<const Segment<Format>> segments, DType dtype,
         std::int64_t granule = 1) {
    std::int64_t total = 0;
    for (const Segment<Format>& segment : segments) total += segment.num_elements;
    if (total == 0) return;
    const std::size_t slot_bytes = static_cast<std::size_t>(total) * element_size(dtype);
    chunk_bytes = std::min(chunk_bytes, max_chunk_bytes(num_slots, slot_bytes));
    const std::int64_t wanted = std::max<std::int64_t>(static_cast<std::int64_t>(chunk_bytes / element_size(dtype)), 1);
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
