// PTX file in executable form: kernels, their instructions with places in the file, and constants in memory.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "integers.hpp"

namespace ptx {

class Registers;
struct Instruction;

// Kinds of registers. 16-bit ones are stored in words of 32, with zeros above.
enum class Kind : u8 { predicate, bits16, bits32, bits64 };

struct Operand {
  Kind kind = Kind::bits32;
  i32 index = -1;  // of the registers of that width, see Registers; 16 and 32 bits share them

  bool is_there() const { return index >= 0; }
};

// A word that an atomic instruction leaves in memory.
using Update = u64 (*)(u64 before, u64 operand);

// Executes in the lanes of `active`.
using Execute = void (*)(Registers& registers, const Instruction& instruction, u32 active);

enum class Unit : u8 { arithmetic, load, store, atomic, shuffle, warp_barrier, barrier, branch, exit };
enum class Space : u8 { parameter, variable, global, shared };

struct Instruction {
  Unit unit = Unit::arithmetic;
  Execute execute = nullptr;  // of arithmetic
  Operand guard{};
  bool guard_is_negated = false;
  bool is_meeting = false;  // lanes that parted go on together from here
  std::array<Operand, 4> targets{}, sources{};
  u8 num_targets = 0, num_sources = 0;
  Space space = Space::global;
  u8 element_bytes = 0;     // of a load or store, whose targets or sources are the elements of a vector; of an atomic
  Update update = nullptr;  // of an atomic, whose target, if it has one, gets what was there
  Operand address{};
  i64 offset = 0;  // added to the address
  u32 jump = 0;    // target of a branch
  u32 line = 0;    // in the file, from 1
};

// Registers that are always there.
enum Special : i32 { kThread, kCta, kCtaThreads, kNumCtas, kLane, kNumSpecials };
inline constexpr Operand kParameter{Kind::bits64, 0};  // the address of the kernel's parameter

struct Constant {
  Operand where;
  u64 value;
};

// A variable of a module: memory that kernels only read.
struct Variable {
  explicit Variable(std::size_t num_bytes) : bytes(num_bytes) {}
  u64 address() const { return reinterpret_cast<u64>(bytes.data()); }

  std::vector<u8> bytes;
};
using Variables = std::map<std::string, Variable>;

struct Kernel {
  std::string name;
  std::size_t parameter_bytes = 0, parameter_alignment = 1, shared_bytes = 0;
  u32 max_threads = 0;  // of a CTA
  std::vector<Instruction> code;
  std::vector<Constant> constants;
  i32 num_predicates = 0, num_words = kNumSpecials, num_longs = 1;
  std::shared_ptr<const std::vector<std::string>> lines;  // of the file
  std::shared_ptr<const Variables> variables;

  std::string where(u32 at, u32 cta) const {
    const u32 line = code[at].line;
    return name + ", CTA " + std::to_string(cta) + ", line " + std::to_string(line) + ":" + (*lines)[line - 1];
  }
};

struct Module {
  std::map<std::string, Kernel> kernels;  // by their names as mangled
};

// Throws std::runtime_error at the first thing that is not known.
Module parse(const std::string& text);

}  // namespace ptx
