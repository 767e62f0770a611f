#include "zcomm/plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>

#include "calls.hpp"
#include "ranks.hpp"
#include "values.hpp"
#include "zcomm/error.hpp"
#include "zcomm/trace.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

// Values that a rank's codec writes into wires and reads from them. Own contributions, which a sum takes without a
// wire, do not count.
struct CodecPasses {
  std::int64_t encoded = 0;
  std::int64_t decoded = 0;
};

CodecPasses operator+(CodecPasses a, CodecPasses b) { return {a.encoded + b.encoded, a.decoded + b.decoded}; }

// Returns the passes of a gather: a rank encodes its own slot and decodes all slots.
CodecPasses passes_of(const GatherPlan& plan) {
  const std::vector<std::int64_t>& lengths = plan.slots().lengths;
  return {lengths[static_cast<std::size_t>(plan.rank())],
          std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0})};
}

// Returns the passes of a reduction: a rank encodes what it sends and decodes what it receives.
CodecPasses passes_of(const ReducePlan& plan) {
  CodecPasses passes;
  const auto length_of = [&](const Move& move) { return plan.slots().lengths[static_cast<std::size_t>(move.slot)]; };
  for (const Hop& hop : plan.topology().reduce_hops(plan.rank())) {
    for (const Move& move : hop.sends) passes.encoded += length_of(move);
    for (const Move& move : hop.recvs) passes.decoded += length_of(move);
  }
  return passes;
}

// Counts the values of wires that are lossy.
class CountingCodec final : public Codec {
 public:
  explicit CountingCodec(CodecPasses& passes) : codec_(make_cpu_codec()), passes_(passes) {}

  void encode(std::span<const Encode> jobs, StreamView stream) const override {
    for (const Encode& job : jobs) passes_.encoded += job.values.num_elements;
    codec_->encode(jobs, stream);
  }
  void decode(std::span<const Decode> jobs, StreamView stream) const override {
    for (const Decode& job : jobs) passes_.decoded += job.values.num_elements;
    codec_->decode(jobs, stream);
  }
  void decode_sum(std::span<const DecodeSum> jobs, StreamView stream) const override {
    for (const DecodeSum& job : jobs) count(job.wires, job.values.num_elements);
    codec_->decode_sum(jobs, stream);
  }
  void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView stream) const override {
    for (const DecodeSumEncode& job : jobs) {
      passes_.encoded += job.num_elements;
      count(job.wires, job.num_elements);
    }
    codec_->decode_sum_encode(jobs, stream);
  }

 private:
  void count(std::span<const Wire> wires, std::int64_t num_elements) const {
    for (const Wire& wire : wires) {
      if (wire.format.kind != ElementKind::exact) passes_.decoded += num_elements;
    }
  }

  std::unique_ptr<Codec> codec_;
  CodecPasses& passes_;
};

struct CountedWorld {
  CountedWorld(const std::vector<int>& node_ids, std::size_t chunk_bytes) : passes(node_ids.size()) {
    std::size_t rank = 0;
    for (auto& transport : make_local_transports(static_cast<int>(node_ids.size()))) {
      communicators.push_back(std::make_unique<Communicator>(std::move(transport), Topology(node_ids),
                                                             std::make_unique<CountingCodec>(passes[rank++]),
                                                             make_host_workspace(), chunk_bytes));
    }
  }
  std::vector<CodecPasses> passes;  // of each rank
  std::vector<std::unique_ptr<Communicator>> communicators;
};

void expect(const char* what, const CallStats& stats, LinkBytes planned) {
  if (stats.intra_node_bytes == planned.intra_node && stats.inter_node_bytes == planned.inter_node) return;
  throw Error(std::string(what) + ": sent " + std::to_string(stats.intra_node_bytes) + " and " +
              std::to_string(stats.inter_node_bytes) + " bytes, planned " + std::to_string(planned.intra_node) +
              " and " + std::to_string(planned.inter_node));
}

template <class Plan>
void expect_plan(const char* what, const CallStats& stats, const Plan& plan) {
  expect(what, stats, plan.bytes());
  std::size_t hop = 0;
  for (const LinkBytes planned : plan.bytes_by_hop()) {
    if (stats.bytes_by_hop[hop++] == planned) continue;
    throw Error(std::string(what) + ": other bytes than planned in hop " + std::to_string(hop));
  }
}

void expect(const char* what, CodecPasses passes, CodecPasses planned) {
  if (passes.encoded == planned.encoded && passes.decoded == planned.decoded) return;
  throw Error(std::string(what) + ": encoded " + std::to_string(passes.encoded) + " and decoded " +
              std::to_string(passes.decoded) + " values, planned " + std::to_string(planned.encoded) + " and " +
              std::to_string(planned.decoded));
}

