// Flips one bit of bytes that this process sends, each time that it is told to. Loaded before the program.
#include <dlfcn.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t kLarge = 30000, kPlace = 5000;
std::atomic<bool> flips_socket{false}, flips_memory{false};
std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;

bool is_shared(const void* place) {
  const auto address = reinterpret_cast<std::uintptr_t>(place);
  for (const auto& [begin, end] : ranges) {
    if (address >= begin && address < end) return true;
  }
  return false;
}

}  // namespace

// Flips a bit of the next large buffer that goes to a socket.
extern "C" void corrupt_socket() { flips_socket = true; }

// Flips a bit behind the next large copy into this range of memory, or into one that was named before.
extern "C" void corrupt_memory(std::uintptr_t begin, std::uintptr_t end) {
  ranges.emplace_back(begin, end);
  flips_memory = true;
}

// Tells whether a flip is still to come.
extern "C" int is_corrupting() { return flips_socket || flips_memory; }

extern "C" ssize_t writev(int file, const iovec* buffers, int count) {
  static const auto real = reinterpret_cast<ssize_t (*)(int, const iovec*, int)>(dlsym(RTLD_NEXT, "writev"));
  for (int i = 0; i < count; ++i) {
    if (buffers[i].iov_len < kLarge || !flips_socket.exchange(false)) continue;
    const auto* const bytes = static_cast<const unsigned char*>(buffers[i].iov_base);
    std::vector<unsigned char> copy(bytes, bytes + buffers[i].iov_len);
    copy[kPlace] ^= 0x40;
    std::vector<iovec> changed(buffers, buffers + count);
    changed[static_cast<std::size_t>(i)].iov_base = copy.data();
    return real(file, changed.data(), count);
  }
  return real(file, buffers, count);
}

extern "C" void* memcpy(void* to, const void* from, std::size_t num_bytes) noexcept {
  std::memmove(to, from, num_bytes);
  if (num_bytes >= kLarge && flips_memory && is_shared(to) && flips_memory.exchange(false))
    static_cast<unsigned char*>(to)[kPlace] ^= 0x40;
  return to;
}
