#include "transport/nccl_symbols.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>

#include "zcomm/error.hpp"

namespace zcomm::nccl {
namespace {

constexpr const char* kSoname = "libnccl.so.2";

// Returns the library, or null. Ignores zcomm's front, which may have NCCL's file name.
void* open_real(const char* name, int more_flags = 0) {
  void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | more_flags);
  return handle == nullptr || dlsym(handle, kFrontMark) == nullptr ? handle : nullptr;
}

// Returns the copy that the process has mapped, or null.
void* find_mapped(const char* name) { return open_real(name, RTLD_NOLOAD); }

std::string last_error() {
  const char* text = dlerror();
  return text == nullptr ? "it is zcomm's front of NCCL" : text;
}

}  // namespace

std::string path_of(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map->l_name != nullptr ? map->l_name
                                                                                                  : kSoname;
}

// Prefers a mapped copy: copies cannot share communicators, and two copies compete for the same devices.
void* open(const std::string& named_path, const std::string& wheel_path) {
  void* mapped = find_mapped(kSoname);
  if (!named_path.empty()) {
    if (void* handle = find_mapped(named_path.c_str())) return handle;
    if (mapped != nullptr) {
      throw TransportError("ZCOMM_NCCL_LIB names " + named_path + ", but this process has NCCL already, from " +
                           path_of(mapped) + ": name that file, or load the other one first, with LD_PRELOAD");
    }
    if (void* handle = open_real(named_path.c_str())) return handle;
    throw TransportError("ZCOMM_NCCL_LIB names a library that cannot be opened: " + last_error());
  }
  if (mapped != nullptr) return mapped;
  std::string tried;
  for (const std::string& name : {wheel_path, std::string(kSoname)}) {
    if (name.empty()) continue;
    if (void* handle = open_real(name.c_str())) return handle;
    tried += "; " + last_error();
  }
  throw TransportError("NCCL was not found (pip install nvidia-nccl-cu13, or set ZCOMM_NCCL_LIB to its file)" + tried);
}

Library open_library(const std::string& named_path, const std::string& wheel_path) {
  void* handle = open(named_path, wheel_path);
  Library library;
  library.path = path_of(handle);
  const auto resolve = [&]<class Function>(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (function == nullptr) {
      throw TransportError("NCCL: expected 2.27.3 or later, got one without " + std::string(name) + ", " +
                           library.path);
    }
  };
#define ZCOMM_RESOLVE(name, result, parameters) resolve(library.name, "nccl" #name);
  ZCOMM_NCCL_FUNCTIONS(ZCOMM_RESOLVE)
#undef ZCOMM_RESOLVE
  if (library.GetVersion(&library.version) != Result::success) {
    throw TransportError(library.path + " does not tell its version");
  }
  if (const int version = library.version; version < kMinNcclVersion) {
    throw TransportError("NCCL: expected 2.27.3 or later, got " + std::to_string(version / 10000) + "." +
                         std::to_string(version / 100 % 100) + "." + std::to_string(version % 100) + " from " +
                         library.path + ": earlier ones can hang or crash in an abort");
  }
  return library;
}

void check_environment() {
  const char* text = std::getenv("NCCL_COMM_BLOCKING");
  if (text == nullptr || std::string(text) == "0") return;
  throw TransportError(std::string("NCCL_COMM_BLOCKING: expected it unset or 0, got ") + text +
                       ": a communicator that blocks cannot be aborted");
}

const Library& library(const std::string& wheel_path) {
  static const Library opened = [&] {
    const char* named = std::getenv("ZCOMM_NCCL_LIB");
    return open_library(named == nullptr ? "" : named, wheel_path);
  }();
  return opened;
}

}  // namespace zcomm::nccl

namespace zcomm {

std::pair<std::string, int> load_nccl(const std::string& wheel_path) {
  const nccl::Library& library = nccl::library(wheel_path);
  return {library.path, library.version};
}

}  // namespace zcomm
