#include "front/tally.hpp"

#include "zcomm/error.hpp"

namespace zcomm::front {

namespace {

// Returns what a rank sends in NCCL's rings, and to each peer where NCCL has none.
std::uint64_t exact_bytes(const Request& request, int rank, int size) {
  const std::uint64_t bytes = request.count * bytes_of_type(request.type);
  const std::uint64_t to_others = bytes * static_cast<std::uint64_t>(size - 1);
  switch (request.collective) {
    case Collective::all_reduce:
      return 2 * to_others / static_cast<std::uint64_t>(size);
    case Collective::broadcast:  // the last rank of the ring passes nothing on
      return (rank + 1) % size == request.root ? 0 : bytes;
    case Collective::gather:
      return rank == request.root ? 0 : bytes;
    case Collective::scatter:
      return rank == request.root ? to_others : 0;
    case Collective::message:
      return request.from != nullptr ? bytes : 0;
    default:
      return to_others;
  }
}

}  // namespace

void Tally::add_bytes(const Request& request, int rank, int size, std::size_t sent_bytes) {
  Counts& counts = counts_[static_cast<std::size_t>(request.collective)];
  counts.sent_bytes += sent_bytes;
  counts.exact_bytes += exact_bytes(request, rank, size);
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
