#include "front/tally.hpp"

#include "zcomm/error.hpp"

namespace zcomm::front {

// In a ring a rank sends its slot to all others; in an all-reduce, twice its share of the tensor.
void Tally::add_bytes(const Request& request, int size, std::size_t sent_bytes) {
  const std::uint64_t bytes = request.count * bytes_of_type(request.type) * static_cast<std::uint64_t>(size - 1);
  Counts& counts = counts_[static_cast<std::size_t>(request.collective)];
  counts.sent_bytes += sent_bytes;
  counts.exact_bytes +=
      request.collective == Collective::all_reduce ? 2 * bytes / static_cast<std::uint64_t>(size) : bytes;
}

std::string Tally::to_json() const {
  std::string all;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    std::string calls;
    for (std::size_t reason = 0; reason < kReasonNames.size(); ++reason) {
      if (const std::uint64_t count = counts_[i].calls[reason]) {
        calls += concat(calls.empty() ? "" : ", ", "\"", std::string(kReasonNames[reason]), "\": ", count);
      }
    }
    if (calls.empty()) continue;
    all += concat(all.empty() ? "" : ", ", "\"", std::string(kCollectiveNames[i]), "\": {\"calls\": {", calls,
                  "}, \"sent_bytes\": ", counts_[i].sent_bytes, ", \"exact_bytes\": ", counts_[i].exact_bytes, "}");
  }
  return all.empty() ? all : "{" + all + "}";
}

}  // namespace zcomm::front
