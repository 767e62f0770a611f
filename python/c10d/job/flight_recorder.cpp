#include "flight_recorder.hpp"

#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <thread>
#include <utility>

#include "c10d/base/tensors.hpp"
#include "job.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

constexpr const char* kVersion = "2.10";  // of the format
constexpr std::size_t kDefaultCapacity = 2000;
constexpr std::string_view kSend = "send";
constexpr std::chrono::seconds kPatienceOfWriter{5};

std::size_t capacity_of_environment() {
  for (const char* name : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    const char* text = std::getenv(name);
    if (text == nullptr) continue;
    std::size_t capacity = 0;
    const char* end = text + std::strlen(text);
    const auto [parsed, error] = std::from_chars(text, end, capacity);
    if (error != std::errc() || parsed != end) {
      throw ArgumentError(std::string(name) + ": expected an integer of at least 0, got '" + text + "'");
    }
    return capacity;
  }
  return kDefaultCapacity;
}

std::string_view name_of(const Request& request) {
  const Collective collective = request.call.collective;
  if (request.call.form != Form::list && collective == Collective::all_gather) return "_all_gather_base";
  if (request.call.form != Form::list && collective == Collective::reduce_scatter) return "_reduce_scatter_base";
  return to_string(collective);
}

template <class Views>
std::int64_t total_of(const Views& slots) {
  std::int64_t total = 0;
  for (const auto& slot : slots) total += slot.num_elements;
  return total;
}

c10::IValue nanoseconds(FlightRecorder::Clock::time_point time) {
  if (time == FlightRecorder::Clock::time_point{}) return {};
  return std::int64_t{std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count()};
}

using List = c10::List<c10::IValue>;
using Dict = c10::Dict<c10::IValue, c10::IValue>;
List new_list() { return List(c10::AnyType::get()); }
Dict new_dict() { return Dict(c10::AnyType::get(), c10::AnyType::get()); }

c10::IValue list_of(const c10::IValue& item) {
  List list = new_list();
  list.push_back(item);
  return list;
}

// Pickles a value for Python, without torch's tags.
std::string pickle(const c10::IValue& value) {
  std::string bytes;
  torch::jit::Pickler pickler([&](const char* data, std::size_t size) { bytes.append(data, size); }, nullptr, nullptr,
                              nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();
  return bytes;
}

std::string text_of(const std::vector<std::uint64_t>& ranks) {
  std::string text;
  for (const std::uint64_t rank : ranks) text += (text.empty() ? "[" : ", ") + std::to_string(rank);
  return text + "]";
}

// Work that ends its record when the caller has waited for it.
class WatchedWork final : public ::c10d::Work {
 public:
  WatchedWork(std::uint64_t id, WorkPtr work) : Work(-1, work->retrieveOpType()), id_(id), work_(std::move(work)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    try {
      const bool done = work_->wait(timeout);
      FlightRecorder::of_process().end(id_, !done);
      return done;
    } catch (const std::exception&) {
      FlightRecorder::of_process().end(id_, true);
      throw;
    }
  }
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  std::uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  const std::uint64_t id_;
  const WorkPtr work_;
};

}  // namespace

RecordedCall recorded_call(std::string_view name, at::TensorList inputs, at::TensorList outputs,
                           std::chrono::milliseconds timeout) {
  const at::ScalarType dtype = inputs.empty() ? at::kByte : inputs[0].scalar_type();
  return {name, elements_of(inputs), elements_of(outputs), dtype, timeout};
}

// Roots count as the others do, which have their own part alone.
RecordedCall recorded_call(const Request& request) {
  const Collective collective = request.call.collective;
  const auto& inputs = collective == Collective::scatter ? request.outputs : request.inputs;
  const auto& outputs = collective == Collective::gather ? request.inputs : request.outputs;
  return recorded_call(name_of(request), inputs, outputs, request.settings.timeout);
}

RecordedCall recorded_call(const Job& job) {
  const std::int64_t written = total_of(job.written);
  std::int64_t read = total_of(job.read);
  if (traits_of(job.call.collective).is_in_place) read = written;
  const bool is_preparation = !job.shares.empty();
  if (job.call.collective == Collective::all_gather && !is_preparation) {  // perhaps of kept values
    read = written / job.operation->world().topology.size();
  }
  return {.name = name_of(job),
          .in_elements = read,
          .out_elements = written,
          .dtype = is_preparation ? job.outputs[0].scalar_type() : scalar_type_of(job.written.front().dtype),
          .timeout = job.settings.timeout,
          .is_compressed = true};
}

FlightRecorder& FlightRecorder::of_process() {
  static auto* recorder = new FlightRecorder;  // never destroyed: Gloo's threads may end calls until the process ends
  return *recorder;
}

FlightRecorder::FlightRecorder() : capacity_(capacity_of_environment()) {}

