// The compressed collectives as jobs: how each is sampled, run and counted.
#pragma once

#include <optional>
#include <string>

#include "job.hpp"
#include "site.hpp"
#include "telemetry.hpp"

namespace zcomm::c10d_binding {

// A call in the terms of torch's traces.
struct CallSummary {
  const char* name;              // that torch's own backends have for the collective
  std::int64_t in_elements = 0;  // of this rank's tensors
  std::int64_t out_elements = 0;
};

struct CompressedJob : Job {
  virtual CallSummary summary() const = 0;
  virtual const std::string& plan_text() const = 0;  // shape and formats
  // Of this rank. Empty for differences, whose size is known when they are made.
  virtual std::optional<LinkBytes> wire_bytes() const = 0;

  std::uint64_t seed = 0;  // of stochastic rounding
  std::chrono::milliseconds timeout{0};
  SitePtr site;
  Telemetry* telemetry = nullptr;
  Stats::Compressed* cost = nullptr;  // of all calls of this collective

 protected:
  void count(const CallStats& stats);
};

template <class Plan>
struct PlannedJob : CompressedJob {
  std::shared_ptr<const Plan> plan;

  const std::string& plan_text() const override { return plan->description(); }
  std::optional<LinkBytes> wire_bytes() const override {
    if constexpr (requires(const Plan& any) { any.bytes(); }) return plan->bytes();
    return {};
  }
};

struct AllGatherJob final : PlannedJob<GatherPlan> {
  ConstTensorView shard;
  std::vector<TensorView> slots;
  GatherExtras extras;

  void run(Communicator& communicator, StreamView stream) override;
  CallSummary summary() const override;
};

// What differences refer to, as its owner in Python holds it.
struct HeldShards {
  at::Tensor data;  // uint8 [kept_bytes of the plan], on the device of the gathers
  KeptShards kept;  // of this data
};
using HeldShardsPtr = std::shared_ptr<HeldShards>;

// What comes ahead of gathers by differences on a GPU: Communicator::prepare_differences().
struct DifferencePrepareJob final : CompressedJob {
  struct Shard {
    std::shared_ptr<const DifferencePlan> plan;
    ConstTensorView values;
    HeldShardsPtr held;
    SitePtr site;
  };
  std::vector<Shard> shards;
  std::string text;

  void run(Communicator& communicator, StreamView stream) override;
  CallSummary summary() const override;
  const std::string& plan_text() const override { return text; }
  std::optional<LinkBytes> wire_bytes() const override { return {}; }
};

struct DifferenceGatherJob final : PlannedJob<DifferencePlan> {
  std::optional<ConstTensorView> shard;  // none: from what is held
  std::vector<TensorView> slots;
  HeldShardsPtr held;

  void run(Communicator& communicator, StreamView stream) override;
  CallSummary summary() const override;
};

// From secondary shards.
struct GatherSecondaryJob final : PlannedJob<GatherPlan> {
  const std::byte* secondary = nullptr;
  std::vector<TensorView> slots;

  void run(Communicator& communicator, StreamView stream) override;
  CallSummary summary() const override;
  std::optional<LinkBytes> wire_bytes() const override { return plan->bytes_from_secondary(); }
};

struct ReduceScatterJob final : PlannedJob<ReducePlan> {
  std::vector<ConstTensorView> slots;
  TensorView output;
  float factor = 1.0f;
  std::optional<Feedback> feedback;

  void run(Communicator& communicator, StreamView stream) override;
  CallSummary summary() const override;
};

struct AllReduceJob final : PlannedJob<AllReducePlan> {
  TensorView tensor;
  float factor = 1.0f;
  std::optional<Feedback> feedback;

  void run(Communicator& communicator, StreamView stream) override;
  CallSummary summary() const override;
};

}  // namespace zcomm::c10d_binding
