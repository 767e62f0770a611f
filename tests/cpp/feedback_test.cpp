#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "calls.hpp"
#include "ranks.hpp"
#include "sanitizers.hpp"
#include "values.hpp"
#include "zcomm/error.hpp"
#include "zcomm/operation.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

const std::vector<std::vector<int>> kNodes{{2}, {1, 1}, {2, 2}, {2, 1}, {3, 3}, {1, 1, 1}};

struct alignas(kWireAlignment) Unit {
  std::byte bytes[kWireAlignment];
};

// Repeated reduce_scatter of one rank.
class FeedbackReduction {
 public:
  FeedbackReduction(Communicator& communicator, std::vector<Segment<HopFormats>> segments, Feedback feedback)
      : communicator_(communicator), segments_(std::move(segments)), feedback_(feedback) {
    for (const auto& segment : segments_) elements_ += segment.num_elements;
  }

  Values operator()(Values input, bool with_feedback = true) {
    const auto slots = split(view(input), communicator_.size(), elements_);
    const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
    Values output(static_cast<std::size_t>(elements_));
    if (residual_.empty()) {
      const ReducePlan plan(communicator_.world(), shape_of(inputs), segments_, feedback_.format);
      residual_.resize(plan.residual_bytes() / kWireAlignment + 1);
      feedback_.residual = residual_.data()->bytes;
      feedback_.empty = true;
      std::memset(residual_.data(), 0x5a, residual_.size() * sizeof(Unit));  // an empty residual is not read
    }
    test::reduce_scatter(communicator_, inputs, view(output), segments_, 1.0f, 20s, {},
                         with_feedback ? &feedback_ : nullptr);
    feedback_.empty = false;
    if (residual_.back().bytes[0] != std::byte{0x5a}) throw Error("written past the end of the residual");
    return output;
  }

  std::size_t residual_bytes() const { return (residual_.size() - 1) * kWireAlignment; }

 private:
  Communicator& communicator_;
  std::vector<Segment<HopFormats>> segments_;
  Feedback feedback_;
  std::int64_t elements_ = 0;
  std::vector<Unit> residual_;
};

Values random_values(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Values values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Runs body(rank, reduction) on every rank.
template <class Body>
void run(const std::vector<int>& shape, const std::vector<Segment<HopFormats>>& segments, Feedback feedback,
         Body&& body, std::size_t chunk_bytes = kDefaultChunkBytes) {
  const std::vector<int> ids = test::node_ids(shape);
  const auto communicators = test::make_communicators(ids, chunk_bytes);
  test::run_ranks(static_cast<int>(ids.size()), [&](int rank) {
    FeedbackReduction reduction(*communicators[static_cast<std::size_t>(rank)], segments, feedback);
    body(rank, reduction);
  });
}

}  // namespace

TEST_CASE("error feedback: what was sent is the sum of the inputs but for half a step, after any number of calls") {
  // Values are multiples of 1/16, and each block has the largest code in every call: all scales are 1, and everything
  // but the codes is exact.
  constexpr std::size_t kElements = 96;
  constexpr int kCalls = test::kSanitizers ? 6 : 50;
  for (const std::vector<int>& shape : kNodes) {
    for (const char* residual_format : {"bf16", "int8:32"}) {
      const bool exact_residual = residual_format == std::string("bf16");
      const std::vector<int> ids = test::node_ids(shape);
      const std::size_t size = ids.size();
      const bool one_node = shape.size() == 1;
      const HopFormats formats = HopFormats::parse(one_node ? "int4:32" : "exact/int4:32");
      std::vector<Values> sent(size, Values(kElements));
      std::vector<Values> lost(size, Values(kElements));  // without feedback
      Values wanted(kElements * size);
      const auto input_of = [&](int rank) {
        Values input(kElements * size);
        for (std::size_t i = 0; i < input.size(); ++i) {
          // Gives one rank of a node the largest code, the others zeros, so that the node's sum is exact.
          const bool first = Topology(ids).local_rank(rank) == 0 || one_node || !Topology(ids).is_hierarchical();
          input[i] = i % 32 == 0 ? (first ? 7.0f : 0.0f)
                                 : static_cast<float>((i * 7 + static_cast<std::size_t>(rank)) % 15) / 16;
        }
        return input;
      };
      for (std::size_t rank = 0; rank < size; ++rank) {
        const Values input = input_of(static_cast<int>(rank));
        for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += kCalls * input[i];
      }
      run(shape, {{static_cast<std::int64_t>(kElements), formats}}, {nullptr, BlockFormat::parse(residual_format)},
          [&](int rank, FeedbackReduction& reduction) {
            const auto r = static_cast<std::size_t>(rank);
            for (int call = 0; call < kCalls; ++call) {
              const Values output = reduction(input_of(rank));
              const Values plain = reduction(input_of(rank), false);
              for (std::size_t i = 0; i < kElements; ++i) sent[r][i] += output[i];
              for (std::size_t i = 0; i < kElements; ++i) lost[r][i] += plain[i];
            }
          });
      double largest_loss = 0;
      for (std::size_t rank = 0; rank < size; ++rank) {
        const std::size_t senders = one_node ? size - 1 : Topology(ids).is_hierarchical() ? shape.size() - 1 : size - 1;
        for (std::size_t i = 0; i < kElements; ++i) {
          const double error = std::abs(sent[rank][i] - wanted[rank * kElements + i]);
          // The residual of each sender; that in int8 loses a 254th of its largest value in each call.
          REQUIRE(error <= static_cast<double>(senders) * (exact_residual ? 0.5 : 0.5 + kCalls * 0.6 / 254));
          largest_loss =
              std::max(largest_loss, std::abs(static_cast<double>(lost[rank][i] - wanted[rank * kElements + i])));
        }
      }
      CHECK(largest_loss > kCalls * 0.3);  // the same calls, each by itself
    }
  }
}

