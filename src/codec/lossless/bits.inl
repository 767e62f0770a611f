// Streams of bits, from the lowest bit of the first byte on, and software versions of pext and pdep.

inline int popcount(std::uint64_t bits) { return __builtin_popcountll(bits); }
inline int lowest(std::uint64_t bits) { return __builtin_ctzll(bits); }

#if defined(__BMI2__)
inline std::uint64_t gather_bits(std::uint64_t bits, std::uint64_t mask) { return _pext_u64(bits, mask); }
inline std::uint64_t scatter_bits(std::uint64_t bits, std::uint64_t mask) { return _pdep_u64(bits, mask); }
#else
// Extracts the bits of `bits` where `mask` has ones, packed from bit 0 on.
inline std::uint64_t gather_bits(std::uint64_t bits, std::uint64_t mask) {
  if (mask == ~std::uint64_t{0}) return bits;
  std::uint64_t gathered = 0;
  for (int i = 0; mask != 0; ++i, mask &= mask - 1) gathered |= (bits >> lowest(mask) & 1) << i;
  return gathered;
}
// Inverts gather_bits; ignores further bits.
inline std::uint64_t scatter_bits(std::uint64_t bits, std::uint64_t mask) {
  if (mask == ~std::uint64_t{0}) return bits;
  std::uint64_t scattered = 0;
  for (; mask != 0; mask &= mask - 1, bits >>= 1) scattered |= (bits & 1) << lowest(mask);
  return scattered;
}
#endif

// Appends bits to a buffer. Writes up to 8 bytes past the last bit.
struct BitWriter {
  std::uint8_t* next;
  std::uint64_t held = 0;
  int num_held = 0;  // bits, below 8

  // Appends the lowest `count` bits of `bits`, 0 to 64; the others must be zero.
  void put(std::uint64_t bits, int count) {
    const std::uint64_t first = held | bits << num_held;
    const std::uint64_t second = bits >> 1 >> (63 - num_held);
    __builtin_memcpy(next, &first, 8);
    const int total = num_held + count;
    next += total >> 3;
    held = (total < 64 ? first : second) >> (total & 56);
    num_held = total & 7;
  }
  // Skips to the next byte.
  void align() {
    __builtin_memcpy(next, &held, 8);
    next += num_held != 0;
    held = 0;
    num_held = 0;
  }
};

// Reads bits without a bounds check on each access. Callers ask is_beyond() after each block of values, so at most
// kReadBeyond bytes past the end are read.
constexpr int kReadBeyond = 80;
struct BitReader {
  const std::uint8_t* bytes;
  std::int64_t num_bits;      // available bits
  std::int64_t position = 0;  // in bits

  bool is_beyond() const { return position > num_bits; }
  // Skips to the next byte.
  void align() { position = (position + 7) / 8 * 8; }
  // Returns the next `count` bits, up to 64; higher bits are undefined.
  std::uint64_t take(int count) {
    const std::uint8_t* p = bytes + (position >> 3);
    const int shift = static_cast<int>(position & 7);
    std::uint64_t low;
    __builtin_memcpy(&low, p, 8);
    position += count;
    return low >> shift | static_cast<std::uint64_t>(p[8]) << (63 - shift) << 1;
  }
  // Returns up to 56 bits.
  std::uint64_t take_few(int count) {
    std::uint64_t low;
    __builtin_memcpy(&low, bytes + (position >> 3), 8);
    low >>= position & 7;
    position += count;
    return low;
  }
};
