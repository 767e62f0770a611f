// Tests of random schedules of calls, captures and failures: results equal the CPU's, a failure ends on every rank, and
// nothing is left, for GPUs of any capacity. A schedule is determined by its number.
#include <unistd.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstring>

#include "calls.hpp"
#include "cuda_helpers.hpp"
#include "nccl_schedule.hpp"
#include "rank_process.hpp"
#include "sanitizers.hpp"
#include "values.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::Action;
using test::DeviceArray;
using test::Fault;
using test::kMaxElements;
using test::Schedule;
using test::Step;
using test::Stream;
using test::Values;

constexpr std::size_t kChunkBytes = 1024;
constexpr auto kPatience = 100ms;  // of calls that may fail
const HopFormats kFormats = HopFormats::parse("int8:128/int4:128");

void call(Communicator& communicator, Action action, TensorView tensor, TensorView part,
          std::chrono::milliseconds timeout, StreamView stream) {
  if (action == Action::all_reduce || action == Action::replay) {
    test::all_reduce(communicator, tensor, kFormats, 0.5f, timeout, stream);
    return;
  }
  if (action == Action::broadcast) {
    test::broadcast(communicator, tensor, communicator.size() - 1, kFormats.inter_node, timeout, stream);
    return;
  }
  const int size = communicator.size();
  const auto slots = split(tensor, size, part.num_elements);
  if (action == Action::gather) {
    test::all_gather(communicator, slots[static_cast<std::size_t>(communicator.rank())], slots, kFormats.intra_node,
                     timeout, stream);
    return;
  }
  std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  if (action == Action::exchange) {
    const std::int64_t share = part.num_elements / size;
    for (ConstTensorView& input : inputs) input = input.slice(0, share);
    test::all_to_all(communicator, inputs, split(part, size, share), kFormats, timeout, stream);
  } else {
    test::reduce_scatter(communicator, inputs, part, kFormats, 0.5f, timeout, stream);
  }
}

// Returns the contents of each rank's tensor or part after each step.
std::vector<std::vector<Values>> expected(const Schedule& schedule) {
  auto communicators = test::make_communicators(schedule.ids, kChunkBytes);
  std::vector<std::vector<Values>> results(schedule.ids.size());
  test::run_ranks(schedule.size(), [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (std::size_t i = 0; i < schedule.steps.size(); ++i) {
      const Step& step = schedule.steps[i];
      Values tensor = schedule.input(i, rank);
      Values part(static_cast<std::size_t>(step.elements));
      call(*communicators[r], step.action, test::view(tensor), test::view(part), 60s, {});
      if (step.action == Action::exchange) part.resize(part.size() / schedule.ids.size() * schedule.ids.size());
      results[r].push_back(step.is_in_part() ? part : tensor);
    }
  });
  return results;
}

// Stream with the tensors of its calls.
struct Lane {
  explicit Lane(int size) : tensor(static_cast<std::size_t>(size) * kMaxElements), part(kMaxElements) {}
  TensorView tensor_view(std::int64_t elements) const { return {tensor.bytes(), elements, DType::float32}; }
  TensorView part_view(std::int64_t elements) const { return {part.bytes(), elements, DType::float32}; }

  Stream stream;
  DeviceArray<float> tensor;
  DeviceArray<float> part;
};

// Store in which ranks report failures to each other.
class Store {
 public:
  void tell(int rank, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = "rank " + std::to_string(teller_ = rank) + ": " + reason;
  }
  // Returns another rank's report.
  std::string ask(int rank) const {
    const std::lock_guard lock(mutex_);
    return rank == teller_ ? std::string() : reason_;
  }

 private:
  mutable std::mutex mutex_;
  std::string reason_;
  int teller_ = -1;
};

class Rank {
 public:
  Rank(const Schedule& schedule, const std::vector<Values>& results, const NcclOptions& options)
      : schedule_(schedule),
        results_(results),
        rank_(options.rank),
        communicator_(test::make_cuda_communicator(schedule.ids, kChunkBytes, options)),
        lanes_{Lane(schedule.size()), Lane(schedule.size())},
        is_wrong_(schedule.steps.size()) {}

