// Exceptions of the library, visible to every module that links it. Messages name what was given and what is accepted.
#pragma once

#include <stdexcept>
#include <string>

namespace zcomm {

class [[gnu::visibility("default")]] Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Reports a wrong argument. Thrown before any byte moves; the communicator stays usable.
class [[gnu::visibility("default")]] ArgumentError : public Error {
 public:
  using Error::Error;
};

// Reports a failed transfer, a lost peer, or ranks that called different things. The communicator is unusable after it.
class [[gnu::visibility("default")]] TransportError : public Error {
 public:
  using Error::Error;
};

// Reports a peer that did not answer within the timeout. The communicator is unusable after it.
class [[gnu::visibility("default")]] TimeoutError : public TransportError {
 public:
  using TransportError::TransportError;
};

// Throws ArgumentError(message()) unless `condition`. Builds the message only on failure.
template <class Message>
inline void check_argument(bool condition, Message&& message) {
  if (!condition) throw ArgumentError(message());
}

}  // namespace zcomm
