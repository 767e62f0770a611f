// Stages of gathers, and helpers of their operations.
#pragma once

#include <memory>
#include <span>

#include "operation_checks.hpp"
#include "stages.hpp"

namespace zcomm {

// Makes the stages of make_all_gather(); fills `secondary` unless it is null, and `wires` in place of the
// slots unless it is empty. Without a shard, gathers from the `secondary` of all ranks of the node. `hop_of_call`: the
// number of the first hop. The arguments must outlive the stages; there is at least one chunk.
std::unique_ptr<Stages> all_gather_stages(const Resources& resources, const GatherPlan& plan,
                                          std::span<const ConstTensorView> shard, std::span<const TensorView> slots,
                                          SecondaryShard* secondary = nullptr, std::span<std::byte> wires = {},
                                          std::size_t hop_of_call = 0);

// Tells whether a call repeats a gather from kept values.
inline bool is_again(const Arguments& arguments) { return arguments.inputs.empty(); }

// Ends a description that ranks compare. Ranks that differ in it have changed their weights differently.
inline constexpr const char* kUnchanged = ", of weights that have not changed";

inline void check_gathered(const Resources& r, const Arguments& arguments) {
  if (!is_again(arguments)) {
    const ConstTensorView& shard = only(arguments.inputs, "inputs");
    return check_slots(r, arguments.outputs, shard.num_elements, shard.dtype, "shard");
  }
  const bool is_complete = arguments.outputs.size() == static_cast<std::size_t>(r.world.topology.size());
  const TensorView own = is_complete ? arguments.outputs[static_cast<std::size_t>(r.world.rank)] : TensorView{};
  check_slots(r, arguments.outputs, own.num_elements, own.dtype, "slots");
}

}  // namespace zcomm
