// Flight recorder: the last collectives of this process in the format of torch's analyzer (torchfrtrace), which finds
// the missing rank. torch's own recorder exports no function to record with.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "c10d/base/pointers.hpp"
#include "observer.hpp"
#include "request.hpp"

namespace zcomm::c10d_binding {

// Call, as the analyzer compares it between ranks.
struct RecordedCall {
  std::string_view name;  // one that the analyzer knows
  std::int64_t in_elements = 0;
  std::int64_t out_elements = 0;
  at::ScalarType dtype = at::kByte;
  std::chrono::milliseconds timeout{0};
  int peer = -1;  // of a point-to-point call, in the group
  int tag = 0;
  bool is_compressed = false;

  bool is_point_to_point() const { return peer >= 0; }
};

RecordedCall recorded_call(std::string_view name, at::TensorList inputs, at::TensorList outputs,
                           std::chrono::milliseconds timeout);
RecordedCall recorded_call(const Request& request);  // of an exact call
RecordedCall recorded_call(const Job& job);

// Ring of the last calls of all groups: TORCH_FR_BUFFER_SIZE (or TORCH_NCCL_TRACE_BUFFER_SIZE) calls, 2000 by default;
// 0 disables it.
class FlightRecorder {
 public:
  using Clock = std::chrono::system_clock;
  struct Group {
    std::string name;
    std::string description;
    std::vector<std::uint64_t> ranks;  // in the world
    int rank;                          // of this process, in the group
  };

  // Throws ArgumentError if the environment has no number of calls.
  static FlightRecorder& of_process();

  // Records a call; `number` counts the group's calls. Returns an id for end().
  std::uint64_t begin(std::shared_ptr<const Group> group, std::uint64_t number, const RecordedCall& call);
  // Ends a call. If it failed after half of its timeout or more, writes the dump once, to the file named by
  // ZCOMM_FLIGHT_RECORDER, if set, plus this process's world rank. Waits for the file 5 s at most. Never throws.
  void end(std::uint64_t id, bool failed) noexcept;
  // Removes a call that was not made after all.
  void forget(std::uint64_t id) noexcept;

  // Tells whether a call has ended with a failure.
  bool has_failed(std::uint64_t id);

  // Writes the dump as end() does, for any failure.
  void write_on_failure() noexcept;

  // Returns a pickled dictionary of "version", "pg_config", "pg_status" and "entries".
  std::string dump();

  std::size_t capacity() const { return capacity_; }

 private:
  struct Entry {
    std::uint64_t id = 0;
    std::shared_ptr<const Group> group;
    std::uint64_t number = 0;
    RecordedCall call;
    Clock::time_point begun;
    Clock::time_point ended;  // zero: in progress
    bool failed = false;
    bool forgotten = false;
  };
  FlightRecorder();
  static c10::IValue entry_of(const Entry& entry);
  static std::string title_of(const Entry& entry);
  struct Dump {
    std::string path;
    std::string bytes;
  };
  static void write(Dump dump);
  // Require the lock. The second returns what is to be written without it: nothing if it was before, or is not wanted.
  std::string pickled() const;
  std::optional<Dump> first_dump(const Group& group);

  const std::size_t capacity_;
  std::mutex mutex_;            // guards all fields below
  std::vector<Entry> entries_;  // a ring
  std::uint64_t num_begun_ = 0;
  bool is_dumped_ = false;
};

// Recorder of one group's calls. The end of a GPU call is not recorded.
class GroupRecorder final : public Observer {
 public:
  // Borrows `group`. `ranks` are the group's, in the world; empty if it is the world.
  GroupRecorder(const ::c10d::Backend& group, std::vector<std::uint64_t> ranks);

  std::uint64_t begin(const RecordedCall& call);
  // Takes back the last call of its kind, which raised before it was made: the next one gets its number, as on ranks
  // that did not make it. Writes its failure first if it took long. A call whose failure is recorded was made, and
  // stays.
  void take_back(std::uint64_t id, const RecordedCall& call);
  // Returns a replacement for one of torch's works on a CPU, which ends the record with the call. Some of Gloo's works
  // report their end only to those who wait.
  static WorkPtr follow(std::uint64_t id, WorkPtr work);

  std::shared_ptr<void> begin(Job& job) override;
  void refused(std::uint64_t record) override { take_back(record, {}); }
  void ran(const Job& job, const CallStats& cost) override;
  void failed(const Job& job) override;

 private:
  // Messages from one rank to another with one tag. The analyzer expects all ranks of a group in each call, so to it
  // they are a group of two.
  struct Channel {
    std::shared_ptr<const FlightRecorder::Group> names;
    std::uint64_t num_calls = 0;
  };
  // Requires the lock.
  Channel& channel_of(const RecordedCall& call);

  const ::c10d::Backend& group_;
  std::vector<std::uint64_t> ranks_;
  std::once_flag named_;  // at the first call: torch names a group after it was made
  std::shared_ptr<const FlightRecorder::Group> names_;
  std::atomic<std::uint64_t> num_calls_{0};  // of collectives
  std::mutex mutex_;
  std::map<std::string, Channel> channels_;  // by the end of their names; those of recorded calls, and some others
};

}  // namespace zcomm::c10d_binding
