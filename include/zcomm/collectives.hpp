// The compressed collectives: steps that join a codec and a transport, the same for CPU and GPU.
//
// qwZ and qgZ of ZeRO++ (arXiv 2306.10209), with per-hop formats as in SDP4Bit (arXiv 2410.15526). All of them cut long
// messages into chunks of whole blocks and run their stages as a pipeline: stage s of chunk k beside stage s-1 of chunk
// k+1, so that the hops and the codec overlap. Chunking does not change a bit of the result.
//
// Each follows a plan for this rank, topology and the lengths and dtype of `slots`, with the format of `feedback` if
// there is one; Communicator checks that.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "zcomm/chunks.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/feedback.hpp"
#include "zcomm/plan.hpp"
#include "zcomm/segment.hpp"
#include "zcomm/topology.hpp"
#include "zcomm/transport.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm {

// What one hop of a call cost on this rank.
struct HopStats {
  std::size_t intra_node_bytes = 0;       // sent to ranks of the same node
  std::size_t inter_node_bytes = 0;       // sent to other nodes
  std::chrono::nanoseconds wait_time{0};  // until its transfers were done; on a GPU, the time to queue the waits
};
inline constexpr std::size_t kMaxHops = 4;  // of an all_reduce: two of its reduce_scatter, then two of its all_gather

// What one call cost on this rank.
struct CallStats {
  std::size_t intra_node_bytes = 0;           // sent to ranks of the same node
  std::size_t inter_node_bytes = 0;           // sent to other nodes
  std::chrono::nanoseconds codec_time{0};     // in codec calls; on a GPU, the time to launch them
  std::chrono::nanoseconds transfer_time{0};  // waiting for transfers; on a GPU, the time to launch them
  int host_waits = 0;                         // times that the host has waited for the GPU
  std::array<HopStats, kMaxHops> hops = {};   // the same bytes, and a part of transfer_time

  std::size_t wire_bytes() const { return intra_node_bytes + inter_node_bytes; }
};

// What a collective works with, borrowed for one call.
struct Resources {
  const Codec& codec;
  Transport& transport;
  const Topology& topology;
  Workspace& workspace;
  StreamView stream;
  CallStats& stats;
  std::uint64_t seed = 0;     // of stochastic rounding, another one for each call
  std::size_t first_hop = 0;  // where the collective's hops are in CallStats::hops
};

// What an all_gather does beside gathering; at most one of the two.
struct GatherExtras {
  // Filled with this rank's secondary shard: secondary_bytes() bytes, aligned to kWireAlignment.
  std::byte* secondary = nullptr;
  // Differences are sent (SDP4Bit, arXiv 2410.15526): the slots of other ranks hold, on every rank, what an earlier
  // gather has left there, and `reference` holds that of the own slot, on this rank alone; it has the elements and the
  // dtype of `shard`, and must not overlap it. Both are brought up to date. A NaN in them counts as 0, or it would
  // stay. Parts that are sent exactly are not differences.
  std::byte* reference = nullptr;
};

// Every rank's shard, decoded into slots[rank] on every rank: the same bits everywhere. slots.size() is the number of
// ranks; slots[own].num_elements == shard.num_elements; `shard` may be slots[own] itself. Slots may differ in length:
// the plan's segments have the elements of the longest one, and a shorter one is cut off.
//
// Flat: every rank sends its wire to every other. Hierarchical: first between ranks of equal local rank in different
// nodes, then inside the node, so that each byte enters a node once.
void all_gather(const Resources& resources, const GatherPlan& plan, ConstTensorView shard,
                std::span<const TensorView> slots, GatherExtras extras = {});

// Secondary shards, hpZ of ZeRO++: the ranks of a node keep among them the wires of a gather, so that a later one of
// the same values stays inside the node. In each node the wire of rank r's shard is kept by the rank whose local rank
// is r's, modulo the ranks of the node: where nodes are equal, each of L ranks keeps an L-th of all wires.

