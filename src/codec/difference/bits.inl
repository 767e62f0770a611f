// Streams of bits, from the lowest bit of the first byte on, and the two instructions that fill them.

inline int popcount(std::uint64_t bits) { return __builtin_popcountll(bits); }
inline int lowest(std::uint64_t bits) { return __builtin_ctzll(bits); }

#if defined(__BMI2__)
inline std::uint64_t gather_bits(std::uint64_t bits, std::uint64_t mask) { return _pext_u64(bits, mask); }
inline std::uint64_t scatter_bits(std::uint64_t bits, std::uint64_t mask) { return _pdep_u64(bits, mask); }
#else
// The bits of `bits` where `mask` has ones, side by side from bit 0 on.
inline std::uint64_t gather_bits(std::uint64_t bits, std::uint64_t mask) {
  if (mask == ~std::uint64_t{0}) return bits;
  std::uint64_t gathered = 0;
  for (int i = 0; mask != 0; ++i, mask &= mask - 1) gathered |= (bits >> lowest(mask) & 1) << i;
  return gathered;
}
// The inverse; further bits are not looked at.
inline std::uint64_t scatter_bits(std::uint64_t bits, std::uint64_t mask) {
  if (mask == ~std::uint64_t{0}) return bits;
  std::uint64_t scattered = 0;
  for (; mask != 0; mask &= mask - 1, bits >>= 1) scattered |= (bits & 1) << lowest(mask);
  return scattered;
}
#endif

// Writes up to 8 bytes past the last bit.
struct BitWriter {
  std::uint8_t* next;
  std::uint64_t held = 0;
  int num_held = 0;  // bits, below 8

  // The lowest `count` bits of `bits`, 0 to 64; the others are zero.
  void put(std::uint64_t bits, int count) {
    const std::uint64_t first = held | bits << num_held;
    const std::uint64_t second = bits >> 1 >> (63 - num_held);
    __builtin_memcpy(next, &first, 8);
    const int total = num_held + count;
    next += total >> 3;
    held = (total < 64 ? first : second) >> (total & 56);
    num_held = total & 7;
  }
  // Up to 56.
  void put_few(std::uint64_t bits, int count) {
    held |= bits << num_held;
    __builtin_memcpy(next, &held, 8);
    const int total = num_held + count;
    next += total >> 3;
    held >>= total & 56;
    num_held = total & 7;
  }

  // Goes on at the next byte.
  void align() {
    __builtin_memcpy(next, &held, 8);
    next += num_held != 0;
    held = 0;
    num_held = 0;
  }
};

// Does not know where its bytes end: after each block of values is_beyond() is asked, so that at most kReadBeyond bytes
// past the end are read.
constexpr int kReadBeyond = 80;
struct BitReader {
  const std::uint8_t* bytes;
  std::int64_t num_bits;      // that are there
  std::int64_t position = 0;  // bit

  bool is_beyond() const { return position > num_bits; }
  // Goes on at the next byte.
  void align() { position = (position + 7) / 8 * 8; }
  // The next bits, of which `count` count, up to 64; the others may be anything.
  std::uint64_t take(int count) {
    const std::uint8_t* p = bytes + (position >> 3);
    const int shift = static_cast<int>(position & 7);
    std::uint64_t low;
    __builtin_memcpy(&low, p, 8);
    position += count;
    return low >> shift | static_cast<std::uint64_t>(p[8]) << (63 - shift) << 1;
  }
  // Up to 56.
  std::uint64_t take_few(int count) {
    std::uint64_t low;
    __builtin_memcpy(&low, bytes + (position >> 3), 8);
    low >>= position & 7;
    position += count;
    return low;
  }
};
