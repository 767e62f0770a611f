// Tests of the schedule of collectives on hosts, by a clock that the codec and the link advance. Nothing is measured.
#include <doctest/doctest.h>

#include "calls.hpp"

namespace zcomm {
namespace {

// Shared by the parts of one simulated rank, which stands for all. Seconds since the call began.
struct Clock {
  double host = 0;
  double link = 0;          // end of what was sent to other nodes
  double link_seconds = 0;  // that it took
  double seconds_per_byte = 0;
};

class TimedCodec final : public Codec {
 public:
  explicit TimedCodec(Clock& clock) : clock_(clock) {}
  void encode(std::span<const Encode> jobs, StreamView) const override {
    for (const Encode& job : jobs) pass(2 * job.values.num_elements);
  }
  void decode(std::span<const Decode> jobs, StreamView) const override {
    for (const Decode& job : jobs) pass(job.values.num_elements);
  }
  void decode_sum(std::span<const DecodeSum> jobs, StreamView) const override {
    for (const DecodeSum& job : jobs) pass(job.values.num_elements * std::ssize(job.wires));
  }
  void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView) const override {
    for (const DecodeSumEncode& job : jobs) pass(job.num_elements * (2 + std::ssize(job.wires)));
  }

 private:
  void pass(std::int64_t num_elements) const { clock_.host += 1e-9 * static_cast<double>(num_elements); }
  Clock& clock_;
};

// One message after another on the link between nodes; inside a node they take no time.
class TimedTransport final : public Transport {
 public:
  TimedTransport(const Topology& topology, Clock& clock) : topology_(topology), clock_(clock) {}
  int rank() const override { return 0; }
  int size() const override { return topology_.size(); }
  void begin(const std::string&, std::span<const int>, std::chrono::milliseconds) override {}
  void abort(const std::string&) noexcept override {}
  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv>, StreamView) override {
    for (const Send& send : sends) {
      if (topology_.link(0, send.peer) == Link::intra_node) continue;
      const double seconds = clock_.seconds_per_byte * static_cast<double>(send.num_bytes);
      clock_.link = std::max(clock_.link, clock_.host) + seconds;
      clock_.link_seconds += seconds;
    }
    return std::make_unique<TimedTransfer>(clock_);
  }

 private:
  class TimedTransfer final : public Transfer {
   public:
    explicit TimedTransfer(Clock& clock) : clock_(clock), end_(clock.link) {}
    void wait(StreamView) override { clock_.host = std::max(clock_.host, end_); }

   private:
    Clock& clock_;
    const double end_;
  };

  const Topology topology_;
  Clock& clock_;
};

// Returns the clock after a call on 64 MiB of float32, of which no byte is touched.
Clock simulate(bool is_gather, const std::vector<int>& node_ids, double seconds_per_byte) {
  Clock clock;
  clock.seconds_per_byte = seconds_per_byte;
  const Topology topology(node_ids);
  Communicator communicator(std::make_unique<TimedTransport>(topology, clock), topology,
                            std::make_unique<TimedCodec>(clock), make_host_workspace(), kDefaultChunkBytes);
  const std::int64_t elements = std::int64_t{16} << 20;
  const TensorView tensor{reinterpret_cast<std::byte*>(std::uintptr_t{1} << 44), elements, DType::float32};
  const auto slots = split(tensor, topology.size(), elements / topology.size());
  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  constexpr std::chrono::seconds kTimeout(1);
  if (is_gather) {
    test::all_gather(communicator, slots[0], slots, BlockFormat::parse("int8:256"), kTimeout);
  } else {
    test::reduce_scatter(communicator, inputs, slots[0], HopFormats::parse("int8:128/int4:128"), 1, kTimeout);
  }
  return clock;
}

}  // namespace

TEST_CASE("pipeline: on hosts codec and link overlap where they take equally long") {
  for (const std::vector<int>& node_ids : {std::vector{0, 1}, std::vector{0, 1, 2, 3}, std::vector{0, 0, 1, 1}}) {
    for (const bool is_gather : {false, true}) {
      CAPTURE(node_ids.size());
      CAPTURE(is_gather);
      const double codec_seconds = simulate(is_gather, node_ids, 0).host;
      const double bytes = simulate(is_gather, node_ids, 1).link_seconds;
      const Clock clock = simulate(is_gather, node_ids, codec_seconds / bytes);
      CHECK(clock.link_seconds == doctest::Approx(codec_seconds));
      CHECK(clock.link_seconds / clock.host >= 0.85);
    }
  }
}

}  // namespace zcomm
