#include "send_recv.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "c10d/base/tensors.hpp"
#include "collectives/random_seed.hpp"
#include "zcomm/call_check.hpp"
#include "zcomm/checked_transport.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm::c10d_binding {
namespace {

// Tags of compressed messages; those of the program are below.
constexpr int kCompressedTags = 0x40000000;

// Behind the wire of a message, with the option `verify`.
constexpr std::size_t kChecksumBytes = sizeof(std::uint64_t);

// Describes a message without its ranks, as a rank that receives from any does not know them.
std::string content_of(const at::Tensor& tensor, const std::optional<BlockFormat>& format, int tag) {
  return " tag " + std::to_string(tag) + ": " + std::to_string(tensor.numel()) + " " +
         c10::toString(tensor.scalar_type()) + " " + (format ? format->to_string() : "exact");
}

int compressed_tag(const std::string& content) {
  return kCompressedTags | static_cast<int>(call_fingerprint(content) % kCompressedTags);
}

}  // namespace

// Work of a message, or of coalesced ones: decodes them once they have arrived.
class SendRecv::MessageWork final : public ::c10d::Work {
 public:
  // `signature`: of a message alone on a CPU, for its error.
  MessageWork(SendRecv& all, ::c10d::OpType type, WorkPtr inner, std::vector<Message> messages,
              std::string signature = {})
      : Work(-1, type),
        group_(BackendPtr::unsafe_reclaim_from_nonowning(&all.group_)),
        all_(all),
        inner_(std::move(inner)),
        messages_(std::move(messages)),
        signature_(std::move(signature)) {}
  ~MessageWork() override { all_.watch_.end(call_); }

  void watch(int kind, const CallWatch::Channel& between, int peer) {
    peer_ = peer;
    call_ = all_.watch_.begin(signature_, static_cast<std::uint64_t>(kind), {&between, 1},
                              [differs = differs_, inner = inner_, &all = all_](const std::string& difference) {
                                all.fail(difference);
                                *differs = true;
                                inner->abort();
                              });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const WithoutGil no_gil;  // torch calls synchronize() with it
    std::unique_lock lock(waiting_, std::defer_lock);
    if (timeout == kNoTimeout) {
      lock.lock();
    } else if (!lock.try_lock_for(timeout)) {
      throw TimeoutError("zcomm: a message that another thread waits for has not moved within " +
                         std::to_string(timeout.count()) + " ms");
    }
    if (!Work::isCompleted()) {
      all_.watch_.wait_for(call_, peer_);
      std::exception_ptr error;
      try {
        if (!inner_->wait(timeout) && !*differs_) return false;
      } catch (const std::exception&) {
        error = std::current_exception();
        if (peer_ >= 0) all_.watch_.find_difference(peer_);  // a peer that has found one may have ended
      }
      end(std::move(error));
      all_.watch_.wait_for(call_, CallWatch::kNobody);
    }
    if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
    if (decoded_) decoded_->block(current_stream(decoded_->device()));  // another stream may wait, too
    return true;
  }

