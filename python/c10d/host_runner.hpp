// Runner for CPU tensors: one job at a time, in order, on the caller's thread or its own.
#pragma once

#include <functional>
#include <mutex>

#include "group_errors.hpp"
#include "runner.hpp"
#include "work_queue.hpp"

namespace zcomm::c10d_binding {

class HostRunner final : public Runner {
 public:
  // Makes the communicator at the first job. Jobs in progress hold `keep_alive`, their owner.
  HostRunner(std::function<std::unique_ptr<Communicator>()> connect, GroupErrors& errors,
             std::function<c10::intrusive_ptr<c10::intrusive_ptr_target>()> keep_alive)
      : connect_(std::move(connect)), errors_(errors), keep_alive_(std::move(keep_alive)) {}
  ~HostRunner() override;

  WorkPtr launch(JobPtr job) override;
  bool drain(std::chrono::milliseconds limit) override { return queue_.drain(limit); }
  void abort(const std::string& reason) noexcept override;
  void stop() override { queue_.stop(); }

 private:
  class Task;
  Communicator& communicator();

  std::function<std::unique_ptr<Communicator>()> connect_;
  GroupErrors& errors_;
  std::function<c10::intrusive_ptr<c10::intrusive_ptr_target>()> keep_alive_;
  std::mutex mutex_;  // guards the next two, for abort()
  std::unique_ptr<Communicator> communicator_;
  std::string abort_reason_;
  WorkQueue queue_;  // last: its thread uses all fields above
};

}  // namespace zcomm::c10d_binding
