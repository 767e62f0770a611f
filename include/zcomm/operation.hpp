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

#include "zcomm/collectives.hpp"
#include "zcomm/error.hpp"
#include "zcomm/plan.hpp"
#include "zcomm/tensor_view.hpp"

namespace zcomm {

class KeptHashes;
class Stages;

// Error feedback: adds the error of an encoding to the next one, so that values are late but not lost. Karimireddy et
// al., "Error Feedback Fixes SignSGD" (arXiv 1901.09847); with a compressed residual, LoCo (arXiv 2407.04480).
//
// It is that of a reduce_scatter called repeatedly with the same lengths, dtype, segments and factor. The residual
// covers the values that this rank encodes for other nodes: with two hops its sums over its node, with one the slots of
// their ranks. In a single node it covers all values that this rank encodes. Exact parts have no residual.
struct Feedback {
  std::byte* residual = nullptr;               // ReducePlan::residual_bytes(), aligned to kWireAlignment
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
  std::span<std::byte> wires = {};     // of a gather: Operation::wires_bytes() that it fills in place of its outputs
};

// Values that a rank keeps of a gather, for later gathers. Another thread may read the two counts at any time.
struct Kept {
  std::span<std::byte> memory = {};           // Operation::kept_bytes(), aligned to kWireAlignment
  std::shared_ptr<KeptHashes> hashes = {};    // of a lossless gather, made on demand
  std::atomic<std::uint64_t> generation = 0;  // gathers since whole values were sent, that one included; 0: none
  std::atomic<std::uint64_t> sent_bytes = 0;  // to each holder in another node by the last gather, with headers
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
  // Returns the bytes of Kept::memory on this rank; the second function, the largest of all ranks. 0: nothing is kept.
  virtual std::size_t kept_bytes() const { return 0; }
  virtual std::size_t largest_kept_bytes() const { return 0; }
  // Returns the same operation, bound to this memory. Throws ArgumentError if it keeps nothing.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): others take it over
  virtual std::shared_ptr<Operation> keeping(std::shared_ptr<Kept>) const {
    throw ArgumentError("kept: expected none for " + description() + ", which keeps nothing, got memory");
  }
  // Returns the bytes of a gather's wires, aligned to kWireAlignment, that decode() takes. 0: there are none.
  virtual std::size_t wires_bytes() const { return 0; }
  // Decodes the wires that the last call has left, and those that it keeps, into the outputs. Moves no byte between
  // ranks. The stream is any that waits for that call; the next call on the same memory must wait for it. Throws
  // ArgumentError.
  virtual void decode(const Codec&, const Arguments&, StreamView) const {
    throw ArgumentError("wires: expected a gather in a format, got " + description());
  }
  // Returns the bytes of error feedback's residual; 0 if none was planned.
  virtual std::size_t residual_bytes() const { return 0; }

  // --- For Communicator, in the order of its calls

  // Throws ArgumentError on arguments that the operation was not planned for.
  virtual void check(const Resources& resources, const Arguments& arguments) const = 0;
  // Returns a description of the call, which ranks compare. Equal words have equal peers.
  virtual std::string words(const Arguments& arguments) const = 0;
  // Returns what else ranks must agree on, which differs from call to call: compared where every call is.
  virtual std::string turn() const { return {}; }
  // Returns the ranks that compare this call, at least those that it exchanges bytes with; if A names B, B names A.
  virtual std::vector<int> peers(const Arguments&) const { return world().topology.peers(world().rank); }
  // Makes the stages, which refer to both arguments and to this object. Null: there is nothing to do.
  virtual std::unique_ptr<Stages> stages(const Resources& resources, const Arguments& arguments) = 0;
};

using OperationPtr = std::shared_ptr<Operation>;

// Makes a gather of every rank's shard, decoded into the outputs on every rank: the same bits everywhere. Its one input
// is this rank's shard, which may be its own slot of the outputs. Slots may differ in length: the plan's segments cover
// the longest one, and shorter ones end earlier.
//
// Flat: every rank sends its wire to every other. Hierarchical: first between ranks of equal local rank in different
// nodes, then within the node, so that each byte enters a node once.
//
// `kept` receives the secondary shard (hpZ of ZeRO++). The ranks of a node keep the wires of the gather between them:
// that of rank r's shard is kept by the rank with r's local rank, modulo the ranks of the node. In equal nodes each of
// L ranks keeps an L-th of all wires. A call without an input rebuilds the outputs from these wires: it gives the same
// bits, and sends nothing between nodes. On a GPU its stream must wait for the call that has filled `kept`.
//
// A call with Arguments::wires leaves all wires there, and those of the secondary shard in it. Its outputs have lengths
// and no addresses. decode() may then write values where and when nothing else uses that memory.
OperationPtr make_all_gather(std::shared_ptr<const GatherPlan> plan, std::shared_ptr<Kept> kept = {});

// Makes a lossless gather of 16-bit values, with fewer bytes between nodes than exact values. The owner of a shard
// sends its difference (lossless.hpp) to the values that the holders of its slot have kept, or the shard if nothing
// is kept. Within a node plain values are sent. Each call updates `kept`, which is empty during a call and after a
// failed one. A call without an input repeats the last gather and sends nothing between nodes; it throws TransportError
// if the kept values were changed since.
//
// Each chunk is one message with its size in the header: the receiver has room for the longest. A call throws
// TransportError that names slot and generations if a message does not refer to this rank's base or does not give its
// owner's values; no wrong value was passed on then.
//
// A GPU checks what arrives: values of a wrong slot become NaN, and soon every call throws that error, as after a
// failed transfer. On a GPU calls throw ArgumentError during graph capture, and one call at a time may use `kept`, on
// any stream.
OperationPtr make_lossless_gather(std::shared_ptr<const LosslessPlan> plan, std::shared_ptr<Kept> kept = {});

// Makes a preparation of several lossless gathers on a GPU; their shards are its inputs. A call encodes their
// differences and exchanges the sizes, which blocks the host once. After this, the next call of each gather sends the
// prepared bytes, ignores its input and never blocks the host. An unprepared gather blocks once. Prepared bytes stay in
// the workspace until then, and the stream must exist. A shard that is prepared twice before its gather is sent whole.
// Throws ArgumentError if there are no gathers, or if one is not lossless or is repeated.
OperationPtr make_preparation(std::vector<OperationPtr> gathers);

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
