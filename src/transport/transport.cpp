#include "zcomm/transport.hpp"

#include "zcomm/error.hpp"

namespace zcomm {

std::unique_ptr<Transfer> Transport::all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream) {
  const auto slot = [&](int rank) { return slots + static_cast<std::size_t>(rank) * slot_bytes; };
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  for (int shift = 1; shift < size(); ++shift) {
    const int to = (rank() + shift) % size();
    const int from = (rank() - shift + size()) % size();
    sends.push_back({to, slot(rank()), slot_bytes});
    recvs.push_back({from, slot(from), slot_bytes});
  }
  return start(sends, recvs, stream);
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): overriders keep it
void Transport::watch(DeferredCheck finding) {
  if (const auto wrong = finding(); wrong && !wrong->empty()) throw TransportError(*wrong);
}

}  // namespace zcomm
