#include "arithmetic.hpp"

#include <bit>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "numbers.hpp"
#include "registers.hpp"
#include "settings.hpp"

namespace ptx {
namespace {

using Table = std::unordered_map<std::string, Opcode>;

// --- A function of numbers as an instruction

template <class T>
constexpr Kind kKind = sizeof(T) == 8   ? Kind::bits64
                       : sizeof(T) == 4 ? Kind::bits32
                                        : Kind::bits16;
template <>
constexpr Kind kKind<bool> = Kind::predicate;

template <class T>
using Stored = std::conditional_t<sizeof(T) == 8, u64, u32>;

template <class T>
Stored<T>* lanes_of(Registers& registers, Operand operand) {
  if constexpr (sizeof(T) == 8) {
    return registers.longs(operand);
  } else {
    return registers.words(operand);
  }
}

template <class T>
T from_stored(Stored<T> bits) {
  if constexpr (std::is_same_v<T, float>) {
    return as_float(bits);
  } else {
    return static_cast<T>(bits);
  }
}

template <class T>
Stored<T> to_stored(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return as_bits(value);
  } else {
    return static_cast<Stored<T>>(value);
  }
}

// Replaces NaN results: a float32 instruction returns its own NaN, not an operand's.
void replace_nans(u32 (&results)[kLanes]) {
  u32 any = 0;
  for (u32 bits : results) any |= u32{is_nan(bits)};
  if (any == 0) return;
  for (u32& bits : results) bits = is_nan(bits) ? make_nan() : bits;
}

template <class Function, class Result, class... Arguments, std::size_t... kIndex>
void each_lane(Registers& registers, const Instruction& instruction, u32 active, std::index_sequence<kIndex...>) {
  const std::tuple sources{lanes_of<Arguments>(registers, instruction.sources[kIndex])...};
  const u32 undefined = registers.undefined_sources(instruction);
  const Operand target = instruction.targets[0];
  if constexpr (std::is_same_v<Result, bool>) {
    u32 results = 0;
    for (u32 l = 0; l < kLanes; ++l) {
      results |= u32{Function{}(from_stored<Arguments>(std::get<kIndex>(sources)[l])...)} << l;
    }
    registers.set_predicate(target, results, undefined, active);
  } else {
    Stored<Result> results[kLanes];
    for (u32 l = 0; l < kLanes; ++l) {
      results[l] = to_stored<Result>(Function{}(from_stored<Arguments>(std::get<kIndex>(sources)[l])...));
    }
    if constexpr (std::is_same_v<Result, float>) replace_nans(results);
    Stored<Result>* lanes = lanes_of<Result>(registers, target);
    for (u32 l = 0; l < kLanes; ++l) lanes[l] = (active >> l & 1u) != 0 ? results[l] : lanes[l];
    registers.set_undefined(target, undefined, active);
  }
}

template <class Function, class Result, class... Arguments>
Opcode opcode_of(Result (*)(Arguments...)) {
  return {[](Registers& registers, const Instruction& instruction, u32 active) {
            each_lane<Function, Result, Arguments...>(registers, instruction, active,
                                                      std::index_sequence_for<Arguments...>{});
          },
          kKind<Result>,
          {kKind<Arguments>...}};
}

// Adds an instruction whose target is a function of its sources. The types give the kinds of registers.
template <class Function>
void add(Table& table, const std::string& name, Function function) {
  table.emplace(name, opcode_of<Function>(+function));
}

// --- Integers

void add_integers(Table& table) {
  for (const char* type : {"s32", "u32"}) add(table, std::string("add.") + type, [](u32 a, u32 b) { return a + b; });
  add(table, "add.s16", [](u16 a, u16 b) { return static_cast<u16>(a + b); });
  add(table, "add.s64", [](u64 a, u64 b) { return a + b; });
  add(table, "sub.s16", [](u16 a, u16 b) { return static_cast<u16>(a - b); });
  add(table, "sub.s32", [](u32 a, u32 b) { return a - b; });
  add(table, "sub.s64", [](u64 a, u64 b) { return a - b; });
  add(table, "neg.s32", [](u32 a) { return 0 - a; });
  add(table, "neg.s64", [](u64 a) { return 0 - a; });
  add(table, "mul.lo.s32", [](u32 a, u32 b) { return a * b; });
  add(table, "mul.lo.s64", [](u64 a, u64 b) { return a * b; });
  add(table, "mul.hi.u32", [](u32 a, u32 b) { return static_cast<u32>(u64{a} * b >> 32); });
  add(table, "mul.wide.u16", [](u16 a, u16 b) { return u32{a} * b; });
  add(table, "mul.wide.u32", [](u32 a, u32 b) { return u64{a} * b; });
  add(table, "mul.wide.s32", [](i32 a, i32 b) { return i64{a} * b; });
  add(table, "mad.lo.s32", [](u32 a, u32 b, u32 c) { return a * b + c; });
  add(table, "mad.lo.s64", [](u64 a, u64 b, u64 c) { return a * b + c; });
  // Division by zero is undefined in PTX.
  add(table, "div.u32", [](u32 a, u32 b) { return b == 0 ? random_bits() : a / b; });
  add(table, "div.u64", [](u64 a, u64 b) { return b == 0 ? random_bits() : a / b; });
  add(table, "max.u32", [](u32 a, u32 b) { return std::max(a, b); });
  add(table, "min.u32", [](u32 a, u32 b) { return std::min(a, b); });
  add(table, "min.u64", [](u64 a, u64 b) { return std::min(a, b); });
  add(table, "max.s32", [](i32 a, i32 b) { return std::max(a, b); });
  add(table, "min.s32", [](i32 a, i32 b) { return std::min(a, b); });
}

// prmt: byte i of the result is a byte of `low` and `high`, or its sign in all bits, as four bits of `selectors` say.
u32 permute(u32 low, u32 high, u32 selectors) {
  const u64 both = u64{high} << 32 | low;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 selector = selectors >> (4 * i) & 15u;
    const u32 byte = static_cast<u32>(both >> (8 * (selector & 7u))) & 0xffu;
    const u32 sign = (byte & 0x80u) != 0 ? 0xffu : 0;
    result |= ((selector & 8u) != 0 ? sign : byte) << (8 * i);
  }
  return result;
}

