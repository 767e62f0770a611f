// Detection of ranks that called different things, by comparing descriptions of their calls.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zcomm/transport.hpp"

namespace zcomm {

inline constexpr std::size_t kMaxCallChars = 192;

// Returns `call`; beyond kMaxCallChars, a hash replaces its end.
std::string call_words(const std::string& call);
// Returns a hash of `call`, the same on all machines.
std::uint64_t call_fingerprint(const std::string& call);
// Returns the text of a TransportError about two different calls.
std::string describe_difference(const std::string& own, int peer, const std::string& theirs);

// Compares calls by messages of a fixed size, sent before those of the call.
class CallCheck {
 public:
  CallCheck(const std::string& call, std::span<const int> peers);

  // Returns the messages to start before the call's own. They borrow from this object.
  std::vector<Send> sends() const;
  std::vector<Recv> recvs();

  // Compares the received calls. Throws TransportError that quotes both calls if a peer's differs.
  void verify() const;

 private:
  using Text = std::array<char, kMaxCallChars>;  // zero-padded call_words()

  std::vector<int> peers_;
  Text own_;
  std::vector<Text> theirs_;
};

}  // namespace zcomm
