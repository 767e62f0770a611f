// Reads the PTX that nvcc makes of zcomm's kernels: kernels with one parameter by value, no functions.
#include <cstddef>
#include <cstring>
#include <sstream>
#include <tuple>
#include <unordered_map>

#include "arithmetic.hpp"
#include "module.hpp"
#include "scanner.hpp"

namespace ptx {
namespace {

std::string text_of(Kind kind) {
  static const char* const texts[] = {"a predicate", "16 bits", "32 bits", "64 bits"};
  return texts[static_cast<int>(kind)];
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// Reads a variable of a module, from ".align" on: numbers of 8 to 64 bits, and zeros after the last.
void read_variable(Scanner& in, Variables& variables) {
  in.expect(".align");
  if (const u64 alignment = in.number(); alignment > alignof(std::max_align_t)) {
    in.refuse("an alignment of at most " + std::to_string(alignof(std::max_align_t)), std::to_string(alignment));
  }
  in.expect(".b");
  const std::size_t element_bytes = in.number() / 8;
  const std::string name = in.name();
  in.expect("[");
  const std::size_t count = in.number();
  in.expect("]"), in.expect("="), in.expect("{");
  Variable variable(count * element_bytes);
  std::size_t i = 0;
  do {
    const u64 value = in.number();
    if (i == count) in.refuse(std::to_string(count) + " numbers", "more");
    std::memcpy(variable.bytes.data() + i++ * element_bytes, &value, element_bytes);
  } while (in.take(","));
  in.expect("}"), in.expect(";");
  variables.emplace(name, std::move(variable));
}

// One kernel, from its name on.
class KernelReader {
 public:
  KernelReader(Scanner& in, const Variables& variables) : in_(in), variables_(variables) {}

  Kernel read() {
    read_head();
    in_.expect("{");
    scopes_.emplace_back();
    while (!scopes_.empty()) read_statement();
    end();
    return std::move(kernel_);
  }

 private:
  void read_head() {
    kernel_.name = in_.name();
    in_.expect("("), in_.expect(".param"), in_.expect(".align");
    kernel_.parameter_alignment = in_.number();
    in_.expect(".b8");
    parameter_ = in_.name();
    in_.expect("[");
    kernel_.parameter_bytes = in_.number();
    in_.expect("]"), in_.expect(")");
    while (!in_.is_next('{')) {
      if (in_.take(".maxntid")) {
        kernel_.max_threads = static_cast<u32>(in_.number());
        while (in_.take(",")) in_.number();
      } else {
        in_.expect(".minnctapersm");  // of no meaning here
        in_.number();
      }
    }
  }

  void read_statement() {
    if (in_.take("{")) {
      scopes_.emplace_back();
    } else if (in_.take("}")) {
      scopes_.pop_back();
    } else if (in_.take(".pragma")) {
      in_.skip_statement();
    } else if (in_.take(".reg")) {
      read_registers();
    } else if (in_.take(".shared")) {
      read_shared();
    } else if (in_.is_next('$')) {
      const std::string label = in_.name();
      in_.expect(":");
      labels_[label] = kernel_.code.size();
    } else {
      read_instruction();
    }
  }

  // --- Declarations

  Operand add_register(Kind kind) {
    i32& count = kind == Kind::predicate ? kernel_.num_predicates
                 : kind == Kind::bits64  ? kernel_.num_longs
                                         : kernel_.num_words;
    return {kind, count++};
  }

  void read_registers() {
    const std::string type = in_.name(true);
    const Kind kind = kind_of(type.substr(1));
    do {
      const std::string stem = in_.name();
      if (in_.take("<")) {
        const u64 count = in_.number();
        in_.expect(">");
        for (u64 i = 0; i < count; ++i) scopes_.back()[stem + std::to_string(i)] = add_register(kind);
      } else {
        scopes_.back()[stem] = add_register(kind);
      }
    } while (in_.take(","));
    in_.expect(";");
  }

  void read_shared() {
    in_.expect(".align");
    const std::size_t alignment = in_.number();
    in_.expect(".b8");
    const std::string name = in_.name();
    in_.expect("[");
    const std::size_t size = in_.number();
    in_.expect("]"), in_.expect(";");
    kernel_.shared_bytes = (kernel_.shared_bytes + alignment - 1) / alignment * alignment;
    scopes_.back()[name] = constant(Kind::bits32, kernel_.shared_bytes);
    kernel_.shared_bytes += size;
  }

  Kind kind_of(const std::string& type) const {
    if (type == "pred") return Kind::predicate;
    const std::string bits = type.size() < 2 ? "" : type.substr(1);
    if (bits == "8" || bits == "16") return Kind::bits16;
    if (bits == "32") return Kind::bits32;
    if (bits == "64") return Kind::bits64;
    in_.refuse("a type of 8 to 64 bits", type);
  }

  // --- Operands

  Operand constant(Kind kind, u64 value) {
    if (kind == Kind::bits16) value &= 0xffffu;
    if (kind == Kind::bits32) value &= 0xffffffffu;
    const auto [it, is_new] = constants_.try_emplace({kind, value});
    if (is_new) kernel_.constants.push_back({it->second = add_register(kind), value});
    return it->second;
  }

  Operand special(const std::string& name) const {
    static const std::map<std::string, Special> all = {
        {"%tid.x", kThread}, {"%ctaid.x", kCta}, {"%ntid.x", kCtaThreads}, {"%nctaid.x", kNumCtas}, {"%laneid", kLane}};
    const auto found = all.find(name);
    if (found == all.end()) in_.refuse("a register", name);
    return {Kind::bits32, found->second};
  }

  // A register of any kind, or a constant of this kind.
  Operand read_any(Kind kind) {
    if (in_.is_number()) return constant(kind, in_.number());
    const std::string name = in_.name(true);
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->find(name); found != scope->end()) return found->second;
    }
    if (const auto found = variables_.find(name); found != variables_.end()) {
      return constant(Kind::bits64, found->second.address());
    }
    return name == parameter_ ? kParameter : special(name);
  }
  // Allows a converted source in the low half of a wider register.
  Operand read_operand(Kind kind, bool is_converted = false) {
    const Operand operand = read_any(kind);
    const bool is_low_half = is_converted && kind == Kind::bits16 && operand.kind == Kind::bits32;
    if (operand.kind != kind && !is_low_half) in_.refuse("an operand of " + text_of(kind), text_of(operand.kind));
    return operand;
  }

