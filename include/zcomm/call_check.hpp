// How ranks notice that they called different things: each sends its own call in words before the bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zcomm/transport.hpp"

namespace zcomm {

class CallCheck {
 public:
  CallCheck(const std::string& call, std::span<const int> peers);

  // The messages to start before the call's own. They borrow from this object.
  std::vector<Send> sends() const;
  std::vector<Recv> recvs();

  // A number that differs between different calls, and is the same on all machines.
  std::uint64_t fingerprint() const { return fingerprint_; }

  // Once they have arrived: throws TransportError that quotes both calls if a peer's differs.
  void verify() const;

 private:
  static constexpr std::size_t kMaxChars = 192;
  using Text = std::array<char, kMaxChars>;  // zero-padded; a longer text ends with its hash
  static Text fit(const std::string& call);

  std::vector<int> peers_;
  Text own_;
  std::uint64_t fingerprint_;
  std::vector<Text> theirs_;
};

}  // namespace zcomm
