// Flips one bit of the first large buffer that this process writes to a socket, and says so. Loaded before the program.
#include <dlfcn.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <vector>

extern "C" ssize_t writev(int file, const iovec* buffers, int count) {
  constexpr std::size_t kLarge = 30000, kPlace = 5000;
  static const auto real = reinterpret_cast<ssize_t (*)(int, const iovec*, int)>(dlsym(RTLD_NEXT, "writev"));
  static std::atomic<bool> has_flipped{false};
  for (int i = 0; i < count; ++i) {
    if (buffers[i].iov_len < kLarge || has_flipped.exchange(true)) continue;
    const auto* const bytes = static_cast<const unsigned char*>(buffers[i].iov_base);
    std::vector<unsigned char> copy(bytes, bytes + buffers[i].iov_len);
    copy[kPlace] ^= 0x40;
    std::vector<iovec> changed(buffers, buffers + count);
    changed[static_cast<std::size_t>(i)].iov_base = copy.data();
    std::fprintf(stderr, "flipped a bit\n");
    return real(file, changed.data(), count);
  }
  return real(file, buffers, count);
}
