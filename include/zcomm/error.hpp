// Exceptions of the library, visible to every module that links it. Every message names what was given and what is
// accepted.
#pragma once

#include <stdexcept>
#include <string>

namespace zcomm {

class [[gnu::visibility("default")]] Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A wrong argument. Thrown before any byte moves; the communicator stays usable.
class [[gnu::visibility("default")]] ArgumentError : public Error {
 public:
  using Error::Error;
};

// A transfer failed, a peer was lost or the ranks called different things. The communicator is unusable after it.
class [[gnu::visibility("default")]] TransportError : public Error {
 public:
  using Error::Error;
};

// A peer did not answer within the timeout. The communicator is unusable after it.
class [[gnu::visibility("default")]] TimeoutError : public TransportError {
 public:
  using TransportError::TransportError;
};

// Throws ArgumentError(message()) unless `condition`. The message is only built on failure.
template <class Message>
inline void check_argument(bool condition, Message&& message) {
  if (!condition) throw ArgumentError(message());
}

}  // namespace zcomm
