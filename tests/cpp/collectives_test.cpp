#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "calls.hpp"
#include "collective_runs.hpp"
#include "sanitizers.hpp"
#include "zcomm/call.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

std::vector<double> to_double(const Values& values) { return {values.begin(), values.end()}; }

// The sum over ranks of their slot `rank`, and the bound of its error after the hops of the collective.
void check_reduced(const std::vector<int>& ids, const std::vector<Values>& inputs, int rank, const Values& output,
                   HopFormats formats, float factor) {
  const Topology topology(ids);
  const std::size_t n = output.size();
  const auto slot_of = [&](int source) {
    const Values& input = inputs[static_cast<std::size_t>(source)];
    const auto begin = input.begin() + static_cast<std::ptrdiff_t>(n * static_cast<std::size_t>(rank));
    return std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(n));
  };
  std::vector<double> sum(n);
  std::vector<double> bound(n);
  std::vector<double> magnitude(n);
  for (int node = 0; node < topology.num_nodes(); ++node) {
    std::vector<double> partial(n);
    std::vector<double> partial_error(n);
    for (const int source : topology.ranks(node)) {
      const std::vector<double> values = slot_of(source);
      // The summing rank has its own contribution in full precision.
      const bool own =
          topology.is_hierarchical() ? topology.local_rank(source) == topology.local_rank(rank) : source == rank;
      const BlockFormat format =
          topology.is_hierarchical() || topology.same_node(source, rank) ? formats.intra_node : formats.inter_node;
      for (std::size_t i = 0; i < n; ++i) {
        partial[i] += values[i];
        magnitude[i] += std::abs(values[i]);
        if (!own) partial_error[i] += half_scale(values, i, format);
      }
    }
    const double worst_error = *std::max_element(partial_error.begin(), partial_error.end());
    const bool second_hop = topology.is_hierarchical() && node != topology.node(rank);
    for (std::size_t i = 0; i < n; ++i) {
      sum[i] += partial[i];
      bound[i] += partial_error[i] + (second_hop ? half_scale(partial, i, formats.inter_node, worst_error) : 0);
    }
  }
  for (std::size_t i = 0; i < n; ++i) {
    const double float32_sums = 0x1p-22 * (magnitude[i] + bound[i]);
    const double error = std::abs(output[i] - factor * sum[i]);
    if (error > factor * (bound[i] + float32_sums)) {
      FAIL("element " << i << " of rank " << rank << ": error " << error << " over the bound " << bound[i]);
    }
  }
}

}  // namespace

TEST_CASE("promises 1, 3, 5: all_gather: replicas agree, errors are bounded, for every shape and size") {
  for (const char* text : {"int8:128", "int4:32", "int4:96", "fp8:96", "bf16", "exact"}) {
    const BlockFormat format = BlockFormat::parse(text);
    for (const Shape& shape : kShapes) {
      const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
      for (const std::int64_t n : kShardElements) {
        const auto shards = random_tensors(static_cast<int>(ids.size()), n, 1);
        const Result result = run_all_gather(ids, shards, format);
        for (std::size_t rank = 1; rank < ids.size(); ++rank) {
          CHECK(same_bits(result.per_rank[rank], result.per_rank[0]));  // promise 1
        }
        for (std::size_t rank = 0; rank < ids.size(); ++rank) {
          const std::vector<double> values = to_double(shards[rank]);
          for (std::size_t i = 0; i < values.size(); ++i) {
            const double decoded = result.per_rank[0][rank * values.size() + i];
            REQUIRE(std::abs(decoded - values[i]) <= half_scale(values, i, format));  // promise 3
          }
        }
      }
    }
  }
}

TEST_CASE("promises 3, 5: reduce_scatter: errors are bounded, for every shape, size and factor") {
  for (const char* text :
       {"int8:128/int4:128", "int8:64/int4:96", "int4:32", "bf16/int8:256", "fp8:64/int4:32", "int4:128", "exact"}) {
    const HopFormats formats = HopFormats::parse(text);
    for (const Shape& shape : kShapes) {
      const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
      const int size = static_cast<int>(ids.size());
      for (const std::int64_t n : kShardElements) {
        const auto inputs = random_tensors(size, n * size, 2);
        for (const float factor : {0.3f, 1.0f / static_cast<float>(size), 1.0f}) {
          if (test::kSanitizers && factor != 0.3f) continue;
          const Result result = run_reduce_scatter(ids, inputs, formats, factor, 1024);
          if (n == 0) continue;
          for (int rank = 0; rank < size; ++rank) {
            check_reduced(ids, inputs, rank, result.per_rank[static_cast<std::size_t>(rank)], formats, factor);
          }
        }
      }
    }
  }
}

