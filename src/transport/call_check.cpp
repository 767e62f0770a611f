#include "zcomm/call_check.hpp"

#include <algorithm>

#include "hash.hpp"
#include "zcomm/error.hpp"

namespace zcomm {

std::string call_words(const std::string& call) {
  if (call.size() <= kMaxCallChars) return call;
  const std::string tail = "... #" + std::to_string(fnv1a(call));
  return call.substr(0, kMaxCallChars - tail.size()) + tail;
}

std::uint64_t call_fingerprint(const std::string& call) { return fnv1a(call); }

std::string describe_difference(const std::string& own, int peer, const std::string& theirs) {
  return "ranks called different things: this rank \"" + own + "\", rank " + std::to_string(peer) + " \"" + theirs +
         "\"";
}

CallCheck::CallCheck(const std::string& call, std::span<const int> peers)
    : peers_(peers.begin(), peers.end()), own_{}, theirs_(peers.size()) {
  const std::string words = call_words(call);
  std::copy(words.begin(), words.end(), own_.begin());
}

std::vector<Send> CallCheck::sends() const {
  std::vector<Send> sends;
  sends.reserve(peers_.size());
  for (const int peer : peers_) sends.push_back({peer, reinterpret_cast<const std::byte*>(own_.data()), own_.size()});
  return sends;
}

std::vector<Recv> CallCheck::recvs() {
  std::vector<Recv> recvs;
  recvs.reserve(peers_.size());
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    recvs.push_back({peers_[i], reinterpret_cast<std::byte*>(theirs_[i].data()), theirs_[i].size()});
  }
  return recvs;
}

void CallCheck::verify() const {
  const auto words = [](const Text& text) { return std::string(text.begin(), std::find(text.begin(), text.end(), 0)); };
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (theirs_[i] != own_) throw TransportError(describe_difference(words(own_), peers_[i], words(theirs_[i])));
  }
}

}  // namespace zcomm
