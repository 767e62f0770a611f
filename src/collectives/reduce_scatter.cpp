// Operations of reductions.
#include "reduce_scatter.hpp"

#include "all_gather.hpp"

namespace zcomm {
namespace {

class ReduceScatterOperation final : public Operation {
 public:
  explicit ReduceScatterOperation(ReducePlan plan) : plan_(std::move(plan)) {}

  const World& world() const override { return plan_.world(); }
  const std::string& description() const override { return plan_.description(); }
  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  std::vector<Segment<HopFormats>> segments() const override {
    return {plan_.segments().begin(), plan_.segments().end()};
  }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return plan_.bytes(); }
  OperationMemory memory() const override { return {.residual = plan_.residual_bytes()}; }

  void check(const Resources& r, const Arguments& arguments) const override {
    const TensorView& output = only(arguments.outputs, "outputs");
    const auto slots = joined_slots(arguments.inputs, plan_.segments(), plan_.slots().lengths.size());
    const bool is_widened = !slots.empty() && output.dtype == DType::float32;
    check_slots(r, slots, output.num_elements, is_widened ? slots.front().dtype : output.dtype, "output");
    check_apart(r, arguments.outputs, arguments.inputs, "output");
    check_plan(r, plan_, shape_of(slots));
    check_feedback(arguments.feedback, plan_.feedback(), plan_.residual_bytes());
  }
  std::string signature(const Arguments& arguments, bool) const override {
    return "reduce_scatter " + plan_.description() + words_of_sum(arguments);
  }
  std::unique_ptr<Stages> stages(const Resources& r, const Arguments& arguments) override {
    if (plan_.num_chunks() == 0) return nullptr;
    // Writes large outputs past the caches: the optimizer reads gradients much later.
    const bool read_late = arguments.outputs.front().num_bytes() >= std::size_t{1} << 20;
    return reduce_scatter_stages(r, plan_, arguments, read_late);
  }

 private:
  const ReducePlan plan_;
};

class AllReduceOperation final : public Operation {
 public:
  explicit AllReduceOperation(AllReducePlan plan) : plan_(std::move(plan)) {}

  const World& world() const override { return plan_.reduce().world(); }
  const std::string& description() const override { return plan_.description(); }
  std::int64_t num_chunks() const override { return plan_.gather().num_chunks(); }
  // Returns the whole tensor as one segment: its shards have whole blocks.
  std::vector<Segment<HopFormats>> segments() const override {
    return {{plan_.num_elements(), plan_.reduce().segments().front().format}};
  }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return plan_.bytes(); }
  OperationMemory memory() const override { return {.residual = plan_.residual_bytes()}; }

  void check(const Resources& r, const Arguments& arguments) const override {
    const TensorView& tensor = only(arguments.outputs, "outputs");
    check_argument(plan_.num_elements() == tensor.num_elements, "plan: expected one of the tensor's ",
                   tensor.num_elements, " elements, got ", plan_.num_elements());
    check_plan(r, plan_.reduce(), {plan_.reduce().slots().lengths, tensor.dtype});
    check_feedback(arguments.feedback, plan_.reduce().feedback(), plan_.residual_bytes());
  }
  std::string signature(const Arguments& arguments, bool) const override {
    return "all_reduce " + plan_.description() + words_of_sum(arguments);
  }
  std::unique_ptr<Stages> stages(const Resources& r, const Arguments& arguments) override {
    const GatherPlan& gather = plan_.gather();
    if (gather.num_chunks() == 0) return nullptr;
    const auto held = std::make_shared<std::pair<std::vector<TensorView>, std::vector<ConstTensorView>>>();
    auto& [slots, inputs] = *held;
    slots = split(arguments.outputs.front(), gather.topology().size(), gather.slots().lengths.front());
    inputs.assign(slots.begin(), slots.end());
    const auto rank = static_cast<std::size_t>(gather.rank());
    Arguments reduced = arguments;
    reduced.inputs = inputs;
    reduced.outputs = {&slots[rank], 1};
    // Works in place: a chunk is gathered after the sums have read all of it.
    auto stages = reduce_scatter_stages(r, plan_.reduce(), reduced, /*read_late=*/false);
    stages->second = all_gather_stages(r, gather, {&inputs[rank], 1}, slots, nullptr, {}, 2);
    stages->held = held;
    return stages;
  }

 private:
  const AllReducePlan plan_;
};

}  // namespace

OperationPtr make_reduce_scatter(ReducePlan plan) { return std::make_shared<ReduceScatterOperation>(std::move(plan)); }
OperationPtr make_all_reduce(AllReducePlan plan) { return std::make_shared<AllReduceOperation>(std::move(plan)); }

}  // namespace zcomm
