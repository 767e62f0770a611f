// Links between ranks, and bytes that they carry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm {

// Link between two ranks.
enum class Link : std::uint8_t {
  intra_node,  // between ranks of one node: fast
  inter_node,  // between ranks of different nodes
};

// Bytes that one rank sends, by link.
struct LinkBytes {
  std::size_t intra_node = 0;  // to ranks of the same node
  std::size_t inter_node = 0;  // to ranks of other nodes

  // Returns the count of `link`, to read or to change.
  std::size_t& on(Link link) { return link == Link::intra_node ? intra_node : inter_node; }
  friend bool operator==(const LinkBytes&, const LinkBytes&) = default;
  // Adds the counts of each link.
  friend LinkBytes operator+(LinkBytes a, LinkBytes b) {
    return {a.intra_node + b.intra_node, a.inter_node + b.inter_node};
  }
};

}  // namespace zcomm
