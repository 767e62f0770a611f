#include "zcomm/dtype.hpp"

#include <doctest/doctest.h>

#include "zcomm/error.hpp"

namespace zcomm {

TEST_CASE("dtypes print and parse") {
  for (DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::byte_pairs})
    CHECK(parse_dtype(to_string(dtype)) == dtype);
  CHECK(element_size(DType::float32) == 4);
  CHECK(element_size(DType::bfloat16) == 2);
  CHECK(element_size(DType::float16) == 2);
}

TEST_CASE("an unknown dtype is refused by name") {
  CHECK_THROWS_WITH_AS(parse_dtype("float64"), "dtype: expected float32, bfloat16 or float16, got 'float64'",
                       ArgumentError);
  CHECK_THROWS_AS(to_string(static_cast<DType>(9)), ArgumentError);
}

}  // namespace zcomm
