// Register operations for NEON: see lanes.inl.

#define ZCOMM_LANES 4
using Floats = float32x4_t;
using Register = int32x4_t;

ZCOMM_INLINE Floats broadcast(float value) { return vdupq_n_f32(value); }
// Writes as always: an instruction that writes past the caches is only a hint here.
template <class Vector>
ZCOMM_INLINE void write_past_caches(void* data, Vector bits) {
  __builtin_memcpy(data, &bits, sizeof(bits));
}

template <bool kNibbles>
ZCOMM_INLINE void load_codes(const std::int8_t* codes, Floats* group) {
  int8x16_t bytes[] = {read<int8x16_t>(codes), {}};
  if constexpr (kNibbles) {
    bytes[1] = vshrq_n_s8(bytes[0], 4);
    bytes[0] = vshrq_n_s8(vshlq_n_s8(bytes[0], 4), 4);
  } else {
    bytes[1] = read<int8x16_t>(codes + 16);
  }
  for (int i = 0; i < 2; ++i) {
    const int16x8_t words[] = {vmovl_s8(vget_low_s8(bytes[i])), vmovl_high_s8(bytes[i])};
    for (int k = 0; k < 2; ++k) {
      Floats* first = group + (kNibbles ? 4 * k + i : 4 * i + 2 * k);
      first[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(words[k])));
      first[kNibbles ? 2 : 1] = vcvtq_f32_s32(vmovl_high_s16(words[k]));
    }
  }
}
ZCOMM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
ZCOMM_INLINE std::int32_t largest_lane(Register bits, std::int32_t) { return vmaxvq_s32(bits); }
ZCOMM_INLINE std::int32_t largest_lane(Register bits, std::int16_t) { return vmaxvq_s16(vreinterpretq_s16_s32(bits)); }

ZCOMM_INLINE void deinterleave(Floats& first, Floats& second) {
  const Floats even = vuzp1q_f32(first, second);
  second = vuzp2q_f32(first, second);
  first = even;
}

ZCOMM_INLINE int8x16_t lower_halves(Register first, Register second) {
  return vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(first), vreinterpretq_s16_s32(second)));
}
ZCOMM_INLINE int8x16_t low_bytes(const Register* words) {
  return vuzp1q_s8(lower_halves(words[0], words[1]), lower_halves(words[2], words[3]));
}
ZCOMM_INLINE int8x16x2_t to_codes(const Floats* group) {
  Register words[8];
  for (int i = 0; i < 8; ++i) words[i] = vcvtnq_s32_f32(group[i]);
  return {low_bytes(words), low_bytes(words + 4)};
}
ZCOMM_INLINE int8x16_t to_nibbles(int8x16x2_t codes) {
  return vsliq_n_s8(vuzp1q_s8(codes.val[0], codes.val[1]), vuzp2q_s8(codes.val[0], codes.val[1]), 4);
}

template <int kBits>
ZCOMM_INLINE void join_pairs(const Floats* group, Register* words) {
  for (int i = 0; i < 4; ++i) {
    words[i] = vsliq_n_s32(vcvtnq_s32_f32(group[2 * i]), vcvtnq_s32_f32(group[2 * i + 1]), kBits);
  }
}
ZCOMM_INLINE int8x16x2_t pairs_to_codes(const Floats* group) {
  Register words[4];
  join_pairs<8>(group, words);
  return {lower_halves(words[0], words[1]), lower_halves(words[2], words[3])};
}
ZCOMM_INLINE int8x16_t pairs_to_nibbles(const Floats* group) {
  Register words[4];
  join_pairs<4>(group, words);
  return low_bytes(words);
}
ZCOMM_INLINE Floats load_bfloat16(const Word16* values) {
  return vreinterpretq_f32_u32(vshll_n_u16(read<uint16x4_t>(values), 16));
}
ZCOMM_INLINE Register upper_halves(Ints first, Ints second) {
  return vreinterpretq_s32_s16(vuzp2q_s16(reinterpret_cast<int16x8_t>(first), reinterpret_cast<int16x8_t>(second)));
}
ZCOMM_INLINE Floats load_halves(const Word16* halves) { return vcvt_f32_f16(read<float16x4_t>(halves)); }
ZCOMM_INLINE Register to_halves(Floats first, Floats second) {
  return vreinterpretq_s32_f16(vcvt_high_f16_f32(vcvt_f16_f32(first), second));
}
