// Argument checks of the lossless codecs.
#pragma once

#include <string>

#include "codec/checks.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm::lossless {

inline void check_16_bits(const char* argument, ConstTensorView values) {
  check_argument(values.dtype != DType::float32, [&] {
    return std::string(argument) +
           ": expected bfloat16, float16 or values of 8 bits, of which differences are made, got float32";
  });
  check_values(values);
}

inline void check_values_and_base(ConstTensorView values, ConstTensorView base) {
  check_16_bits("values", values);
  check_16_bits("base", base);
  check_argument(values.dtype == base.dtype && values.num_elements == base.num_elements, [&] {
    return "base: expected " + std::to_string(values.num_elements) + " elements of " +
           std::string(to_string(values.dtype)) + " as in values, got " + std::to_string(base.num_elements) + " of " +
           std::string(to_string(base.dtype));
  });
}

template <class T>
void check_number(const char* argument, const T* number) {
  check_aligned(argument, number, sizeof(T), 1);
}

inline void check_job(const EncodeLossless& job) {
  check_values_and_base(job.values, job.base);
  check_aligned("message", job.message, kWireAlignment);
  check_number("hash", job.hash);
  check_argument((job.message == nullptr) == (job.num_bytes == nullptr), [&] {
    const char* const expected = job.message == nullptr ? "a null pointer, as message is one" : "memory of 8 bytes";
    return "num_bytes: expected " + std::string(expected) + ", got " +
           (job.num_bytes == nullptr ? "a null pointer" : "another address");
  });
  if (job.num_bytes != nullptr) check_number("num_bytes", job.num_bytes);
}

inline void check_job(const DecodeLossless& job) {
  check_16_bits("base", job.base);
  check_aligned("message", job.message, kWireAlignment, static_cast<std::int64_t>(job.num_bytes));
  check_number("hash", job.hash);
  check_number("status", job.status);
}

inline void check_job(const CheckHash& job) {
  check_16_bits("values", job.values);
  check_number("hash", job.hash);
  if (job.status == nullptr) return;
  check_16_bits("spoiled", job.spoiled);
  check_argument(job.spoiled.dtype == job.values.dtype, [&] {
    return "spoiled: expected values of " + std::string(to_string(job.values.dtype)) + ", got " +
           std::string(to_string(job.spoiled.dtype));
  });
  check_number("status", job.status);
}

}  // namespace zcomm::lossless