std::uint64_t FlightRecorder::begin(std::shared_ptr<const Group> group, std::uint64_t number,
                                    const RecordedCall& call) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = num_begun_++;
  if (capacity_ == 0) return id;
  Entry entry{id, std::move(group), number, call, Clock::now(), {}, false};
  if (entries_.size() < capacity_) {
    entries_.push_back(std::move(entry));
  } else {
    entries_[id % capacity_] = std::move(entry);
  }
  return id;
}

void FlightRecorder::end(std::uint64_t id, bool failed) noexcept {
  try {
    std::optional<Dump> dump;
    {
      const std::lock_guard lock(mutex_);
      if (id + capacity_ < num_begun_ || capacity_ == 0) return;  // overwritten
      Entry& entry = entries_[id % capacity_];
      if (!failed) entry.ended = Clock::now();
      entry.failed = failed;
      if (failed && Clock::now() - entry.begun >= entry.call.timeout / 2) dump = first_dump(*entry.group);
    }
    if (dump) write(std::move(*dump));
  } catch (const std::exception&) {
    // The caller receives the failure of the call itself.
  }
}

void FlightRecorder::forget(std::uint64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  if (id + capacity_ >= num_begun_ && capacity_ > 0) entries_[id % capacity_].forgotten = true;
}

void FlightRecorder::write_on_failure() noexcept {
  try {
    std::optional<Dump> dump;
    {
      const std::lock_guard lock(mutex_);
      if (!entries_.empty()) dump = first_dump(*entries_.front().group);
    }
    if (dump) write(std::move(*dump));
  } catch (const std::exception&) {
    // The caller receives the failure of the call itself.
  }
}

bool FlightRecorder::has_failed(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  return id + capacity_ >= num_begun_ && capacity_ > 0 && entries_[id % capacity_].failed;
}

std::optional<FlightRecorder::Dump> FlightRecorder::first_dump(const Group& group) {
  const char* prefix = std::getenv("ZCOMM_FLIGHT_RECORDER");
  if (prefix == nullptr || std::exchange(is_dumped_, true)) return std::nullopt;
  return Dump{prefix + std::to_string(group.ranks[static_cast<std::size_t>(group.rank)]), pickled()};
}

// Writes on a detached thread, because a path such as a FIFO or a hung mount may block forever.
// Waits for a limited time, because the process may end as soon as the caller raises.
void FlightRecorder::write(Dump dump) {
  const std::string path = dump.path;
  std::promise<void> written;
  const std::future<void> end = written.get_future();
  std::thread([dump = std::move(dump), written = std::move(written)]() mutable {
    std::ofstream file(dump.path, std::ios::binary);
    file << dump.bytes << std::flush;
    std::fprintf(stderr,
                 file ? "zcomm: wrote the last collectives of this rank, for torchfrtrace, to %s\n"
                      : "zcomm: ZCOMM_FLIGHT_RECORDER: expected a path that can be written, got %s\n",
                 dump.path.c_str());
    written.set_value();
  }).detach();
  if (end.wait_for(kPatienceOfWriter) == std::future_status::ready) return;
  std::fprintf(stderr, "zcomm: ZCOMM_FLIGHT_RECORDER: expected a path that can be written within 5 s, got %s\n",
               path.c_str());
}

std::string FlightRecorder::dump() {
  const std::lock_guard lock(mutex_);
  return pickled();
}

std::string FlightRecorder::pickled() const {
  List calls = new_list();
  Dict groups = new_dict();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[(num_begun_ + i) % entries_.size()];  // oldest first
    if (entry.forgotten) continue;
    calls.push_back(entry_of(entry));
    Dict group = new_dict();
    group.insert("name", entry.group->name);
    group.insert("desc", entry.group->description);
    group.insert("ranks", text_of(entry.group->ranks));
    groups.insert_or_assign(entry.group->name, group);
  }
  Dict all = new_dict();
  all.insert("version", kVersion);
  all.insert("pg_config", groups);
  all.insert("pg_status", new_dict());
  all.insert("entries", calls);
  return pickle(all);
}

