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
std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> found = {&kBaselineKernels};
#ifdef ZCOMM_X86_KERNELS
  // __builtin_cpu_supports also checks that the operating system saves the registers.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("bmi2")) {
    found.push_back(&kAvx2Kernels);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      found.push_back(&kAvx512Kernels);
    }
  }
#elif defined(ZCOMM_NEON_KERNELS)
  found.push_back(&kNeonKernels);
#endif
  return found;
}

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> detected = detect();
  return detected;
}

}  // namespace

const Kernels& find_kernels(std::string_view isa) {
  const char* argument = "isa";
  if (isa.empty()) {
    // Reads the variable on every call, so that tests can change it. C++ reads one other variable: ZCOMM_NCCL_LIB, in
    // nccl_symbols.cpp.
    const char* value = std::getenv("ZCOMM_ISA");
    if (value == nullptr || *value == '\0') return *all_kernels().back();
    argument = "ZCOMM_ISA";
    isa = value;
  }
  std::string accepted;
  for (const Kernels* kernels : all_kernels()) {
    if (isa == kernels->isa) return *kernels;
    accepted += (accepted.empty() ? "" : ", ") + std::string(kernels->isa);
  }
  throw ArgumentError(std::string(argument) + ": expected one of this machine's, " + accepted + ", got '" +
                      std::string(isa) + "'");
}

}  // namespace cpu

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const cpu::Kernels* kernels : cpu::all_kernels()) names.emplace_back(kernels->isa);
  return names;
}

}  // namespace zcomm
