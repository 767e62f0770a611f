// Arithmetic instructions: each lane's result depends only on that lane's registers.
#pragma once

#include "module.hpp"

namespace ptx {

struct Opcode {
  Execute execute;
  Kind target;
  std::vector<Kind> sources;
};

// Finds an opcode by its PTX name with all modifiers; null if it is unknown. "low.b32", "high.b32" and "pack.b32" (and
// .b64) stand for the halves and wholes of registers that PTX writes in braces.
const Opcode* find_opcode(const std::string& name);

}  // namespace ptx