// Returns slots of n elements of a tensor that is shorter than all slots together.
std::vector<TensorView> slots_of(Values& values, int size, std::int64_t n, std::int64_t missing) {
  TensorView tensor = view(values);
  tensor.num_elements = std::max<std::int64_t>(size * n - missing, n);
  return split(tensor, size, n);
}

template <class Format>
std::vector<Segment<Format>> segments_of(std::int64_t n, const char* format, bool mixed) {
  if (!mixed) return {{n, Format::parse(format)}};
  return {{n / 3, Format::parse(format)}, {n / 5, {}}, {n - n / 3 - n / 5, Format::parse(format)}};
}

const std::vector<Shape> kWorlds{{{1}}, {{4}}, {{1, 1, 1}}, {{2, 2}}, {{3, 1}}, {{1, 2, 2}, true}, {{3, 3}, true}};

TEST_CASE("plans: the bytes and codec passes of a call are those that were planned") {
  for (const Shape& shape : kWorlds) {
    const std::vector<int> ids = node_ids(shape.nodes, shape.interleaved);
    const int size = static_cast<int>(ids.size());
    for (const std::int64_t n : {1, 100, 1031}) {
      for (const std::int64_t missing : {std::int64_t{0}, n + 7}) {
        for (const bool mixed : {false, true}) {
          CountedWorld world(ids, 1024);
          run_ranks(size, [&](int rank) {
            Communicator& communicator = *world.communicators[static_cast<std::size_t>(rank)];
            CodecPasses& passes = world.passes[static_cast<std::size_t>(rank)];
            Values values = random_tensors(1, size * n, static_cast<unsigned>(rank))[0];
            const auto slots = slots_of(values, size, n, missing);
            const TensorView own = slots[static_cast<std::size_t>(rank)];

            const auto reduced = segments_of<HopFormats>(n, "int8:64/int4:32", mixed);
            const ReducePlan reduce(communicator.world(), shape_of(slots), reduced);
            Values sum(static_cast<std::size_t>(own.num_elements));
            const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
            expect_plan("reduce_scatter", test::reduce(communicator, reduce, inputs, view(sum), 1.0f, 20s), reduce);
            if (!mixed) expect("reduce_scatter", passes, passes_of(reduce));
            Values alone(sum.size());
            test::reduce_scatter(communicator, inputs, view(alone), reduced, 1.0f, 20s);
            if (!same_bits(sum, alone)) throw Error("reduce_scatter: other bits with a plan");

            passes = {};
            const GatherPlan gather(communicator.world(), shape_of(slots),
                                    segments_of<BlockFormat>(n, "int8:64", mixed));
            std::vector<std::max_align_t> kept(gather.secondary_bytes() / sizeof(std::max_align_t) + 1);
            const auto secondary = std::make_shared<SecondaryShard>();
            secondary->memory = {reinterpret_cast<std::byte*>(kept.data()), gather.secondary_bytes()};
            expect_plan("all_gather", test::gather(communicator, gather, own, slots, 20s), gather);
            if (!mixed) expect("all_gather", passes, passes_of(gather));
            expect_plan("all_gather", test::gather(communicator, gather, own, slots, 20s, {}, secondary), gather);
            passes = {};
            expect("gather_secondary", test::gather_again(communicator, gather, slots, secondary, 20s),
                   gather.bytes_from_secondary());
            if (!mixed) expect("gather_secondary", passes, CodecPasses{0, passes_of(gather).decoded});
            if (gather.bytes_from_secondary().inter_node != 0) throw Error("gather_secondary: bytes between nodes");
          });
        }
      }
    }
  }
}

struct Message {
  int slot;  // the first one
  std::size_t num_bytes;
  friend bool operator==(const Message&, const Message&) = default;
};

// Returns the messages of the first chunk to or from a peer; of all peers without one.
std::vector<Message> messages(const GatherPlan& plan, const std::vector<Move>& moves, std::optional<int> with = {}) {
  std::vector<Message> found;
  plan.for_each_message(moves, 0, [&](int peer, int slot, std::size_t num_bytes) {
    if (peer == with.value_or(peer)) found.push_back({slot, num_bytes});
  });
  return found;
}

