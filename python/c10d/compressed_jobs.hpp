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
  std::shared_ptr<const GatherPlan> plan;
  ConstTensorView shard;
  std::vector<TensorView> slots;
  GatherExtras extras;

  void run(Communicator& communicator, StreamView stream) override;
};

// What differences refer to, as its owner in Python holds it.
struct HeldShards {
  at::Tensor data;  // uint8 [kept_bytes of the plan]
  KeptShards kept;  // of this data
};
using HeldShardsPtr = std::shared_ptr<HeldShards>;

struct DifferenceGatherJob final : CompressedJob {
  std::shared_ptr<const DifferencePlan> plan;
  std::optional<ConstTensorView> shard;  // none: from what is held
  std::vector<TensorView> slots;
  HeldShardsPtr held;

  void run(Communicator& communicator, StreamView stream) override;
};

// From secondary shards.
struct GatherSecondaryJob final : CompressedJob {
  std::shared_ptr<const GatherPlan> plan;
  const std::byte* secondary = nullptr;
  std::vector<TensorView> slots;

  void run(Communicator& communicator, StreamView stream) override;
};

struct ReduceScatterJob final : CompressedJob {
  std::shared_ptr<const ReducePlan> plan;
  std::vector<ConstTensorView> slots;
  TensorView output;
  float factor = 1.0f;
  std::optional<Feedback> feedback;

  void run(Communicator& communicator, StreamView stream) override;
};

struct AllReduceJob final : CompressedJob {
  std::shared_ptr<const AllReducePlan> plan;
  TensorView tensor;
  float factor = 1.0f;
  std::optional<Feedback> feedback;

  void run(Communicator& communicator, StreamView stream) override;
};

}  // namespace zcomm::c10d_binding