// bfi: `target` with the low `length` bits of `bits` from bit `position` on.
template <class T>
T insert_bits(T bits, T target, u32 position, u32 length) {
  constexpr u32 kLast = 8 * sizeof(T) - 1;
  position &= 0xffu, length &= 0xffu;
  if (position > kLast || length == 0) return target;
  const T mask = (length > kLast ? ~T{0} : (T{1} << length) - 1) << position;
  return (target & ~mask) | (bits << position & mask);
}

u32 reversed(u32 bits) {
  u32 result = 0;
  for (u32 i = 0; i < 32; ++i) result |= (bits >> i & 1u) << (31 - i);
  return result;
}

template <class T>
void add_bitwise(Table& table, const std::string& type) {
  add(table, "and." + type, [](T a, T b) { return static_cast<T>(a & b); });
  add(table, "or." + type, [](T a, T b) { return static_cast<T>(a | b); });
  add(table, "xor." + type, [](T a, T b) { return static_cast<T>(a ^ b); });
}

// Shifts by more than a register has bits give zero, or all its sign.
void add_bits(Table& table) {
  add_bitwise<u16>(table, "b16");
  add_bitwise<u32>(table, "b32");
  add_bitwise<u64>(table, "b64");
  add(table, "not.b32", [](u32 a) { return ~a; });
  add(table, "not.b64", [](u64 a) { return ~a; });
  add(table, "popc.b32", [](u32 a) { return static_cast<u32>(std::popcount(a)); });
  add(table, "clz.b32", [](u32 a) { return static_cast<u32>(std::countl_zero(a)); });
  add(table, "clz.b64", [](u64 a) { return static_cast<u32>(std::countl_zero(a)); });
  add(table, "brev.b32", [](u32 a) { return reversed(a); });
  // Counts the bits above the highest set one.
  add(table, "bfind.shiftamt.u32", [](u32 a) { return a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)); });
  add(table, "shl.b32", [](u32 a, u32 n) { return n > 31 ? 0 : a << n; });
  add(table, "shl.b64", [](u64 a, u32 n) { return n > 63 ? 0 : a << n; });
  add(table, "shr.u16", [](u16 a, u32 n) { return static_cast<u16>(n > 15 ? 0 : a >> n); });
  add(table, "shr.u32", [](u32 a, u32 n) { return n > 31 ? 0 : a >> n; });
  add(table, "shr.u64", [](u64 a, u32 n) { return n > 63 ? 0 : a >> n; });
  add(table, "shr.s32", [](i32 a, u32 n) { return a >> std::min(n, 31u); });
  add(table, "shf.l.wrap.b32",
      [](u32 low, u32 high, u32 n) { return static_cast<u32>((u64{high} << 32 | low) << (n & 31u) >> 32); });
  add(table, "shf.r.wrap.b32",
      [](u32 low, u32 high, u32 n) { return static_cast<u32>((u64{high} << 32 | low) >> (n & 31u)); });
  add(table, "prmt.b32", [](u32 low, u32 high, u32 selectors) { return permute(low, high, selectors); });
  add(table, "bfi.b32",
      [](u32 bits, u32 target, u32 position, u32 length) { return insert_bits(bits, target, position, length); });
  add(table, "bfi.b64",
      [](u64 bits, u64 target, u32 position, u32 length) { return insert_bits(bits, target, position, length); });
}

