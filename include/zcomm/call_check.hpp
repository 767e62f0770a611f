// Detection of ranks that called different things, by comparing descriptions of their calls.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace zcomm {

inline constexpr std::size_t kMaxCallChars = 192;

// Returns `call`; beyond kMaxCallChars, a hash replaces its end.
std::string signature_text(const std::string& call);
// Returns a hash of `call`, the same on all machines.
std::uint64_t call_fingerprint(const std::string& call);
// Returns the text of a TransportError about two different calls, for all ranks.
std::string describe_difference(int rank, const std::string& own, int peer, const std::string& theirs);
// Returns the first cause of a failure: ranks that fail quote those that have failed before.
std::string first_cause(const std::string& failure);

// signature_text() as a message of a fixed size: padded with zeros.
using CallText = std::array<char, kMaxCallChars>;
CallText call_text(const std::string& call);
// Returns describe_difference() of both calls, or an empty string if they are equal. `theirs` may be other bytes.
std::string difference(int rank, const CallText& own, int peer, const CallText& theirs);

}  // namespace zcomm
