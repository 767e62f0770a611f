// Operations that are called once.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "zcomm/communicator.hpp"
#include "zcomm/exchange.hpp"
#include "zcomm/gather.hpp"

namespace zcomm::test {

inline CallStats gather(Communicator& communicator, GatherPlan plan, ConstTensorView shard,
                        std::span<const TensorView> slots, std::chrono::milliseconds timeout, StreamView stream = {},
                        std::shared_ptr<SecondaryShard> kept = {}) {
  const auto operation = make_all_gather(std::make_shared<const GatherPlan>(std::move(plan)), std::move(kept));
  return communicator.run(*operation, {{&shard, 1}, slots}, timeout, stream);
}

inline CallStats all_gather(Communicator& communicator, ConstTensorView shard, std::span<const TensorView> slots,
                            GatherSegments segments, std::chrono::milliseconds timeout, StreamView stream = {}) {
  return gather(communicator, {communicator.world(), shape_of(slots), segments}, shard, slots, timeout, stream);
}

inline CallStats all_gather(Communicator& communicator, ConstTensorView shard, std::span<const TensorView> slots,
                            BlockFormat format, std::chrono::milliseconds timeout, StreamView stream = {}) {
  const Segment<BlockFormat> whole{shape_of(slots).longest(), format};
  return all_gather(communicator, shard, slots, GatherSegments(&whole, 1), timeout, stream);
}

// From what a gather with this plan has kept.
inline CallStats gather_again(Communicator& communicator, GatherPlan plan, std::span<const TensorView> slots,
                              std::shared_ptr<SecondaryShard> kept, std::chrono::milliseconds timeout,
                              StreamView stream = {}) {
  const auto operation = make_all_gather(std::make_shared<const GatherPlan>(std::move(plan)), std::move(kept));
  return communicator.run(*operation, {{}, slots}, timeout, stream);
}

inline CallStats reduce(Communicator& communicator, ReducePlan plan, std::span<const ConstTensorView> slots,
                        TensorView output, float factor, std::chrono::milliseconds timeout, StreamView stream = {},
                        const Feedback* feedback = nullptr) {
  const auto operation = make_reduce_scatter(std::move(plan));
  return communicator.run(*operation, {slots, {&output, 1}, factor, feedback}, timeout, stream);
}

inline std::optional<BlockFormat> format_of(const Feedback* feedback) {
  if (feedback == nullptr) return std::nullopt;
  return feedback->format;
}

inline CallStats reduce_scatter(Communicator& communicator, std::span<const ConstTensorView> slots, TensorView output,
                                ReduceSegments segments, float factor, std::chrono::milliseconds timeout,
                                StreamView stream = {}, const Feedback* feedback = nullptr) {
  ReducePlan plan(communicator.world(), shape_of(slots), segments, format_of(feedback));
  return reduce(communicator, std::move(plan), slots, output, factor, timeout, stream, feedback);
}

inline CallStats reduce_scatter(Communicator& communicator, std::span<const ConstTensorView> slots, TensorView output,
                                HopFormats formats, float factor, std::chrono::milliseconds timeout,
                                StreamView stream = {}) {
  const Segment<HopFormats> whole{shape_of(slots).longest(), formats};
  return reduce_scatter(communicator, slots, output, ReduceSegments(&whole, 1), factor, timeout, stream);
}

inline CallStats reduce_all(Communicator& communicator, AllReducePlan plan, TensorView tensor, float factor,
                            std::chrono::milliseconds timeout, StreamView stream = {},
                            const Feedback* feedback = nullptr) {
  const auto operation = make_all_reduce(std::move(plan));
  return communicator.run(*operation, {{}, {&tensor, 1}, factor, feedback}, timeout, stream);
}

inline CallStats all_reduce(Communicator& communicator, TensorView tensor, HopFormats formats, float factor,
                            std::chrono::milliseconds timeout, StreamView stream = {},
                            const Feedback* feedback = nullptr) {
  AllReducePlan plan(communicator.world(), tensor.num_elements, tensor.dtype, formats, format_of(feedback));
  return reduce_all(communicator, std::move(plan), tensor, factor, timeout, stream, feedback);
}

inline CallStats all_to_all(Communicator& communicator, std::span<const ConstTensorView> inputs,
                            std::span<const TensorView> outputs, HopFormats formats, std::chrono::milliseconds timeout,
                            StreamView stream = {}) {
  const auto operation = make_exchange(ExchangePlan::all_to_all(
      communicator.world(), shape_of(inputs).lengths, shape_of(outputs).lengths, inputs.front().dtype, formats));
  return communicator.run(*operation, {inputs, outputs}, timeout, stream);
}

inline CallStats broadcast(Communicator& communicator, TensorView tensor, int root, BlockFormat format,
                           std::chrono::milliseconds timeout, StreamView stream = {}) {
  const auto operation = make_broadcast(communicator.world(), root, tensor.num_elements, tensor.dtype, format);
  return communicator.run(*operation, {{}, {&tensor, 1}}, timeout, stream);
}

}  // namespace zcomm::test
