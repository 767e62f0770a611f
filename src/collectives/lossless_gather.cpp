// Lossless gathers: stages and operations.
#include <algorithm>
#include <utility>

#include "all_gather.hpp"
#include "lossless_preparation.hpp"
#include "stages.hpp"
#include "zcomm/call_check.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {
namespace {

// Gathers from the owners of slots to their holders in other nodes, then within the nodes. Without a shard, gathers
// kept values again, within the node. Holders send kept values straight into the slots of their peers or, if these have
// several views, by way of buffers.
class LosslessStages final : public Stages {
 public:
  // If the shard lies in its slot, and the kept values are the same, that is not written to. `prepared`: the messages,
  // if the transport needs that; else each is encoded when it is sent, and its receivers have room for the longest one.
  LosslessStages(const Resources& r, const LosslessShard& shard, std::span<const TensorView> views,
                 std::shared_ptr<const PreparedMessages> prepared, bool is_again)
      : r_(r),
        shard_(shard),
        plan_(shard.plan),
        secondary_(shard.secondary),
        prepared_(std::move(prepared)),
        is_again_(is_again),
        base_(prepared_ == nullptr ? secondary_.generation.load() : prepared_->base),
        slots_(views, plan_.slots().lengths.size()),
        is_scattered_(views.size() > plan_.slots().lengths.size()),
        has_own_(prepared_ == nullptr && !is_again && !is_scattered_ &&
                 views[static_cast<std::size_t>(plan_.rank())].data == shard.shard.data),
        outgoing_(r, prepared_ == nullptr && !is_again && !holders().empty() ? 1 : 0, longest(), kDepth),
        incoming_(r, is_again ? 0 : static_cast<int>(owners().size()), longest(), kDepth),
        passed_on_(r, is_scattered_ ? r.world.topology.size() : 0, longest_chunk_bytes(),
                   static_cast<int>(std::min<std::int64_t>(plan_.num_chunks(), kDepth + 1))) {}

  void begin() override {
    secondary_.hashes->make_wait(r_.stream);
    if (is_again_) return;
    r_.preparations.remove(secondary_);
    secondary_.generation = 0;
    secondary_.hashes->begin_gather(base_);
  }

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  int num_hops() const override { return is_again_ ? 1 : 2; }

 private:
  static constexpr int kDepth = 2;  // chunks between two hops

  const std::vector<Move>& holders() const { return plan_.inter_node_hop().sends; }
  const std::vector<Move>& owners() const { return plan_.inter_node_hop().recvs; }
  TensorView secondary(int slot, std::int64_t chunk) const { return secondary_values(plan_, secondary_, slot, chunk); }
  std::size_t longest_chunk_bytes() const {
    return element_size(plan_.slots().dtype) * static_cast<std::size_t>(plan_.longest_chunk());
  }
  // Returns the longest message between nodes.
  std::size_t longest() const {
    if (prepared_ == nullptr) return most_bytes(plan_.longest_chunk());
    const std::vector<std::size_t>& bodies = prepared_->received;
    return kLosslessHeaderBytes + (bodies.empty() ? 0 : align_wire(*std::ranges::max_element(bodies)));
  }

  // Sends this rank's values to other nodes, and plain values to the ranks of its node.
  void first_hop(std::int64_t chunk) override {
    if (is_again_) {
      check(chunk);
    } else {
      sends_.clear();
      recvs_.clear();
      if (prepared_ == nullptr) {
        list_encoded(chunk);
      } else {
        list_prepared(chunk);
      }
      exchanged_[chunk] = start_transfer(r_, sends_, recvs_);
    }
    own_[chunk] = pass_on(chunk, /*own=*/true);
    if (is_again_) others_[chunk] = pass_on(chunk, /*own=*/false);
  }
  // Decodes messages of other nodes, and sends the values to the ranks of its node.
  void second_hop(std::int64_t chunk) override {
    finish_transfer(r_, exchanged_[chunk]);
    if (!owners().empty()) decode(chunk);
    others_[chunk] = pass_on(chunk, /*own=*/false);
  }
  void finish(std::int64_t chunk) override {
    copies_.clear();
    for (const int slot : plan_.held()) {
      if (slot != plan_.rank() || !has_own_) copy(secondary(slot, chunk).data, slot, chunk);
    }
    run_codec(r_, copies_);
    wait_for_transfer(r_, *own_[chunk], 1);
    wait_for_transfer(r_, *others_[chunk], 1);
    if (is_scattered_) scatter(chunk);
    own_[chunk].reset();
    others_[chunk].reset();
  }
  void end() override {
    secondary_.hashes->mark_use(r_.stream);
    look_for_errors();
    if (is_again_) return;
    if (prepared_ != nullptr && prepared_->stream.handle != r_.stream.handle) {
      secondary_.hashes->make_wait(prepared_->stream);
    }
    secondary_.sent_bytes = sent_bytes_;
    secondary_.generation = base_ + 1;
  }