  // Returns all violations.
  template <class Meet>
  std::string run(Meet&& meet) {
    if (schedule_.has_graph) capture_graph();
    std::thread aborter;
    bool has_failed = false;
    try {
      run_steps(meet, aborter);
      if (schedule_.fault != Fault::none && !has_stopped()) fail_at_last();
    } catch (const TransportError& error) {
      has_failed = true;
      if (schedule_.fault == Fault::none) complaints_ += std::string("failed: ") + error.what() + "; ";
    }
    for (const Lane& lane : lanes_) synchronize(lane.stream.view());
    if (aborter.joinable()) aborter.join();
    if (schedule_.fault == Fault::none) check_results(schedule_.steps.size());
    if (has_failed) check_it_stays_failed();
    if (!schedule_.graph_goes_last_on(rank_)) drop_graph();
    communicator_.reset();
    drop_graph();
    return complaints_;
  }

 private:
  bool has_stopped() const { return schedule_.fault == Fault::stops && rank_ == schedule_.bad_rank; }

  template <class Meet>
  void run_steps(Meet&& meet, std::thread& aborter) {
    for (std::size_t i = 0; i < schedule_.steps.size(); ++i) {
      if (schedule_.fault != Fault::none && i == schedule_.bad_step) {
        if (schedule_.meets_before) {
          for (const Lane& lane : lanes_) synchronize(lane.stream.view());
          check_results(i);
          meet();
        }
        if (rank_ == schedule_.bad_rank) do_fault(aborter);
        if (has_stopped()) return;
        timeout_ = kPatience;
      }
      run_step(i);
    }
  }

  void do_fault(std::thread& aborter) {
    constexpr int kRemoteError = 6;
    if (schedule_.fault == Fault::error) nccl_host_fail_rank(false, rank_, kRemoteError);
    if (schedule_.fault == Fault::hangs) nccl_host_hold_rank(rank_, 1);
    if (schedule_.fault == Fault::aborts) {
      aborter = std::thread([this] {
        std::this_thread::sleep_for(schedule_.abort_after);
        communicator_->abort("for a test");
      });
    }
  }

  void run_step(std::size_t number) {
    const Step& step = schedule_.steps[number];
    const Lane& lane = lanes_[static_cast<std::size_t>(step.lane)];
    lane.tensor.set(schedule_.input(number, rank_), lane.stream);
    if (step.action == Action::replay) {
      test::require_cuda(cudaGraphLaunch(graph_, lane.stream));
    } else {
      call(*communicator_, step.action, lane.tensor_view(step.elements * schedule_.size()),
           lane.part_view(step.elements), timeout_, lane.stream.view());
    }
    const float* found = step.is_in_part() ? lane.part.data() : lane.tensor.data();
    test::require_cuda(cuda_host::enqueue(lane.stream, [this, number, found] {
      const Values& right = results_[number];
      is_wrong_[number] = std::memcmp(found, right.data(), right.size() * sizeof(float)) != 0;
    }));
  }

  void capture_graph() {
    const Lane& lane = lanes_[0];
    const auto use = [&] {
      call(*communicator_, Action::replay, lane.tensor_view(kMaxElements * schedule_.size()),
           lane.part_view(kMaxElements), 60s, lane.stream.view());
    };
    lane.tensor.set(Values(static_cast<std::size_t>(schedule_.size()) * kMaxElements), lane.stream);
    use();  // allocates the scratch
    graph_ = test::capture(lane.stream, use);
  }

  void drop_graph() {
    if (graph_ != nullptr) test::require_cuda(cudaGraphExecDestroy(std::exchange(graph_, nullptr)));
  }

  // Ends with a step that cannot complete: earlier ones may all have been done before the fault.
  void fail_at_last() {
    for (;; std::this_thread::sleep_for(5ms)) {
      call(*communicator_, Action::all_reduce, lanes_[0].tensor_view(64), lanes_[0].part_view(64), kPatience,
           lanes_[0].stream.view());
    }
  }

  void check_results(std::size_t num_steps) {
    for (std::size_t i = 0; i < num_steps; ++i) {
      if (is_wrong_[i]) complaints_ += "rank " + std::to_string(rank_) + ": step " + std::to_string(i) + " is wrong; ";
    }
  }

  void check_it_stays_failed() {
    try {
      call(*communicator_, Action::all_reduce, lanes_[0].tensor_view(64), lanes_[0].part_view(64), kPatience,
           lanes_[0].stream.view());
      complaints_ += "a call after the failure did not throw; ";
    } catch (const TransportError&) {
      // Expected.
    }
  }

