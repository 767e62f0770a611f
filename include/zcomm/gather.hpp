// Gathers: operations that leave every rank with the values of all ranks, and may fill a secondary shard.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "zcomm/codec.hpp"
#include "zcomm/operation.hpp"

namespace zcomm {

class SecondaryHashes;

// Secondary shard: gathered values that a rank keeps for later gathers within its node, hpZ of ZeRO++ (arXiv
// 2306.10209). You allocate the memory; gathers fill and read it.
//
// Another thread may read the two counts at any time.
struct SecondaryShard {
  std::span<std::byte> memory = {};              // exactly OperationMemory::secondary bytes, aligned to kWireAlignment
  std::shared_ptr<SecondaryHashes> hashes = {};  // of a lossless gather, which makes them in its first call
  // 0: it keeps no valid values, as before the first gather, during one and after one that failed. Else of a lossless
  // gather, the gathers since whole values were sent, including that one.
  std::atomic<std::uint64_t> generation = 0;
  // Of a lossless gather: bytes that the last call sent to each holder in another node, with headers.
  std::atomic<std::uint64_t> sent_bytes = 0;
};

// Operation of a gather.
class Gather : public Operation {
 public:
  // Returns a gather with the same plan that uses other memory.
  virtual std::shared_ptr<Gather> bound_to(std::shared_ptr<SecondaryShard> secondary) const = 0;

  // Decodes wires into `arguments.outputs`: those in `arguments.wires` and those in the secondary shard.
  // Moves no byte between ranks. On a GPU the work is queued on `stream`, on a CPU it is done on return.
  // Requires `stream` to wait for the call that left the wires, and the next call on the same memory to wait for
  // `stream`.
  // Throws ArgumentError if the gather has no wires, or was not planned for the outputs.
  virtual void decode(const Codec& codec, const Arguments& arguments, StreamView stream) const = 0;
};

// Shared owner of a gather.
using GatherPtr = std::shared_ptr<Gather>;

// Makes an all_gather: every rank gets every rank's shard, encoded and decoded, with the same bits on every rank.
//
// A call takes one input, this rank's shard, and one output per rank. The input may be the same memory as the own slot
// of the outputs, and must overlap no other slot. Slots may differ in length: the plan's segments cover the longest
// one, and shorter ones end earlier. A rank decodes its own slot, too.
//
// With one hop, every rank sends its wire to every other. With two, it first sends to the ranks of equal local rank in
// other nodes and to its node. Then ranks forward within the node, so that each byte enters a node once.
// `plan` must not be null.
//
// `secondary` makes the ranks of a node keep the wires of the gather between them (hpZ of ZeRO++). Topology::holder()
// says which rank keeps a slot. A later call without an input rebuilds the outputs from these wires: it gives the same
// bits, and sends nothing between nodes. On a GPU its stream must wait for the call that filled `secondary`.
// A call without an input throws ArgumentError unless an earlier call has filled the secondary shard.
//
// A call with Arguments::wires leaves all wires there or in the secondary shard, and ignores the addresses of its
// outputs. decode() can then write values later, when nothing else uses that memory.
//
// Example, with weights of `size` slots of `count` elements, in place:
//   const std::vector<TensorView> slots = split(weights, communicator.size(), count);
//   const Segment<BlockFormat> whole{count, BlockFormat::parse("int8:256")};
//   const auto plan = std::make_shared<const GatherPlan>(communicator.world(), shape_of(slots),
//                                                        GatherSegments(&whole, 1));
//   const GatherPtr gather = make_all_gather(plan);
//   const ConstTensorView shard = slots[static_cast<std::size_t>(communicator.rank())];
//   communicator.run(*gather, {{&shard, 1}, slots}, std::chrono::seconds(60));
GatherPtr make_all_gather(std::shared_ptr<const GatherPlan> plan, std::shared_ptr<SecondaryShard> secondary = {});

// Makes a lossless gather of 16-bit values, which sends fewer bytes between nodes than uncompressed values have.
//
// A call takes the views of make_all_gather(). The owner of a shard sends its lossless difference (lossless.hpp) from
// the values that the holders of its slot keep. If they keep none, it sends whole values. Within a node ranks send
// plain values.
//
// Every call with an input updates `secondary`. Its generation is 0 during the call and after a failure, so the next
// call sends whole values. A call without an input repeats the last gather, and sends nothing between nodes. It throws
// ArgumentError if no gather has filled `secondary`, and TransportError if its values have changed since.
// A call without `secondary` throws ArgumentError. `plan` must not be null.
//
// Each chunk is one message with its size in the header, and the receiver has room for the longest one. A call throws
// TransportError, with slot and generations, if a message does not refer to this rank's base or does not give its
// owner's values. Wrong values are not passed on then.
//
// On a GPU, kernels check what arrives: values of a wrong slot become NaN, and soon afterwards every call throws that
// error, as after a failed transfer. A call throws ArgumentError during graph capture. One call at a time may use
// `secondary`, on any stream. A call that was not prepared blocks the host once if there are other nodes: see
// make_preparation().
//
// Example, with bfloat16 weights:
//   const auto plan = std::make_shared<const LosslessPlan>(communicator.world(), shape_of(slots));
//   const Scratch memory(*workspace, plan->secondary_bytes(), stream);
//   const auto secondary = std::make_shared<SecondaryShard>();
//   secondary->memory = {memory.data(), plan->secondary_bytes()};
//   const GatherPtr gather = make_lossless_gather(plan, secondary);
//   communicator.run(*gather, {{&shard, 1}, slots}, timeout, stream);  // whole values, later differences
//   communicator.run(*gather, {{}, slots}, timeout, stream);           // again, within nodes
GatherPtr make_lossless_gather(std::shared_ptr<const LosslessPlan> plan,
                               std::shared_ptr<SecondaryShard> secondary = {});

// Makes a preparation of several lossless gathers on a GPU. NCCL needs message sizes on both hosts in advance, so a
// preparation exchanges them for many gathers at a time.
//
// A call takes one input per gather, its shard, and no output. It encodes the differences and exchanges their sizes,
// which blocks the host once if there are other nodes. The next call of each gather then sends the prepared bytes,
// ignores its input, and never blocks the host. Prepared bytes stay in the workspace until that call, and the stream of
// the preparation must exist until then. A shard that is prepared twice before its gather is sent whole.
//
// Throws ArgumentError if there are no gathers, or if one is not lossless or is repeated. A call throws ArgumentError
// on a transport that is not stream-ordered, where gathers need no preparation.
OperationPtr make_preparation(std::vector<GatherPtr> gathers);

}  // namespace zcomm
