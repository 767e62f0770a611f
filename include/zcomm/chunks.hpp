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

// Describes `num_elements` consecutive elements of every slot, sent in `format`. Segments partition the longest slot
// from its first element on; shorter slots end earlier. Each segment starts a new block, so that no scale spans two.
// All segments of a slot share the same messages. They exist because norms and biases lie next to weights in flat
// buffers: models are far more sensitive to these few elements, and sending them exactly costs almost nothing.
template <class Format>
struct Segment {
  std::int64_t num_elements = 0;
  Format format;
};

// Segments as named outside of C++: pairs of a number of elements and a format's name.
using NamedSegments = std::vector<std::pair<std::int64_t, std::string>>;

// Parses named segments. Throws ArgumentError on an unknown format.
template <class Format>
std::vector<Segment<Format>> parse_segments(const NamedSegments& named) {
  std::vector<Segment<Format>> segments;
  segments.reserve(named.size());
  for (const auto& [num_elements, format] : named) segments.push_back({num_elements, Format::parse(format)});
  return segments;
}

using GatherSegments = std::span<const Segment<BlockFormat>>;
using ReduceSegments = std::span<const Segment<HopFormats>>;

// Upper bound of a chunk, in bytes of values of a slot: 128 MiB over all slots, which bounds scratch memory. Messages
// also cost a start each, so that many ranks may have more, but a call then has at least four chunks.
constexpr std::size_t max_chunk_bytes(int num_slots, std::size_t slot_bytes) {
  const std::size_t share = (std::size_t{128} << 20) / static_cast<std::size_t>(num_slots);
  return std::max(share, std::min(std::size_t{512} << 10, slot_bytes / 4));
}

// Returns the default chunk size on GPUs, among `size` ranks: the largest. There a chunk costs a launch of NCCL, as
// long as 20 MiB over NVLink; docs/performance.md has the model.
constexpr std::size_t default_gpu_chunk_bytes(int size) {
  return max_chunk_bytes(size, std::numeric_limits<std::size_t>::max());
}

// Elements [begin, begin + count) of every slot, sent in one format as one wire.
template <class Format>
struct Piece {
  std::int64_t begin;
  std::int64_t count;
  Format format;
  std::size_t segment;      // index of its segment
  std::int64_t in_segment;  // its first element in the segment
};

// Returns a number of elements that whole blocks of all formats divide.
inline std::int64_t granule_of(BlockFormat format) { return std::max(format.block_size, 1); }
inline std::int64_t granule_of(HopFormats formats) {
  return std::lcm(granule_of(formats.intra_node), granule_of(formats.inter_node));
}

// Cuts slots into chunks, each a run of pieces. Blocks never straddle pieces, so chunking does not change a bit. A
// chunk of a slot is sent as the wires of its pieces, back to back.
template <class Format>
class Chunks {
 public:
  // Cuts `segments`, which cover the longest slot, so that all ranks have the same chunks. Pieces that do not end their
  // segment have a multiple of `granule` elements.
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

  std::int64_t count() const { return static_cast<std::int64_t>(first_pieces_.size()); }
  // Returns the index of a chunk's first piece among those of all chunks.
  std::size_t first_piece(std::int64_t chunk) const { return first_pieces_[static_cast<std::size_t>(chunk)]; }

  std::span<const Piece<Format>> operator[](std::int64_t chunk) const {
    const auto i = static_cast<std::size_t>(chunk);
    const std::size_t end = i + 1 < first_pieces_.size() ? first_pieces_[i + 1] : pieces_.size();
    return std::span(pieces_).subspan(first_pieces_[i], end - first_pieces_[i]);
  }

 private:
  std::vector<Piece<Format>> pieces_;
  std::vector<std::size_t> first_pieces_;  // by chunk
};

}  // namespace zcomm
