// Operations: collectives that are ready to be called, once or repeatedly. An operation is a plan, bound to the values
// that it keeps between calls. Communicator::run() runs it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zcomm/call.hpp"
#include "zcomm/error.hpp"
#include "zcomm/plan.hpp"
#include "zcomm/tensor_view.hpp"

namespace zcomm {

class Stages;

// Error feedback of a reduction: adds the error of an encoding to the next one, so that values are late but not lost.
// Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv 1901.09847); with a compressed residual, LoCo (arXiv
// 2407.04480).
//
// The caller keeps the residual between calls, which must have the same lengths, dtype, segments and factor.
// The residual covers the values that this rank encodes for other nodes: with two hops its sums over its node, with one
// hop the slots of their ranks. In a single node it covers all values that this rank encodes.
// Parts that are sent uncompressed have no residual.
struct Feedback {
  std::byte* residual = nullptr;  // OperationMemory::residual bytes, aligned to kWireAlignment; read and written
  // Format of the residual, as it was planned. It must be lossy and round to nearest.
  BlockFormat format{ElementKind::int8, 128};
  float decay = 1.0f;  // factor of the residual in each call, 0 to 1
  bool empty = false;  // true: the residual has no values yet, and is only written
};

// Inputs and outputs of one call, borrowed until it is done.
//
// The functions that make operations say which views a call takes. The views of a gather, and the inputs of a
// reduction, may be given per segment instead of per slot (slot-major order), so parameters need not be contiguous.
// Every slot must then have the planned length of every segment.
struct Arguments {
  std::span<const ConstTensorView> inputs = {};
  std::span<const TensorView> outputs = {};
  float factor = 1.0f;                 // reductions: multiplies the sums; the same on all ranks
  const Feedback* feedback = nullptr;  // reductions: not null exactly if the plan has feedback
  std::span<std::byte> wires = {};     // gathers: OperationMemory::wires, filled instead of the outputs
};

// Bytes that the caller of an operation allocates on this rank, in the codec's memory.
// Each piece must be aligned to kWireAlignment. A size of 0 means that the operation uses none. `secondary` and `wires`
// are needed only by calls with a secondary shard and with Arguments::wires.
struct OperationMemory {
  std::size_t secondary = 0;          // for SecondaryShard::memory
  std::size_t largest_secondary = 0;  // the largest `secondary` of all ranks
  std::size_t residual = 0;           // for Feedback::residual
  std::size_t wires = 0;              // for Arguments::wires
};

// Collective of one rank, ready to be called. Functions below, in gather.hpp and in exchange.hpp make it.
//
// It may be run repeatedly, by communicators of the world that it was made for, one call at a time.
class Operation {
 public:
  virtual ~Operation() = default;

  // Returns the world that the operation was made for.
  virtual const World& world() const = 0;

  // Returns shape and formats in words. They are equal on all ranks that make the same call.
  virtual const std::string& description() const = 0;

  // Returns the number of chunks of a call.
  virtual std::int64_t num_chunks() const = 0;

  // Returns the formats of a slot's segments; an all_reduce returns one segment for its whole tensor.
  // The result is empty for an operation without lossy formats. Every operation with one overrides it.
  virtual std::vector<Segment<HopFormats>> segments() const { return {}; }

  // Returns the size in bytes of values below which a message is sent uncompressed; 0: every message is encoded.
  virtual std::size_t min_bytes() const { return 0; }

  // Returns the bytes that this rank sends in a call with these arguments, or nullopt if they depend on the values.
  virtual std::optional<LinkBytes> bytes(const Arguments& arguments) const = 0;

  // Returns the memory that the caller provides in addition to inputs and outputs.
  virtual OperationMemory memory() const { return {}; }

  // --- Internal: Communicator::run() calls these, in this order. A caller needs nothing below in this class.

  // Throws ArgumentError on arguments that the operation was not planned for.
  virtual void check(const Resources& resources, const Arguments& arguments) const = 0;

  // Returns a description of the call, which ranks compare. Calls of equal signatures have equal peers.
  // With `with_state`, the transport compares every call, so state that differs from call to call is part of it.
  virtual std::string signature(const Arguments& arguments, bool with_state) const = 0;

  // Returns the ranks that compare this call: at least those that it exchanges bytes with. If A names B, B names A.
  virtual std::vector<int> peers(const Arguments&) const { return world().topology.peers(world().rank); }

  // Tells whether stages() sends bytes, so that it must follow Transport::begin(). A failure there ends the group.
  virtual bool sends_in_stages(const Resources&, const Arguments&) const { return false; }

  // Makes the stages, which refer to both arguments and to this object. Returns null if there is nothing to do.
  // Takes all scratch, and unless sends_in_stages() leaves everything else as it is: the call may not come about.
  virtual std::unique_ptr<Stages> stages(const Resources& resources, const Arguments& arguments) = 0;
};

// Shared owner of an operation.
using OperationPtr = std::shared_ptr<Operation>;

// Makes a reduce_scatter: output = factor * sum over ranks of their input[own rank].
//
// A call takes one input per rank, inputs[r] being this rank's contribution to rank r, and one output.
// The output has the length of inputs[own rank], and the dtype of the inputs or float32. It may be the same memory as
// inputs[own rank], and must overlap no other input.
//
// Sums are float32, in rank order. With two hops they are in local-rank order within a node, then in node order.
// A rank's own contribution is never quantized. The result has the same bits for every chunk size.
//
// With two hops, slots go to the local rank of their owner within the node. The sums there are encoded again and go to
// the owner's node: two quantizations. This is qgZ of ZeRO++ (arXiv 2306.10209).
// With one hop, slots go to their owners directly, in the format of the link: one quantization.
//
// Example, with gradients of `size` slots of `count` elements, averaged in place:
//   const std::vector<TensorView> slots = split(gradients, communicator.size(), count);
//   const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
//   const Segment<HopFormats> whole{count, HopFormats::parse("int8:128/int4:128")};
//   const OperationPtr reduce =
//       make_reduce_scatter({communicator.world(), shape_of(inputs), ReduceSegments(&whole, 1)});
//   const TensorView output = slots[static_cast<std::size_t>(communicator.rank())];
//   const float factor = 1.0f / static_cast<float>(communicator.size());
//   communicator.run(*reduce, {inputs, {&output, 1}, factor}, std::chrono::seconds(60));
OperationPtr make_reduce_scatter(ReducePlan plan);

// Makes an all_reduce in place: output = factor * sum over ranks of their output, with the same bits on every rank.
//
// A call takes no input and one output, the tensor.
// It is a reduce_scatter of the tensor's slots, then an all_gather in the intra-node format, as one pipeline.
//
// Example:
//   const HopFormats formats = HopFormats::parse("int8:128/int4:128");
//   const OperationPtr sum =
//       make_all_reduce({communicator.world(), tensor.num_elements, tensor.dtype, formats});
//   communicator.run(*sum, {{}, {&tensor, 1}}, std::chrono::seconds(60), stream);
OperationPtr make_all_reduce(AllReducePlan plan);

// Makes a broadcast in place: the output of all ranks becomes the root's, with the same bits on every rank.
//
// A call takes no input and one output of `num_elements` elements. A lossy format rounds the root's own values, too.
// Throws ArgumentError if `world`, `root`, `num_elements` or `format` is not valid, or if the format does not take the
// dtype.
//
// The root encodes its values once. The wires go along a chain of nodes, and each node sends and receives them once.
// In every node the first rank that receives them, its head, passes them to the others.
OperationPtr make_broadcast(World world, int root, std::int64_t num_elements, DType dtype, BlockFormat format);

}  // namespace zcomm