TEST_CASE("plans: a gather of equal slots sends one message to each peer in a hop") {
  for (const Shape& shape : {Shape{{2, 2}}, Shape{{2, 2}, true}, Shape{std::vector<int>(2, 8)},
                             Shape{std::vector<int>(8, 8)}, Shape{std::vector<int>(8, 8), true}}) {
    const Topology topology(node_ids(shape.nodes, shape.interleaved));
    const SlotShape slots{std::vector<std::int64_t>(static_cast<std::size_t>(topology.size()), 1000)};
    const std::size_t num_nodes = shape.nodes.size();
    const auto node_size = static_cast<std::size_t>(shape.nodes.front());
    for (int rank = 0; rank < topology.size(); ++rank) {
      const GatherPlan plan({topology, rank}, slots, segments_of<BlockFormat>(1000, "int8:64", true));
      for (const auto& moves : {&Hop::sends, &Hop::recvs}) {
        CHECK(messages(plan, plan.hops()[0].*moves).size() == num_nodes - 1 + node_size - 1);
        CHECK(messages(plan, plan.hops()[1].*moves).size() == node_size - 1);
        CHECK(messages(plan, plan.secondary_hop().*moves).size() == node_size - 1);
      }
    }
  }
}

TEST_CASE("plans: a gather's messages are the same for both sides, and contain no gaps") {
  for (const Shape& shape : kWorlds) {
    const Topology topology(node_ids(shape.nodes, shape.interleaved));
    for (const std::int64_t missing : {0, 1, 150, 1700}) {
      SlotShape slots;
      for (int slot = 0; slot < topology.size(); ++slot) {
        const std::int64_t left = topology.size() * 1000 - missing - slot * 1000;
        slots.lengths.push_back(slot == 0 ? 1000 : std::clamp<std::int64_t>(left, 0, 1000));
      }
      std::vector<GatherPlan> plans;
      for (int rank = 0; rank < topology.size(); ++rank) {
        plans.emplace_back(World{topology, rank}, slots, segments_of<BlockFormat>(1000, "int8:64", true));
      }
      const auto hops = [](const GatherPlan& plan) {
        return std::vector{plan.hops()[0], plan.hops()[1], plan.secondary_hop()};
      };
      for (const GatherPlan& plan : plans) {
        for (std::size_t hop = 0; hop < 3; ++hop) {
          const Hop own = hops(plan)[hop];
          for (const int peer : topology.others(plan.rank())) {
            const GatherPlan& its = plans[static_cast<std::size_t>(peer)];
            CHECK(messages(plan, own.sends, peer) == messages(its, hops(its)[hop].recvs, plan.rank()));
          }
          std::size_t sent = 0, wires = 0;
          for (const Message& message : messages(plan, own.sends)) sent += message.num_bytes;
          for (const Move& move : own.sends) wires += plan.num_bytes(move.slot, 0);
          CHECK(sent == wires);
        }
      }
    }
  }
}

TEST_CASE("plans: by default a call on GPUs has one chunk of 128 MiB, or two chunks for each hop") {
  const auto plan = [](const std::vector<int>& nodes, std::int64_t slot_bytes, bool in_one_chunk = false) {
    const std::vector<int> ids = test::node_ids(nodes);
    const SlotShape slots{std::vector<std::int64_t>(ids.size(), slot_bytes / 4)};
    const World world{Topology(ids), 0, kDefaultGpuChunkBytes};
    return GatherPlan(world, slots, segments_of<BlockFormat>(slot_bytes / 4, "int8:128", false), false, 1,
                      in_one_chunk);
  };
  constexpr std::int64_t kKiB = 1 << 10;
  constexpr std::int64_t kMiB = 1 << 20;
  CHECK(plan({8}, 16 * kMiB).num_chunks() == 1);
  CHECK(plan({8}, 64 * kMiB).num_chunks() == 2);
  CHECK(plan({8}, 256 * kMiB).num_chunks() == 2);
  CHECK(plan({4, 4}, 64 * kMiB).num_chunks() == 4);
  CHECK(plan({4, 4}, 256 * kMiB).num_chunks() == 4);
  CHECK(plan({4, 4}, 64 * kMiB, true).num_chunks() == 1);
  CHECK(plan({4, 4}, 64 * kMiB + 4, true).num_chunks() == 1);
  // 2^30 elements bound the chunks of a longer call, and 512 KiB of each slot are never too many.
  CHECK(plan({4, 4}, 1024 * kMiB).num_chunks() == 8);
  CHECK(plan(std::vector<int>(128, 8), 8192 * kKiB).num_chunks() == 8);
  CHECK(plan(std::vector<int>(128, 8), 1024 * kKiB).num_chunks() == 4);
  for (std::int64_t odd = 1; odd < 100; odd += 7) CHECK(plan({4, 4}, 64 * kMiB + 4 * odd).num_chunks() == 4);
}

