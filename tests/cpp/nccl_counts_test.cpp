// Cost of calls over NCCL and CUDA, counted: NCCL's groups and threads, kernels, events, waits.
#include <atomic>
#include <ostream>

#include "nccl_tensors.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::kChunkBytes;
using test::make_cuda_communicator;
using test::NoTraces;
using test::run_nccl_ranks;
using test::Stream;
using test::Tensors;

// Work of all ranks of this process so far.
struct Work {
  std::int64_t groups = 0;     // of NCCL, which starts a thread for each
  std::int64_t transfers = 0;  // kernels of NCCL: a group has one between nodes, and one inside
  std::int64_t kernels = 0;    // of the codec
  std::int64_t records = 0;    // of events
  std::int64_t waits = 0;      // of streams for events
  std::int64_t host_waits = 0;

  static Work so_far() {
    const cuda_host::Calls calls = cuda_host::calls();
    return {nccl_host_num_threads(), nccl_host_num_launches(), calls.launches, calls.records, calls.waits,
            calls.host_waits};
  }
  Work since(const Work& before) const {
    return {groups - before.groups,   transfers - before.transfers, kernels - before.kernels,
            records - before.records, waits - before.waits,         host_waits - before.host_waits};
  }
  Work operator+(const Work& other) const {
    return {groups + other.groups,   transfers + other.transfers, kernels + other.kernels,
            records + other.records, waits + other.waits,         host_waits + other.host_waits};
  }
  Work times(std::int64_t n) const {
    return {n * groups, n * transfers, n * kernels, n * records, n * waits, n * host_waits};
  }
  bool operator==(const Work&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Work& work) {
  return out << work.groups << " groups, " << work.transfers << " transfers, " << work.kernels << " kernels, "
             << work.records << " records, " << work.waits << " waits, " << work.host_waits << " host waits";
}

enum class Call { gather, scatter, all_reduce };

// Returns the number of groups after the one with the last chunk's first hop. A reduction of several chunks has one
// more: it sums while a group is in flight.
std::int64_t num_later_groups(Call call, bool is_hierarchical, std::int64_t num_chunks) {
  if (!is_hierarchical) return 0;
  return call == Call::scatter && num_chunks > 1 ? 2 : 1;
}

// Returns the groups that send inside the node, on a stream between two events. A gather first sends the rank's wires
// there, then the wires of other nodes.
std::int64_t num_inside(Call call, bool is_hierarchical, std::int64_t num_chunks) {
  if (!is_hierarchical) return 0;
  return call == Call::gather ? num_chunks + 1 : num_chunks;
}

// Returns the work of one call of one rank. Each group has an event before and after it, and each piece of scratch one
// at its release. The stream waits for each hop of each chunk. With several chunks each kernel has a lane, with an
// event before and after it.
Work expected_work(Call call, bool is_hierarchical, std::int64_t num_chunks) {
  const std::int64_t num_hops = is_hierarchical ? 2 : 1;
  if (call == Call::all_reduce) {
    const Work in_turn = expected_work(Call::scatter, is_hierarchical, num_chunks) +
                         expected_work(Call::gather, is_hierarchical, num_chunks);
    const std::int64_t num_groups = num_chunks + 2 + num_later_groups(Call::scatter, is_hierarchical, num_chunks) +
                                    num_later_groups(Call::gather, is_hierarchical, num_chunks) +
                                    (num_chunks > 1 ? 1 : 0);
    const std::int64_t num_shared = std::max<std::int64_t>(in_turn.groups - num_groups, 0);
    if (!is_hierarchical) {
      return in_turn.since(
          {.groups = num_shared, .transfers = num_shared, .records = 2 * num_shared, .waits = num_shared});
    }
    // All but the first two groups and the last send between nodes and inside.
    const std::int64_t num_transfers = std::min(in_turn.transfers, 2 * num_groups - 3);
    const std::int64_t num_shared_inside = std::max<std::int64_t>(2 * num_chunks + 1 - (num_groups - 1), 0);
    return in_turn.since({.groups = num_shared,
                          .transfers = in_turn.transfers - num_transfers,
                          .records = 2 * (num_shared + num_shared_inside),
                          .waits = num_shared + 2 * num_shared_inside});
  }
  const bool is_gather = call == Call::gather;
  const std::int64_t num_groups = num_chunks + num_later_groups(call, is_hierarchical, num_chunks);
  // Encode is one launch, decode or sum another. A second hop adds two: sums for other nodes, and the sum of this
  // rank's slot.
  const std::int64_t num_kernels = is_gather || !is_hierarchical ? 2 : 4;
  // A gather has one buffer of wires. A reduce-scatter has two for each hop, and with two hops one of partial sums.
  const std::int64_t num_pieces = is_gather ? 1 : is_hierarchical ? 5 : 2;
  const std::int64_t num_on_lanes = num_chunks > 1 ? num_kernels * num_chunks : 0;
  const std::int64_t num_on_streams = num_on_lanes + num_inside(call, is_hierarchical, num_chunks);
  return {.groups = num_groups,
          .transfers = num_chunks + num_inside(call, is_hierarchical, num_chunks),
          .kernels = num_kernels * num_chunks,
          .records = 2 * num_groups + num_pieces + 2 * num_on_streams,
          .waits = num_groups + num_hops * num_chunks + 2 * num_on_streams};
}

// Returns the chain of dependent kernels and groups of a call: each link waits for the end of a product, if the call
// runs beside some. Kernels of a step run side by side, and while a group is in flight. So with several chunks the
// chain is the first encode, all groups, and the last decode or sum.
std::int64_t expected_products(Call call, bool is_hierarchical, std::int64_t num_chunks) {
  if (call == Call::scatter && is_hierarchical && num_chunks == 1) return 5;  // a sum between the two groups
  return 2 + num_chunks + num_later_groups(call, is_hierarchical, num_chunks);
}

struct Counted {
  Work work;              // of all ranks
  std::int64_t products;  // that the call of a rank lasts
};

// Counts one call on all of four ranks in the steady state.
template <class MakeCall>
Counted counted_call(bool is_hierarchical, std::int64_t num_chunks, MakeCall&& make,
                     std::size_t chunk_bytes = kChunkBytes) {
  const auto ids = is_hierarchical ? test::node_ids({2, 2}) : test::node_ids({4});
  Work before;
  Counted counted{};
  std::atomic<int> num_there = 0;
  const auto meet = [&](int round) {
    ++num_there;
    while (num_there < 4 * round) std::this_thread::sleep_for(100us);
  };
  run_nccl_ranks(4, [&](int rank, const NcclOptions& options) {
    const auto communicator = make_cuda_communicator(ids, chunk_bytes, options);
    Stream stream;
    const Tensors tensors(4, num_chunks);
    tensors.clear(stream);
    const auto call = make(*communicator, stream, tensors);
    call();
    synchronize(stream.view());
    meet(1);
    const std::int64_t products = cuda_host::num_products(stream);
    if (rank == 0) before = Work::so_far();
    meet(2);
    call();
    meet(3);
    if (rank == 0) counted = {Work::so_far().since(before), cuda_host::num_products(stream) - products};
    meet(4);
    synchronize(stream.view());
  });
  return counted;
}

Counted counted_call(Call kind, bool is_hierarchical, std::int64_t num_chunks) {
  return counted_call(is_hierarchical, num_chunks,
                      [kind](Communicator& communicator, const Stream& stream, const Tensors& tensors) {
                        return [&communicator, &stream, &tensors, kind] {
                          if (kind == Call::gather) tensors.gather(communicator, stream);
                          if (kind == Call::scatter) tensors.scatter(communicator, stream);
                          if (kind == Call::all_reduce) tensors.all_reduce(communicator, stream);
                        };
                      });
}

}  // namespace