TEST_CASE("promise 3: a reduce_scatter by EDEN loses what its formats lose, in one hop and two") {
  // Of normal values eden4:64 loses 0.93 % of their power, eden2:128 13 %, each on one hop at most.
  for (const char* text : {"exact/eden2:128", "eden4:64/eden2:128", "eden4:64", "int8:64/eden2:32"}) {
    const HopFormats formats = HopFormats::parse(text);
    for (const Shape& shape : kShapes) {
      const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
      const int size = static_cast<int>(ids.size());
      const std::int64_t n = 4097;
      const auto inputs = random_tensors(size, n * size, 5);
      const Result result = run_reduce_scatter(ids, inputs, formats, 1.0f, 4096);
      for (std::size_t rank = 0; rank < ids.size(); ++rank) {
        double power = 0, lost = 0;
        for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
          double sum = 0;
          for (const Values& input : inputs) sum += input[rank * static_cast<std::size_t>(n) + i];
          power += sum * sum;
          lost += std::pow(result.per_rank[rank][i] - sum, 2);
        }
        CAPTURE(text);
        CHECK(lost <= 0.15 * power);
      }
    }
  }
}

TEST_CASE("promise 4: sums and means of representable values are exact in every format and shape") {
  // Every block holds the largest code, so its scale is 1 and all codes are integers: nothing is rounded. Ranks of a
  // node alternate in sign, so that its sum is zero or one rank's values, and the second hop rounds nothing either.
  for (const char* text : {"int4:32", "int8:128", "exact"}) {
    const int qmax = text == std::string("int4:32") ? 7 : 127;
    for (const Shape& shape : kShapes) {
      const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
      const int size = static_cast<int>(ids.size());
      const std::int64_t n = 257;
      std::vector<Values> inputs(ids.size(), Values(static_cast<std::size_t>(n * size)));
      for (std::size_t rank = 0; rank < ids.size(); ++rank) {
        const int sign = Topology(ids).local_rank(static_cast<int>(rank)) % 2 == 0 ? 1 : -1;
        for (std::size_t i = 0; i < inputs[rank].size(); ++i) {
          const int j = static_cast<int>(i % static_cast<std::size_t>(n));
          inputs[rank][i] = static_cast<float>(sign * (j % 4 == 0 ? qmax : j * 5 % (2 * qmax + 1) - qmax));
        }
      }
      for (const float factor : {1.0f, 0.5f, 1.0f / static_cast<float>(size)}) {
        const Result result = run_reduce_scatter(ids, inputs, HopFormats::parse(text), factor, 256);
        for (std::size_t rank = 0; rank < ids.size(); ++rank) {
          for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
            float sum = 0;
            for (const Values& input : inputs) sum += input[rank * static_cast<std::size_t>(n) + i];
            REQUIRE(result.per_rank[rank][i] == factor * sum);
          }
        }
      }
    }
  }
}

TEST_CASE("promises 1, 3, 5: all_reduce: replicas agree, errors are bounded, tensors that do not divide") {
  const HopFormats formats = HopFormats::parse("int8:128/int4:128");
  for (const Shape& shape : kShapes) {
    const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
    for (const std::int64_t n : {0, 1, 5, 128, 129, 1000, 5000}) {
      const auto tensors = random_tensors(static_cast<int>(ids.size()), n, 3);
      const Result result = run_all_reduce(ids, tensors, formats, 0.5f);
      for (std::size_t rank = 1; rank < ids.size(); ++rank) {
        CHECK(same_bits(result.per_rank[rank], result.per_rank[0]));
      }
      for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
        double sum = 0;
        double magnitude = 0;
        for (const Values& tensor : tensors) {
          sum += 0.5 * tensor[i];
          for (std::size_t j = i / 128 * 128; j < std::min<std::size_t>(i / 128 * 128 + 128, tensor.size()); ++j) {
            magnitude = std::max(magnitude, std::abs(0.5 * tensor[j]));
          }
        }
        // Bound: one int4 step per rank and hop, and the int8 step of the gather.
        const double size = static_cast<double>(ids.size());
        REQUIRE(std::abs(result.per_rank[0][i] - sum) <= size * magnitude * (0.5 / 7 * 1.2 + 0.5 / 127 * 2.5));
      }
    }
  }
}

