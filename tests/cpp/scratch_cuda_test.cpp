// Calls that find no scratch on a GPU, over tests/cuda_host: they have sent nothing, and the group stays whole.
#include <doctest/doctest.h>

#include <new>

#include "calls.hpp"
#include "device_modules.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;
using Floats = std::vector<float>;

class ScarceWorkspace final : public Workspace {
 public:
  std::byte* acquire(std::size_t num_bytes, StreamView stream) override {
    if (num_left == 0) throw std::bad_alloc();
    if (num_left > 0) --num_left;
    return memory_->acquire(num_bytes, stream);
  }
  void release(std::byte* data, StreamView stream) noexcept override { memory_->release(data, stream); }

  int num_left = -1;  // pieces; negative: without end

 private:
  const std::unique_ptr<Workspace> memory_ = make_cuda_workspace();
};

// One rank of 2 x 2, of which rank 1 finds no scratch.
struct Rank {
  explicit Rank(NcclOptions options) : scarce(owned.get()), codec(make_cuda_codec(*owned)) {
    communicator = std::make_unique<Communicator>(make_nccl_transport(options), Topology(kTwoNodes), std::move(codec),
                                                  std::move(owned), 4096);
  }

  // Makes a call several times. On rank 1 each lacks another of its pieces, and is made again.
  template <class Call>
  void call_without_scratch(Call&& call) {
    int num_failed = 0;
    for (int piece = 0; piece < 8; ++piece) {
      if (communicator->rank() == 1) {
        scarce->num_left = piece;
        try {
          call();
          scarce->num_left = -1;
          continue;
        } catch (const std::bad_alloc&) {
          ++num_failed;
        }
        scarce->num_left = -1;
      }
      call();
    }
    if (communicator->rank() == 1 && num_failed == 0) throw Error("no call lacked scratch");
  }

  std::unique_ptr<ScarceWorkspace> owned = std::make_unique<ScarceWorkspace>();
  ScarceWorkspace* scarce;
  std::unique_ptr<Codec> codec;
  std::unique_ptr<Communicator> communicator;
  Stream stream;
};

// Calls body(rank) on four ranks with a GPU each. Their processes do not end by failures.
template <class Body>
void run_scarce(Body&& body) {
  run_nccl_ranks(4, [&](int, const NcclOptions& options) {
    Rank rank(options);
    body(rank);
  });
}

Floats values_of(int rank, std::size_t count) {
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>((i * 37 + 11 * static_cast<std::size_t>(rank)) % 201);
  return values;
}

constexpr std::int64_t kShard = 5000;

}  // namespace

TEST_CASE("cuda collectives: a call that finds no scratch throws that, sends nothing, and can be made again") {
  const NoTraces no_traces;
  run_scarce([](Rank& self) {
    Communicator& communicator = *self.communicator;
    const HopFormats formats = HopFormats::parse("int8:128/int4:128");
    DeviceArray<float> whole(4 * kShard);
    DeviceArray<float> shard(kShard);
    const TensorView all{whole.bytes(), 4 * kShard, DType::float32};
    const TensorView own{shard.bytes(), kShard, DType::float32};
    const auto slots = split(all, 4, kShard);
    const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
    const auto check_alike = [&](const DeviceArray<float>& result, auto&& call) {
      const auto from_scratch = [&] {
        whole.set(values_of(communicator.rank(), 4 * kShard), self.stream);
        call();
      };
      from_scratch();
      const Floats expected = result.get(self.stream);
      self.call_without_scratch(from_scratch);
      if (result.get(self.stream) != expected) throw Error("another result after calls without scratch");
    };
    check_alike(whole, [&] {
      test::all_gather(communicator, slots[static_cast<std::size_t>(communicator.rank())], slots, formats.intra_node,
                       60s, self.stream.view());
    });
    check_alike(shard,
                [&] { test::reduce_scatter(communicator, inputs, own, formats, 0.25f, 60s, self.stream.view()); });
    check_alike(whole, [&] { test::all_reduce(communicator, all, formats, 0.5f, 60s, self.stream.view()); });
    check_alike(whole, [&] { test::broadcast(communicator, all, 2, formats.intra_node, 60s, self.stream.view()); });
  });
}

TEST_CASE("cuda collectives: a gather that finds no scratch leaves what a secondary shard keeps") {
  const NoTraces no_traces;
  run_scarce([](Rank& self) {
    DeviceArray<float> whole(4 * kShard);
    const auto slots = split(TensorView{whole.bytes(), 4 * kShard, DType::float32}, 4, kShard);
    const ConstTensorView own = slots[static_cast<std::size_t>(self.communicator->rank())];
    const Segment<BlockFormat> segment{kShard, BlockFormat::parse("int8:64")};
    const auto plan =
        std::make_shared<const GatherPlan>(self.communicator->world(), shape_of(slots), GatherSegments(&segment, 1));
    DeviceArray<std::byte> memory(plan->secondary_bytes());
    const auto kept = std::make_shared<SecondaryShard>();
    kept->memory = {memory.bytes(), plan->secondary_bytes()};
    const GatherPtr gather = make_all_gather(plan, kept);
    const auto run = [&](bool again) {
      const std::span<const ConstTensorView> inputs{&own, again ? 0U : 1U};
      self.communicator->run(*gather, {inputs, slots}, 60s, self.stream.view());
    };
    whole.set(values_of(self.communicator->rank(), 4 * kShard), self.stream);
    run(false);
    const Floats expected = whole.get(self.stream);
    if (self.communicator->rank() == 1) {
      const std::uint64_t generation = kept->generation;
      self.scarce->num_left = 0;
      CHECK_THROWS_AS(run(false), std::bad_alloc);
      self.scarce->num_left = -1;
      CHECK(kept->generation == generation);
    }
    self.call_without_scratch([&] {
      whole.set(Floats(4 * kShard), self.stream);
      run(true);
    });
    CHECK(whole.get(self.stream) == expected);
  });
}

TEST_CASE("device gathers: one that finds no scratch keeps what was prepared for it, and its generation") {
  const NoTraces no_traces;
  run_scarce([](Rank& self) {
    Module module(*self.communicator, even(kTwoNodes, 5000));
    for (int step = 0; step < 3; ++step) {
      module.set(step, self.stream);
      prepare(*self.communicator, {&module}, self.stream.view());
      if (self.communicator->rank() == 1) {
        const std::uint64_t generation = module.kept->generation;
        for (int piece = 0; piece < 2; ++piece) {
          self.scarce->num_left = 0;
          CHECK_THROWS_AS(module.gather(self.stream.view()), std::bad_alloc);
          self.scarce->num_left = -1;
          CHECK(module.kept->generation == generation);
        }
      }
      module.gather(self.stream.view());
      CHECK(module.output->get(self.stream) == module.expected(step));
    }
  });
}

}  // namespace zcomm