// Rule: a group on a non-blocking communicator costs a thread that NCCL starts and the caller waits for.
TEST_CASE("nccl: a call is two groups more than it has chunks, an all_reduce six at most; the host waits for nothing") {
  const NoTraces no_traces;
  for (const Call call : {Call::gather, Call::scatter, Call::all_reduce}) {
    for (const bool is_hierarchical : {false, true}) {
      for (const std::int64_t num_chunks : {1, 2, 3, 8, 17}) {
        CAPTURE(static_cast<int>(call));
        CAPTURE(is_hierarchical);
        CAPTURE(num_chunks);
        Work expected = expected_work(call, is_hierarchical, num_chunks).times(4);
        const Work counted = counted_call(call, is_hierarchical, num_chunks).work;
        if (call ==
            Call::all_reduce) {  // whose steps may have more kernels than there are lanes, which then share events
          CHECK(counted.records <= expected.records);
          CHECK(counted.waits <= expected.waits);
          expected.records = counted.records;
          expected.waits = counted.waits;
        }
        CHECK(counted == expected);
      }
    }
  }
}

// Rule: work that finds no free multiprocessor waits until a running kernel ends, at any priority.
TEST_CASE("nccl: beside matrix products a call lasts one product for each group, and two for its kernels") {
  const NoTraces no_traces;
  for (const Call call : {Call::gather, Call::scatter}) {
    for (const bool is_hierarchical : {false, true}) {
      for (const std::int64_t num_chunks : {1, 2, 4, 13}) {
        CAPTURE(static_cast<int>(call));
        CAPTURE(is_hierarchical);
        CAPTURE(num_chunks);
        CHECK(counted_call(call, is_hierarchical, num_chunks).products ==
              expected_products(call, is_hierarchical, num_chunks));
      }
    }
  }
  CHECK(counted_call(Call::all_reduce, true, 4).products == 12);
  CHECK(counted_call(Call::all_reduce, false, 2).products == 7);
}

TEST_CASE("nccl: a gather of one chunk that leaves its wires lasts one product for each hop, and one to encode") {
  const NoTraces no_traces;
  for (const bool is_hierarchical : {false, true}) {
    const auto late = [](Communicator& communicator, const Stream& stream, const Tensors& tensors) {
      const std::vector<TensorView> slots = tensors.slots();
      const Segment<BlockFormat> segment{tensors.elements, BlockFormat::parse("int8:128")};
      const SlotShape shape = shape_of(slots);
      const auto plan =
          std::make_shared<const GatherPlan>(World{communicator.topology(), communicator.rank(), kDefaultGpuChunkBytes},
                                             shape, GatherSegments(&segment, 1), false, 1, true);
      const GatherPtr gather = make_all_gather(plan);
      const auto wires = std::make_shared<test::DeviceArray<std::byte>>(gather->memory().wires);
      return [=, &communicator, &stream] {
        const ConstTensorView shard = slots[static_cast<std::size_t>(communicator.rank())];
        Arguments arguments{.inputs = {&shard, 1}, .outputs = slots};
        arguments.wires = {wires->bytes(), wires->size()};
        communicator.run(*gather, arguments, test::kLong, stream.view());
      };
    };
    CHECK(counted_call(is_hierarchical, 40, late, kDefaultGpuChunkBytes).products == (is_hierarchical ? 3 : 2));
  }
}

}  // namespace zcomm