TEST_CASE("promise 2: same inputs, same bits, whatever the chunks") {
  const std::vector<int> ids = test::node_ids({2, 2});
  const auto inputs = random_tensors(4, 4 * 3000, 4);
  const HopFormats formats = HopFormats::parse("int8:96/int4:128");
  const Result whole = run_reduce_scatter(ids, inputs, formats, 0.25f);
  const Result gathered = run_all_gather(ids, inputs, BlockFormat::parse("int8:256"));
  for (const std::size_t chunk_bytes : {std::size_t{1}, std::size_t{2000}, std::size_t{5000}}) {
    const Result chunked = run_reduce_scatter(ids, inputs, formats, 0.25f, chunk_bytes);
    const Result regathered = run_all_gather(ids, inputs, BlockFormat::parse("int8:256"), chunk_bytes);
    for (std::size_t rank = 0; rank < 4; ++rank) {
      CHECK(same_bits(chunked.per_rank[rank], whole.per_rank[rank]));
      CHECK(same_bits(regathered.per_rank[rank], gathered.per_rank[rank]));
    }
  }
}

TEST_CASE("promise 6: a NaN or infinity reaches every receiver of its block") {
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()};
  for (const float value : bad) {
    for (const Shape& shape : kShapes) {
      const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
      const int size = static_cast<int>(ids.size());
      if (size == 1) continue;
      auto inputs = random_tensors(size, 300 * size, 5);
      inputs[1][0] = value;  // rank 1's contribution to element 0 of rank 0
      const Result reduced = run_reduce_scatter(ids, inputs, HopFormats::parse("int8:128/int4:128"));
      CHECK_FALSE(std::isfinite(reduced.per_rank[0][0]));
      CHECK(std::isfinite(reduced.per_rank[0][299]));
      const Result gathered = run_all_gather(ids, inputs, BlockFormat::parse("int8:256"));
      for (const Values& values : gathered.per_rank) {
        CHECK(std::isnan(values[inputs[1].size()]));
        CHECK(std::isfinite(values[0]));
      }
    }
  }
}

TEST_CASE("each byte enters a node once, and the hops send what their formats say") {
  const std::vector<int> ids = test::node_ids({2, 2, 2, 2});
  const std::int64_t n = 4096;
  const auto inputs = random_tensors(8, n * 8, 6);
  const auto wire = [](const char* format, std::int64_t count) {
    return WireLayout(BlockFormat::parse(format), DType::float32, count).num_bytes;
  };
  std::vector<Values> shards(8, Values(static_cast<std::size_t>(n)));
  for (const CallStats& stats : run_all_gather(ids, shards, BlockFormat::parse("int8:256")).stats) {
    CHECK(stats.inter_node_bytes == 3 * wire("int8:256", n));
    CHECK(stats.intra_node_bytes == 4 * wire("int8:256", n));
  }
  for (const CallStats& stats : run_reduce_scatter(ids, inputs, HopFormats::parse("int8:128/int4:128")).stats) {
    CHECK(stats.intra_node_bytes == 4 * wire("int8:128", n));
    CHECK(stats.inter_node_bytes == 3 * wire("int4:128", n));
  }
}

