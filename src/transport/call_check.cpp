#include "zcomm/call_check.hpp"

#include <algorithm>

#include "hash.hpp"

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

CallText call_text(const std::string& call) {
  CallText text{};
  const std::string words = call_words(call);
  std::copy(words.begin(), words.end(), text.begin());
  return text;
}

std::string difference(const CallText& own, int peer, const CallText& theirs) {
  const auto words = [](const CallText& text) {
    std::string all(text.begin(), std::find(text.begin(), text.end(), 0));
    const bool is_text = !all.empty() && std::ranges::all_of(all, [](char c) { return c >= ' ' && c <= '~'; });
    return is_text ? all : "something that it has called before";
  };
  return own == theirs ? std::string() : describe_difference(words(own), peer, words(theirs));
}

}  // namespace zcomm
