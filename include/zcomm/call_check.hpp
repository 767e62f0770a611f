// Detection of ranks that make different calls, by comparing descriptions of their calls. Transports use it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace zcomm {

// The longest description of a call that ranks exchange, in bytes.
inline constexpr std::size_t kMaxCallChars = 192;

// Returns `call` if it has at most kMaxCallChars. Otherwise a hash of the whole replaces the end.
std::string signature_text(const std::string& call);

// Returns a 64-bit FNV-1a hash of `call`, the same on all machines.
std::uint64_t call_fingerprint(const std::string& call);

// Returns the message of a TransportError about two different calls.
// `rank` made the call `own`, `peer` the call `theirs`. The message is meant for all ranks.
std::string describe_difference(int rank, const std::string& own, int peer, const std::string& theirs);

// Returns the first cause of a failure. Ranks that fail quote those that failed earlier, so messages nest.
// Returns `failure` unchanged if it quotes nothing.
std::string first_cause(const std::string& failure);

// signature_text() as a message of a fixed size, padded with zeros.
using CallText = std::array<char, kMaxCallChars>;

// Returns the text that this rank sends to its peers for `call`.
CallText call_text(const std::string& call);

// Returns describe_difference() of both calls, or an empty string if they are equal.
// `theirs` may hold any bytes: the message then says that the peer called something it had called earlier.
std::string difference(int rank, const CallText& own, int peer, const CallText& theirs);

}  // namespace zcomm
