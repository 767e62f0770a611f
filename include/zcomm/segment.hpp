// Segments: a shard whose parts are sent in different formats.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/block_format.hpp"

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

}  // namespace zcomm