  // Like exception(), these never wait for a thread in wait(): Python calls them with its lock.
  bool isCompleted() override {
    const std::unique_lock lock(waiting_, std::try_to_lock);
    if (!lock) return false;
    if (!Work::isCompleted() && (*differs_ || inner_->isCompleted())) end(inner_->exception());
    return Work::isCompleted();
  }
  bool isSuccess() const override {
    const std::lock_guard lock(mutex_);
    return completed_ && !exception_;
  }
  int sourceRank() const override { return inner_->sourceRank(); }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { inner_->abort(); }
  std::uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  // Decodes the messages, unless they have failed. Requires the lock.
  void end(std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
      if (!*differs_) decode();
    } catch (const CorruptedWireError& failed) {
      error = all_.errors_.record(CorruptedWireError(signature_ + ": " + failed.what()));
    } catch (const std::exception& failed) {
      error = std::current_exception();
      if (!signature_.empty()) {
        error = all_.errors_.record(TransportError(signature_ + " did not move: " + failed.what()));
      }
    }
    if (*differs_) error = all_.failure();
    finish(std::move(error));
    all_.errors_.announce();
  }
  void decode() {
    for (const Message& message : messages_) {
      if (!message.values.defined()) continue;
      all_.decode(message);
      if (message.wire.is_cpu()) continue;
      decoded_.emplace(message.wire.device().type());
      decoded_->record(current_stream(message.wire.device()));
    }
    messages_.clear();
    all_.watch_.end(call_);
  }

  const BackendPtr group_;  // first: it owns `all_`
  SendRecv& all_;
  const WorkPtr inner_;
  const std::shared_ptr<std::atomic<bool>> differs_ = std::make_shared<std::atomic<bool>>(false);  // set by the watch
  CallWatch::Id call_ = 0;                                                                         // 0: none
  int peer_ = CallWatch::kNobody;
  std::timed_mutex waiting_;  // guards the next two; held by a thread that waits
  std::vector<Message> messages_;
  const std::string signature_;
  std::optional<c10::Event> decoded_;  // end of decoding on a GPU
};

SendRecv::SendRecv(::c10d::Backend& group, c10::intrusive_ptr<ZcommOptions> options, InnerGroups& inner,
                   CompressedCalls& compressed, StorePtr store, GroupErrors& errors)
    : group_(group),
      options_(std::move(options)),
      inner_(inner),
      compressed_(compressed),
      errors_(errors),
      watch_(std::move(store), group.getRank()) {}

void SendRecv::fail(const std::string& difference) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = errors_.record(TransportError(difference));
  }
  errors_.announce();
}

std::exception_ptr SendRecv::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::optional<BlockFormat> SendRecv::format_of(const at::Tensor& tensor, int peer, int tag) {
  const Topology& topology = compressed_.topology();
  const Policy& own = options_->policy;
  const Policy policy = effective_policy(own, group_);
  const HopFormats& formats = policy.exchanges;
  TORCH_CHECK_VALUE(
      tensor.is_cpu() || (formats == own.exchanges && (formats.is_exact() || policy.min_bytes == own.min_bytes)),
      "zcomm: exchanges: expected the group's '", own.exchanges.to_string(), "' and min_bytes ", own.min_bytes,
      " for a tensor on a GPU, got an override to '", formats.to_string(), "' and ", policy.min_bytes,
      ": NCCL does not compare messages");
  if (formats.is_exact() || policy.exact_group || peer == group_.getRank()) return std::nullopt;
  TORCH_CHECK_VALUE(tag >= 0 && tag < kCompressedTags, "zcomm: tag: expected 0 to ", kCompressedTags - 1, ", got ",
                    tag);
  const BlockFormat& format = formats.on(topology.link(group_.getRank(), peer));
  const Call call = describe(Collective::scatter, Form::single, tensor, {&tensor, 1});
  const bool is_small = call.num_bytes < policy.min_bytes || call.num_bytes == 0;
  const bool keeps_all =
      format.kind == ElementKind::exact || (format.kind == ElementKind::bf16 && tensor.element_size() == 2);
  if (keeps_all || !call.floating_point || is_small) return std::nullopt;
  if (call.dtype && call.contiguous) {
    options_->check_device(tensor.is_cpu());
    return format;
  }
  TORCH_CHECK(!policy.strict, "zcomm: strict=True, but a message of ", call.num_bytes,
              " bytes would be sent uncompressed: expected a contiguous float32, bfloat16 or float16 tensor, got ",
              tensor.scalar_type(), " with strides ", tensor.strides());
  return std::nullopt;
}

