// Host side of the kernels for lossless differences: a call launches three of them, each for all jobs.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "codec/cuda/launcher.hpp"
#include "codec/cuda/lossless_cuda.hpp"
#include "codec/cuda/lossless_decode.cuh"
#include "codec/cuda/lossless_encode.cuh"
#include "codec/lossless/checks.hpp"
#include "cuda/owned.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm::gpu {
namespace {

// Returns the values that all kernels of a job know: those that it changes, or hashes.
template <class Job>
TensorView values_of(const Job& job) {
  if constexpr (requires { job.base; }) {
    return job.base;
  } else {
    return {const_cast<std::byte*>(job.values.data), job.values.num_elements, job.values.dtype};
  }
}

// Returns the bytes of a job's scratch: its state, then the starts of its tiles.
template <class Job>
std::size_t scratch_bytes(const Job& job) {
  const std::int64_t num_starts = divide_up(values_of(job).num_elements, std::int64_t{kTileValues} * kStartTiles);
  return sizeof(LosslessState) + 8 * static_cast<std::size_t>(num_starts);
}

constexpr auto one_cta = [](const auto&) { return std::int64_t{1}; };
// CTAs for a piece, with one tile per warp.
constexpr auto tile_ctas = [](const auto& piece) {
  return divide_up(static_cast<std::int64_t>(piece.num_elements), std::int64_t{kTileValues} * kTileWarps);
};
constexpr auto finish_ctas = [](const FinishPiece& piece) {
  constexpr std::int64_t kValues = std::int64_t{kThreads} * kFinishGroups * kGroup;
  return std::max<std::int64_t>(1, divide_up(static_cast<std::int64_t>(piece.num_spoiled), kValues));
};

template <class Table, class NumCtas>
void launch(const char* action, Kernel<Table> kernel, std::uint32_t threads,
            const std::vector<typename Table::Piece>& pieces, NumCtas num_ctas, StreamView stream) {
  Launcher launcher(stream, action, kernel, threads);
  for (const auto& piece : pieces) {
    if (num_ctas(piece) > 0) launcher.add(piece, num_ctas(piece));
  }
  launcher.launch();
}

class CudaJobMemory final : public JobMemory {
 public:
  CudaJobMemory(std::unique_ptr<DeviceBytes> data, std::unique_ptr<PinnedBytes> shared)
      : JobMemory(data->data(), shared->data()),
        data_(std::move(data)),
        shared_(std::move(shared)),
        used_(std::make_unique<Event>()) {
    check_cuda(cudaGetDevice(&device_), "tell the current device");
    std::memset(shared_->data(), 0, shared_->size());
  }
  ~CudaJobMemory() override {
    try {
      const CudaDeviceGuard on_device(device_);
      data_.reset();
      shared_.reset();
      used_.reset();
    } catch (const Error&) {
      // The process ends, or the device is lost.
    }
  }

  void mark_use(StreamView stream) override { used_->record(stream); }
  void make_wait(StreamView stream) const override { used_->make_wait(stream); }
  void wait() const override { used_->wait(); }
  bool is_over() const override { return used_->is_over(); }
  bool is_at_once() const override { return false; }

 private:
  int device_ = 0;
  std::unique_ptr<DeviceBytes> data_;
  std::unique_ptr<PinnedBytes> shared_;
  std::unique_ptr<Event> used_;
};

class CudaLossless final : public LosslessCodec {
 public:
  explicit CudaLossless(Workspace& workspace) : workspace_(workspace) {}

  void encode(std::span<const EncodeLossless> jobs, StreamView stream) const override {
    std::vector<EncodeLosslessPiece> pieces;
    run(
        jobs, stream,
        [&](const EncodeLossless& job, const LosslessPiece& piece) {
          pieces.push_back({piece, job.values.data, job.message, job.hash, job.num_bytes, job.generation});
        },
        [&] {
          launch<EncodeLosslessTable>("measure differences", measure_kernel<>, kTileThreads, pieces, tile_ctas, stream);
          launch<EncodeLosslessTable>("write headers of differences", seal_kernel<>, kThreads, pieces, one_cta, stream);
          launch<EncodeLosslessTable>("write differences", write_kernel<>, kTileThreads, pieces, tile_ctas, stream);
        });
  }

