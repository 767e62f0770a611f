// Exchanges: collectives that move values from rank to rank without sums, in one hop: all_to_all, gather, scatter,
// send and recv.
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
class ExchangePlan {
 public:
  // Values for one rank or from one.
  struct Message {
    int peer;
    std::int64_t num_elements;  // at least one
    BlockFormat format;
  };

  using Lengths = std::vector<std::int64_t>;

  // Plans an all-to-all of any lengths: the elements that this rank sends to each rank, itself included, and those that
  // it receives. Fewer than `min_bytes` of values between two ranks stay exact. Throws ArgumentError, as the other
  // functions.
  static ExchangePlan all_to_all(World world, Lengths sent, Lengths received, DType dtype, HopFormats formats,
                                 std::size_t min_bytes = 0);
  // Plans a gather of `num_elements` of each rank to `root`; the second function, a scatter of as many to each rank.
  static ExchangePlan gather(World world, int root, std::int64_t num_elements, DType dtype, HopFormats formats);
  static ExchangePlan scatter(World world, int root, std::int64_t num_elements, DType dtype, HopFormats formats);
  // Plans a message between two ranks, which alone call it.
  static ExchangePlan message(World world, int from, int to, std::int64_t num_elements, DType dtype,
                              HopFormats formats);

  const World& world() const { return world_; }
  const Lengths& sent() const { return sent_; }
  const Lengths& received() const { return received_; }
  DType dtype() const { return dtype_; }
  HopFormats formats() const { return formats_; }
  std::size_t min_bytes() const { return min_bytes_; }
  // Returns the call in words that ranks compare. Those of an all-to-all lack the lengths, which differ by rank.
  const std::string& description() const { return description_; }

  LinkBytes bytes() const;

  // --- For the collective itself

  // Returns the messages in the order in which they start: those to other nodes first, from the next rank on.
  std::span<const Message> sends() const { return sends_; }
  std::span<const Message> recvs() const { return recvs_; }
  // Returns the ranks that call it, without this one: all compare what they call, also those that exchange nothing.
  const std::vector<int>& peers() const { return peers_; }
  // Returns the elements of a whole chunk of a message, by which all ranks cut all messages. A rank has as many chunks
  // as its longest message.
  std::int64_t chunk_elements() const { return chunk_elements_; }
  std::int64_t num_chunks() const { return num_chunks_; }
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

// Makes an exchange. inputs[r] are the values for rank r, outputs[r] those from rank r: one view of each rank, empty
// where nothing is sent. Inputs and outputs may not overlap, but this rank's own ones may be the same.
OperationPtr make_exchange(ExchangePlan plan);

}  // namespace zcomm
