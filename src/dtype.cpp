#include "zcomm/dtype.hpp"

#include <algorithm>
#include <iterator>

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

constexpr std::string_view kNames[] = {"float32", "bfloat16", "float16", "byte_pairs"};  // in the order of DType

}  // namespace

std::string_view to_string(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  check_argument(index < std::size(kNames), "dtype: expected float32, bfloat16 or float16, got the number ", index);
  return kNames[index];
}

DType parse_dtype(std::string_view name) {
  const auto* const found = std::ranges::find(kNames, name);
  check_argument(found != std::end(kNames), "dtype: expected float32, bfloat16 or float16, got '", name, "'");
  return static_cast<DType>(found - kNames);
}

}  // namespace zcomm
