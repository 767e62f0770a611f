// Vectors of vectors.inl as loops.

constexpr int kWidth = 16;
struct Bytes {
  std::uint8_t at[kWidth];
};
struct Words {
  std::uint16_t at[kWidth];
};
struct Lanes {
  std::uint64_t at[kNumLanes];
};

template <class Function>
inline Bytes for_each_byte(Function&& function) {
  Bytes result;
  for (int i = 0; i < kWidth; ++i) result.at[i] = static_cast<std::uint8_t>(function(i));
  return result;
}

inline Bytes load_bytes(const std::uint8_t* p) {
  Bytes a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline void store_bytes(std::uint8_t* p, Bytes a) { __builtin_memcpy(p, &a, sizeof a); }
inline Bytes splat(int value) {
  return for_each_byte([&](int) { return value; });
}
inline Bytes add(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] + b.at[i]; });
}
inline Bytes subtract_saturated(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] > b.at[i] ? a.at[i] - b.at[i] : 0; });
}
inline Bytes smaller(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
}
inline Bytes both(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] & b.at[i]; });
}
inline Bytes without(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] & ~b.at[i]; });
}
inline bool is_zero(Bytes a) {
  int any = 0;
  for (const std::uint8_t byte : a.at) any |= byte;
  return any == 0;
}
inline std::uint64_t at_least(Bytes a, Bytes b) {
  std::uint64_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= static_cast<std::uint64_t>(a.at[i] >= b.at[i]) << i;
  return bits;
}
// Expands the next bits of a 64-bit word, from bit `part` on, to bytes of ones or zeros.
inline Bytes spread(const std::uint64_t* word, int part) {
  return for_each_byte([&](int i) { return (*word >> (part + i) & 1) != 0 ? 255 : 0; });
}
// Extracts bit kBit of each byte.
template <int kBit>
inline std::uint64_t bits_of(Bytes a) {
  std::uint64_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= static_cast<std::uint64_t>(a.at[i] >> kBit & 1) << i;
  return bits;
}
// Returns a * factors / 128; factors are at most 128.
inline Bytes shift_right(Bytes a, Bytes factors) {
  return for_each_byte([&](int i) { return a.at[i] * factors.at[i] >> 7; });
}
// Returns table[index[i]]; the table has 16 entries.
inline Bytes look_up(const std::uint8_t* table, Bytes index) {
  return for_each_byte([&](int i) { return table[index.at[i]]; });
}

using Sums = std::uint32_t;
inline Sums no_sums() { return 0; }
inline Sums add_bytes(Sums sums, Bytes a) {
  for (const std::uint8_t byte : a.at) sums += byte;
  return sums;
}
// Adds ceil(z / 2) * weight.
inline Sums add_weighted_halves(Sums sums, Bytes z, Bytes weight) {
  for (int i = 0; i < kWidth; ++i) sums += (z.at[i] + 1u) / 2 * weight.at[i];
  return sums;
}
inline std::uint32_t total_of(Sums sums) { return sums; }

inline Words load_words(const std::uint16_t* p) {
  Words a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline void store_words(std::uint16_t* p, Words a) { __builtin_memcpy(p, &a, sizeof a); }
template <int kShift>
inline Bytes fields(Words a, int mask) {
  return for_each_byte([&](int i) { return a.at[i] >> kShift & mask; });
}
// Maps the difference from a to b to a natural number, at most 255.
inline Bytes zigzag(Words a, Words b) {
  return for_each_byte([&](int i) {
    const auto d = static_cast<std::uint16_t>(b.at[i] - a.at[i]);
    const auto z = static_cast<std::uint16_t>(2 * d ^ (d >> 15 != 0 ? 0xffff : 0));
    return z < 255 ? z : 255;
  });
}
inline Words undo_zigzag(Words a, Bytes z) {
  for (int i = 0; i < kWidth; ++i) {
    const int d = z.at[i] >> 1 ^ -(z.at[i] & 1);
    a.at[i] = static_cast<std::uint16_t>(a.at[i] + d);
  }
  return a;
}
// Maps a change of one byte of a pair to a natural number, odd for the low byte; 255: both changed, or one by far.
inline Bytes zigzag_of_pairs(Words a, Words b) {
  const auto zigzag_of = [](int from, int to) {
    const auto d = static_cast<std::int8_t>(to - from);
    return static_cast<std::uint8_t>(2 * d ^ (d >> 7));
  };
  return for_each_byte([&](int i) {
    const int low = zigzag_of(a.at[i] & 0xff, b.at[i] & 0xff), high = zigzag_of(a.at[i] >> 8, b.at[i] >> 8);
    const int z = low != 0 ? 2 * low - 1 : 2 * high;
    return z < 255 && (low == 0 || high == 0) ? z : 255;
  });
}
inline Words undo_zigzag_of_pairs(Words a, Bytes z) {
  for (int i = 0; i < kWidth; ++i) {
    const int of_byte = (z.at[i] + 1) / 2, d = of_byte >> 1 ^ -(of_byte & 1);
    const int low = (a.at[i] + (z.at[i] % 2 != 0 ? d : 0)) & 0xff, high = (a.at[i] >> 8) + (z.at[i] % 2 != 0 ? 0 : d);
    a.at[i] = static_cast<std::uint16_t>(high << 8 | low);
  }
  return a;
}
inline bool differ(Words a, Words b) { return __builtin_memcmp(&a, &b, sizeof a) != 0; }

inline Lanes no_lanes() { return {}; }
inline Lanes add_products(Lanes lanes, Words a, const std::uint32_t* keys) {
  std::uint32_t words[kWidth / 2];
  __builtin_memcpy(words, &a, sizeof words);
  for (int i = 0; i < kNumLanes; ++i) {
    const std::uint32_t x = words[2 * i] + keys[2 * i];
    const std::uint32_t y = words[2 * i + 1] + keys[2 * i + 1];
    lanes.at[i] += static_cast<std::uint64_t>(x) * y;
  }
  return lanes;
}
inline void store_lanes(std::uint64_t* p, Lanes lanes) { __builtin_memcpy(p, &lanes, sizeof lanes); }
