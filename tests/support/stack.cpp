// The call stack of the code that first touches a piece of memory.
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>

#include <csignal>
#include <cstddef>

namespace {

constexpr int kMaxFrames = 128;
constexpr int kOfHandler = 2;  // its own frame, and that of the signal
char* watched;
std::size_t num_watched;
void* frames[kMaxFrames];
int num_frames = 0;

void record(int, siginfo_t* info, void*) {
  const char* touched = static_cast<const char*>(info->si_addr);
  if (touched < watched || touched >= watched + num_watched) {
    std::signal(SIGSEGV, SIG_DFL);  // a fault of its own
    return;
  }
  num_frames = backtrace(frames, kMaxFrames);
  mprotect(watched, num_watched, PROT_READ | PROT_WRITE);
}

}  // namespace

extern "C" {

// Watches whole pages. Returns 0.
int watch(void* memory, std::size_t num_bytes) {
  backtrace(frames, 1);  // loads what it needs
  watched = static_cast<char*>(memory);
  num_watched = num_bytes;
  struct sigaction action = {};
  action.sa_sigaction = record;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGSEGV, &action, nullptr) + mprotect(memory, num_bytes, PROT_NONE);
}

// Returns the number of frames, the innermost first.
int stack_size() { return num_frames - kOfHandler; }

// Sets `library` and `offset` to the place of an instruction of a frame.
void frame(int index, const char** library, std::size_t* offset) {
  const char* address = static_cast<const char*>(frames[kOfHandler + index]) - (index == 0 ? 0 : 1);  // of the call
  Dl_info info = {};
  dladdr(address, &info);
  *library = info.dli_fname;
  *offset = static_cast<std::size_t>(address - static_cast<const char*>(info.dli_fbase));
}

}  // extern "C"