// Bytes of `rank`'s secondary shard of a gather into `slots`, of which only lengths and dtype matter.
std::size_t secondary_bytes(const Topology& topology, int rank, std::size_t chunk_bytes,
                            std::span<const TensorView> slots, GatherSegments segments);

// The slots once more, from the secondary shards that an all_gather with slots of the same lengths and dtype, in the
// same segments, has filled on every rank of the node: the same bits, and no byte between nodes.
void gather_secondary(const Resources& resources, const GatherPlan& plan, const std::byte* secondary,
                      std::span<const TensorView> slots);

class DeviceKept;

// What a rank keeps of a gather by differences, so that the next one can send what has changed since. It is for one
// plan. Another thread may read the two counts meanwhile.
struct KeptShards {
  std::span<std::byte> values;                // DifferencePlan::kept_bytes(), aligned to kWireAlignment
  std::vector<std::uint64_t> hashes = {};     // of each chunk of each held slot; on a GPU none
  std::shared_ptr<DeviceKept> device = {};    // of values on a GPU, made when it is needed: their hashes there
  std::atomic<std::uint64_t> generation = 0;  // gathers since whole values were sent, that one included; 0: none
  std::atomic<std::uint64_t> sent_bytes = 0;  // to each holder in another node by the last gather, headers included
};

// The same as an all_gather of 16-bit values that are sent as they are, for fewer bytes between nodes: the owner of a
// shard sends the lossless difference (difference.hpp) to what the holders of its slot have kept of the last gather,
// or, with nothing kept, the shard. Inside a node the values are sent as they are. `kept` is brought up to date. It has
// nothing while a call is under way, and after one that failed.
//
// Each chunk is one message, whose header has its size: the receiver has room for the longest. Throws TransportError
// that names slot and generations if what arrives is no difference to what this rank has, or does not give the values
// that its owner has; then no value of it was handed on. This is for host memory; Communicator does it on a GPU.
void all_gather(const Resources& resources, const DifferencePlan& plan, ConstTensorView shard,
                std::span<const TensorView> slots, KeptShards& kept);

// The slots once more from what the last one has left, as gather_secondary above: no byte between nodes. Throws
// TransportError if it was written to since.
void gather_secondary(const Resources& resources, const DifferencePlan& plan, const KeptShards& kept,
                      std::span<const TensorView> slots);

// The shard of a gather by differences.
struct ShardDifference {
  const DifferencePlan& plan;
  ConstTensorView shard;
  KeptShards& kept;
};

// output = factor * sum over ranks of their slots[own]. slots[r] is what this rank contributes to rank r. `output` may
// be slots[own].
struct Reduction {
  const ReducePlan& plan;
  std::span<const ConstTensorView> slots;
  TensorView output;
  float factor;
  const Feedback* feedback = nullptr;
  bool read_late = false;  // of `output`, as in DecodeSum

  ConstTensorView values(int slot, const Piece<HopFormats>& piece) const {
    return slots[static_cast<std::size_t>(slot)].slice(piece.begin, piece.count);
  }
};

// Segments are as in all_gather. Sums are float32, in rank order (hierarchical: in local-rank order inside a node, then
// in node order). The own contribution is added in full precision.
//
// Hierarchical: slots go to the local rank of their owner, are summed there and encoded again, then go to the owner's
// node: two quantizations. Flat: one hop, straight to the owner, in the inside format to ranks of the same node and in
// the between format to others: one quantization. Direct: one hop of the values themselves, to all ranks, so that the
// sums are those of float32 additions in rank order.
void reduce_scatter(const Resources& resources, const Reduction& reduction);

// The slots of a tensor of so many elements in an all_reduce among `size` ranks: whole blocks of all formats, so that
// the last ones are short or empty and no padding is copied.
std::vector<TensorView> all_reduce_slots(TensorView tensor, int size, HopFormats formats);

// tensor = factor * sum over ranks of tensor, the same bits on every rank: a reduce_scatter of these slots, then an
// all_gather in the inside format.
void all_reduce(const Resources& resources, const AllReducePlan& plan, TensorView tensor, float factor,
                const Feedback* feedback = nullptr);

}  // namespace zcomm
