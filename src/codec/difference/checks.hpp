// Argument checks of the difference codecs, shared by host and device.
#pragma once

#include <string>

#include "codec/checks.hpp"

namespace zcomm::difference {

inline void check_16_bits(const char* argument, ConstTensorView values) {
  check_argument(values.dtype != DType::float32, [&] {
    return std::string(argument) + ": expected bfloat16 or float16, of which differences are made, got float32";
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

}  // namespace zcomm::difference
