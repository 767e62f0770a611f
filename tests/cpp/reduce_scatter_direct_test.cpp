#include <doctest/doctest.h>

#include "calls.hpp"
#include "collective_runs.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

}  // namespace

TEST_CASE("direct: it is the float32 sum in rank order, for every shape, size, chunk, dtype and factor") {
  for (const Shape& shape : kShapes) {
    const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
    for (const std::int64_t n : kShardElements) {
      const auto inputs = random_tensors(static_cast<int>(ids.size()), n * static_cast<std::int64_t>(ids.size()), 12);
      for (const std::size_t chunk_bytes : {std::size_t{100}, kDefaultChunkBytes}) {
        const Result result = run_reduce_scatter(ids, inputs, kDirect, 0.3f, chunk_bytes);
        for (std::size_t rank = 0; rank < ids.size(); ++rank) {
          Values expected(static_cast<std::size_t>(n));
          for (std::size_t i = 0; i < expected.size(); ++i) {
            float sum = inputs[0][rank * expected.size() + i];
            for (std::size_t peer = 1; peer < ids.size(); ++peer) sum += inputs[peer][rank * expected.size() + i];
            expected[i] = 0.3f * sum;
          }
          CHECK(same_bits(result.per_rank[rank], expected));
          CHECK(result.stats[rank].wire_bytes() == (ids.size() - 1) * expected.size() * sizeof(float));
        }
      }
    }
  }
}

TEST_CASE("direct: 16-bit values are added in float32 and rounded once; the output may be a slot of the input") {
  // Each of the three added to 256 as bfloat16 would be lost.
  const std::vector<std::uint16_t> parts{0x4380, 0x3f80, 0x3f80, 0x3f80, 0x3f80};  // 256, 1, 1, 1, 1
  auto communicators = test::make_communicators({0, 0, 1, 1, 2});
  test::run_ranks(5, [&](int rank) {
    std::vector<std::uint16_t> whole(5 * 33, parts[static_cast<std::size_t>(rank)]);
    const TensorView all{reinterpret_cast<std::byte*>(whole.data()), 5 * 33, DType::bfloat16};
    const auto slots = split(all, 5, 33);
    const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
    const TensorView own = slots[static_cast<std::size_t>(rank)];
    test::reduce_scatter(*communicators[static_cast<std::size_t>(rank)], inputs, own, kDirect, 1, 20s);
    for (std::size_t i = 0; i < 33; ++i) {
      if (whole[static_cast<std::size_t>(rank) * 33 + i] != 0x4382) throw Error("expected 260");
    }
  });
}

}  // namespace zcomm
