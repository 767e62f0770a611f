#include "codec/cpu/isa.hpp"

#include <cstdlib>
#include <string>
#include <vector>

#include "zcomm/codec.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace cpu {
namespace {

// Lists instruction sets, slowest first.
std::vector<Isa> detect() {
  std::vector<Isa> isas = {{"baseline", &kBaselineKernels}};
#ifdef ZCOMM_X86_KERNELS
  // __builtin_cpu_supports also checks that the operating system saves the registers.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("bmi2")) {
    isas.push_back({"avx2", &kAvx2Kernels});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      isas.push_back({"avx512", &kAvx512Kernels});
    }
  }
#elif defined(ZCOMM_NEON_KERNELS)
  isas.push_back({"neon", &kNeonKernels});
#endif
  return isas;
}

const std::vector<Isa>& isas() {
  static const std::vector<Isa> detected = detect();
  return detected;
}

}  // namespace

const Isa& find_isa(std::string_view isa) {
  const char* argument = "isa";
  if (isa.empty()) {
    // Reads the variable on every call, so that tests can change it. C++ reads one other variable: ZCOMM_NCCL_LIB, in
    // nccl_symbols.cpp.
    const char* value = std::getenv("ZCOMM_ISA");
    if (value == nullptr || *value == '\0') return isas().back();
    argument = "ZCOMM_ISA";
    isa = value;
  }
  std::string accepted;
  for (const Isa& candidate : isas()) {
    if (isa == candidate.name) return candidate;
    accepted += accepted.empty() ? candidate.name : std::string(", ") + candidate.name;
  }
  throw ArgumentError(std::string(argument) + ": expected one of this machine's, " + accepted + ", got '" +
                      std::string(isa) + "'");
}

}  // namespace cpu

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const cpu::Isa& isa : cpu::isas()) names.emplace_back(isa.name);
  return names;
}

}  // namespace zcomm