template <class T>
void add_move(Table& table, const std::string& type) {
  add(table, "mov." + type, [](T a) { return a; });
}

void add_conversions(Table& table) {
  for (const char* type : {"b16", "u16"}) add_move<u16>(table, type);
  for (const char* type : {"b32", "u32", "f32"}) add_move<u32>(table, type);
  for (const char* type : {"b64", "u64"}) add_move<u64>(table, type);
  add(table, "low.b32", [](u32 a) { return static_cast<u16>(a); });
  add(table, "high.b32", [](u32 a) { return static_cast<u16>(a >> 16); });
  add(table, "pack.b32", [](u16 a, u16 b) { return u32{a} | u32{b} << 16; });
  add(table, "low.b64", [](u64 a) { return static_cast<u32>(a); });
  add(table, "high.b64", [](u64 a) { return static_cast<u32>(a >> 32); });
  add(table, "pack.b64", [](u32 a, u32 b) { return u64{a} | u64{b} << 32; });
  add(table, "cvt.u64.u16", [](u16 a) { return u64{a}; });
  add(table, "cvt.u64.u32", [](u32 a) { return u64{a}; });
  add(table, "cvt.s64.s32", [](i32 a) { return i64{a}; });
  add(table, "cvt.u32.u64", [](u64 a) { return static_cast<u32>(a); });
  add(table, "cvt.u32.u16", [](u16 a) { return u32{a}; });
  add(table, "cvt.u32.u8", [](u16 a) { return u32{a} & 0xffu; });
  add(table, "cvt.s32.s16", [](i16 a) { return i32{a}; });
  add(table, "cvt.u16.u32", [](u32 a) { return static_cast<u16>(a); });
  add(table, "cvt.u16.u64", [](u64 a) { return static_cast<u16>(a); });
  add(table, "cvta.to.global.u64", [](u64 a) { return a; });  // generic addresses are those of global memory
  add(table, "cvt.rn.f32.s32", [](i32 a) { return static_cast<float>(a); });
  add(table, "cvt.rn.f32.u32", [](u32 a) { return static_cast<float>(a); });
  add(table, "cvt.f32.f16", [](u16 a) { return from_float16(a); });
  add(table, "cvt.rn.f16x2.f32", [](float high, float low) { return to_float16(low) | to_float16(high) << 16; });
  add(table, "cvt.rn.bf16x2.f32", [](float high, float low) { return to_bfloat16(low) | to_bfloat16(high) << 16; });
}

// --- Floating-point numbers