  const Schedule& schedule_;
  const std::vector<Values>& results_;
  const int rank_;
  std::unique_ptr<Communicator> communicator_;
  std::array<Lane, 2> lanes_;
  std::vector<std::atomic<bool>> is_wrong_;
  cudaGraphExec_t graph_ = nullptr;
  std::chrono::milliseconds timeout_{60s};
  std::string complaints_;
};

void run_schedule(const Schedule& schedule) {
  INFO(schedule.to_string());
  const std::vector<std::vector<Values>> results = expected(schedule);
  test::NoTraces no_traces;
  no_traces.communicators_before += schedule.num_forgotten();
  nccl_host_set_kernel_slots(schedule.kernel_slots);
  nccl_host_set_launch_polls(schedule.launch_polls);
  cuda_host::set_hardware_queues(schedule.hardware_queues);
  cuda_host::set_queue_limit(schedule.queue_limit);
  cuda_host::set_delays(schedule.seed, std::chrono::microseconds(schedule.delay_us));
  std::barrier all_there(schedule.size());
  std::vector<std::string> complaints(schedule.ids.size());
  const auto store = std::make_shared<Store>();
  CHECK_NOTHROW(test::run_nccl_ranks(schedule.size(), [&](int rank, NcclOptions options) {
    const auto r = static_cast<std::size_t>(rank);
    options.on_failure = [store, rank](const std::string& reason) { store->tell(rank, reason); };
    options.peer_failure = [store, rank] { return store->ask(rank); };
    complaints[r] = Rank(schedule, results[r], options).run([&] { all_there.arrive_and_wait(); });
  }));
  nccl_host_hold_rank(schedule.bad_rank, 0);
  for (const std::string& text : complaints) CHECK(text == "");
}

// Ends this process if a schedule takes longer.
class HangGuard {
 public:
  explicit HangGuard(std::chrono::seconds limit) : limit_(limit), thread_([this] { watch(); }) {}
  ~HangGuard() {
    is_over_ = true;
    thread_.join();
  }
  HangGuard(const HangGuard&) = delete;
  HangGuard& operator=(const HangGuard&) = delete;

  void begin(const Schedule& schedule) {
    const std::lock_guard lock(mutex_);
    text_ = schedule.to_string();
    start_ = std::chrono::steady_clock::now();
  }

 private:
  void watch() {
    for (; !is_over_; std::this_thread::sleep_for(20ms)) {
      const std::lock_guard lock(mutex_);
      if (std::chrono::steady_clock::now() - start_ < limit_) continue;
      std::fprintf(stderr, "hangs: %s\n", text_.c_str());
      _exit(3);
    }
  }

  const std::chrono::seconds limit_;
  std::mutex mutex_;
  std::string text_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

unsigned number_of(const char* variable, unsigned otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
}

constexpr unsigned kNumSchedules = test::kThreadSanitizer ? 40 : 200;

}  // namespace

// Skipped by default: a case below runs it in a separate process.
TEST_CASE("schedules of a range of numbers" * doctest::skip()) {
  const unsigned first = number_of("ZCOMM_FIRST_SCHEDULE", 0);
  const unsigned count = number_of("ZCOMM_RANDOM_SCHEDULES", 0);
  HangGuard guard(std::chrono::seconds(number_of("ZCOMM_TEST_HANG_SECONDS", 120)));
  for (unsigned seed = first; seed < first + count; ++seed) {
    const Schedule schedule(seed);
    guard.begin(schedule);
    run_schedule(schedule);
  }
}

// Runs ZCOMM_RANDOM_SCHEDULES schedules from number ZCOMM_FIRST_SCHEDULE on, in processes, because they may hang.
TEST_CASE("nccl: random schedules of calls, captures and failures end, with the right results until they fail") {
  const unsigned first = number_of("ZCOMM_FIRST_SCHEDULE", 0);
  const unsigned count = number_of("ZCOMM_RANDOM_SCHEDULES", kNumSchedules);
  constexpr unsigned kProcesses = 2;
  std::vector<pid_t> processes;
  for (unsigned i = 0; i < kProcesses; ++i) {
    const unsigned begin = count * i / kProcesses;
    const unsigned end = count * (i + 1) / kProcesses;
    processes.push_back(
        test::spawn_case("schedules of a range of numbers", {"ZCOMM_FIRST_SCHEDULE=" + std::to_string(first + begin),
                                                             "ZCOMM_RANDOM_SCHEDULES=" + std::to_string(end - begin)}));
  }
  for (const pid_t process : processes) CHECK(test::outcome_of(process, std::chrono::hours(24)) == "ends well");
}

}  // namespace zcomm
