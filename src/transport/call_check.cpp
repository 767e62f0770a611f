#include "zcomm/call_check.hpp"

#include <algorithm>

#include "hash.hpp"

namespace zcomm {
namespace {

constexpr const char* kDifference = "ranks called different things: rank ";

// Removes hashes, by which signatures differ that a reader cannot tell apart.
std::string without_hashes(std::string signature) {
  for (std::size_t at = 0; (at = signature.find(" #", at)) != std::string::npos;) {
    const std::size_t end = std::min(signature.find_first_not_of("0123456789", at + 2), signature.size());
    signature.erase(at, end - at);
  }
  return signature;
}

}  // namespace

std::string signature_text(const std::string& call) {
  if (call.size() <= kMaxCallChars) return call;
  const std::string tail = "... #" + std::to_string(fnv1a(call));
  return call.substr(0, kMaxCallChars - tail.size()) + tail;
}

std::uint64_t call_fingerprint(const std::string& call) { return fnv1a(call); }

std::string describe_difference(int rank, const std::string& own, int peer, const std::string& theirs) {
  const std::string mine = without_hashes(own), other = without_hashes(theirs);
  return kDifference + std::to_string(rank) + " \"" + mine + "\", rank " + std::to_string(peer) +
         (mine == other ? " the same with other segments" : " \"" + other + "\"");
}

std::string first_cause(const std::string& failure) {
  if (const std::size_t at = failure.find(kDifference); at != std::string::npos) return failure.substr(at);
  const std::size_t last = failure.rfind(" gave up");
  const std::size_t begin = last == std::string::npos ? last : failure.rfind("rank ", last);
  return begin == std::string::npos ? failure : failure.substr(begin);
}

CallText call_text(const std::string& call) {
  CallText text{};
  const std::string signature = signature_text(call);
  std::copy(signature.begin(), signature.end(), text.begin());
  return text;
}

std::string difference(int rank, const CallText& own, int peer, const CallText& theirs) {
  const auto signature = [](const CallText& text) {
    std::string all(text.begin(), std::find(text.begin(), text.end(), 0));
    const bool is_text = !all.empty() && std::ranges::all_of(all, [](char c) { return c >= ' ' && c <= '~'; });
    return is_text ? all : "something that it has called before";
  };
  return own == theirs ? std::string() : describe_difference(rank, signature(own), peer, signature(theirs));
}

}  // namespace zcomm
