// Selection of the kernels for this machine's instruction set.
#pragma once

#include <string_view>

#include "codec/cpu/kernels.hpp"

namespace zcomm::cpu {

// Returns the kernels of one of cpu_isas(). Empty means ZCOMM_ISA if it is set, else the fastest. Throws ArgumentError
// if this machine does not support the named one.
const Kernels& find_kernels(std::string_view isa);

}  // namespace zcomm::cpu
