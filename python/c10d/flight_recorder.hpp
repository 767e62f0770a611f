// The last collectives of this process, in the format that torch's analyzer reads (torchfrtrace): which rank did not
// come. torch's own recorder exports no function to record with.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace zcomm::c10d_binding {

// A call, as the analyzer compares it between ranks.
struct RecordedCall {
  const char* name = "";  // one that the analyzer knows
  std::int64_t in_elements = 0;
  std::int64_t out_elements = 0;
  at::ScalarType dtype = at::kByte;
  std::chrono::milliseconds timeout{0};
  int peer = -1;  // of a point-to-point call, in the group
  int tag = 0;

  bool is_point_to_point() const { return peer >= 0; }
};

RecordedCall recorded_call(const char* name, at::TensorList inputs, at::TensorList outputs,
                           std::chrono::milliseconds timeout);

// The last calls of all groups: TORCH_FR_BUFFER_SIZE of them (or TORCH_NCCL_TRACE_BUFFER_SIZE), 2000 by default; 0:
// none.
class FlightRecorder {
 public:
  using Clock = std::chrono::system_clock;
  struct Group {
    std::string name;
    std::string description;
    std::vector<std::uint64_t> ranks;  // in the world
    int rank;                          // of this process, in the group
  };

  static FlightRecorder& of_process();

  // Returns what end() wants; `number`: of this call among those of the group.
  std::uint64_t begin(std::shared_ptr<const Group> group, std::uint64_t number, const RecordedCall& call);
  // Of a call that failed after half of its timeout or more: writes the dump, once, to the file that begins with
  // ZCOMM_FLIGHT_RECORDER, if that is set, and ends with this process's rank in the world. Never throws.
  void end(std::uint64_t id, bool failed) noexcept;

  // The same, whatever failed.
  void write_on_failure() noexcept;

  // A pickle: a dictionary of "version", "pg_config", "pg_status" and "entries".
  std::string dump();

 private:
  struct Entry {
    std::uint64_t id = 0;
    std::shared_ptr<const Group> group;
    std::uint64_t number = 0;
    RecordedCall call;
    Clock::time_point begun;
    Clock::time_point ended;  // zero: not yet
    bool failed = false;
  };
  FlightRecorder();
  static c10::IValue entry_of(const Entry& entry);
  static std::string title_of(const Entry& entry);
  // With the lock held.
  std::string pickled() const;
  void write_once(const Group& group);

  const std::size_t capacity_;
  std::mutex mutex_;            // of what follows
  std::vector<Entry> entries_;  // a ring
  std::uint64_t num_begun_ = 0;
  bool is_written_ = false;
};

// The calls of one group.
class GroupRecorder {
 public:
  // `ranks`: of the group, in the world; empty: it is the world. `group` outlives this.
  GroupRecorder(const ::c10d::Backend& group, std::vector<std::uint64_t> ranks);

  std::uint64_t begin(const RecordedCall& call);
  // Returns what the caller gets in place of `work`, of torch's on a CPU, so that the call ends when that is done. Some
  // of Gloo's tell it only to who waits for them.
  static c10::intrusive_ptr<::c10d::Work> follow(std::uint64_t id, c10::intrusive_ptr<::c10d::Work> work);

 private:
  // The messages of one rank to another, with one tag. To the analyzer, which expects all ranks of a group in each of
  // its calls, they are a group of the two.
  struct Channel {
    std::shared_ptr<const FlightRecorder::Group> names;
    std::uint64_t num_calls = 0;
  };
  std::uint64_t begin_point_to_point(const RecordedCall& call);

  const ::c10d::Backend& group_;
  std::vector<std::uint64_t> ranks_;
  std::once_flag named_;  // at the first call: torch names a group after it has made it
  std::shared_ptr<const FlightRecorder::Group> names_;
  std::atomic<std::uint64_t> num_calls_{0};  // collectives
  std::mutex mutex_;
  std::map<std::string, Channel> channels_;  // by what their names end with
};

}  // namespace zcomm::c10d_binding
