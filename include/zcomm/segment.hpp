// How shards are sent whose parts have different formats.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/block_format.hpp"

namespace zcomm {

// So many elements of every slot, in this format. Segments cut a slot from its first element on and together have the
// elements of the longest slot; blocks begin anew with each, so that no scale is shared across them. All segments of a
// slot are sent in the same messages. A weight's neighbours in a flat buffer may be a norm or a bias: a few elements to
// which a model is far more sensitive, and which cost next to nothing as they are.
template <class Format>
struct Segment {
  std::int64_t num_elements = 0;
  Format format;
};

// As they are named outside of C++: pairs of a number of elements and a format's name.
using NamedSegments = std::vector<std::pair<std::int64_t, std::string>>;

// Throws ArgumentError on a format that is not there.
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
