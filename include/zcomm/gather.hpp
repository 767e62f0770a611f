// Gathers: operations that leave every rank with the values of all ranks, and may keep a secondary shard.
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

// What a rank keeps of gathered values for later gathers: hpZ of ZeRO++ (arXiv 2306.10209). Another thread may read
// the two counts at any time.
struct SecondaryShard {
  std::span<std::byte> memory = {};              // OperationMemory::secondary, aligned to kWireAlignment
  std::shared_ptr<SecondaryHashes> hashes = {};  // of a lossless gather, made by its first call
  std::atomic<std::uint64_t> generation = 0;     // gathers since whole values were sent, including that one; 0: none
  std::atomic<std::uint64_t> sent_bytes = 0;     // to each holder in another node by the last gather, with headers
};

class Gather : public Operation {
 public:
  // Returns the same gather, bound to this memory.
  virtual std::shared_ptr<Gather> bound_to(std::shared_ptr<SecondaryShard> secondary) const = 0;
  // Decodes the wires that the last call has left, and those of the secondary shard, into the outputs, on `stream`.
  // Moves no byte between ranks. Precondition: `stream` waits for the last call; the next call on the same memory
  // waits for `stream`. Throws ArgumentError if the gather has no wires, or on arguments that were not planned for.
  virtual void decode(const Codec& codec, const Arguments& arguments, StreamView stream) const = 0;
};

using GatherPtr = std::shared_ptr<Gather>;

// Makes a gather of every rank's shard, decoded into the outputs on every rank: the same bits everywhere. Its one input
// is this rank's shard, which may be its own slot of the outputs. Slots may differ in length: the plan's segments cover
// the longest one, and shorter ones end earlier.
//
// Flat: every rank sends its wire to every other. Hierarchical: first between ranks of equal local rank in different
// nodes, then within the node, so that each byte enters a node once.
//
// `secondary` receives the secondary shard (hpZ of ZeRO++). The ranks of a node keep the wires of the gather between
// them: that of rank r's shard is kept by the rank with r's local rank, modulo the ranks of the node. In equal nodes
// each of L ranks keeps an L-th of all wires. A call without an input rebuilds the outputs from these wires: it gives
// the same bits, and sends nothing between nodes. On a GPU its stream must wait for the call that has filled
// `secondary`.
//
// A call with Arguments::wires leaves all wires there, and those of the secondary shard in it. Its outputs have lengths
// and no addresses. decode() may then write values where and when nothing else uses that memory.
GatherPtr make_all_gather(std::shared_ptr<const GatherPlan> plan, std::shared_ptr<SecondaryShard> secondary = {});

// Makes a lossless gather of 16-bit values, with fewer bytes between nodes than exact values. The owner of a shard
// sends its difference (lossless.hpp) to the values that the holders of its slot have kept, or the shard if nothing
// is kept. Within a node plain values are sent. Each call updates `secondary`, which is empty during a call and after a
// failed one. A call without an input repeats the last gather and sends nothing between nodes; it throws TransportError
// if the kept values were changed since.
//
// Each chunk is one message with its size in the header: the receiver has room for the longest. A call throws
// TransportError that names slot and generations if a message does not refer to this rank's base or does not give its
// owner's values; no wrong value was passed on then.
//
// A GPU checks what arrives: values of a wrong slot become NaN, and soon every call throws that error, as after a
// failed transfer. On a GPU calls throw ArgumentError during graph capture, and one call at a time may use `secondary`,
// on any stream.
GatherPtr make_lossless_gather(std::shared_ptr<const LosslessPlan> plan,
                               std::shared_ptr<SecondaryShard> secondary = {});

// Makes a preparation of several lossless gathers on a GPU; their shards are its inputs. A call encodes their
// differences and exchanges the sizes, which blocks the host once. After this, the next call of each gather sends the
// prepared bytes, ignores its input and never blocks the host. An unprepared gather blocks once. Prepared bytes stay in
// the workspace until then, and the stream must exist. A shard that is prepared twice before its gather is sent whole.
// Throws ArgumentError if there are no gathers, or if one is not lossless or is repeated.
OperationPtr make_preparation(std::vector<GatherPtr> gathers);

}  // namespace zcomm
