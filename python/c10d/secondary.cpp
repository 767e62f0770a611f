// All-gathers that keep the wires inside the node, and gathers of what is kept: hpZ of ZeRO++ (arXiv 2306.10209). Who
// uses them knows that the values have not changed in between, on any rank.
#include "process_group.hpp"

namespace zcomm::c10d_binding {
namespace {

std::byte* check_secondary(const at::Tensor& secondary, const at::Tensor& output, std::size_t num_bytes) {
  TORCH_CHECK_VALUE(secondary.scalar_type() == at::kByte && secondary.is_contiguous() &&
                        secondary.device() == output.device() && secondary.nbytes() == num_bytes,
                    "zcomm: secondary is ", secondary.numel(), " ", secondary.scalar_type(), " on ", secondary.device(),
                    ", need ", num_bytes, " Byte on ", output.device(), ", contiguous");
  return static_cast<std::byte*>(secondary.data_ptr());
}

}  // namespace

std::tuple<std::size_t, std::size_t, std::string> ProcessGroup::secondary_shard(const at::Tensor& output,
                                                                                const at::Tensor& input) {
  const Policy policy = effective_policy(options_->policy);
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = is_own_slot(output, input, getRank());
  if (judge(policy, call) != Verdict::compressed) return {0, 0, "exact"};
  check_shapes(output, input, getSize(), "output", "input");
  const auto slots = slots_of(output, getSize());
  const auto bytes_of = [&](int rank) {
    return secondary_bytes(*topology_, rank, options_->chunk_bytes, slots, policy.all_gather);
  };
  // The first local ranks keep the most: a node's ranks take turns with the slots.
  std::size_t largest = 0;
  for (int node = 0; node < topology_->num_nodes(); ++node) {
    largest = std::max(largest, bytes_of(topology_->ranks(node).front()));
  }
  return {bytes_of(getRank()), largest, policy.all_gather.to_string()};
}

WorkPtr ProcessGroup::all_gather_keeping(at::Tensor output, at::Tensor input, at::Tensor secondary,
                                         const std::string& format, bool async) {
  const auto slots = slots_of(output, getSize());
  const BlockFormat wire_format = BlockFormat::parse(format);
  std::byte* kept = check_secondary(secondary, output,
                                    secondary_bytes(*topology_, getRank(), options_->chunk_bytes, slots, wire_format));
  count(describe(Collective::all_gather, Form::single, input, {&output, 1}), Verdict::compressed);
  return launch(Collective::all_gather, ::c10d::OpType::_ALLGATHER_BASE, "zcomm:all_gather", {input, secondary},
                {output}, async,
                [shard = view_of(input), slots, wire_format, kept, timeout = options_->timeout](
                    Communicator& communicator, StreamView stream) {
                  return communicator.all_gather(shard, slots, wire_format, timeout, stream, kept);
                });
}

WorkPtr ProcessGroup::gather_secondary(at::Tensor output, at::Tensor secondary, const std::string& format, bool async) {
  const auto slots = slots_of(output, getSize());
  const BlockFormat wire_format = BlockFormat::parse(format);
  const std::byte* kept = check_secondary(
      secondary, output, secondary_bytes(*topology_, getRank(), options_->chunk_bytes, slots, wire_format));
  count(describe(Collective::all_gather, Form::single, output, {&output, 1}), Verdict::compressed);
  return launch(Collective::all_gather, ::c10d::OpType::_ALLGATHER_BASE, "zcomm:gather_secondary", {secondary},
                {output}, async,
                [slots, wire_format, kept, timeout = options_->timeout](Communicator& communicator, StreamView stream) {
                  return communicator.gather_secondary(kept, slots, wire_format, timeout, stream);
                });
}

}  // namespace zcomm::c10d_binding