// Returns the format of all messages that may come.
std::optional<BlockFormat> SendRecv::format_from_any(const at::Tensor& tensor, int tag) {
  std::vector<std::optional<BlockFormat>> formats;
  for (int peer = 0; peer < group_.getSize(); ++peer) {
    if (peer != group_.getRank()) formats.push_back(format_of(tensor, peer, tag));
    TORCH_CHECK_VALUE(formats.empty() || formats.front() == formats.back(),
                      "zcomm: src: expected the rank that sends, got none: messages inside a node and between nodes "
                      "have other formats, '",
                      effective_policy(options_->policy, group_).exchanges.to_string(),
                      "' (or send and receive in zcomm.exact())");
  }
  return formats.empty() ? std::nullopt : formats.front();
}

// A wire of a CPU is reused memory: touching new pages takes longer than encoding.
at::Tensor SendRecv::make_wire(const at::Tensor& values, const BlockFormat& format) {
  const std::size_t num_bytes =
      wire_bytes(format, dtype_of(values).value(), values.numel()) + (is_verified() ? kChecksumBytes : 0);
  const std::array shape{static_cast<std::int64_t>(num_bytes)};
  if (!values.is_cpu()) return at::empty(shape, values.options().dtype(at::kByte));
  auto memory = std::make_shared<Scratch>(*host_workspace_, num_bytes, StreamView{});
  std::byte* data = memory->data();
  return at::from_blob(
      data, shape, [workspace = host_workspace_, memory = std::move(memory)](void*) mutable { memory.reset(); },
      at::kByte);
}

void SendRecv::encode(const Message& message, const at::Tensor& values, std::uint64_t seed) {
  const c10::DeviceGuard guard(values.device());
  if (!values.is_cpu()) check_drawn_anew(message.format, current_view(values.device()));
  const Encode job{view_of(values), message.format, static_cast<std::byte*>(message.wire.data_ptr()), {seed}};
  codec_of(values).encode({&job, 1}, current_view(values.device()));
  if (!is_verified()) return;
  const std::size_t num_bytes = message.wire.nbytes() - kChecksumBytes;
  const std::uint64_t sum = checksum(job.wire, num_bytes);
  std::memcpy(job.wire + num_bytes, &sum, sizeof(sum));
}

void SendRecv::decode(const Message& message) {
  const c10::DeviceGuard guard(message.values.device());
  const TensorView values = view_of(message.values);
  const auto* wire = static_cast<const std::byte*>(message.wire.data_ptr());
  if (is_verified()) {
    const std::size_t num_bytes = message.wire.nbytes() - kChecksumBytes;
    std::uint64_t sum = 0;
    std::memcpy(&sum, wire + num_bytes, sizeof(sum));
    if (checksum(wire, num_bytes) != sum)
      throw CorruptedWireError("corrupted bytes: they have another checksum than when they were sent");
  }
  const Decode job{{wire, message.format, values.dtype}, values};
  codec_of(message.values).decode({&job, 1}, current_view(message.values.device()));
  if (!message.wire.is_cpu()) message.wire.record_stream(current_stream(message.wire.device()));
}

