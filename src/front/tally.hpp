// Counts of one communicator: what was compressed, and what stayed exact and why.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "front/request.hpp"

namespace zcomm::front {

// Why a call stays exact, in the order in which it is asked.
enum class Reason : unsigned char {
  compressed,
  collective,    // a reduction to one rank
  format_exact,  // nobody asks for more
  dtype,         // no codec takes it
  operation,     // MIN, MAX, PROD, or made by ncclRedOpCreatePreMulSum
  in_place,      // an all-to-all into its own input
  min_bytes,
  event,       // the call wants an event of NCCL's own launch
  capture,     // a graph records it, and the same call was not made on that stream before
  one_node,    // all ranks are in one node
  no_meeting,  // the ranks could not connect a second time
  no_pairs,    // an exchange, for which not all ranks are connected
  format,      // the format does not take this shape
};
inline constexpr std::array<std::string_view, 13> kReasonNames{
    "compressed", "collective", "format_exact", "dtype",      "operation", "in_place", "min_bytes",
    "event",      "capture",    "one_node",     "no_meeting", "no_pairs",  "format"};

class Tally {
 public:
  void add(const Request& request, Reason reason) {
    ++counts_[static_cast<std::size_t>(request.collective)].calls[static_cast<std::size_t>(reason)];
  }
  // Adds the bytes of a compressed call, of one rank among `size`.
  void add_bytes(const Request& request, int rank, int size, std::size_t sent_bytes);

  // Returns a JSON object: of each collective the calls by reason, the bytes that compressed ones sent, and what NCCL
  // would have sent for them. Empty if there were no calls.
  std::string to_json() const;

 private:
  struct Counts {
    std::array<std::uint64_t, kReasonNames.size()> calls{};
    std::uint64_t sent_bytes = 0, exact_bytes = 0;
  };
  std::array<Counts, kCollectiveNames.size()> counts_;
};

}  // namespace zcomm::front
