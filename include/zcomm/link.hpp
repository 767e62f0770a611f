// Kinds of links between ranks.
#pragma once

#include <cstdint>

namespace zcomm {

enum class Link : std::uint8_t {
  intra_node,  // between ranks of one node: fast
  inter_node,
};

}  // namespace zcomm
