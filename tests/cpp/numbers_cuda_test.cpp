// The arithmetic of scales without divisions.
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>

#include "codec/cuda/any_codes.cuh"
#include "sanitizers.hpp"

namespace zcomm {

TEST_SUITE("numbers on a GPU") {
  TEST_CASE("scales are those of a division") {
    const auto expected = [](std::uint32_t absmax, float max_code) {
      const float quotient = __uint_as_float(absmax) / max_code;
      const float rounded_up = __uint_as_float((__float_as_uint(quotient) + 0xffffu) & 0xffff0000u);
      return __float_as_uint(std::max(rounded_up, 0x1p-126f));
    };
    std::int64_t num_wrong = 0;
    const auto check_one = [&](std::uint32_t absmax, float max_code) {
      num_wrong += gpu::make_scale(__uint_as_float(absmax), max_code, 1.0f / max_code) != expected(absmax, max_code);
    };
    const auto check = [&](std::uint32_t absmax) {
      for (float max_code : {127.0f, 7.0f}) check_one(absmax, max_code);
      if (absmax % 64 == 0) {
        for (float max_code : {31.0f, 1.0f, 448.0f}) check_one(absmax, max_code);
      }
    };
    constexpr std::uint32_t kStep = test::kSanitizers ? 101 : 1;
    // Rounding does not depend on the exponent but where a quotient or its remainder is subnormal; that is slow, too.
    for (std::uint32_t mantissa = 0; mantissa < (1u << 23); mantissa += kStep) check(127u << 23 | mantissa);
    for (std::uint32_t bits = 0; bits < 64u << 23; bits += 11 * kStep) check(bits);
    for (std::uint32_t bits = 64u << 23; bits < gpu::kInfinity32; bits += 101 * kStep) check(bits);
    for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
      check(exponent << 23), check(exponent << 23 | 0x7fffffu);
    }
    CHECK(num_wrong == 0);
  }

  TEST_CASE("reciprocals are those of a division") {
    std::int64_t num_wrong = 0;
    for (std::uint32_t scale_bits = 0x0080u; scale_bits < 0x7e80u; ++scale_bits) {  // 2^-126 up to 2^126
      const float scale = __uint_as_float(scale_bits << 16);
      const float reciprocal = 1.0f / scale;
      for (int ulp : {-1, 0, 1}) {
        const float approximation = __uint_as_float(__float_as_uint(reciprocal) + static_cast<std::uint32_t>(ulp));
        num_wrong += gpu::refine_reciprocal(scale, approximation) != reciprocal;
      }
    }
    for (std::uint32_t scale_bits = 0x0080u; scale_bits < 0x7f80u; ++scale_bits) {  // every one that is finite
      const float scale = __uint_as_float(scale_bits << 16);
      num_wrong += gpu::any_reciprocal(scale) != 1.0f / scale;
    }
    CHECK(num_wrong == 0);
  }
}

}  // namespace zcomm
