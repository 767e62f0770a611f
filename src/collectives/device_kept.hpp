// GPU state of the values that a gather by differences keeps: their hashes, and errors.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/owned.hpp"
#include "difference_errors.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

// Hashes, and errors found by kernels, on the device that is current at construction.
class DeviceKept {
 public:
  explicit DeviceKept(const DifferencePlan& plan)
      : rank_(plan.rank()), num_chunks_(static_cast<std::size_t>(plan.num_chunks())) {
    for (int slot = 0; slot < plan.topology().size(); ++slot) {
      if (plan.place(slot) >= 0) slots_.push_back(slot);
    }
    check_cuda(cudaGetDevice(&device_), "tell the current device");
    const std::size_t count = std::max<std::size_t>(slots_.size() * num_chunks_, 1);
    hashes_ = std::make_unique<DeviceBytes>(count * sizeof(std::uint64_t));
    status_ = std::make_unique<PinnedBytes>(count * sizeof(std::uint32_t));
    std::fill_n(status(0), count, 0);
    used_ = std::make_unique<Event>();
  }
  ~DeviceKept() {
    try {
      const CudaDeviceGuard on_device(device_);
      hashes_.reset();
      status_.reset();
      used_.reset();
    } catch (const Error&) {
      // The process ends, or the device is lost.
    }
  }
  DeviceKept(const DeviceKept&) = delete;
  DeviceKept& operator=(const DeviceKept&) = delete;

  // Returns the place of one chunk of a held slot: see NodeGather::hash_number().
  std::uint64_t* hash(std::size_t number) const { return reinterpret_cast<std::uint64_t*>(hashes_->data()) + number; }
  std::uint32_t* status(std::size_t number) const { return reinterpret_cast<std::uint32_t*>(status_->data()) + number; }

  // Orders calls on different streams: each begins with make_wait() and ends with end_use().
  void make_wait(StreamView stream) const { used_->make_wait(stream); }
  void end_use(StreamView stream) { used_->record(stream); }

  // Attributes errors of later calls to a gather from generation `base`, or to the values that it leaves.
  void begin_gather(std::uint64_t base) { base_ = base; }

  // Returns the errors found so far: see Finding. Thread-safe.
  std::optional<std::string> finding() const {
    for (std::size_t i = 0; i < slots_.size() * num_chunks_; ++i) {
      const std::uint32_t errors = std::atomic_ref(*status(i)).load();
      if (errors != 0) return describe(errors, slots_[i / num_chunks_], base_);
    }
    if (used_->is_over()) return "";
    return std::nullopt;
  }
  // Throws TransportError if an error was found by now.
  void check() const {
    const std::optional<std::string> wrong = finding();
    if (wrong && !wrong->empty()) throw TransportError(*wrong);
  }

 private:
  std::string describe(std::uint32_t errors, int slot, std::uint64_t base) const {
    if (errors == kKeptError) return written_to(slot, base + 1, rank_);
    if ((errors & kBaseError) != 0) return other_base(slot, base);
    if ((errors & (kHeaderError | kGenerationError)) != 0) return other_result(slot, base, "another message arrived");
    return other_result(slot, base, (errors & kBodyError) != 0 ? "no encoder wrote what arrived" : kStrayWrite);
  }

  const int rank_;
  const std::size_t num_chunks_;
  std::vector<int> slots_;  // held slots
  std::atomic<std::uint64_t> base_ = 0;
  int device_ = 0;
  std::unique_ptr<DeviceBytes> hashes_;
  std::unique_ptr<PinnedBytes> status_;
  std::unique_ptr<Event> used_;  // after the last call
};

}  // namespace zcomm
