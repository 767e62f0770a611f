// Exceptions of the library, visible to every module that links it. Messages read "NAME: expected Y, got X" where an
// argument is wrong.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace zcomm {

// Base of all exceptions of the library. Thrown itself for failures of CUDA, for what a build lacks, and for bytes that
// no encoder wrote.
class [[gnu::visibility("default")]] Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Reports a wrong argument. It is thrown before any byte moves, and the communicator stays usable.
class [[gnu::visibility("default")]] ArgumentError : public Error {
 public:
  using Error::Error;
};

// Reports a failed transfer, a lost peer, or ranks that made different calls.
// The communicator is unusable afterwards: every later call throws.
class [[gnu::visibility("default")]] TransportError : public Error {
 public:
  using Error::Error;
};

// Reports a message that does not have its sender's checksum, on the rank that received it. Its text has kCorrupted.
// Peers get a TransportError that quotes it.
class [[gnu::visibility("default")]] CorruptedWireError : public TransportError {
 public:
  using TransportError::TransportError;
};
inline constexpr const char* kCorrupted = "corrupted bytes";

// Reports a peer that did not answer within the timeout. The communicator is unusable afterwards.
class [[gnu::visibility("default")]] TimeoutError : public TransportError {
 public:
  using TransportError::TransportError;
};

// --- Internal: building messages. A caller needs nothing below.

// Joins the parts of a message.
// A part is a text, a number, an object with to_string(), or a function that returns a text.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(part)>>) {
      text += std::to_string(part);
    } else if constexpr (requires { part.to_string(); }) {
      text += part.to_string();
    } else if constexpr (requires { part(); }) {
      text += part();
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

// Throws ArgumentError unless `condition` is true. The joined parts are its message.
// The parts are joined only on failure, so a costly part is best given as a function.
template <class... Parts>
void check_argument(bool condition, const Parts&... parts) {
  if (!condition) throw ArgumentError(concat(parts...));
}

}  // namespace zcomm