TEST_CASE("promise 9: wrong arguments raise before any byte moves and leave the communicator usable") {
  auto communicators = test::make_communicators({0, 0});
  Communicator& communicator = *communicators[0];
  Values four(4);
  Values two(2);
  const auto slots = split(view(four), 2, 2);
  const auto format = BlockFormat::parse("int8:32");
  CHECK_THROWS_WITH_AS(test::all_gather(communicator, view(four), slots, format, 1s),
                       doctest::Contains("shard: expected the 2 elements of slot 0, got 4"), ArgumentError);
  CHECK_THROWS_WITH_AS(test::all_gather(communicator, view(two), std::span(slots).first(1), format, 1s),
                       doctest::Contains("one for each of 2 ranks"), ArgumentError);
  TensorView half = view(two);
  half.dtype = DType::float16;
  CHECK_THROWS_WITH_AS(test::all_gather(communicator, half, slots, format, 1s), doctest::Contains("float16"),
                       ArgumentError);
  CHECK_THROWS_WITH_AS(
      test::all_gather(communicator, slots[1], slots, format, 1s),
      doctest::Contains("shard: expected memory that overlaps no slot but its own, got some of slot 1"), ArgumentError);
  const std::vector<ConstTensorView> contributions(slots.begin(), slots.end());
  CHECK_THROWS_WITH_AS(
      test::reduce_scatter(communicator, contributions, view(four).slice(1, 2), HopFormats{format, format}, 1.0f, 1s),
      doctest::Contains("output: expected memory that overlaps no slot but its own"), ArgumentError);
  // Begins where the last rank's own slot does, and is twice as long.
  TensorView halves = view(four);
  halves.dtype = DType::float16;
  const auto short_slots = split(halves, 2, 2);
  const std::vector<ConstTensorView> short_ones(short_slots.begin(), short_slots.end());
  TensorView sums = view(four).slice(1, 2);
  CHECK_THROWS_WITH_AS(
      test::reduce_scatter(*communicators[1], short_ones, sums, HopFormats{format, format}, 1.0f, 1s),
      doctest::Contains("output: expected memory that overlaps no slot but its own, got some of slot 1"),
      ArgumentError);
  Values others(4);
  const ConstTensorView crooked{view(others).data + 1, 2, DType::float32};
  CHECK_THROWS_WITH_AS(test::all_gather(communicator, crooked, slots, format, 1s),
                       "inputs: expected an address that is a multiple of 4, got 1 bytes past one", ArgumentError);
  CHECK_THROWS_WITH_AS(test::broadcast(communicator, {view(others).data + 1, 2, DType::float32}, 0, format, 1s),
                       "outputs: expected an address that is a multiple of 4, got 1 bytes past one", ArgumentError);
  const BlockFormat odd{ElementKind::int8, 33};
  CHECK_THROWS_WITH_AS(test::all_gather(communicator, view(two), slots, odd, 1s), doctest::Contains("got 'int8:33'"),
                       ArgumentError);
  CHECK_THROWS_WITH_AS(test::broadcast(communicator, view(two), 0, odd, 1s), doctest::Contains("got 'int8:33'"),
                       ArgumentError);
  TensorView pairs = view(four);
  pairs.dtype = DType::byte_pairs;
  const auto exact = BlockFormat::parse("exact");
  const char* const no_float = "dtype: expected float32, bfloat16 or float16, got byte_pairs";
  CHECK_THROWS_WITH_AS(test::all_reduce(communicator, pairs, HopFormats{exact, exact}, 1.0f, 1s), no_float,
                       ArgumentError);
  CHECK_THROWS_WITH_AS(test::broadcast(communicator, pairs, 0, format, 1s), no_float, ArgumentError);
  test::run_ranks(2, [&](int rank) {
    Values gathered{1, 2, 3, 4};
    const auto own = split(view(gathered), 2, 2);
    test::all_gather(*communicators[static_cast<std::size_t>(rank)], own[static_cast<std::size_t>(rank)], own,
                     BlockFormat::parse("exact"), 10s);
  });
}

TEST_CASE("an empty slot whose address lies in another one overlaps nothing") {
  auto communicators = test::make_communicators({0, 0});
  test::run_ranks(2, [&](int rank) {
    Values values(100, 1.0f);
    const TensorView slots[] = {view(values), view(values).slice(50, 0)};
    Values mine(100, 2.0f);
    const ConstTensorView shard = rank == 0 ? ConstTensorView(view(mine)) : ConstTensorView(slots[1]);
    test::all_gather(*communicators[static_cast<std::size_t>(rank)], shard, slots, BlockFormat::parse("exact"), 10s);
    CHECK(values == mine);
  });
}

TEST_CASE("promise 8: ranks that disagree on a shape, a format or a factor fail with both calls in words") {
  const auto fails_on_both = [](auto&& call) {
    auto communicators = test::make_communicators({0, 0});
    std::atomic<int> failures = 0;
    test::run_ranks(2, [&](int rank) {
      try {
        call(*communicators[static_cast<std::size_t>(rank)], rank);
      } catch (const TransportError& error) {
        if (std::string(error.what()).find("called different things") != std::string::npos) ++failures;
      }
    });
    return failures == 2;
  };
  CHECK(fails_on_both([](Communicator& communicator, int rank) {
    Values values(rank == 0 ? 64 : 128);
    test::all_reduce(communicator, view(values), HopFormats::parse("int8:32"), 1, 5s);
  }));
  CHECK(fails_on_both([](Communicator& communicator, int rank) {
    Values values(64);
    test::all_reduce(communicator, view(values), HopFormats::parse(rank == 0 ? "int8:32" : "int4:32"), 1, 5s);
  }));
  CHECK(fails_on_both([](Communicator& communicator, int rank) {
    Values values(64);
    test::all_reduce(communicator, view(values), HopFormats::parse("int8:32"), rank == 0 ? 0.1f : 0.1000001f, 5s);
  }));
}

}  // namespace zcomm