  // Looks for errors that this call's jobs find: at once on a CPU, when the call is over on a GPU.
  void look_for_errors() {
    r_.transport.watch([hashes = secondary_.hashes] { return hashes->finding(); });
  }
  // Looks before values are passed on, where jobs are done by then.
  void look_at_once() {
    if (secondary_.hashes->are_at_once()) look_for_errors();
  }

  void check(std::int64_t chunk) {
    checks_.clear();
    for (const int slot : plan_.held()) {
      const TensorView values = secondary(slot, chunk);
      checks_.push_back({values, values, secondary_.hashes->hash(slot, chunk), secondary_.hashes->status(slot, chunk)});
    }
    run_codec(r_, checks_);
    look_at_once();
  }
  void list_encoded(std::int64_t chunk) {
    EncodeLossless job = shard_.encoding(chunk, base_);
    std::uint64_t num_bytes = 0;
    if (!holders().empty()) {
      job.message = outgoing_.data(0, chunk);
      job.num_bytes = &num_bytes;
    }
    run_codec(r_, {&job, 1});
    sent_bytes_ += num_bytes;
    for (const Move& move : holders()) sends_.push_back({move.peer, job.message, num_bytes, /*has_upper_bound=*/true});
    for (std::size_t i = 0; i < owners().size(); ++i) {
      const std::size_t most = most_bytes(secondary(owners()[i].slot, chunk).num_elements);
      recvs_.push_back({owners()[i].peer, incoming_.data(static_cast<int>(i), chunk), most, /*is_upper_bound=*/true});
    }
  }
  void list_prepared(std::int64_t chunk) {
    if (holders().empty()) return;
    const auto number = static_cast<std::size_t>(chunk);
    const std::size_t num_bytes = prepared_->sent[number];
    sent_bytes_ += kLosslessHeaderBytes + num_bytes;
    const std::byte* const body = prepared_->bodies->data() + prepared_->offsets[number];
    for (const Move& move : holders()) sends_.push_back({move.peer, body, num_bytes});
    copies_.clear();
    for (std::size_t i = 0; i < owners().size(); ++i) {
      std::byte* const message = incoming_.data(static_cast<int>(i), chunk);
      copies_.push_back(copy_of(prepared_->header(i, number), message, kLosslessHeaderBytes));
      recvs_.push_back({owners()[i].peer, message + kLosslessHeaderBytes, prepared_->body_bytes(i, number)});
    }
    run_codec(r_, copies_);
  }
  void decode(std::int64_t chunk) {
    jobs_.clear();
    for (std::size_t i = 0; i < owners().size(); ++i) {
      const int slot = owners()[i].slot;
      const TensorView values = secondary(slot, chunk);
      const std::byte* const message = incoming_.data(static_cast<int>(i), chunk);
      const std::size_t body_bytes = prepared_ == nullptr ? checked_header(message, slot, base_, values).body_bytes
                                                          : prepared_->body_bytes(i, static_cast<std::size_t>(chunk));
      jobs_.push_back({message, kLosslessHeaderBytes + body_bytes, values, base_, secondary_.hashes->hash(slot, chunk),
                       secondary_.hashes->status(slot, chunk)});
    }
    run_codec(r_, jobs_);
    look_at_once();
  }

