// Operations of lossless gathers; difference_gather.cpp has their stages.
#include <algorithm>
#include <utility>

#include "all_gather.hpp"
#include "difference_gather.hpp"
#include "preparation.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {
namespace {

class LosslessGather final : public Operation {
 public:
  LosslessGather(std::shared_ptr<const DifferencePlan> plan, std::shared_ptr<Kept> kept)
      : plan_(std::move(plan)), kept_(std::move(kept)) {}

  const World& world() const override { return plan_->world(); }
  const std::string& description() const override { return plan_->description(); }
  std::int64_t num_chunks() const override { return plan_->num_chunks(); }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return {}; }
  std::size_t kept_bytes() const override { return plan_->kept_bytes(); }
  std::size_t largest_kept_bytes() const override { return plan_->largest_kept_bytes(); }
  OperationPtr keeping(std::shared_ptr<Kept> kept) const override {
    return make_lossless_gather(plan_, std::move(kept));
  }

  void check(const Resources& r, const Arguments& arguments) const override {
    check_gathered(r, arguments);
    check_plan(r, *plan_, shape_of(arguments.outputs));
    check_memory(r);
    if (!is_again(arguments)) return;
    check_argument(kept_->generation > 0, [] {
      return std::string(
          "kept: expected shards that an all_gather by differences has filled, got those of generation 0");
    });
    check_argument(!r.preparations.is_prepared(*kept_), [] {
      return std::string("kept: expected shards that were gathered, got those of a gather that is only prepared");
    });
  }
  std::string words(const Arguments& arguments) const override {
    const std::string generation = std::to_string(kept_->generation);
    if (is_again(arguments)) return "gather_secondary " + description() + " of generation " + generation + kUnchanged;
    return "all_gather " + description() + " to generation " + generation + ", of weights that may have changed";
  }
  Peers peers(const Arguments& arguments) const override { return is_again(arguments) ? Peers::of_node : Peers::usual; }
  Pipeline stages(const Resources& r, const Arguments& arguments) override {
    if (is_again(arguments)) return {{}, kept_stages(r, *plan_, *kept_, arguments.outputs)};
    auto messages = r.preparations.messages(r, difference(arguments.inputs.front()));
    return {{}, difference_stages(r, *plan_, *kept_, arguments.outputs, std::move(messages))};
  }

  ShardDifference difference(ConstTensorView shard) const { return {*plan_, shard, *kept_}; }
  std::uint64_t generation() const { return kept_->generation; }

  void check_shard(const Resources& r, ConstTensorView shard) const {
    const std::int64_t length = plan_->slots().lengths[static_cast<std::size_t>(world().rank)];
    check_argument(shard.num_elements == length && shard.dtype == plan_->slots().dtype, [&] {
      return "inputs: expected " + std::to_string(length) + " elements of " +
             std::string(to_string(plan_->slots().dtype)) + ", as was planned, got " +
             std::to_string(shard.num_elements) + " of " + std::string(to_string(shard.dtype));
    });
    check_plan(r, *plan_, plan_->slots());
    check_memory(r);
  }

 private:
  void check_memory(const Resources& r) const {
    check_argument(r.codec.lossless() != nullptr,
                   [] { return std::string("codec: expected one of lossless differences, got one without"); });
    check_argument(kept_ != nullptr, [] { return std::string("kept: expected memory, got none"); });
    check_kept(*kept_, plan_->kept_bytes());
    check_argument(!r.preparations.are_needed() || !is_capturing(r.stream), [] {
      return std::string(
          "stream: expected one that runs, got one that records a CUDA graph: the sizes of differences change, and a "
          "graph's do not");
    });
  }

  const std::shared_ptr<const DifferencePlan> plan_;
  const std::shared_ptr<Kept> kept_;
};

class PreparationOperation final : public Operation {
 public:
  explicit PreparationOperation(std::vector<OperationPtr> gathers) {
    check_argument(!gathers.empty(), [] { return std::string("gathers: expected at least one, got none"); });
    for (OperationPtr& gather : gathers) {
      auto lossless = std::dynamic_pointer_cast<LosslessGather>(std::move(gather));
      check_argument(lossless != nullptr,
                     [] { return std::string("gathers: expected lossless ones, got one that encodes"); });
      check_argument(std::find(gathers_.begin(), gathers_.end(), lossless) == gathers_.end(),
                     [] { return std::string("gathers: expected each once, got one twice"); });
      gathers_.push_back(std::move(lossless));
    }
    description_ = std::to_string(gathers_.size()) + " gathers, the first of " + gathers_.front()->description();
  }

  const World& world() const override { return gathers_.front()->world(); }
  const std::string& description() const override { return description_; }
  std::int64_t num_chunks() const override { return 0; }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return {}; }

  void check(const Resources& r, const Arguments& arguments) const override {
    check_argument(r.preparations.are_needed(), [] {
      return std::string(
          "codec: expected that of a GPU, got one of host memory: there sizes are sent with each gather");
    });
    check_argument(arguments.inputs.size() == gathers_.size(), [&] {
      return "inputs: expected the shards of " + std::to_string(gathers_.size()) + " gathers, got " +
             std::to_string(arguments.inputs.size());
    });
    for (std::size_t i = 0; i < gathers_.size(); ++i) gathers_[i]->check_shard(r, arguments.inputs[i]);
  }
  std::string words(const Arguments&) const override {
    return "prepare " + description_ + " to generation " + std::to_string(gathers_.front()->generation());
  }
  Pipeline stages(const Resources& r, const Arguments& arguments) override {
    std::vector<ShardDifference> shards;
    shards.reserve(gathers_.size());
    for (std::size_t i = 0; i < gathers_.size(); ++i) shards.push_back(gathers_[i]->difference(arguments.inputs[i]));
    r.preparations.prepare(r, shards);
    return {};
  }

 private:
  std::vector<std::shared_ptr<LosslessGather>> gathers_;
  std::string description_;
};

}  // namespace

OperationPtr make_lossless_gather(std::shared_ptr<const DifferencePlan> plan, std::shared_ptr<Kept> kept) {
  return std::make_shared<LosslessGather>(std::move(plan), std::move(kept));
}

OperationPtr make_preparation(std::vector<OperationPtr> gathers) {
  return std::make_shared<PreparationOperation>(std::move(gathers));
}

}  // namespace zcomm