WorkPtr SendRecv::move(::c10d::OpType type, std::vector<at::Tensor>& tensors, int peer, int tag) {
  check_one(tensors);
  // Gloo ends the process for an invalid rank.
  TORCH_CHECK_VALUE(peer >= 0 && peer < group_.getSize(), "zcomm: peer: expected a rank from 0 to ",
                    group_.getSize() - 1, ", got ", peer);
  TORCH_CHECK_VALUE(peer != group_.getRank() || !tensors[0].is_cpu(), "zcomm: peer: expected another rank, got ", peer,
                    ", this rank: copy the tensor instead, as Gloo sends nothing to its own rank");
  if (const std::exception_ptr error = failure()) std::rethrow_exception(error);
  const bool is_send = type == ::c10d::OpType::SEND;
  const int rank = group_.getRank();
  const at::Tensor tensor = tensors[0];
  const CallWatch::Channel between{is_send ? rank : peer, is_send ? peer : rank, tag};
  const std::optional<BlockFormat> format = format_of(tensor, peer, tag);
  const std::string content = content_of(tensor, format, tag);
  std::vector<Message> messages;
  std::vector<at::Tensor> moved = tensors;
  int inner_tag = tag;
  if (format) {
    const std::uint64_t seed = compressed_.begin_message();
    messages.push_back({make_wire(tensor, *format), *format, is_send ? at::Tensor() : tensor});
    moved = {messages[0].wire};
    inner_tag = compressed_tag(content);
    if (is_send) {
      encode(messages[0], tensor,
             mix_seed(mix_seed(seed ^ static_cast<std::uint64_t>(rank)) ^ static_cast<std::uint64_t>(peer)));
      const std::lock_guard lock(mutex_);
      auto& [calls, bytes, wire_bytes] = sent_[peer];
      ++calls;
      bytes += tensor.nbytes();
      wire_bytes += moved[0].nbytes() - (is_verified() ? kChecksumBytes : 0);
    }
  } else {
    compressed_.count_message(tensors);
  }
  RecordedCall recorded = recorded_call(is_send ? "send" : "recv", tensors, tensors, options_->timeout);
  recorded.peer = peer;
  recorded.tag = tag;
  const InnerCall call{recorded, tensor.device(), is_send ? at::TensorList(tensors) : at::TensorList(),
                       is_send ? at::TensorList() : at::TensorList(tensors), format ? "compressed" : "other"};
  return inner_.forward(call, [&](::c10d::Backend& inner) -> WorkPtr {
    WorkPtr work = is_send ? inner.send(moved, peer, inner_tag) : inner.recv(moved, peer, inner_tag);
    if (!tensor.is_cpu() && (messages.empty() || inner_.is_coalescing())) {
      std::ranges::move(messages, std::back_inserter(coalesced_));
      return work;
    }
    std::string signature = "message " + std::to_string(between.from) + " to " + std::to_string(between.to) + content;
    if (!tensor.is_cpu()) signature.clear();
    auto message =
        c10::make_intrusive<MessageWork>(*this, type, std::move(work), std::move(messages), std::move(signature));
    if (tensor.is_cpu()) message->watch(inner_tag, between, peer);
    return message;
  });
}

// Leaves the call out of the record and of the watch, because its sender is unknown.
WorkPtr SendRecv::recv_any(std::vector<at::Tensor>& tensors, int tag) {
  check_one(tensors);
  if (const std::exception_ptr error = failure()) std::rethrow_exception(error);
  const at::Tensor tensor = tensors[0];
  const std::optional<BlockFormat> format = format_from_any(tensor, tag);
  const std::string content = content_of(tensor, format, tag);
  std::vector<Message> messages;
  std::vector<at::Tensor> moved = tensors;
  if (format) {
    compressed_.begin_message();
    messages.push_back({make_wire(tensor, *format), *format, tensor});
    moved = {messages[0].wire};
  } else {
    compressed_.count_message(tensors);
  }
  watch_.ignore(tag);
  const HookedCallPtr hooked = inner_.hooks().begin("recv", format ? "compressed" : "other", {}, tensors);
  WorkPtr work = inner_.forward(tensor.device(), [&](::c10d::Backend& inner) {
    return c10::make_intrusive<MessageWork>(
        *this, ::c10d::OpType::RECVANYSOURCE, inner.recvAnysource(moved, format ? compressed_tag(content) : tag),
        std::move(messages),
        "message from any rank to " + std::to_string(group_.getRank()) + content +
            " (do its senders compress alike, and call zcomm.exact() and zcomm.override() alike?)");
  });
  CallHooks::end(hooked, work);
  return work;
}

WorkPtr SendRecv::end_coalescing(WorkPtr work) {
  if (coalesced_.empty()) return work;
  return c10::make_intrusive<MessageWork>(*this, ::c10d::OpType::COALESCED, std::move(work),
                                          std::exchange(coalesced_, {}));
}

std::map<int, SendRecv::Sent> SendRecv::sent() const {
  const std::lock_guard lock(mutex_);
  return sent_;
}

}  // namespace zcomm::c10d_binding
