// Instructions that compute: each lane's result comes from that lane's registers.
#pragma once

#include "module.hpp"

namespace ptx {

struct Opcode {
  Execute execute;
  Kind target;
  std::vector<Kind> sources;
};

// By its name in PTX, with all modifiers; null where it is not known. Halves and wholes of registers, for which PTX has
// braces, are "low.b32", "high.b32" and "pack.b32", and the same of b64.
const Opcode* find_opcode(const std::string& name);

}  // namespace ptx