  void read_source(Instruction& instruction, Kind kind, bool is_converted = false) {
    instruction.sources[instruction.num_sources++] = read_operand(kind, is_converted);
  }
  void read_target(Instruction& instruction, Kind kind) {
    instruction.targets[instruction.num_targets++] = read_operand(kind);
  }

  // --- Instructions

  void read_instruction() {
    Instruction instruction;
    if (in_.take("@")) {
      instruction.guard_is_negated = in_.take("!");
      instruction.guard = read_operand(Kind::predicate);
    }
    instruction.line = in_.line();
    const std::string name = in_.name(true);
    const std::vector<std::string> parts = split(name, '.');
    if (name == "bra" || name == "bra.uni") {
      instruction.unit = Unit::branch;
      jumps_.emplace_back(kernel_.code.size(), in_.name());
    } else if (name == "ret") {
      instruction.unit = Unit::exit;
    } else if (name == "bar.sync") {
      instruction.unit = Unit::barrier;
      if (const u64 barrier = in_.number(); barrier != 0) in_.refuse("barrier 0", std::to_string(barrier));
    } else if (name == "bar.warp.sync") {
      instruction.unit = Unit::warp_barrier;
      read_source(instruction, Kind::bits32);
    } else if (name == "shfl.sync.bfly.b32") {
      read_shuffle(instruction);
    } else if (parts[0] == "atom" || parts[0] == "red") {
      read_atomic(instruction, name, parts);
    } else if (parts[0] == "ld" || parts[0] == "st") {
      read_access(instruction, parts);
    } else if (parts[0] == "mov" && in_.take("{")) {
      return read_halves(instruction, parts.back());
    } else {
      read_arithmetic(instruction, name, parts.back());
    }
    in_.expect(";");
    kernel_.code.push_back(instruction);
  }

