#include "zcomm/call_check.hpp"

#include <algorithm>

#include "hash.hpp"
#include "zcomm/error.hpp"

namespace zcomm {

CallCheck::Text CallCheck::fit(const std::string& call) {
  std::string text = call;
  if (text.size() > kMaxChars) {
    const std::string tail = "... #" + std::to_string(fnv1a(call));
    text = call.substr(0, kMaxChars - tail.size()) + tail;
  }
  Text fixed{};
  std::copy(text.begin(), text.end(), fixed.begin());
  return fixed;
}

CallCheck::CallCheck(const std::string& call, std::span<const int> peers)
    : peers_(peers.begin(), peers.end()), own_(fit(call)), fingerprint_(fnv1a(call)), theirs_(peers.size()) {}

std::vector<Send> CallCheck::sends() const {
  std::vector<Send> sends;
  for (const int peer : peers_) sends.push_back({peer, reinterpret_cast<const std::byte*>(own_.data()), kMaxChars});
  return sends;
}

std::vector<Recv> CallCheck::recvs() {
  std::vector<Recv> recvs;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    recvs.push_back({peers_[i], reinterpret_cast<std::byte*>(theirs_[i].data()), kMaxChars});
  }
  return recvs;
}

void CallCheck::verify() const {
  const auto words = [](const Text& text) { return std::string(text.begin(), std::find(text.begin(), text.end(), 0)); };
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (theirs_[i] == own_) continue;
    throw TransportError("ranks called different things: this rank \"" + words(own_) + "\", rank " +
                         std::to_string(peers_[i]) + " \"" + words(theirs_[i]) + "\"");
  }
}

}  // namespace zcomm
