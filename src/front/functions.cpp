#include "front/functions.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "transport/nccl_symbols.hpp"

// What the jumps below call.
extern "C" {
struct ZcommFrontSlot {
  void* function;
  const char* name;
};
[[gnu::visibility("hidden")]] void* zcomm_front_resolve(ZcommFrontSlot* slot) noexcept;
[[gnu::visibility("default")]] const char* zcomm_front_library();
}

// Each forwarded function jumps to the real one, and so keeps all arguments where they are. The first call finds it:
// registers that hold arguments are saved meanwhile. NCCL passes no floating-point numbers by value.
#if defined(__x86_64__)
#define ZCOMM_FIND                                                                        \
  "pushq %rdi; pushq %rsi; pushq %rdx; pushq %rcx; pushq %r8; pushq %r9; subq $8, %rsp\n" \
  "movq %r11, %rdi; call zcomm_front_resolve; movq %rax, %r11; addq $8, %rsp\n"           \
  "popq %r9; popq %r8; popq %rcx; popq %rdx; popq %rsi; popq %rdi; jmp *%r11\n"
#define ZCOMM_JUMP                                                     \
  "endbr64; movq 2f(%rip), %r11; testq %r11, %r11; je 1f; jmp *%r11\n" \
  "1: leaq 2f(%rip), %r11; jmp zcomm_front_find\n"
#elif defined(__aarch64__)
#define ZCOMM_FIND                                                                                   \
  "stp x29, x30, [sp, #-96]!; stp x0, x1, [sp, #16]; stp x2, x3, [sp, #32]; stp x4, x5, [sp, #48]\n" \
  "stp x6, x7, [sp, #64]; str x8, [sp, #80]; mov x0, x17; bl zcomm_front_resolve; mov x16, x0\n"     \
  "ldr x8, [sp, #80]; ldp x6, x7, [sp, #64]; ldp x4, x5, [sp, #48]; ldp x2, x3, [sp, #32]\n"         \
  "ldp x0, x1, [sp, #16]; ldp x29, x30, [sp], #96; br x16\n"
#define ZCOMM_JUMP "hint #34; adrp x17, 2f; add x17, x17, :lo12:2f; ldr x16, [x17]; cbz x16, zcomm_front_find; br x16\n"
#else
#error "the front has jumps for x86-64 and aarch64 alone"
#endif
// clang-format off
#define ZCOMM_FORWARDED \
  "CommCount,CommCuDevice,CommDeregister,CommGetUniqueId,CommMemStats,CommQueryProperties,CommRegister,CommResume," \
  "CommSuspend,CommUserRank,CommWindowDeregister,CommWindowRegister,DevCommCreate,DevCommDestroy," \
  "GetCftDeviceLeInfo,GetErrorString,GetLastError,GetLsaDevicePointer,GetLsaMultimemDevicePointer," \
  "GetMultimemDeviceLeInfo,GetMultimemDevicePointer,GetPeerDeviceLeInfo,GetPeerDevicePointer,GetUniqueId," \
  "GetVersion,GinBarrierCreateRequirement,GinInboxA2ACreateRequirement,GinOutboxCreateRequirement,LLA2ACalcSlots," \
  "LLA2ACreateRequirement,LsaBarrierCreateRequirement,MemAlloc,MemFree,ParamBind,ParamDumpAll,ParamGet," \
  "ParamGetAllParameterKeys,ParamGetI16,ParamGetI32,ParamGetI64,ParamGetI8,ParamGetParameter,ParamGetStr," \
  "ParamGetU16,ParamGetU32,ParamGetU64,ParamGetU8,PutSignal,RedOpCreatePreMulSum,RedOpDestroy,ResetDebugInit," \
  "ResetDebugInitInternal,SetEncryption,Signal,TeamCft,TeamCftMultimem,TeamLsa,TeamRail,TeamRankToLsa," \
  "TeamRankToWorld,TeamWorld,WaitSignal,WinGetUserPtr\n"
asm(".pushsection .text\n zcomm_front_find:\n" ZCOMM_FIND ".irp name," ZCOMM_FORWARDED
    ".globl nccl\\name\n .type nccl\\name, %function\n nccl\\name:\n" ZCOMM_JUMP ".size nccl\\name, .-nccl\\name\n"
    ".pushsection .data\n .balign 8\n 2: .quad 0, 3f\n .popsection\n"
    ".pushsection .rodata\n 3: .asciz \"nccl\\name\"\n .popsection\n .endr\n .popsection\n");
// clang-format on

namespace zcomm::front {
namespace {

// Returns the path of the file that has this address.
std::string file_of(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

// Opens what the program would have got: the next library that it is linked with, else what zcomm opens without a
// front. Returns null, with a line on stderr, if there is none.
void* open_real() {
  const char* named = std::getenv("ZCOMM_NCCL_LIB");
  if (named == nullptr || *named == '\0') {
    named = "";
    if (void* next = dlsym(RTLD_NEXT, "ncclGetVersion")) {
      if (void* handle = dlopen(file_of(next).c_str(), RTLD_NOW | RTLD_NOLOAD)) return handle;
    }
  }
  try {
    return nccl::open(named, wheel_beside_front());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "zcomm's front of NCCL has no library to forward to: %s\n", error.what());
    return nullptr;
  }
}

void* real_library() {
  static void* const opened = open_real();
  return opened;
}

nccl::Result fail() { return nccl::Result::invalid_usage; }
const char* fail_with_text() { return "zcomm's front found no NCCL"; }

}  // namespace

std::string name_of_library(const void* address) {
  const std::string path = file_of(address);
  return path.substr(path.find_last_of('/') + 1);
}

bool is_of_real_library(const void* address) {
  static const void* const real = real_library() == nullptr ? nullptr : dlsym(real_library(), "ncclGetVersion");
  return file_of(address) == file_of(real);
}

std::string wheel_beside_front() {
  const std::string own = file_of(reinterpret_cast<const void*>(&zcomm_front_library));
  return own.substr(0, own.find_last_of('/') + 1) + "../nvidia/nccl/lib/libnccl.so.2";
}

void* real_function(const char* name) noexcept {
  if (void* found = real_library() == nullptr ? nullptr : dlsym(real_library(), name)) return found;
  std::fprintf(stderr, "zcomm's front of NCCL cannot forward %s: the real library has no such function\n", name);
  const bool is_text = std::strcmp(name, "ncclGetErrorString") == 0 || std::strcmp(name, "ncclGetLastError") == 0;
  return is_text ? reinterpret_cast<void*>(&fail_with_text) : reinterpret_cast<void*>(&fail);
}

}  // namespace zcomm::front

// Threads that come at the same time find the same.
void* zcomm_front_resolve(ZcommFrontSlot* slot) noexcept {
  void* const found = zcomm::front::real_function(slot->name);
  __atomic_store_n(&slot->function, found, __ATOMIC_RELEASE);
  return found;
}

// Returns the file of the real library, or an empty text. Its presence tells that a library is the front.
const char* zcomm_front_library() {
  void* const found = zcomm::front::real_library();
  static const std::string& path = *new std::string(found == nullptr ? "" : zcomm::nccl::path_of(found));
  return path.c_str();
}