  void decode(std::span<const DecodeLossless> jobs, StreamView stream) const override {
    std::vector<DecodeLosslessPiece> pieces;
    std::vector<FinishPiece> finishes;
    run(
        jobs, stream,
        [&](const DecodeLossless& job, const LosslessPiece& piece) {
          pieces.push_back({piece, job.message, job.num_bytes, job.hash, job.generation});
          const bool has_header = job.num_bytes >= kLosslessHeaderBytes;
          const auto* const fields = reinterpret_cast<const std::uint64_t*>(job.message);
          finishes.push_back({piece, piece.base, piece.num_elements, has_header ? fields + 4 : nullptr, job.hash,
                              job.status, kResultError, nan_of(piece.dtype)});
        },
        [&] {
          launch<DecodeLosslessTable>("read headers of differences", begin_kernel<>, kThreads, pieces, one_cta, stream);
          launch<DecodeLosslessTable>("add differences", decode_lossless_kernel<>, kTileThreads, pieces, tile_ctas,
                                      stream);
          launch<FinishTable>("compare hashes", finish_kernel<>, kThreads, finishes, finish_ctas, stream);
        });
  }

  void check(std::span<const CheckHash> jobs, StreamView stream) const override {
    std::vector<LosslessPiece> pieces;
    std::vector<FinishPiece> finishes;
    run(
        jobs, stream,
        [&](const CheckHash& job, const LosslessPiece& piece) {
          pieces.push_back(piece);
          const bool sets = job.status == nullptr;
          finishes.push_back({piece, job.spoiled.data, static_cast<std::uint64_t>(job.spoiled.num_elements),
                              sets ? nullptr : job.hash, sets ? job.hash : nullptr, job.status, kSecondaryError,
                              nan_of(piece.dtype)});
        },
        [&] {
          launch<HashTable>("hash values", hash_kernel<>, kTileThreads, pieces, tile_ctas, stream);
          launch<FinishTable>("compare hashes", finish_kernel<>, kThreads, finishes, finish_ctas, stream);
        });
  }

  std::unique_ptr<JobMemory> make_memory(std::size_t num_bytes, std::size_t num_shared_bytes) const override {
    return std::make_unique<CudaJobMemory>(std::make_unique<DeviceBytes>(std::max<std::size_t>(num_bytes, 1)),
                                           std::make_unique<PinnedBytes>(std::max<std::size_t>(num_shared_bytes, 1)));
  }

 private:
  // Checks all jobs; calls add(job, piece) for each, whose state is in zeroed scratch, and then launch_all().
  template <class Job, class Add, class LaunchAll>
  void run(std::span<const Job> jobs, StreamView stream, const Add& add, const LaunchAll& launch_all) const {
    std::size_t num_bytes = 0;
    for (const Job& job : jobs) {
      lossless::check_job(job);
      num_bytes += scratch_bytes(job);
    }
    if (jobs.empty()) return;
    const Scratch scratch(workspace_, num_bytes, stream);
    check_cuda(cudaMemsetAsync(scratch.data(), 0, num_bytes, as_cuda(stream)), "zero the states of differences");
    std::byte* next = scratch.data();
    for (const Job& job : jobs) {
      const TensorView values = values_of(job);
      add(job, LosslessPiece{reinterpret_cast<LosslessState*>(next), values.data,
                             static_cast<std::uint64_t>(values.num_elements), values.dtype});
      next += scratch_bytes(job);
    }
    launch_all();
  }

  Workspace& workspace_;
};

}  // namespace

std::unique_ptr<LosslessCodec> make_cuda_lossless(Workspace& workspace) {
  return std::make_unique<CudaLossless>(workspace);
}

}  // namespace zcomm::gpu