u32 larger_pair(u32 a, u32 b, u32 infinity, bool xorsign) {
  return larger_half(a & 0xffffu, b & 0xffffu, infinity, xorsign) | larger_half(a >> 16, b >> 16, infinity, xorsign)
                                                                        << 16;
}

void add_floats(Table& table) {
  add(table, "add.rn.f32", [](float a, float b) { return a + b; });
  add(table, "mul.rn.f32", [](float a, float b) { return a * b; });
  add(table, "div.rn.f32", [](float a, float b) { return a / b; });
  add(table, "sqrt.rn.f32", [](float value) { return std::sqrt(value); });
  add(table, "fma.rn.f32", [](float a, float b, float c) { return std::fma(a, b, c); });
  add(table, "neg.f32", [](float a) { return as_float(as_bits(a) ^ ~kAbs); });
  add(table, "abs.f32", [](float a) { return as_float(as_bits(a) & kAbs); });
  add(table, "copysign.f32", [](u32 sign, u32 magnitude) { return (sign & ~kAbs) | (magnitude & kAbs); });
  add(table, "rcp.approx.ftz.f32", [](float a) { return approximate_reciprocal(a); });
  add(table, "max.NaN.f32", [](float a, float b) { return larger_float(a, b, false); });
  add(table, "max.NaN.xorsign.abs.f32", [](float a, float b) { return larger_float(a, b, true); });
  add(table, "max.NaN.f16x2", [](u32 a, u32 b) { return larger_pair(a, b, 0x7c00u, false); });
  add(table, "max.NaN.xorsign.abs.f16x2", [](u32 a, u32 b) { return larger_pair(a, b, 0x7c00u, true); });
  add(table, "max.NaN.bf16x2", [](u32 a, u32 b) { return larger_pair(a, b, 0x7f80u, false); });
  add(table, "max.NaN.xorsign.abs.bf16x2", [](u32 a, u32 b) { return larger_pair(a, b, 0x7f80u, true); });
  for (const char* type : {"f16x2", "bf16x2"}) {
    add(table, std::string("abs.") + type, [](u32 a) { return a & 0x7fff7fffu; });
  }
}

// --- Comparisons and predicates

template <class T>
void add_equality(Table& table, const std::string& type) {
  add(table, "setp.eq." + type, [](T a, T b) { return a == b; });
  add(table, "setp.ne." + type, [](T a, T b) { return a != b; });
}

template <class T>
void add_order(Table& table, const std::string& type) {
  add(table, "setp.lt." + type, [](T a, T b) { return a < b; });
  add(table, "setp.le." + type, [](T a, T b) { return a <= b; });
  add(table, "setp.gt." + type, [](T a, T b) { return a > b; });
  add(table, "setp.ge." + type, [](T a, T b) { return a >= b; });
}

// Comparisons of floats are false if one is NaN; those that end with u are true.
void add_float_comparisons(Table& table) {
  add_order<float>(table, "f32");
  add(table, "setp.eq.f32", [](float a, float b) { return a == b; });
  add(table, "setp.ne.f32", [](float a, float b) { return a < b || a > b; });
  add(table, "setp.equ.f32", [](float a, float b) { return !(a < b || a > b); });
  add(table, "setp.neu.f32", [](float a, float b) { return a != b; });
  add(table, "setp.ltu.f32", [](float a, float b) { return !(a >= b); });
  add(table, "setp.leu.f32", [](float a, float b) { return !(a > b); });
  add(table, "setp.gtu.f32", [](float a, float b) { return !(a <= b); });
  add(table, "setp.geu.f32", [](float a, float b) { return !(a < b); });
  add(table, "setp.num.f32", [](float a, float b) { return a == a && b == b; });
  add(table, "setp.nan.f32", [](float a, float b) { return a != a || b != b; });
}

