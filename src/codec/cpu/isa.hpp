// Which kernels this machine runs.
#pragma once

#include <string_view>

#include "codec/cpu/kernels.hpp"

namespace zcomm::cpu {

// The name of the instruction set that `isa` stands for in find_kernels().
std::string_view find_isa(std::string_view isa);

// The kernels of one of cpu_isas(); empty means ZCOMM_ISA if that is set, else the fastest. Throws ArgumentError if the
// named one is not there.
const Kernels& find_kernels(std::string_view isa);

}  // namespace zcomm::cpu