c10::IValue FlightRecorder::entry_of(const Entry& entry) {
  // Part of the dtype, which the analyzer compares between ranks: one that compresses a call and one that does not wait
  // for each other.
  const std::string dtype =
      std::string(c10::toString(entry.call.dtype)) + (entry.call.is_compressed ? " compressed" : "");
  const bool done = entry.ended != Clock::time_point{};
  Dict fields = new_dict();
  fields.insert("record_id", static_cast<std::int64_t>(entry.id));
  fields.insert("pg_id", std::int64_t{0});
  fields.insert("process_group", c10::ivalue::Tuple::create({entry.group->name, entry.group->description}));
  fields.insert("collective_seq_id", static_cast<std::int64_t>(entry.number));
  fields.insert("p2p_seq_id", entry.call.is_point_to_point() ? static_cast<std::int64_t>(entry.number) : 0);
  fields.insert("op_id", static_cast<std::int64_t>(entry.number));
  fields.insert("profiling_name", title_of(entry));
  fields.insert("time_created_ns", nanoseconds(entry.begun));
  fields.insert("time_discovered_started_ns", nanoseconds(entry.begun));
  fields.insert("time_discovered_completed_ns", nanoseconds(entry.ended));
  fields.insert("input_sizes", list_of(list_of(entry.call.in_elements)));
  fields.insert("input_dtypes", list_of(dtype));
  fields.insert("output_sizes", list_of(list_of(entry.call.out_elements)));
  fields.insert("output_dtypes", list_of(dtype));
  fields.insert("state", done ? "completed" : "scheduled");
  fields.insert("retired", done || entry.failed);
  fields.insert("timeout_ms", std::int64_t{entry.call.timeout.count()});
  fields.insert("is_p2p", entry.call.is_point_to_point());
  fields.insert("frames", new_list());
  return fields;
}

// Uses the prefix that all versions of the analyzer know.
std::string FlightRecorder::title_of(const Entry& entry) {
  const std::string title = "nccl:" + std::string(entry.call.name);
  if (!entry.call.is_point_to_point()) return title;
  const int own = entry.group->rank;  // one of two
  return title + " " + std::to_string(own) + (entry.call.name == kSend ? "->" : "<-") + std::to_string(1 - own);
}

GroupRecorder::GroupRecorder(const ::c10d::Backend& group, std::vector<std::uint64_t> ranks)
    : group_(group), ranks_(std::move(ranks)) {
  const bool is_world = ranks_.empty();
  for (int rank = 0; is_world && rank < group.getSize(); ++rank) ranks_.push_back(static_cast<std::uint64_t>(rank));
}

std::uint64_t GroupRecorder::begin(const RecordedCall& call) {
  std::call_once(named_, [this] {
    names_ = std::make_shared<FlightRecorder::Group>(
        FlightRecorder::Group{group_.getGroupUid(), group_.getGroupDesc(), ranks_, group_.getRank()});
  });
  if (!call.is_point_to_point()) return FlightRecorder::of_process().begin(names_, ++num_calls_, call);
  const std::lock_guard lock(mutex_);
  Channel& channel = channel_of(call);
  return FlightRecorder::of_process().begin(channel.names, ++channel.num_calls, call);
}

std::shared_ptr<void> GroupRecorder::begin(Job& job) {
  job.record = begin(recorded_call(job));
  return nullptr;
}

void GroupRecorder::ran(const Job& job, const CallStats&) {
  if (job.outputs[0].is_cpu()) FlightRecorder::of_process().end(job.record, false);
}

void GroupRecorder::failed(const Job& job) { FlightRecorder::of_process().end(job.record, true); }

void GroupRecorder::take_back(std::uint64_t id, const RecordedCall& call) {
  if (FlightRecorder::of_process().has_failed(id)) return;
  FlightRecorder::of_process().end(id, true);
  FlightRecorder::of_process().forget(id);
  if (!call.is_point_to_point()) {
    --num_calls_;
    return;
  }
  const std::lock_guard lock(mutex_);
  --channel_of(call).num_calls;
}

GroupRecorder::Channel& GroupRecorder::channel_of(const RecordedCall& call) {
  const std::uint64_t own = names_->ranks.at(static_cast<std::size_t>(names_->rank));
  const std::uint64_t other = names_->ranks.at(static_cast<std::size_t>(call.peer));
  const auto [from, to] = call.name == kSend ? std::pair(own, other) : std::pair(other, own);
  std::string text = " " + std::to_string(from) + "->" + std::to_string(to);
  if (call.tag != 0) text += " tag " + std::to_string(call.tag);
  // Prunes channels without entries: a program may use a new tag for each message.
  if (channels_.size() > 2 * FlightRecorder::of_process().capacity()) {
    std::erase_if(channels_, [](const auto& channel) { return channel.second.names.use_count() == 1; });
  }
  Channel& channel = channels_[text];
  if (!channel.names) {
    channel.names =
        std::make_shared<FlightRecorder::Group>(FlightRecorder::Group{names_->name + text,
                                                                      names_->description + text,
                                                                      {std::min(own, other), std::max(own, other)},
                                                                      own < other ? 0 : 1});
  }
  return channel;
}

WorkPtr GroupRecorder::follow(std::uint64_t id, WorkPtr work) {
  c10::intrusive_ptr<c10::ivalue::Future> end;
  try {
    end = work->getFuture();
  } catch (const std::exception&) {  // reduce-scatters and point-to-point calls have none
    return c10::make_intrusive<WatchedWork>(id, std::move(work));
  }
  end->addCallback([id](c10::ivalue::Future& future) { FlightRecorder::of_process().end(id, future.hasError()); });
  return work;
}

}  // namespace zcomm::c10d_binding