  // Sends kept values within the node: each rank's own slot, or those of other nodes.
  std::unique_ptr<Transfer> pass_on(std::int64_t chunk, bool own) {
    sends_.clear();
    recvs_.clear();
    for (const Move& move : plan_.intra_node_hop().sends) {
      if ((move.slot == plan_.rank()) != own) continue;
      const TensorView values = secondary(move.slot, chunk);
      sends_.push_back({move.peer, values.data, values.num_bytes()});
    }
    for (const Move& move : plan_.intra_node_hop().recvs) {
      if ((move.slot == move.peer) != own) continue;
      const TensorView values = slots_(move.slot, plan_.chunk(chunk));
      recvs_.push_back(is_scattered_ ? passed_on_.recv(move.peer, move.slot, chunk, chunk_bytes(chunk))
                                     : Recv{move.peer, values.data, values.num_bytes()});
    }
    return start_transfer(r_, sends_, recvs_, 1);
  }
  // Copies what was received into its views.
  void scatter(std::int64_t chunk) {
    copies_.clear();
    for (const Move& move : plan_.intra_node_hop().recvs) copy(passed_on_.received(move.slot, chunk), move.slot, chunk);
    run_codec(r_, copies_);
  }
  void copy(const std::byte* values, int slot, std::int64_t chunk) {
    for (const Piece<BlockFormat>& piece : plan_.parts(chunk)) {
      const TensorView to = slots_(slot, piece);
      copies_.push_back({{values, {}, to.dtype}, to});
      values += to.num_bytes();
    }
  }
  std::size_t chunk_bytes(std::int64_t chunk) const {
    return element_size(plan_.slots().dtype) * static_cast<std::size_t>(plan_.chunk(chunk).count);
  }

  const Resources& r_;
  const LosslessShard shard_;
  const LosslessPlan& plan_;
  SecondaryShard& secondary_;
  const std::shared_ptr<const PreparedMessages> prepared_;
  const bool is_again_;
  const std::uint64_t base_;  // the generation that differences refer to
  const SlotViews<TensorView> slots_;
  const bool is_scattered_;
  const bool has_own_;
  const MessageBuffers outgoing_;
  const MessageBuffers incoming_;  // one message for each owner
  MessageBuffers passed_on_;       // values of the node's ranks
  std::size_t sent_bytes_ = 0;     // to each holder so far, with headers
  Ring<std::unique_ptr<Transfer>> exchanged_{kDepth};
  Ring<std::unique_ptr<Transfer>> own_{kDepth + 1};
  Ring<std::unique_ptr<Transfer>> others_{kDepth};
  // Buffers reused by all chunks.
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<CheckHash> checks_;
  std::vector<DecodeLossless> jobs_;
  std::vector<Decode> copies_;
};

class LosslessGather final : public Gather {
 public:
  LosslessGather(std::shared_ptr<const LosslessPlan> plan, std::shared_ptr<SecondaryShard> secondary)
      : plan_(std::move(plan)), secondary_(std::move(secondary)) {}

  const World& world() const override { return plan_->world(); }
  const std::string& description() const override { return plan_->description(); }
  std::int64_t num_chunks() const override { return plan_->num_chunks(); }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return {}; }
  OperationMemory memory() const override {
    return {.secondary = plan_->secondary_bytes(), .largest_secondary = plan_->largest_secondary_bytes()};
  }
  GatherPtr bound_to(std::shared_ptr<SecondaryShard> secondary) const override {
    return make_lossless_gather(plan_, std::move(secondary));
  }
  void decode(const Codec&, const Arguments&, StreamView) const override {
    throw ArgumentError("wires: expected a gather in a format, got " + description());
  }

  void check(const Resources& r, const Arguments& given) const override {
    const std::vector<TensorView> slots = joined_slots(given.outputs, plan_->segments(), plan_->slots().lengths.size());
    Arguments arguments = given;
    arguments.outputs = slots;
    check_gathered(r, arguments);
    check_apart(r, given.inputs, given.outputs, "shard");
    check_plan(r, *plan_, shape_of(slots));
    check_memory(r);
    if (!is_again(arguments)) return;
    check_argument(
        secondary_->generation > 0,
        "secondary: expected shards that an all_gather by differences has filled, got those of generation 0");
    check_argument(!r.preparations.is_prepared(*secondary_),
                   "secondary: expected shards that were gathered, got those of a gather that is only prepared");
  }
  std::string signature(const Arguments& arguments, bool with_state) const override {
    const std::string state = with_state ? ", generation " + std::to_string(secondary_->generation) : "";
    if (is_again(arguments)) return "gather_secondary " + description() + kUnchanged + state;
    return "all_gather " + description() + ", of weights that may have changed" + state;
  }
  std::vector<int> peers(const Arguments& arguments) const override {
    return is_again(arguments) ? plan_->topology().node_peers(plan_->rank()) : plan_->topology().peers(plan_->rank());
  }
  bool sends_in_stages(const Resources& r, const Arguments& arguments) const override {
    return r.transport.is_stream_ordered() && !is_again(arguments) && !r.preparations.is_prepared(*secondary_);
  }
  std::unique_ptr<Stages> stages(const Resources& r, const Arguments& arguments) override {
    const bool again = is_again(arguments);
    const LosslessShard shard = shard_of(r, again ? ConstTensorView{} : arguments.inputs.front());
    auto prepared = again ? nullptr : r.preparations.of(r, shard);
    return std::make_unique<LosslessStages>(r, shard, arguments.outputs, std::move(prepared), again);
  }