void add_comparisons(Table& table) {
  add_float_comparisons(table);
  add_equality<u16>(table, "b16"), add_equality<u16>(table, "u16"), add_equality<i16>(table, "s16");
  add_equality<u32>(table, "b32"), add_equality<u32>(table, "u32"), add_equality<i32>(table, "s32");
  add_equality<u64>(table, "b64"), add_equality<u64>(table, "u64"), add_equality<i64>(table, "s64");
  add_order<u16>(table, "u16"), add_order<i16>(table, "s16");
  add_order<u32>(table, "u32"), add_order<i32>(table, "s32");
  add_order<u64>(table, "u64"), add_order<i64>(table, "s64");
}

// Combines predicates. The result is defined if one side decides alone: false for `and`, true for `or`.
template <bool kAnd>
void combine(Registers& registers, const Instruction& instruction, u32 active) {
  const u32 a = registers.predicate(instruction.sources[0]), b = registers.predicate(instruction.sources[1]);
  const u32 a_undefined = registers.undefined(instruction.sources[0]);
  const u32 b_undefined = registers.undefined(instruction.sources[1]);
  const u32 flip = kAnd ? ~0u : 0;
  const u32 decided = ((a ^ flip) & ~a_undefined) | ((b ^ flip) & ~b_undefined);
  registers.set_predicate(instruction.targets[0], kAnd ? a & b : a | b, (a_undefined | b_undefined) & ~decided, active);
}

template <bool kNot>
void copy_predicate(Registers& registers, const Instruction& instruction, u32 active) {
  const u32 value = registers.predicate(instruction.sources[0]);
  registers.set_predicate(instruction.targets[0], kNot ? ~value : value, registers.undefined(instruction.sources[0]),
                          active);
}

void different_predicates(Registers& registers, const Instruction& instruction, u32 active) {
  const u32 value = registers.predicate(instruction.sources[0]) ^ registers.predicate(instruction.sources[1]);
  registers.set_predicate(instruction.targets[0], value, registers.undefined_sources(instruction), active);
}

// selp: the source that is not taken may be undefined.
template <class T>
void select(Registers& registers, const Instruction& instruction, u32 active) {
  const auto& [a, b, which, none] = instruction.sources;
  const u32 first = registers.predicate(which);
  const Stored<T>*if_true = lanes_of<T>(registers, a), *if_false = lanes_of<T>(registers, b);
  Stored<T>* results = lanes_of<T>(registers, instruction.targets[0]);
  const u32 undefined =
      registers.undefined(which) | (first & registers.undefined(a)) | (~first & registers.undefined(b));
  for (u32 l = 0; l < kLanes; ++l) {
    const Stored<T> result = (first >> l & 1u) != 0 ? if_true[l] : if_false[l];
    results[l] = (active >> l & 1u) != 0 ? result : results[l];
  }
  registers.set_undefined(instruction.targets[0], undefined, active);
}

void add_predicates(Table& table) {
  constexpr Kind p = Kind::predicate;
  table.emplace("and.pred", Opcode{combine<true>, p, {p, p}});
  table.emplace("or.pred", Opcode{combine<false>, p, {p, p}});
  table.emplace("xor.pred", Opcode{different_predicates, p, {p, p}});
  table.emplace("not.pred", Opcode{copy_predicate<true>, p, {p}});
  table.emplace("mov.pred", Opcode{copy_predicate<false>, p, {p}});
  for (const char* type : {"b16", "u16"}) {
    table.emplace(std::string("selp.") + type, Opcode{select<u16>, Kind::bits16, {Kind::bits16, Kind::bits16, p}});
  }
  for (const char* type : {"b32", "u32", "f32"}) {
    table.emplace(std::string("selp.") + type, Opcode{select<u32>, Kind::bits32, {Kind::bits32, Kind::bits32, p}});
  }
  for (const char* type : {"b64", "u64"}) {
    table.emplace(std::string("selp.") + type, Opcode{select<u64>, Kind::bits64, {Kind::bits64, Kind::bits64, p}});
  }
}

Table make_table() {
  Table table;
  add_integers(table);
  add_bits(table);
  add_conversions(table);
  add_floats(table);
  add_comparisons(table);
  add_predicates(table);
  return table;
}

}  // namespace

const Opcode* find_opcode(const std::string& name) {
  static const Table& table = *new Table(make_table());
  const auto found = table.find(name);
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace ptx
