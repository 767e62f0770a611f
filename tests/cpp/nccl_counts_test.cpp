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
  std::int64_t groups = 0;
  std::int64_t threads = 0;  // started by NCCL for groups
  std::int64_t kernels = 0;  // of the codec
  std::int64_t records = 0;  // of events
  std::int64_t waits = 0;    // of streams for events
  std::int64_t host_waits = 0;

  static Work so_far() {
    const cuda_host::Calls calls = cuda_host::calls();
    return {nccl_host_num_launches(), nccl_host_num_threads(), calls.launches, calls.records, calls.waits,
            calls.host_waits};
  }
  Work since(const Work& before) const {
    return {groups - before.groups,   threads - before.threads, kernels - before.kernels,
            records - before.records, waits - before.waits,     host_waits - before.host_waits};
  }
  Work operator+(const Work& other) const {
    return {groups + other.groups,   threads + other.threads, kernels + other.kernels,
            records + other.records, waits + other.waits,     host_waits + other.host_waits};
  }
  Work times(std::int64_t n) const {
    return {n * groups, n * threads, n * kernels, n * records, n * waits, n * host_waits};
  }
  bool operator==(const Work&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Work& work) {
  return out << work.groups << " groups, " << work.threads << " threads, " << work.kernels << " kernels, "
             << work.records << " records, " << work.waits << " waits, " << work.host_waits << " host waits";
}

enum class Call { gather, scatter, all_reduce };

// Returns the groups after that of a chunk's first hop. From four chunks on, a reduction sums while a group is in
// flight.
std::int64_t num_later_groups(Call call, bool is_hierarchical, std::int64_t num_chunks) {
  if (!is_hierarchical) return 0;
  return call == Call::scatter && num_chunks >= 4 ? 2 : 1;
}

// Returns the work of one call of one rank. Each group has an event before and after it, and each piece of scratch one
// at its release. The stream waits for each hop of each chunk.
Work expected_work(Call call, bool is_hierarchical, std::int64_t num_chunks) {
  const std::int64_t num_hops = is_hierarchical ? 2 : 1;
  if (call == Call::all_reduce) {
    const Work in_turn = expected_work(Call::scatter, is_hierarchical, num_chunks) +
                         expected_work(Call::gather, is_hierarchical, num_chunks);
    const std::int64_t num_groups = num_chunks + 2 + num_later_groups(Call::scatter, is_hierarchical, num_chunks) +
                                    num_later_groups(Call::gather, is_hierarchical, num_chunks);
    const std::int64_t num_shared = std::max<std::int64_t>(in_turn.groups - num_groups, 0);
    return in_turn.since({.groups = num_shared, .threads = num_shared, .records = 2 * num_shared, .waits = num_shared});
  }
  const bool is_gather = call == Call::gather;
  const std::int64_t num_groups = num_chunks + num_later_groups(call, is_hierarchical, num_chunks);
  // Encode is one launch, decode or sum another. A second hop adds two: sums for other nodes, and the sum of this
  // rank's slot.
  const std::int64_t num_kernels = is_gather || !is_hierarchical ? 2 : 4;
  // A gather has one buffer of wires. A reduce-scatter has two for each hop, and with two hops one of partial sums.
  const std::int64_t num_pieces = is_gather ? 1 : is_hierarchical ? 5 : 2;
  return {.groups = num_groups,
          .threads = num_groups,
          .kernels = num_kernels * num_chunks,
          .records = 2 * num_groups + num_pieces,
          .waits = num_groups + num_hops * num_chunks};
}

// Counts the work of one call on all of four ranks in the steady state.
Work counted_work(Call kind, bool is_hierarchical, std::int64_t num_chunks) {
  const auto ids = is_hierarchical ? test::node_ids({2, 2}) : test::node_ids({4});
  Work before;
  Work counted;
  std::atomic<int> num_there = 0;
  const auto meet = [&](int round) {
    ++num_there;
    while (num_there < 4 * round) std::this_thread::sleep_for(100us);
  };
  run_nccl_ranks(4, [&](int rank, const NcclOptions& options) {
    const auto communicator = make_cuda_communicator(ids, kChunkBytes, options);
    Stream stream;
    const Tensors tensors(4, num_chunks);
    const auto call = [&] {
      if (kind == Call::gather) tensors.gather(*communicator, stream);
      if (kind == Call::scatter) tensors.scatter(*communicator, stream);
      if (kind == Call::all_reduce) tensors.all_reduce(*communicator, stream);
    };
    tensors.clear(stream);
    call();
    synchronize(stream.view());
    meet(1);
    if (rank == 0) before = Work::so_far();
    meet(2);
    call();
    meet(3);
    if (rank == 0) counted = Work::so_far().since(before);
    meet(4);
    synchronize(stream.view());
  });
  return counted;
}

}  // namespace

// Rule: a group on a non-blocking communicator costs a thread that NCCL starts and the caller waits for.
TEST_CASE(
    "nccl: a call is two groups more than it has chunks, an all_reduce five at most; the host waits for nothing") {
  const NoTraces no_traces;
  for (const Call call : {Call::gather, Call::scatter, Call::all_reduce}) {
    for (const bool is_hierarchical : {false, true}) {
      for (const std::int64_t num_chunks : {1, 2, 3, 8, 17}) {
        CAPTURE(static_cast<int>(call));
        CAPTURE(is_hierarchical);
        CAPTURE(num_chunks);
        CHECK(counted_work(call, is_hierarchical, num_chunks) ==
              expected_work(call, is_hierarchical, num_chunks).times(4));
      }
    }
  }
}

}  // namespace zcomm
