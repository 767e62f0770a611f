// How ranks notice that they called different things: they compare their calls in words.
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

// `call`, whose end a hash of it takes the place of if it is longer than kMaxCallChars.
std::string call_words(const std::string& call);
// A number that differs between different calls, and is the same on all machines.
std::uint64_t call_fingerprint(const std::string& call);
// What a TransportError says of two calls in words.
std::string describe_difference(const std::string& own, int peer, const std::string& theirs);

// Compares by messages of one size, which go before those of the call.
class CallCheck {
 public:
  CallCheck(const std::string& call, std::span<const int> peers);

  // The messages to start before the call's own. They borrow from this object.
  std::vector<Send> sends() const;
  std::vector<Recv> recvs();

  // Once they have arrived: throws TransportError that quotes both calls if a peer's differs.
  void verify() const;

 private:
  using Text = std::array<char, kMaxCallChars>;  // zero-padded call_words()

  std::vector<int> peers_;
  Text own_;
  std::vector<Text> theirs_;
};

}  // namespace zcomm