  void read_shuffle(Instruction& instruction) {
    instruction.unit = Unit::shuffle;
    read_target(instruction, Kind::bits32);
    if (in_.take("|")) read_target(instruction, Kind::predicate);
    for (int i = 0; i < 4; ++i) in_.expect(","), read_source(instruction, Kind::bits32);
  }

  void read_arithmetic(Instruction& instruction, const std::string& name, const std::string& type) {
    const Opcode* opcode = find_opcode(name);
    if (opcode == nullptr) in_.refuse("an instruction that is known", name);
    read_target(instruction, opcode->target);
    in_.expect(",");
    if (name == "mov." + type && in_.take("{")) {
      opcode = find_opcode("pack." + type);
      if (opcode == nullptr) in_.refuse("a type that two registers make", type);
      read_source(instruction, opcode->sources[0]), in_.expect(","), read_source(instruction, opcode->sources[1]);
      in_.expect("}");
    } else {
      for (std::size_t i = 0; i < opcode->sources.size(); ++i) {
        if (i > 0) in_.expect(",");
        read_source(instruction, opcode->sources[i], name.starts_with("cvt."));
      }
    }
    instruction.execute = opcode->execute;
  }

  // mov {low, high}, whole: two instructions here.
  void read_halves(Instruction instruction, const std::string& type) {
    const Opcode *low = find_opcode("low." + type), *high = find_opcode("high." + type);
    if (low == nullptr) in_.refuse("a type that two registers make", type);
    const Operand first = read_operand(low->target);
    in_.expect(",");
    const Operand second = read_operand(high->target);
    in_.expect("}"), in_.expect(",");
    read_source(instruction, low->sources[0]);
    in_.expect(";");
    instruction.num_targets = 1;
    instruction.targets[0] = first, instruction.execute = low->execute;
    kernel_.code.push_back(instruction);
    instruction.targets[0] = second, instruction.execute = high->execute;
    kernel_.code.push_back(instruction);
  }

  // Elements of a load or store may be narrower than their registers.
  Operand read_element(Kind kind) {
    const Operand operand = read_any(kind);
    if (operand.kind < kind) in_.refuse("a register of " + text_of(kind), text_of(operand.kind));
    return operand;
  }

  // red: an atomic without a target.
  void read_atomic(Instruction& instruction, const std::string& name, const std::vector<std::string>& parts) {
    static const std::map<std::string, std::pair<Space, Update>> known = {
        {"global.add.u64", {Space::global, [](u64 a, u64 b) { return a + b; }}},
        {"global.or.b32", {Space::global, [](u64 a, u64 b) { return a | b; }}},
        {"shared.or.b32", {Space::shared, [](u64 a, u64 b) { return a | b; }}}};
    const auto found = known.find(name.substr(parts[0].size() + 1));
    if (found == known.end()) in_.refuse("an atomic that is known", name);
    const Kind kind = kind_of(parts.back());
    instruction.unit = Unit::atomic;
    std::tie(instruction.space, instruction.update) = found->second;
    instruction.element_bytes = kind == Kind::bits64 ? 8 : 4;
    if (parts[0] == "atom") read_target(instruction, kind), in_.expect(",");
    read_address(instruction), in_.expect(",");
    read_source(instruction, kind);
  }

