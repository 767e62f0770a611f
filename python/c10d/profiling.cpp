#include "profiling.hpp"

#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace zcomm::c10d_binding {
namespace {

// Returns a group's ranks as a first one and a stride, as in torch's events; -1 if there is no stride.
std::pair<int, int> start_and_stride(const std::vector<std::uint64_t>& ranks) {
  if (ranks.empty()) return {0, 1};
  const auto at = [&](std::size_t i) { return static_cast<int>(ranks[i]); };
  const int stride = ranks.size() > 1 ? at(1) - at(0) : 1;
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    if (at(i) - at(i - 1) != stride) return {at(0), -1};
  }
  return {at(0), stride};
}

// Passes on the number of the call and whether it is asynchronous, which torch takes from 2.13 on.
template <class Info = torch::ParamCommsDebugInfo, class... Args>
std::shared_ptr<Info> make_info(const Job& job, Args&&... args) {
  std::shared_ptr<Info> info;
  if constexpr (std::is_constructible_v<Info, Args..., bool>) {
    info = std::make_shared<Info>(std::forward<Args>(args)..., job.async);
  } else {
    info = std::make_shared<Info>(std::forward<Args>(args)...);
  }
  if constexpr (requires { info->setSequenceInfo(0, false); }) {
    info->setSequenceInfo(static_cast<std::int64_t>(job.sequence_number), false);
  }
  return info;
}

std::unordered_map<std::string, c10::IValue> own_fields(const Job& job) {
  const std::string call = std::string(job.title).substr(std::string_view("zcomm:").size());
  std::unordered_map<std::string, c10::IValue> fields{{"zcomm plan", call + " " + job.operation->description()}};
  if (const std::optional<LinkBytes> wire = job.operation->bytes(job.arguments())) {
    fields["Wire bytes intra-node"] = static_cast<std::int64_t>(wire->intra_node);
    fields["Wire bytes inter-node"] = static_cast<std::int64_t>(wire->inter_node);
  }
  return fields;
}

Profilers profilers_of_thread() { return {c10::ThreadLocalDebugInfo::current(), at::get_record_function_tls_()}; }

void make_current(const Profilers& profilers) {
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(profilers.state);
  at::set_record_function_tls_(profilers.callbacks);
}

class RangedCodec final : public Codec {
 public:
  explicit RangedCodec(std::unique_ptr<Codec> codec) : codec_(std::move(codec)) {}

  void encode(std::span<const Encode> jobs, StreamView stream) const override {
    if (jobs.empty()) return;
    RECORD_USER_SCOPE("zcomm::encode");
    codec_->encode(jobs, stream);
  }
  void decode(std::span<const Decode> jobs, StreamView stream) const override {
    if (jobs.empty()) return;
    RECORD_USER_SCOPE("zcomm::decode");
    codec_->decode(jobs, stream);
  }
  void decode_sum(std::span<const DecodeSum> jobs, StreamView stream) const override {
    if (jobs.empty()) return;
    RECORD_USER_SCOPE("zcomm::decode_sum");
    codec_->decode_sum(jobs, stream);
  }
  void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView stream) const override {
    if (jobs.empty()) return;
    RECORD_USER_SCOPE("zcomm::decode_sum_encode");
    codec_->decode_sum_encode(jobs, stream);
  }
  const LosslessCodec* lossless() const override { return codec_->lossless(); }

 private:
  std::unique_ptr<Codec> codec_;
};

class RangedTransfer final : public Transfer {
 public:
  explicit RangedTransfer(std::unique_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}
  void wait(StreamView stream) override {
    RECORD_USER_SCOPE("zcomm::wait_for_transfer");
    transfer_->wait(stream);
  }

 private:
  std::unique_ptr<Transfer> transfer_;
};

// Returns the transfer itself while no profiler is on: there is one per chunk.
std::unique_ptr<Transfer> with_range(std::unique_ptr<Transfer> transfer) {
  if (!at::hasCallbacks()) return transfer;
  return std::make_unique<RangedTransfer>(std::move(transfer));
}

