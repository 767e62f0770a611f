// Tests of random schedules of a program's calls, groups, splits, captures and aborts, with the front before NCCL. A
// schedule is determined by its number.
#include <array>

#include "front_cases.hpp"
#include "nccl_schedule.hpp"
#include "sanitizers.hpp"

namespace zcomm {
namespace {

using front::Collective;
using test::Action;
using test::Buffers;
using test::Bytes;
using test::Case;
using test::Comm;
using test::Fault;
using test::require_cuda;
using test::require_nccl;
using test::Result;
using test::Schedule;
using test::Stream;

constexpr std::size_t kMinBytes = 2048;  // ZCOMM_MIN_BYTES

// Returns the calls of a step: a group, if there are several.
std::vector<Case> cases_of(const Schedule& schedule, const test::Step& step) {
  const auto count = static_cast<std::size_t>(step.elements);
  const bool in_place = step.elements % 2 == 0;
  const auto made = [&](Collective kind, unsigned op = test::kSum) {
    return Case{
        kind, count, DType::float32, op, in_place, schedule.size(), static_cast<int>(count / 8) % schedule.size()};
  };
  switch (step.action) {
    case Action::gather:
      return {made(Collective::all_gather)};
    case Action::scatter:
      return {made(Collective::reduce_scatter)};
    case Action::exchange: {
      constexpr Collective kExchanges[] = {Collective::all_to_all, Collective::broadcast, Collective::gather,
                                           Collective::scatter, Collective::message};
      return {made(kExchanges[count / 2 % 5])};
    }
    case Action::broadcast:
      return {made(Collective::reduce_scatter), made(Collective::all_reduce, test::kMax),
              made(Collective::all_gather),     made(Collective::all_to_all),
              made(Collective::broadcast),      made(Collective::message)};
    case Action::replay: {
      constexpr Collective kReplayed[] = {Collective::all_reduce, Collective::all_to_all, Collective::broadcast,
                                          Collective::gather};
      return {made(kReplayed[count / 2 % 4])};
    }
    default:
      return {made(Collective::all_reduce)};
  }
}

std::vector<Bytes> expected(const Case& the_case, const std::vector<int>& nodes, unsigned seed) {
  const std::size_t slots = front::has_one_slot(the_case.kind) ? 1 : the_case.slots();
  const bool is_compressed =
      nodes.front() != nodes.back() && the_case.op != test::kMax && the_case.count * 4 * slots >= kMinBytes;
  return is_compressed ? test::compressed(the_case, nodes, seed) : test::exact(the_case, seed);
}

// One rank's part of a schedule, on two communicators and two streams.
class Rank {
 public:
  Rank(const Schedule& schedule, const std::vector<int>& nodes, const NcclUniqueId* ids, int rank)
      : schedule_(schedule), nodes_(nodes), rank_(rank), blocks_(schedule.seed % 2 == 0) {
    comms_[0] = std::make_unique<test::ProgramComm>(ids[0], rank, schedule.size(), blocks_);
    if (schedule.seed % 3 != 0) {
      comms_[1] = std::make_unique<test::ProgramComm>(ids[1], rank, schedule.size(), blocks_);
    } else {
      comms_[1] = std::make_unique<test::ProgramComm>(*comms_[0], rank, blocks_);
    }
  }

  void run() {
    const bool aborts = schedule_.fault == Fault::aborts || schedule_.fault == Fault::error;
    if (aborts) warm_up();
    for (std::size_t i = 0; i < schedule_.steps.size(); ++i) {
      if (aborts && i == schedule_.bad_step) return abort(i);
      if (schedule_.steps[i].action == Action::replay) {
        replay(i);
      } else {
        check(i, call(i));
      }
    }
  }

 private:
  using AllBuffers = std::vector<std::unique_ptr<Buffers>>;

  Comm comm_of(std::size_t call) const { return *comms_[call % 2]; }
  const Stream& stream_of(std::size_t step) const {
    return streams_[static_cast<std::size_t>(schedule_.steps[step].lane)];
  }
  unsigned seed_of(std::size_t step, std::size_t call) const {
    return schedule_.seed * 100 + static_cast<unsigned>(step * 10 + call);
  }

  AllBuffers buffers_of(std::size_t step) const {
    AllBuffers all;
    for (const Case& each : cases_of(schedule_, schedule_.steps[step])) {
      all.push_back(std::make_unique<Buffers>(each, rank_, stream_of(step), seed_of(step, all.size())));
    }
    return all;
  }

  // Makes the calls of a step, several in nested groups.
  Result issue(std::size_t step, const AllBuffers& all) const {
    if (all.size() == 1) return all[0]->call(comm_of(step), stream_of(step));
    require_nccl(nccl::ncclGroupStart());
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i == 1) require_nccl(nccl::ncclGroupStart());
      require_nccl(all[i]->call(comm_of(i), stream_of(step)));
      if (i == 2) require_nccl(nccl::ncclGroupEnd());
    }
    return nccl::ncclGroupEnd();
  }

  AllBuffers call(std::size_t step) const {
    AllBuffers all = buffers_of(step);
    if (const Result result = issue(step, all); result != Result::in_progress) require_nccl(result);
    for (const auto& comm : comms_) test::settle(*comm);
    return all;
  }

