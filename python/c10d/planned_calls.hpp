// Collectives whose caller makes them again and again, and knows what its tensors hold: parts that are sent exactly,
// gathers that keep their wires inside the node (hpZ of ZeRO++, arXiv 2306.10209), error feedback, and calls that are
// counted by themselves. The caller holds the plan: a call that is like the one before makes none.
#pragma once

#include "compressed_calls.hpp"
#include "inner_groups.hpp"

namespace zcomm::c10d_binding {

// So many elements of a shard, and whether they are sent exactly. None: all is sent as the policy has it.
using Parts = std::vector<std::pair<std::int64_t, bool>>;

class PlannedCalls;

// What was planned, for which tensors.
template <class Plan, class Format>
struct Planned {
  c10::weak_intrusive_ptr<::c10d::Backend> group;  // whose `calls` these are
  PlannedCalls* calls;
  Format format;  // of the parts that are not sent exactly
  at::DeviceType device;
  at::ScalarType dtype;
  std::int64_t num_elements;  // of the gathered, scattered or reduced tensor
  Parts parts;
  std::shared_ptr<const Plan> plan;
};
using PlannedGather = Planned<GatherPlan, BlockFormat>;
using PlannedDifferences = Planned<DifferencePlan, BlockFormat>;
using PlannedReduce = Planned<ReducePlan, HopFormats>;
using PlannedAllReduce = Planned<AllReducePlan, HopFormats>;

// A residual, in the format that was planned.
struct HeldResidual {
  at::Tensor data;  // uint8 [residual_bytes of the plan], on the device of the call
  float decay = 1.0f;
  bool empty = false;
};

class PlannedCalls {
 public:
  // All outlive this.
  PlannedCalls(::c10d::Backend& group, c10::intrusive_ptr<ZcommOptions> options, InnerGroups& inner,
               CompressedCalls& compressed)
      : group_(group), options_(std::move(options)), inner_(inner), compressed_(compressed) {}

  // Null: the call stays exact, by the policy in force (`formats`, unless it is null, takes the place of the options',
  // but not that of an override), or as all parts do. `kept`, if it is what would be planned; it may be null. `again`:
  // a gather_secondary() will follow, which Choice::automatic counts.
  std::shared_ptr<PlannedGather> plan_gather(const at::Tensor& output, const at::Tensor& input,
                                             const PolicyOverride* formats, const Parts& parts, bool again,
                                             const std::shared_ptr<PlannedGather>& kept);
  // Of bfloat16 or float16: throws ValueError for others. The policy is not asked.
  std::shared_ptr<PlannedDifferences> plan_differences(const at::Tensor& output, const at::Tensor& input,
                                                       const std::shared_ptr<PlannedDifferences>& kept);
  // `feedback`: the format of the residual, if there is one.
  std::shared_ptr<PlannedReduce> plan_reduce(const at::Tensor& output, const at::Tensor& input,
                                             const ::c10d::ReduceOp& op, const PolicyOverride* formats,
                                             const Parts& parts, const std::optional<BlockFormat>& feedback,
                                             const std::shared_ptr<PlannedReduce>& kept);
  std::shared_ptr<PlannedAllReduce> plan_all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                                                    const PolicyOverride* formats,
                                                    const std::optional<BlockFormat>& feedback,
                                                    const std::shared_ptr<PlannedAllReduce>& kept);

  // `secondary` is filled; of `reference` see GatherExtras.
  WorkPtr gather(const PlannedGather& planned, const at::Tensor& output, const at::Tensor& input,
                 const std::optional<at::Tensor>& secondary, const std::optional<at::Tensor>& reference,
                 const SitePtr& site, bool async);
  // `output` once more, from the secondary shards of all ranks of the node. The caller knows that the values have not
  // changed since these were kept, on any rank.
  WorkPtr gather_secondary(const PlannedGather& planned, const at::Tensor& output, const at::Tensor& secondary,
                           const SitePtr& site, bool async);
  // By lossless differences to what `held` has, which is brought up to date; and once more from there.
  WorkPtr gather_differences(const PlannedDifferences& planned, const at::Tensor& output, const at::Tensor& input,
                             const HeldShardsPtr& held, const SitePtr& site, bool async);
  WorkPtr gather_held(const PlannedDifferences& planned, const at::Tensor& output, const HeldShardsPtr& held,
                      const SitePtr& site, bool async);
  // On a GPU: `input` is what the next gather to `held` sends.
  struct ToPrepare {
    std::shared_ptr<PlannedDifferences> planned;
    at::Tensor input;
    HeldShardsPtr held;
    SitePtr site;
  };
  WorkPtr prepare_differences(const std::vector<ToPrepare>& gathers, bool async);
  WorkPtr reduce(const PlannedReduce& planned, const at::Tensor& output, const at::Tensor& input,
                 const ::c10d::ReduceOp& op, const std::optional<HeldResidual>& residual, const SitePtr& site,
                 bool async);
  WorkPtr all_reduce(const PlannedAllReduce& planned, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                     const std::optional<HeldResidual>& residual, bool async);

 private:
  Policy policy_of(const PolicyOverride* formats) const;
  template <class P, class Format>
  bool is_planned(const std::shared_ptr<P>& kept, const Format& format, const at::Tensor& whole, const Parts& parts);
  template <class P, class Format, class Plan>
  std::shared_ptr<P> planned(const Format& format, const at::Tensor& whole, const Parts& parts,
                             std::shared_ptr<const Plan> plan);
  template <class P>
  void check_planned(const P& planned, const at::Tensor& whole) const;
  CallSettings settings(bool async) const { return {options_->policy, options_->timeout, async}; }

  ::c10d::Backend& group_;
  c10::intrusive_ptr<ZcommOptions> options_;
  InnerGroups& inner_;
  CompressedCalls& compressed_;
};

}  // namespace zcomm::c10d_binding