class RangedTransport final : public Transport {
 public:
  explicit RangedTransport(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  int rank() const override { return transport_->rank(); }
  int size() const override { return transport_->size(); }
  void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout) override {
    transport_->begin(call, peers, timeout);
  }
  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs,
                                  StreamView stream) override {
    RECORD_USER_SCOPE("zcomm::start_transfer");
    return with_range(transport_->start(sends, recvs, stream));
  }
  std::unique_ptr<Transfer> all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream) override {
    RECORD_USER_SCOPE("zcomm::start_transfer");
    return with_range(transport_->all_gather(slots, slot_bytes, stream));
  }
  void begin_group() override { transport_->begin_group(); }
  void end_group(StreamView stream) override {
    if (transport_->starts_at_once()) return transport_->end_group(stream);  // nothing is left to do
    RECORD_USER_SCOPE("zcomm::start_transfer");
    transport_->end_group(stream);
  }
  bool starts_at_once() const override { return transport_->starts_at_once(); }
  bool takes_limits() const override { return transport_->takes_limits(); }
  void check() override { transport_->check(); }
  void watch(Finding finding) override { transport_->watch(std::move(finding)); }
  void abort(const std::string& reason) noexcept override { transport_->abort(reason); }

 private:
  std::unique_ptr<Transport> transport_;
};

}  // namespace

CallEvent::CallEvent(const Job& job, const CallSummary& call, const ::c10d::Backend& group,
                     const std::vector<std::uint64_t>& ranks)
    : event_(at::RecordScope::FUNCTION) {
  if (event_.isActive()) begin(job, call, group, ranks);
}

void CallEvent::begin(const Job& job, const CallSummary& call, const ::c10d::Backend& group,
                      const std::vector<std::uint64_t>& ranks) {
  const std::tuple<std::string, std::string> name(group.getGroupUid(), group.getGroupDesc());
  const auto [start, stride] = start_and_stride(ranks);
  const std::vector<std::int64_t> no_splits;
  debug_info_.emplace(c10::DebugInfoKind::PARAM_COMMS_INFO,
                      make_info(job, name, group.getRank(), std::string(call.name), call.in_elements, call.out_elements,
                                job.outputs[0].scalar_type(), no_splits, no_splits, start, stride, group.getSize()));
  // Follows the order of torch's own RECORD_PARAM_COMMS_DATA, which readers of execution traces rely on.
  inputs_ = {job.inputs,
             std::make_tuple(static_cast<std::int64_t>(job.sequence_number), false),
             name,
             static_cast<std::int64_t>(group.getRank()),
             call.name,
             no_splits,
             no_splits,
             static_cast<std::int64_t>(start),
             static_cast<std::int64_t>(stride),
             static_cast<std::int64_t>(group.getSize()),
             job.async};
  const std::unordered_map<std::string, c10::IValue> fields = own_fields(job);
  event_.before(at::kParamCommsCallName, &inputs_, &fields);
  if (event_.needsOutputs()) event_.setOutputs(std::vector<c10::IValue>{job.outputs});
}

std::unique_ptr<Codec> with_ranges(std::unique_ptr<Codec> codec) {
  return std::make_unique<RangedCodec>(std::move(codec));
}

std::unique_ptr<Transport> with_ranges(std::unique_ptr<Transport> transport) {
  return std::make_unique<RangedTransport>(std::move(transport));
}

std::optional<Profilers> current_profilers() {
  if (!at::hasCallbacks()) return std::nullopt;
  return profilers_of_thread();
}

WithProfilers::WithProfilers(const std::optional<Profilers>& profilers) {
  if (!profilers) return;
  before_ = profilers_of_thread();
  make_current(*profilers);
}

WithProfilers::~WithProfilers() {
  if (before_) make_current(*before_);
}

}  // namespace zcomm::c10d_binding
