// Tests of all_reduce against the calls that it combines in one pipeline.
#include <doctest/doctest.h>

#include <cstring>
#include <utility>

#include "calls.hpp"
#include "collective_runs.hpp"
#include "sanitizers.hpp"
#include "zcomm/call.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

struct alignas(kWireAlignment) Unit {
  std::byte bytes[kWireAlignment];
  bool operator==(const Unit& other) const { return std::memcmp(bytes, other.bytes, sizeof(bytes)) == 0; }
};

// Results of a rank after two calls: error feedback takes effect in the second.
struct Outcome {
  Values tensor;
  std::vector<Unit> residual;
  LinkBytes sent;
  bool operator==(const Outcome& other) const {
    return same_bits(tensor, other.tensor) && residual == other.residual && sent == other.sent;
  }
};

CallStats reduce_then_gather(Communicator& communicator, TensorView tensor, HopFormats formats,
                             const Feedback* feedback) {
  const AllReducePlan plan(communicator.world(), tensor.num_elements, tensor.dtype, formats);
  const auto slots = split(tensor, communicator.size(), plan.reduce().slots().lengths.front());
  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  const TensorView own = slots[static_cast<std::size_t>(communicator.rank())];
  const Segment<HopFormats> whole{slots[0].num_elements, formats};
  CallStats stats = test::reduce_scatter(communicator, inputs, own, {&whole, 1}, 0.5f, 20s, {}, feedback);
  const CallStats gathered = test::all_gather(communicator, own, slots, formats.intra_node, 20s);
  stats.intra_node_bytes += gathered.intra_node_bytes;
  stats.inter_node_bytes += gathered.inter_node_bytes;
  return stats;
}

std::vector<Outcome> outcomes(const std::vector<int>& ids, std::int64_t num_elements, HopFormats formats,
                              std::size_t chunk_bytes, bool has_feedback, bool in_turn) {
  const auto communicators = make_communicators(ids, chunk_bytes);
  const auto inputs = random_tensors(static_cast<int>(ids.size()), 2 * num_elements, 3);
  std::vector<Outcome> results(ids.size());
  run_ranks(static_cast<int>(ids.size()), [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    Communicator& communicator = *communicators[r];
    Outcome& result = results[r];
    Feedback feedback{nullptr, BlockFormat::parse("int8:64"), 0.9f, true};
    if (has_feedback) {
      const AllReducePlan plan(communicator.world(), num_elements, DType::float32, formats, feedback.format);
      result.residual.resize(plan.residual_bytes() / kWireAlignment + 1);
      feedback.residual = result.residual.data()->bytes;
    }
    const Feedback* const used = has_feedback ? &feedback : nullptr;
    for (const std::ptrdiff_t call : {0, 1}) {
      const auto begin = inputs[r].begin() + call * num_elements;
      result.tensor.assign(begin, begin + num_elements);
      const CallStats stats = in_turn
                                  ? reduce_then_gather(communicator, view(result.tensor), formats, used)
                                  : test::all_reduce(communicator, view(result.tensor), formats, 0.5f, 20s, {}, used);
      result.sent = {stats.intra_node_bytes, stats.inter_node_bytes};
      feedback.empty = false;
    }
  });
  return results;
}

}  // namespace

TEST_CASE("all_reduce: the bits and the bytes of a reduce_scatter and an all_gather, one after the other") {
  for (const char* text : {"int8:128/int4:128", "int8:256/int4:32", "int4:32/int8:32", "bf16", "exact"}) {
    for (const Shape& shape : kShapes) {
      const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
      for (const std::int64_t n : {0, 100, 9001}) {
        for (const std::size_t chunk_bytes : {std::size_t{1024}, std::size_t{2000}, kDefaultChunkBytes}) {
          for (const bool has_feedback : {false, true}) {
            if (kSanitizers && (n == 0 || chunk_bytes == 2000)) continue;
            CAPTURE(text);
            CAPTURE(Topology(ids).to_string());
            CAPTURE(n);
            CAPTURE(chunk_bytes);
            CAPTURE(has_feedback);
            const auto run = [&](bool in_turn) {
              auto results = outcomes(ids, n, HopFormats::parse(text), chunk_bytes, has_feedback, in_turn);
              // The blocks of a residual bind the chunks of the gather, too, and each chunk has padding of its own.
              for (Outcome& result : results) result.sent = has_feedback ? LinkBytes{} : result.sent;
              return results;
            };
            CHECK((run(false) == run(true)));
          }
        }
      }
    }
  }
}

// Chunks begin at multiples of both blocks, so that those of the sums are those of the gather.
TEST_CASE("all_reduce: the same bits whatever the chunks, where blocks are of sizes that do not divide each other") {
  for (const char* text : {"int8:96/int4:128", "int4:32/int8:160"}) {
    for (const Shape& shape : kShapes) {
      const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
      const auto run = [&](std::size_t chunk_bytes) {
        auto results = outcomes(ids, 9001, HopFormats::parse(text), chunk_bytes, false, false);
        for (Outcome& result : results) result.sent = {};  // a chunk more is some padding more
        return results;
      };
      const auto whole = run(kDefaultChunkBytes);
      for (const std::size_t chunk_bytes : {1, 1000, 2000}) {
        CAPTURE(text);
        CAPTURE(Topology(ids).to_string());
        CAPTURE(chunk_bytes);
        CHECK((run(chunk_bytes) == whole));
      }
    }
  }
}

TEST_CASE("a reduction by EDEN refuses odd blocks for its sums, in a hop and in a residual, when it is planned") {
  const World world{Topology(std::vector<int>{0, 0, 1, 1}), 0};
  const auto planned = [&](const char* formats, const char* residual) {
    AllReducePlan(world, 64, DType::float32, HopFormats::parse(formats), BlockFormat::parse(residual));
  };
  CHECK_NOTHROW(planned("eden2:128/int8:64", "int8:256"));
  for (const auto& [formats, residual] :
       {std::pair("eden2:128/int8:96", "bf16"), {"int8:96/eden2:128", "bf16"}, {"int8:64/eden2:128", "int8:96"}}) {
    CHECK_THROWS_WITH_AS(
        planned(formats, residual),
        "format: expected a block size that is a power of two for a sum of eden2:128 wires, got int8:96",
        ArgumentError);
  }
}

}  // namespace zcomm
