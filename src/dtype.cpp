#include "zcomm/dtype.hpp"

#include <string>

#include "zcomm/error.hpp"

namespace zcomm {

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float16:
      return "float16";
    case DType::byte_pairs:
      return "byte_pairs";
  }
  throw ArgumentError("dtype: expected float32, bfloat16 or float16, got the number " +
                      std::to_string(static_cast<int>(dtype)));
}

DType parse_dtype(std::string_view name) {
  for (DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::byte_pairs}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw ArgumentError("dtype: expected float32, bfloat16 or float16, got '" + std::string(name) + "'");
}

}  // namespace zcomm
