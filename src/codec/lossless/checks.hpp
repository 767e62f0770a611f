// Argument checks of the lossless codecs.
#pragma once

#include "codec/checks.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm::lossless {

inline void check_16_bits(const char* argument, ConstTensorView values) {
  check_argument(values.dtype != DType::float32, argument,
                 ": expected bfloat16, float16 or values of 8 bits, of which differences are made, got float32");
  check_values(values);
}

inline void check_values_and_base(ConstTensorView values, ConstTensorView base) {
  check_16_bits("values", values);
  check_16_bits("base", base);
  check_argument(values.dtype == base.dtype && values.num_elements == base.num_elements, "base: expected ",
                 values.num_elements, " elements of ", to_string(values.dtype), " as in values, got ",
                 base.num_elements, " of ", to_string(base.dtype));
}

template <class T>
void check_number(const char* argument, const T* number) {
  check_aligned(argument, number, sizeof(T), 1);
}

inline void check_job(const EncodeLossless& job) {
  check_values_and_base(job.values, job.base);
  check_aligned("message", job.message, kWireAlignment);
  check_number("hash", job.hash);
  check_argument((job.message == nullptr) == (job.num_bytes == nullptr), "num_bytes: expected ",
                 job.message == nullptr ? "a null pointer, as message is one, got another address"
                                        : "memory of 8 bytes, got a null pointer");
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
  check_argument(job.spoiled.dtype == job.values.dtype, "spoiled: expected values of ", to_string(job.values.dtype),
                 ", got ", to_string(job.spoiled.dtype));
  check_number("status", job.status);
}

}  // namespace zcomm::lossless
