// Where the real functions of NCCL are.
#pragma once

#include <string>

namespace zcomm::front {

// Returns the real function of that name. The first call opens the real library. Where that is impossible, or where it
// has no such function, the result returns an error of NCCL, and stderr says why.
void* real_function(const char* name) noexcept;

// Returns the name of the file that has this address.
std::string name_of_library(const void* address);

// Tells whether code of the real library has this address: it calls some of its functions by their names.
bool is_of_real_library(const void* address);

// Returns the path that NCCL has if its wheel is installed next to zcomm's.
std::string wheel_beside_front();

}  // namespace zcomm::front

// Calls the real function with the parameters of this library's own, and finds it once.
#define ZCOMM_REAL(name)                                                                             \
  [] {                                                                                               \
    static const auto found = reinterpret_cast<decltype(&name)>(zcomm::front::real_function(#name)); \
    return found;                                                                                    \
  }()
