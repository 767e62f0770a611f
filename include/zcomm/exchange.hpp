// Exchanges: collectives that move values from rank to rank without sums, in one hop: all_to_all, gather, scatter, send
// and recv.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zcomm/dtype.hpp"
#include "zcomm/operation.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

// Plan of an exchange. Values are encoded once, in the format of the link to their receiver. Own values are copied.
//
// Each function throws ArgumentError if the world or a rank is not valid, or if a length is negative. It also throws it
// if a format is not valid or does not take `dtype`.
// Exchanges connect ranks that gathers and reductions may not: see NcclOptions::peers.
//
// Example, with inputs[r] for rank r and outputs[r] from it:
//   const ExchangePlan plan = ExchangePlan::all_to_all(communicator.world(), shape_of(inputs).lengths,
//                                                      shape_of(outputs).lengths, DType::bfloat16,
//                                                      HopFormats::parse("exact/int8:128"));
//   std::printf("%zu bytes to other nodes\n", plan.bytes().inter_node);
//   const OperationPtr exchange = make_exchange(plan);
//   communicator.run(*exchange, {inputs, outputs}, std::chrono::seconds(60));
class ExchangePlan {
 public:
  // Values for one rank, or from one.
  struct Message {
    int peer;                   // the other rank
    std::int64_t num_elements;  // at least one
    BlockFormat format;         // of the link, or uncompressed if the message is small
  };

  // Numbers of elements, by rank.
  using Lengths = std::vector<std::int64_t>;

  // Plans an all_to_all of any lengths.
  // `sent` are the elements that this rank sends to each rank, itself included; `received` those that it receives.
  // Both have one length per rank. The lengths of two ranks must match: sent[b] on rank a is received[a] on rank b.
  // Values between two ranks stay uncompressed if they have fewer than `min_bytes` bytes.
  static ExchangePlan all_to_all(World world, Lengths sent, Lengths received, DType dtype, HopFormats formats,
                                 std::size_t min_bytes = 0);

  // Plans a gather of `num_elements` elements of each rank to `root`, the root included.
  static ExchangePlan gather(World world, int root, std::int64_t num_elements, DType dtype, HopFormats formats);

  // Plans a scatter of `num_elements` elements from `root` to each rank, the root included.
  static ExchangePlan scatter(World world, int root, std::int64_t num_elements, DType dtype, HopFormats formats);

  // Plans a message between two ranks. Only these two make the call, so `world` must be one of them.
  static ExchangePlan message(World world, int from, int to, std::int64_t num_elements, DType dtype,
                              HopFormats formats);

  // Returns the world that the plan was made for.
  const World& world() const { return world_; }

  // Returns the elements that this rank sends to each rank, itself included.
  const Lengths& sent() const { return sent_; }

  // Returns the elements that this rank receives from each rank, itself included.
  const Lengths& received() const { return received_; }

  // Returns the type of all values.
  DType dtype() const { return dtype_; }

  // Returns the formats by link.
  HopFormats formats() const { return formats_; }

  // Returns the bytes of values below which a message stays uncompressed.
  std::size_t min_bytes() const { return min_bytes_; }

  // Returns the call in words that ranks compare. Those of an all_to_all lack the lengths, which differ by rank.
  const std::string& description() const { return description_; }

  // Returns the bytes that this rank sends.
  LinkBytes bytes() const;

  // --- Internal: for the stages of the collective. A caller needs nothing below in this class.

  // Returns the messages that this rank sends, in the order in which they start. Those to other nodes come first.
  std::span<const Message> sends() const { return sends_; }

  // Returns the messages that this rank receives. Those from other nodes come first.
  std::span<const Message> recvs() const { return recvs_; }

  // Returns the ranks that make the call, without this one. All compare it, even those that exchange nothing.
  const std::vector<int>& peers() const { return peers_; }

  // Returns the elements of a whole chunk of a message. All ranks cut all messages by it.
  std::int64_t chunk_elements() const { return chunk_elements_; }

  // Returns the number of chunks of this rank's longest message, the values for itself included.
  std::int64_t num_chunks() const { return num_chunks_; }

  // Returns the bytes of a chunk of a message; 0 past its end.
  std::size_t num_bytes(const Message& message, std::int64_t chunk) const;

 private:
  ExchangePlan(World world, Lengths sent, Lengths received, DType dtype, HopFormats formats, std::size_t min_bytes,
               std::string description, std::vector<int> peers);
  std::vector<Message> messages(const Lengths& lengths, int direction) const;

  World world_;
  Lengths sent_;
  Lengths received_;
  DType dtype_;
  HopFormats formats_;
  std::size_t min_bytes_;
  std::string description_;
  std::vector<int> peers_;
  std::int64_t chunk_elements_;
  std::int64_t num_chunks_ = 0;
  std::vector<Message> sends_;
  std::vector<Message> recvs_;
};

// Makes an exchange.
//
// A call takes one input and one output per rank: inputs[r] are the values for rank r, outputs[r] the values from it.
// Their lengths and dtype are the planned ones, so a view is empty where nothing is sent.
// Inputs and outputs must not overlap, except that inputs[own rank] and outputs[own rank] may be the same memory.
OperationPtr make_exchange(ExchangePlan plan);

}  // namespace zcomm
