// All-gathers that keep the wires inside the node, and gathers of what is kept: hpZ of ZeRO++ (arXiv 2306.10209). Who
// uses them knows that the values have not changed in between, on any rank.
#include "process_group.hpp"

namespace zcomm::c10d_binding {

std::size_t ProcessGroup::secondary_bytes_of(int rank, const at::Tensor& output, BlockFormat format) {
  agree();
  return secondary_bytes(*topology_, rank, options_->chunk_bytes, slots_of(output, getSize()), format);
}

void ProcessGroup::check_secondary(const at::Tensor& secondary, const at::Tensor& output, BlockFormat format) {
  const std::size_t num_bytes = secondary_bytes_of(getRank(), output, format);
  TORCH_CHECK_VALUE(secondary.scalar_type() == at::kByte && secondary.is_contiguous() &&
                        secondary.device() == output.device() && secondary.nbytes() == num_bytes,
                    "zcomm: secondary is ", secondary.numel(), " ", secondary.scalar_type(), " on ", secondary.device(),
                    ", need ", num_bytes, " Byte on ", output.device(), ", contiguous");
}

std::tuple<std::size_t, std::size_t, std::string> ProcessGroup::secondary_shard(const at::Tensor& output,
                                                                                const at::Tensor& input) {
  const Policy policy = effective_policy(options_->policy);
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = is_own_slot(output, input, getRank());
  if (judge(policy, call) != Verdict::compressed) return {0, 0, "exact"};
  check_shapes(output, input, getSize(), "output", "input");
  // The first local ranks keep the most: a node's ranks take turns with the slots.
  std::size_t largest = 0;
  for (int node = 0; node < topology_->num_nodes(); ++node) {
    largest = std::max(largest, secondary_bytes_of(topology_->ranks(node).front(), output, policy.all_gather));
  }
  return {secondary_bytes_of(getRank(), output, policy.all_gather), largest, policy.all_gather.to_string()};
}

WorkPtr ProcessGroup::all_gather_keeping(at::Tensor output, at::Tensor input, at::Tensor secondary,
                                         const std::string& format, bool async) {
  Terms terms{options_->policy, options_->timeout, async};
  terms.policy.all_gather = BlockFormat::parse(format);
  check_shapes(output, input, getSize(), "output", "input");
  check_secondary(secondary, output, terms.policy.all_gather);
  count(describe(Collective::all_gather, Form::single, input, {&output, 1}), Verdict::compressed);
  return launch_all_gather(::c10d::OpType::_ALLGATHER_BASE, input, slots_of(output, getSize()), {output}, terms,
                           secondary);
}

WorkPtr ProcessGroup::gather_secondary(at::Tensor output, at::Tensor secondary, const std::string& format, bool async) {
  const BlockFormat wire_format = BlockFormat::parse(format);
  check_secondary(secondary, output, wire_format);
  count(describe(Collective::all_gather, Form::single, output, {&output, 1}), Verdict::compressed);
  return launch(
      Collective::all_gather, ::c10d::OpType::_ALLGATHER_BASE, "zcomm:gather_secondary", {secondary}, {output}, async,
      [slots = slots_of(output, getSize()), wire_format, kept = static_cast<const std::byte*>(secondary.data_ptr()),
       timeout = options_->timeout](Communicator& communicator, StreamView stream) {
        return communicator.gather_secondary(kept, slots, wire_format, timeout, stream);
      });
}

}  // namespace zcomm::c10d_binding