TEST_CASE("error feedback: an empty residual, or one that decays at once, changes no bit") {
  const std::vector<Segment<HopFormats>> segments{
      {1000, HopFormats::parse("int8:64/int4:32")}, {7, {}}, {300, HopFormats::parse("int4:32/bf16")}};
  for (const std::vector<int>& shape : kNodes) {
    run(shape, segments, {nullptr, BlockFormat::parse("int8:64"), 0.0f}, [&](int rank, FeedbackReduction& reduction) {
      for (unsigned call = 0; call < 3; ++call) {
        const Values input =
            random_values(1307 * test::node_ids(shape).size(), 10 * call + static_cast<unsigned>(rank));
        if (!same_bits(reduction(input), reduction(input, false))) throw Error("other bits");
      }
    });
  }
}

TEST_CASE("error feedback: the same bits whatever the chunks; exact parts have no residual") {
  const std::vector<Segment<HopFormats>> segments{{1000, HopFormats::parse("int8:64/int4:32")}, {500, {}}};
  for (const std::vector<int>& shape : kNodes) {
    const std::size_t size = test::node_ids(shape).size();
    std::vector<std::vector<Values>> results(size);
    for (const std::size_t chunk_bytes : {kDefaultChunkBytes, std::size_t{300}}) {
      run(
          shape, segments, {nullptr, BlockFormat::parse("int8:128"), 0.9f},
          [&](int rank, FeedbackReduction& reduction) {
            const auto r = static_cast<std::size_t>(rank);
            std::vector<Values> outputs;
            for (unsigned call = 0; call < 4; ++call) {
              outputs.push_back(reduction(random_values(1500 * size, 10 * call + static_cast<unsigned>(rank))));
            }
            if (results[r].empty()) {
              results[r] = outputs;
              const std::size_t one = WireLayout(BlockFormat::parse("int8:128"), DType::float32, 1000).num_bytes;
              if (reduction.residual_bytes() % one != 0) throw Error("a residual of exact parts");
            }
            for (std::size_t call = 0; call < outputs.size(); ++call) {
              if (!same_bits(outputs[call], results[r][call])) throw Error("other bits");
            }
          },
          chunk_bytes);
    }
  }
}

TEST_CASE("error feedback: a block that was not finite starts over") {
  for (const std::vector<int>& shape : kNodes) {
    run(shape, {{128, HopFormats::parse("int8:32/int4:32")}}, {nullptr, BlockFormat::parse("int8:32")},
        [&](int rank, FeedbackReduction& reduction) {
          const std::size_t size = test::node_ids(shape).size();
          Values input = random_values(128 * size, static_cast<unsigned>(rank));
          Values overflow = input;
          for (std::size_t i = 0; i < overflow.size(); i += 64) overflow[i] = std::numeric_limits<float>::infinity();
          reduction(overflow);
          for (const float value : reduction(input)) {
            if (!std::isfinite(value)) throw Error("not finite");
          }
        });
  }
}

TEST_CASE("error feedback: wrong arguments") {
  const auto communicators = test::make_communicators({0});
  Values values(64);
  const TensorView slot = view(values);
  const ConstTensorView input = slot;
  const Segment<HopFormats> segment{64, HopFormats::parse("int8:32")};
  const auto reduce = [&](Feedback feedback) {
    test::reduce_scatter(*communicators[0], {&input, 1}, slot, {&segment, 1}, 1.0f, 1s, {}, &feedback);
  };
  CHECK_THROWS_WITH_AS(reduce({nullptr, {}}),
                       doctest::Contains("feedback.format: expected a lossy format that rounds to nearest, got exact"),
                       ArgumentError);
  CHECK_THROWS_WITH_AS(
      reduce({nullptr, BlockFormat::parse("int8:32:stochastic")}),
      doctest::Contains("feedback.format: expected a lossy format that rounds to nearest, got int8:32:stochastic"),
      ArgumentError);
  CHECK_THROWS_WITH_AS(reduce({nullptr, BlockFormat::parse("int8:32"), 1.5f}),
                       doctest::Contains("feedback.decay: expected 0 to 1, got 1.5"), ArgumentError);
  CHECK_THROWS_WITH_AS(reduce({nullptr, {ElementKind::int8, 33}}), doctest::Contains("got 'int8:33'"), ArgumentError);
  Unit residual[8];
  CHECK_THROWS_WITH_AS(reduce({residual->bytes + 8, BlockFormat::parse("int8:32")}),
                       "feedback.residual: expected an address that is a multiple of 16, got 8 bytes past one",
                       ArgumentError);
}

}  // namespace zcomm
