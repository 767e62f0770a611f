// Messages between two ranks, compressed where the option exchanges names a format.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <optional>

#include "c10d/calls/compressed_calls.hpp"
#include "c10d/calls/inner_groups.hpp"
#include "c10d/transport/call_watch.hpp"

namespace zcomm::c10d_binding {

// Sends wires through the inner groups' own messages: no queue orders them, as sends and receives may come in any
// order. Ranks decide alike, by equal options, dtype and size. Gloo's messages have tags by which only equal ones
// match, and a watch that finds the others. NCCL compares nothing, so no override may change those of GPU tensors.
class SendRecv {
 public:
  // Borrows all but `options`; `store` has the keys of a CallWatch.
  SendRecv(::c10d::Backend& group, c10::intrusive_ptr<ZcommOptions> options, InnerGroups& inner,
           CompressedCalls& compressed, StorePtr store, GroupErrors& errors);

  // Sends or receives, as `type` has it.
  WorkPtr move(::c10d::OpType type, std::vector<at::Tensor>& tensors, int peer, int tag);
  // Receives from any rank, compressed if all would compress such a tensor in one format.
  WorkPtr recv_any(std::vector<at::Tensor>& tensors, int tag);
  // Begins and ends a block of coalesced calls; NCCL's messages are decoded after the `work` of all of them.
  void start_coalescing() { coalesced_.clear(); }
  WorkPtr end_coalescing(WorkPtr work);

  // Numbers of the compressed messages that this rank has sent to a peer, of the bytes of their values and of their
  // wires.
  using Sent = std::array<std::uint64_t, 3>;
  std::map<int, Sent> sent() const;

 private:
  class MessageWork;
  // Values that are encoded in `wire`, kept until the message has moved. Those of a send are undefined.
  struct Message {
    at::Tensor wire;
    BlockFormat format;
    at::Tensor values;
  };

  // Ends all messages of the group: of those that never met, Gloo keeps what later ones would take for theirs.
  void fail(const std::string& difference);
  std::exception_ptr failure() const;
  std::optional<BlockFormat> format_of(const at::Tensor& tensor, int peer, int tag);
  std::optional<BlockFormat> format_from_any(const at::Tensor& tensor, int tag);
  bool is_verified() const { return options_->verify != Verify::none; }
  at::Tensor make_wire(const at::Tensor& values, const BlockFormat& format);
  void encode(const Message& message, const at::Tensor& values, std::uint64_t seed);
  void decode(const Message& message);

  ::c10d::Backend& group_;
  c10::intrusive_ptr<ZcommOptions> options_;
  InnerGroups& inner_;
  CompressedCalls& compressed_;
  GroupErrors& errors_;
  const std::shared_ptr<Workspace> host_workspace_ = make_host_workspace();
  std::vector<Message> coalesced_;
  mutable std::mutex mutex_;  // guards the next two
  std::map<int, Sent> sent_;
  std::exception_ptr failure_;
  CallWatch watch_;  // last: its thread uses fields above
};

}  // namespace zcomm::c10d_binding