  void check(std::size_t step, const AllBuffers& all) const {
    const std::vector<Case> cases = cases_of(schedule_, schedule_.steps[step]);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto right = expected(cases[i], nodes_, seed_of(step, i));
      if (all[i]->result(stream_of(step)) == right[static_cast<std::size_t>(rank_)]) continue;
      throw Error(schedule_.to_string() + ": step " + std::to_string(step) + " is wrong");
    }
  }

  // Captures what a call before it has made possible on the same stream.
  void replay(std::size_t step) const {
    check(step, call(step));
    const AllBuffers all = buffers_of(step);
    require_cuda(cudaStreamSynchronize(stream_of(step)));
    const cudaGraphExec_t graph = test::capture(stream_of(step), [&] {
      if (const Result result = issue(step, all); result != Result::in_progress) require_nccl(result);
      for (const auto& comm : comms_) test::settle(*comm);
    });
    require_cuda(cudaGraphLaunch(graph, stream_of(step)));
    check(step, all);
    require_cuda(cudaGraphExecDestroy(graph));
  }

  // Lets both communicators meet and connect all pairs: NCCL forbids an abort beside a call that waits for that.
  void warm_up() const {
    const auto made = [&](Collective kind, unsigned op) {
      return Case{kind, kMinBytes, DType::float32, op, true, schedule_.size()};
    };
    for (const auto& comm : comms_) {
      for (const Case& each : {made(Collective::all_reduce, test::kSum), made(Collective::all_reduce, test::kMax),
                               made(Collective::all_to_all, test::kSum), made(Collective::message, test::kSum)}) {
        const Buffers buffers(each, rank_, streams_[0]);
        if (const Result result = buffers.call(*comm, streams_[0]); result != Result::in_progress) require_nccl(result);
        test::settle(*comm);
        require_cuda(cudaStreamSynchronize(streams_[0]));
      }
    }
  }

  // The bad rank never makes the call, so the others end theirs.
  void abort(std::size_t step) {
    const AllBuffers all = buffers_of(step);
    if (rank_ != schedule_.bad_rank) {
      if (const Result result = issue(step, all); result != Result::in_progress) require_nccl(result);
      std::this_thread::sleep_for(schedule_.abort_after);
    }
    require_nccl(nccl::ncclGroupStart());  // each waits for what runs of the other
    for (const auto& comm : comms_) comm->abort();
    require_nccl(nccl::ncclGroupEnd());
    for (const Stream& stream : streams_) require_cuda(cudaStreamSynchronize(stream));
  }

  const Schedule& schedule_;
  const std::vector<int>& nodes_;
  const int rank_;
  const bool blocks_;
  std::array<std::unique_ptr<test::ProgramComm>, 2> comms_;
  std::array<Stream, 2> streams_;
};

unsigned number_of(const char* variable, unsigned otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
}

}  // namespace

TEST_CASE("front process: random schedules" * doctest::skip()) {
  const unsigned first = number_of("ZCOMM_FIRST_SCHEDULE", 0);
  const unsigned node_size = number_of("ZCOMM_NODE_SIZE", 1);
  for (unsigned seed = first; seed < first + number_of("ZCOMM_RANDOM_SCHEDULES", 0); ++seed) {
    const Schedule schedule(seed);
    INFO(schedule.to_string());
    std::vector<int> nodes;
    for (unsigned rank = 0; rank < schedule.ids.size(); ++rank) nodes.push_back(static_cast<int>(rank / node_size));
    test::NoTraces no_traces;
    nccl_host_set_launch_polls(schedule.launch_polls);
    cuda_host::set_hardware_queues(0);  // communicators that meet at the same time need one each
    cuda_host::set_delays(schedule.seed, std::chrono::microseconds(schedule.delay_us));
    const NcclUniqueId ids[] = {test::new_id(), test::new_id()};
    CHECK_NOTHROW(test::run_ranks(schedule.size(), [&](int rank) {
      const CudaDeviceGuard device(rank);
      Rank(schedule, nodes, ids, rank).run();
    }));
  }
}

constexpr unsigned kNumSchedules = test::kThreadSanitizer ? 15 : test::kSanitizers ? 50 : 100;

// Runs ZCOMM_RANDOM_SCHEDULES schedules from number ZCOMM_FIRST_SCHEDULE on, for nodes of one rank and of two.
TEST_CASE("front: random schedules of calls, groups, splits, captures and aborts end, with the right results") {
  std::vector<pid_t> processes;
  const std::string count = std::to_string(number_of("ZCOMM_RANDOM_SCHEDULES", kNumSchedules));
  for (const char* node_size : {"ZCOMM_NODE_SIZE=1", "ZCOMM_NODE_SIZE=2"}) {
    processes.push_back(
        test::spawn_case("front process: random schedules",
                         {node_size, "ZCOMM_RANDOM_SCHEDULES=" + count, "ZCOMM_MIN_BYTES=" + std::to_string(kMinBytes),
                          "ZCOMM_ALL_GATHER=int8:256", "ZCOMM_REDUCE_SCATTER=int8:128/int4:128",
                          "ZCOMM_ALL_REDUCE=int8:128/int4:128", "ZCOMM_EXCHANGES=int8:128/int4:128"}));
  }
  for (const pid_t process : processes) CHECK(test::outcome_of(process, std::chrono::hours(1)) == "ends well");
}

}  // namespace zcomm