// A layer of a model of 70 billion parameters: 855.6 million bfloat16 values.
TEST_CASE("plans: a layer of a 70B model has few chunks, and at most 1.7 GB of scratch") {
  const Segment<HopFormats> reduced{0, HopFormats::parse("int8:128/int4:128")};
  for (const std::vector<int>& nodes : {std::vector{4}, {8}, {2, 2}, {8, 8}, std::vector(8, 8), std::vector(64, 8)}) {
    CAPTURE(Topology(test::node_ids(nodes)).to_string());
    const std::vector<int> ids = test::node_ids(nodes);
    const auto size = static_cast<std::int64_t>(ids.size());
    Segment<HopFormats> segment = reduced;
    segment.num_elements = (855'638'016 + size - 1) / size;
    for (const DType dtype : {DType::bfloat16, DType::float32}) {
      const SlotShape slots{std::vector<std::int64_t>(ids.size(), segment.num_elements), dtype};
      const ReducePlan plan({Topology(ids), 0, kDefaultGpuChunkBytes}, slots, {&segment, 1});
      CHECK(plan.num_chunks() == (nodes.size() == 1 ? 2 : 4));
      CHECK(scratch_of(plan, true) <= 1'700'000'000);
    }
  }
}

TEST_CASE("plans: an all_reduce costs what its two halves cost") {
  for (const Shape& shape : kWorlds) {
    const std::vector<int> ids = node_ids(shape.nodes, shape.interleaved);
    const int size = static_cast<int>(ids.size());
    for (const std::int64_t n : {1, 97, 5000}) {
      CountedWorld world(ids, 4096);
      run_ranks(size, [&](int rank) {
        Communicator& communicator = *world.communicators[static_cast<std::size_t>(rank)];
        Values values = random_tensors(1, n, static_cast<unsigned>(rank))[0];
        const AllReducePlan plan(communicator.world(), n, DType::float32, HopFormats::parse("int8:32/int4:64"));
        expect_plan("all_reduce", test::reduce_all(communicator, plan, view(values), 1.0f, 20s), plan);
        expect("all_reduce", world.passes[static_cast<std::size_t>(rank)],
               passes_of(plan.reduce()) + passes_of(plan.gather()));
      });
    }
  }
}

TEST_CASE("plans: the largest secondary shard is that of some rank, and none is larger") {
  for (const Shape& shape : kWorlds) {
    const Topology topology(node_ids(shape.nodes, shape.interleaved));
    const SlotShape slots{std::vector<std::int64_t>(static_cast<std::size_t>(topology.size()), 1000)};
    const SlotShape halves{slots.lengths, DType::float16};
    std::size_t largest = 0, largest_kept = 0, kept_in_first_node = 0;
    for (int rank = 0; rank < topology.size(); ++rank) {
      const GatherPlan plan({topology, rank}, slots, segments_of<BlockFormat>(1000, "int4:32", true));
      largest = std::max(largest, plan.secondary_bytes());
      const std::size_t kept = LosslessPlan({topology, rank}, halves).secondary_bytes();
      largest_kept = std::max(largest_kept, kept);
      if (topology.node(rank) == 0) kept_in_first_node += kept;
    }
    CHECK(LosslessPlan({topology, 0}, halves).largest_secondary_bytes() == largest_kept);
    CHECK(kept_in_first_node == 2000 * slots.lengths.size());
    const GatherPlan plan({topology, 0}, slots, segments_of<BlockFormat>(1000, "int4:32", true));
    CHECK(plan.largest_secondary_bytes() == largest);
  }
}

TEST_CASE(
    "plans: a residual is needed where something lossy leaves the node, or leaves the rank if there is one node") {
  const SlotShape slots{{64, 64, 64, 64}};
  const auto bytes = [&](const std::vector<int>& ids, const char* formats) {
    const Segment<HopFormats> segment{64, HopFormats::parse(formats)};
    const ReducePlan plan({Topology(ids), 0}, slots, {&segment, 1}, BlockFormat::parse("int8:32"));
    return plan.residual_bytes();
  };
  const std::size_t wire = WireLayout(BlockFormat::parse("int8:32"), DType::float32, 64).num_bytes;
  CHECK(bytes({0, 0, 0, 0}, "int8:32") == 3 * wire);
  CHECK(bytes({0, 0, 1, 1}, "int8:32") == wire);
  CHECK(bytes({0, 0, 0, 1}, "int8:32") == wire);
  CHECK(bytes({0, 1, 2, 3}, "int8:32") == 3 * wire);
  CHECK(bytes({0, 0, 1, 1}, "int8:32/exact") == 0);
  CHECK(bytes({0, 0, 1, 1}, "exact/int8:32") == wire);
}

TEST_CASE("plans: what they are not for is refused before a byte moves") {
  const auto communicators = make_communicators({0});
  Communicator& communicator = *communicators[0];
  Values values(64);
  const TensorView slot = view(values);
  const ConstTensorView input = slot;
  const Segment<BlockFormat> gathered{64, BlockFormat::parse("int8:32")};
  const Segment<HopFormats> reduced{64, HopFormats::parse("int8:32")};
  const auto gather = [&](const GatherPlan& plan) { test::gather(communicator, plan, input, {&slot, 1}, 1s); };
  const SlotShape slots{{64}};
  gather({communicator.world(), slots, {&gathered, 1}});
  CHECK_THROWS_WITH_AS(gather({{Topology(std::vector<int>{0, 0}), 1}, {{64, 64}}, {&gathered, 1}}),
                       "plan: expected one of rank 0 in 1x1, got rank 1 in 1x2", ArgumentError);
  CHECK_THROWS_WITH_AS(gather({{communicator.topology(), 0, 64}, slots, {&gathered, 1}}),
                       "plan: expected one with a chunk_bytes of 1048576, got 64", ArgumentError);
  CHECK_THROWS_WITH_AS(gather({communicator.world(), {{64}, DType::float16}, {&gathered, 1}}),
                       "plan: expected one of slots float32[1 x 64], got float16[1 x 64]", ArgumentError);
  CHECK_THROWS_WITH_AS(GatherPlan(communicator.world(), {{63}}, {&gathered, 1}),
                       "segments: expected the 63 elements of the longest slot, got 64", ArgumentError);
  CHECK_THROWS_WITH_AS(GatherPlan(communicator.world(), {{64, 64}}, {&gathered, 1}),
                       "slots: expected one for each of 1 ranks, got 2", ArgumentError);
  CHECK_THROWS_WITH_AS(GatherPlan({communicator.topology(), 1, 64}, slots, {&gathered, 1}),
                       "rank: expected 0 to 0, got 1", ArgumentError);
  const ReducePlan with_residual(communicator.world(), slots, {&reduced, 1}, BlockFormat::parse("int8:128"));
  CHECK_THROWS_WITH_AS(test::reduce(communicator, with_residual, {&input, 1}, slot, 1.0f, 1s),
                       "feedback: expected a residual in the plan's format, int8:128, got none", ArgumentError);
  const AllReducePlan shorter(communicator.world(), 63, DType::float32, HopFormats::parse("int8:32"));
  CHECK_THROWS_WITH_AS(test::reduce_all(communicator, shorter, slot, 1.0f, 1s),
                       "plan: expected one of the tensor's 64 elements, got 63", ArgumentError);
}

TEST_CASE("plans: the words that ranks compare tell shapes and segments apart") {
  const Topology topology(std::vector<int>{0, 0});
  const auto words = [&](const SlotShape& slots, const std::vector<Segment<BlockFormat>>& segments) {
    return GatherPlan({topology, 0, 64}, slots, segments).description();
  };
  const BlockFormat int8 = BlockFormat::parse("int8:32");
  CHECK(words({{12, 12}}, {{12, int8}}) == "float32[2 x 12] int8:32");
  CHECK(words({{12, 7}, DType::bfloat16}, {{12, int8}}) == "bfloat16[12,7] int8:32");
  const std::string two = words({{12, 12}}, {{6, int8}, {6, {}}});
  CHECK(two.starts_with("float32[2 x 12] 2 segments of int8:32 and exact #"));
  CHECK(two != words({{12, 12}}, {{5, int8}, {7, {}}}));
}

TEST_CASE("plans: lengths below 0, and differences of encoded values, are refused") {
  const World world{Topology(std::vector<int>{0, 0}), 0};
  CHECK_THROWS_WITH_AS(AllReducePlan(world, -64, DType::float32, HopFormats::parse("int8:64")),
                       doctest::Contains("num_elements: expected at least 0, got -64"), ArgumentError);
  const Segment<BlockFormat> lossy{8, BlockFormat::parse("int8:32")};
  CHECK_THROWS_WITH_AS(LosslessPlan(world, {{8, 8}, DType::bfloat16}, GatherSegments(&lossy, 1)),
                       doctest::Contains("segments: expected exact ones, got int8:32"), ArgumentError);
}

}  // namespace
}  // namespace zcomm
