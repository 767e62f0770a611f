// Operations: collectives that are ready to be called, once or repeatedly. An operation is a plan, bound to the values
// that it keeps between calls. Communicator::run() carries it out.
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

// Error feedback: adds the error of an encoding to the next one, so that values are late but not lost. Karimireddy et
// al., "Error Feedback Fixes SignSGD" (arXiv 1901.09847); with a compressed residual, LoCo (arXiv 2407.04480).
//
// It is that of a reduce_scatter called repeatedly with the same lengths, dtype, segments and factor. The residual
// covers the values that this rank encodes for other nodes: with two hops its sums over its node, with one the slots of
// their ranks. In a single node it covers all values that this rank encodes. Exact parts have no residual.
struct Feedback {
  std::byte* residual = nullptr;               // OperationMemory::residual
  BlockFormat format{ElementKind::int8, 128};  // of the residual: any lossy one, rounded to nearest
  float decay = 1.0f;                          // factor of the residual in each call, 0 to 1
  bool empty = false;                          // the residual has no values yet, and is only written
};

// Inputs and outputs of one call, borrowed until it is done. Of a gather and of a reduction's inputs, there may be one
// for each segment in place of one for each slot, slot after slot: parameters need not lie side by side.
struct Arguments {
  std::span<const ConstTensorView> inputs = {};
  std::span<const TensorView> outputs = {};
  float factor = 1.0f;                 // of sums
  const Feedback* feedback = nullptr;  // of sums, in the planned format, if any
  std::span<std::byte> wires = {};     // of a gather: OperationMemory::wires, filled in place of its outputs
};

// Bytes that the caller of an operation allocates on this rank. Each is aligned to kWireAlignment; 0: none is used.
struct OperationMemory {
  std::size_t secondary = 0;          // SecondaryShard::memory
  std::size_t largest_secondary = 0;  // the largest `secondary` of all ranks
  std::size_t residual = 0;           // Feedback::residual
  std::size_t wires = 0;              // Arguments::wires
};

class Operation {
 public:
  virtual ~Operation() = default;

  virtual const World& world() const = 0;
  // Returns shape and formats in words that ranks compare.
  virtual const std::string& description() const = 0;
  virtual std::int64_t num_chunks() const = 0;
  // Returns the formats of a slot's parts; for an all-reduce those of its tensor. Empty: lossless. Every
  // operation with a lossy format overrides it.
  virtual std::vector<Segment<HopFormats>> segments() const { return {}; }
  // Returns the bytes from which on a message of values is encoded; smaller ones are sent exactly.
  virtual std::size_t min_bytes() const { return 0; }
  // Returns the bytes that a call with these arguments will send. Empty if they depend on the values.
  virtual std::optional<LinkBytes> bytes(const Arguments& arguments) const = 0;
  // Returns the memory that calls use beside their arguments.
  virtual OperationMemory memory() const { return {}; }

  // --- For Communicator, in the order of its calls

  // Throws ArgumentError on arguments that the operation was not planned for.
  virtual void check(const Resources& resources, const Arguments& arguments) const = 0;
  // Returns a description of the call, which ranks compare. Calls of equal signatures have equal peers.
  // `with_state`: the transport compares every call, so state that differs from call to call is part of it.
  virtual std::string signature(const Arguments& arguments, bool with_state) const = 0;
  // Returns the ranks that compare this call, at least those that it exchanges bytes with; if A names B, B names A.
  virtual std::vector<int> peers(const Arguments&) const { return world().topology.peers(world().rank); }
  // Makes the stages, which refer to both arguments and to this object. Null: there is nothing to do.
  virtual std::unique_ptr<Stages> stages(const Resources& resources, const Arguments& arguments) = 0;
};

using OperationPtr = std::shared_ptr<Operation>;

// Makes a reduction: the one output = factor * sum over ranks of their input[own]. inputs[r] is this rank's
// contribution to rank r. The output may be inputs[own]; it has the dtype of the inputs or float32.
// Sums are float32, in rank order (hierarchical: in local-rank order within a node, then in node order). The own
// contribution is added in full precision.
//
// Hierarchical: slots go to the local rank of their owner, are summed and encoded again there, then go to the owner's
// node: two quantizations. Flat: one hop to the owner, in the intra-node format to ranks of the same node and in the
// inter-node format to others: one quantization.
OperationPtr make_reduce_scatter(ReducePlan plan);

// Makes an all-reduce of the one output, without an input: output = factor * sum over ranks, with the same bits on
// every rank. It is a reduce_scatter of the tensor's slots, then an all_gather in the intra-node format.
OperationPtr make_all_reduce(AllReducePlan plan);

// Makes a broadcast of the root's one output to the outputs of all ranks, without an input: the same bits on every
// rank. A lossy format rounds the root's own values, too. Throws ArgumentError.
//
// The root encodes its values once. The wires travel along a chain of nodes. Each node sends and receives them once. In
// every node the first rank to have them, its head, passes them to the others.
OperationPtr make_broadcast(World world, int root, std::int64_t num_elements, DType dtype, BlockFormat format);

}  // namespace zcomm