  // Makes SecondaryShard::hashes, at the first gather.
  LosslessShard shard_of(const Resources& r, ConstTensorView shard) const {
    if (secondary_->hashes == nullptr)
      secondary_->hashes = std::make_shared<SecondaryHashes>(*r.codec.lossless(), plan_);
    return {*plan_, shard, *secondary_};
  }

  void check_shard(const Resources& r, ConstTensorView shard) const {
    const std::int64_t length = plan_->slots().lengths[static_cast<std::size_t>(world().rank)];
    check_argument(shard.num_elements == length && shard.dtype == plan_->slots().dtype, "inputs: expected ", length,
                   " elements of ", to_string(plan_->slots().dtype), ", as was planned, got ", shard.num_elements,
                   " of ", to_string(shard.dtype));
    check_plan(r, *plan_, plan_->slots());
    check_memory(r);
  }

 private:
  void check_memory(const Resources& r) const {
    check_argument(r.codec.lossless() != nullptr, "codec: expected one of lossless differences, got one without");
    check_argument(secondary_ != nullptr, "secondary: expected memory, got none");
    check_secondary(*secondary_, plan_->secondary_bytes());
    check_argument(
        !r.transport.is_stream_ordered() || !is_capturing(r.stream),
        "stream: expected one that runs, got one that records a CUDA graph: the sizes of differences change, and a "
        "graph's do not");
  }

  const std::shared_ptr<const LosslessPlan> plan_;
  const std::shared_ptr<SecondaryShard> secondary_;
};

class PreparationOperation final : public Operation {
 public:
  explicit PreparationOperation(std::vector<GatherPtr> gathers) {
    check_argument(!gathers.empty(), "gathers: expected at least one, got none");
    for (GatherPtr& gather : gathers) {
      auto lossless = std::dynamic_pointer_cast<LosslessGather>(std::move(gather));
      check_argument(lossless != nullptr, "gathers: expected lossless ones, got one that encodes");
      check_argument(std::find(gathers_.begin(), gathers_.end(), lossless) == gathers_.end(),
                     "gathers: expected each once, got one twice");
      gathers_.push_back(std::move(lossless));
    }
    description_ = std::to_string(gathers_.size()) + " gathers, the first of " + gathers_.front()->description();
    std::string all;
    for (const auto& gather : gathers_) all += gather->description() + "\n";
    signature_ = "prepare " + description_ + " #" + std::to_string(call_fingerprint(all));
  }

  const World& world() const override { return gathers_.front()->world(); }
  const std::string& description() const override { return description_; }
  std::int64_t num_chunks() const override { return 0; }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return {}; }

  void check(const Resources& r, const Arguments& arguments) const override {
    check_argument(r.transport.is_stream_ordered(),
                   "codec: expected that of a GPU, got one of host memory: there sizes are sent with each gather");
    check_argument(arguments.inputs.size() == gathers_.size(), "inputs: expected the shards of ", gathers_.size(),
                   " gathers, got ", arguments.inputs.size());
    for (std::size_t i = 0; i < gathers_.size(); ++i) gathers_[i]->check_shard(r, arguments.inputs[i]);
  }
  std::string signature(const Arguments&, bool) const override { return signature_; }
  bool sends_in_stages(const Resources&, const Arguments&) const override { return true; }
  std::unique_ptr<Stages> stages(const Resources& r, const Arguments& arguments) override {
    std::vector<LosslessShard> shards;
    shards.reserve(gathers_.size());
    for (std::size_t i = 0; i < gathers_.size(); ++i) {
      shards.push_back(gathers_[i]->shard_of(r, arguments.inputs[i]));
    }
    r.preparations.prepare(r, shards);
    return nullptr;
  }

 private:
  std::vector<std::shared_ptr<LosslessGather>> gathers_;
  std::string description_;
  std::string signature_;
};

}  // namespace

GatherPtr make_lossless_gather(std::shared_ptr<const LosslessPlan> plan, std::shared_ptr<SecondaryShard> secondary) {
  return std::make_shared<LosslessGather>(std::move(plan), std::move(secondary));
}

OperationPtr make_preparation(std::vector<GatherPtr> gathers) {
  return std::make_shared<PreparationOperation>(std::move(gathers));
}

}  // namespace zcomm
