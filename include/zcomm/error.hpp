// Exceptions of the library, visible to every module that links it. Messages name what was given and what is accepted.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

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

// Joins texts, numbers, results of to_string() methods, and results of functions.
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

// Throws ArgumentError unless `condition`, with the parts as its message. Joins them only on failure.
template <class... Parts>
void check_argument(bool condition, const Parts&... parts) {
  if (!condition) throw ArgumentError(concat(parts...));
}

}  // namespace zcomm
