// Selection of the kernels for this machine's instruction set.
#pragma once

#include <string_view>

#include "codec/cpu/kernels.hpp"

namespace zcomm::cpu {

struct Isa {
  const char* name;
  const Kernels* kernels;
};

// Returns one of cpu_isas(). Empty means ZCOMM_ISA if it is set, else the fastest. Throws ArgumentError if this machine
// does not support the named one.
const Isa& find_isa(std::string_view isa);

}  // namespace zcomm::cpu
