#include "reduce_scatter.hpp"

#include "operation_checks.hpp"

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
  std::size_t residual_bytes() const override { return plan_.residual_bytes(); }

  void check(const Resources& r, const Arguments& arguments) const override {
    const TensorView& output = only(arguments.outputs, "outputs");
    const auto slots = joined_slots(arguments.inputs, plan_.segments(), plan_.slots().lengths.size());
    const bool is_widened = !slots.empty() && output.dtype == DType::float32;
    check_slots(r, slots, output.num_elements, is_widened ? slots.front().dtype : output.dtype, "output");
    check_apart(r, arguments.outputs, arguments.inputs, "output");
    check_plan(r, plan_, shape_of(slots));
    check_feedback(arguments.feedback, plan_.feedback());
  }
  std::string words(const Arguments& arguments) const override {
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

}  // namespace

void ReduceStages::encode_sum(std::size_t first, int owner, std::int64_t chunk, std::size_t index, DecodeSumEncode job,
                              std::vector<DecodeSumEncode>& jobs) {
  job.wires = terms_from(first);
  if (!plan_.has_residual(owner, job.format)) return jobs.push_back(job);
  const Feedback& feedback = *arguments_.feedback;
  std::byte* const residual = feedback.residual + plan_.residual_offset(owner, chunk, index);
  if (!feedback.empty) {
    // Counts NaN as 0, so that a block that overflowed recovers.
    terms_.push_back({residual, feedback.format, DType::float32, feedback.decay, true});
  }
  job.wires = terms_from(first);
  jobs.push_back(job);
  terms_.push_back({job.wire, job.format, DType::float32, -1.0f});
  updates_.push_back({terms_from(first), job.num_elements, feedback.format, residual, {}});
}

std::unique_ptr<Stages> reduce_scatter_stages(const Resources& resources, const ReducePlan& plan,
                                              const Arguments& arguments, bool read_late) {
  const auto make = plan.topology().is_hierarchical() ? hierarchical_reduce_scatter : flat_reduce_scatter;
  return make(resources, plan, arguments, read_late);
}

OperationPtr make_reduce_scatter(ReducePlan plan) { return std::make_shared<ReduceScatterOperation>(std::move(plan)); }

}  // namespace zcomm
