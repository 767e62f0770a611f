// The compressed collectives as jobs: how each is sampled, run and counted.
#pragma once

#include <optional>

#include "job.hpp"
#include "site.hpp"
#include "telemetry.hpp"

namespace zcomm::c10d_binding {

struct CompressedJob : Job {
  std::uint64_t seed = 0;  // of stochastic rounding
  std::chrono::milliseconds timeout{0};
  SitePtr site;
  Telemetry* telemetry = nullptr;
  Stats::Compressed* cost = nullptr;  // of all calls of this collective

 protected:
  void count(const CallStats& stats);
};

struct AllGatherJob final : CompressedJob {
  ConstTensorView shard;
  std::vector<TensorView> slots;
  std::vector<Segment<BlockFormat>> segments;
  GatherExtras extras;

  void run(Communicator& communicator, StreamView stream) override;
};

// From secondary shards.
struct GatherSecondaryJob final : CompressedJob {
  const std::byte* secondary = nullptr;
  std::vector<TensorView> slots;
  std::vector<Segment<BlockFormat>> segments;

  void run(Communicator& communicator, StreamView stream) override;
};

struct ReduceScatterJob final : CompressedJob {
  std::vector<ConstTensorView> slots;
  TensorView output;
  std::vector<Segment<HopFormats>> segments;
  float factor = 1.0f;
  std::optional<Feedback> feedback;

  void run(Communicator& communicator, StreamView stream) override;
};

struct AllReduceJob final : CompressedJob {
  TensorView tensor;
  HopFormats formats;
  float factor = 1.0f;
  std::optional<Feedback> feedback;

  void run(Communicator& communicator, StreamView stream) override;
};

}  // namespace zcomm::c10d_binding