  void read_access(Instruction& instruction, std::vector<std::string> parts) {
    static const std::map<std::string, Space> spaces = {{"param", Space::parameter},
                                                        {"global.nc", Space::variable},
                                                        {"global", Space::global},
                                                        {"shared", Space::shared}};
    static const std::map<std::string, u32> vectors = {{"v2", 2}, {"v4", 4}};
    if (parts.size() > 2 && parts[2] == "nc") {
      parts[1] += ".nc";
      parts.erase(parts.begin() + 2);
    }
    const bool is_load = parts[0] == "ld", is_vector = parts.size() == 4;
    if (parts.size() < 3 || !spaces.contains(parts[1]) || (is_vector && !vectors.contains(parts[2])) ||
        parts.back()[0] == 's' || (!is_load && (parts[1] == "param" || parts[1] == "global.nc"))) {
      in_.refuse("a load or store that is known", parts[0] + "." + parts[1]);
    }
    instruction.unit = is_load ? Unit::load : Unit::store;
    instruction.space = spaces.at(parts[1]);
    instruction.element_bytes = static_cast<u8>(std::stoi(parts.back().substr(1)) / 8);
    if (!is_load) read_address(instruction), in_.expect(",");
    auto& elements = is_load ? instruction.targets : instruction.sources;
    u8& count = is_load ? instruction.num_targets : instruction.num_sources;
    if (is_vector) in_.expect("{");
    for (u32 i = 0; i < (is_vector ? vectors.at(parts[2]) : 1); ++i) {
      if (i > 0) in_.expect(",");
      elements[count++] = read_element(kind_of(parts.back()));
    }
    if (is_vector) in_.expect("}");
    if (is_load) in_.expect(","), read_address(instruction);
  }

  void read_address(Instruction& instruction) {
    in_.expect("[");
    instruction.address = read_operand(instruction.space == Space::shared ? Kind::bits32 : Kind::bits64);
    if (in_.take("+")) instruction.offset = static_cast<i64>(in_.number());
    in_.expect("]");
  }

  // --- Ends: labels become places in the code

  void end() {
    std::vector<Instruction>& code = kernel_.code;
    const bool ends = !code.empty() && (code.back().unit == Unit::exit || code.back().unit == Unit::branch);
    if (!ends || code.back().guard.is_there()) in_.refuse("a last instruction of " + kernel_.name + " that leaves it");
    for (const auto& [at, label] : jumps_) {
      const auto found = labels_.find(label);
      if (found == labels_.end() || found->second >= code.size()) in_.refuse("a label", label);
      code[at].jump = static_cast<u32>(found->second);
      code[found->second].is_meeting = true;
    }
    for (std::size_t i = 0; i < code.size(); ++i) {
      const Unit unit = code[i].unit;
      if (unit == Unit::shuffle || unit == Unit::warp_barrier || unit == Unit::barrier) code[i].is_meeting = true;
      if (code[i].unit == Unit::branch && i + 1 < code.size()) code[i + 1].is_meeting = true;
    }
  }

  Scanner& in_;
  const Variables& variables_;
  Kernel kernel_;
  std::string parameter_;
  std::vector<std::unordered_map<std::string, Operand>> scopes_;
  std::map<std::pair<Kind, u64>, Operand> constants_;
  std::unordered_map<std::string, std::size_t> labels_;
  std::vector<std::pair<std::size_t, std::string>> jumps_;
};

}  // namespace

Module parse(const std::string& text) {
  Module module;
  const auto lines = std::make_shared<const std::vector<std::string>>(split(text, '\n'));
  const auto variables = std::make_shared<Variables>();
  for (Scanner in(text); !in.is_at_end();) {
    if (in.take(".version") || in.take(".target") || in.take(".address_size")) {
      in.skip_line();
      continue;
    }
    if (in.take(".global")) {
      read_variable(in, *variables);
      continue;
    }
    in.expect(".visible"), in.expect(".entry");
    Kernel kernel = KernelReader(in, *variables).read();
    kernel.lines = lines;
    kernel.variables = variables;
    module.kernels.emplace(kernel.name, std::move(kernel));
  }
  return module;
}

}  // namespace ptx
