// Lossless gathers: stages and operations.
#include <algorithm>
#include <utility>

#include "all_gather.hpp"
#include "counted.hpp"
#include "lossless_messages.hpp"
#include "message.hpp"
#include "slot_views.hpp"
#include "zcomm/call_check.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {
namespace {

// Gathers within a node: sends the kept values of holders straight into the slots of their peers, or, if these have
// several views, by way of buffers.
class NodeGather : public Stages {
 public:
  // Takes this rank's shard if the kept values are the same. If it lies in its slot, that is not written to.
  NodeGather(const Resources& r, const LosslessPlan& plan, Kept& kept, std::span<const TensorView> views,
             const std::byte* shard)
      : r_(r),
        plan_(plan),
        kept_(kept),
        slots_(views, plan.slots().lengths.size()),
        is_scattered_(views.size() > plan.slots().lengths.size()),
        has_own_(views[static_cast<std::size_t>(plan.rank())].data == shard && !is_scattered_),
        received_(r, is_scattered_ ? r.world.topology.size() : 0, element_size(DType::bfloat16) * longest(plan),
                  static_cast<int>(std::min<std::int64_t>(plan.num_chunks(), kDepth))) {
    kept_.hashes->make_wait(r.stream);
  }

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  void finish(std::int64_t chunk) override {
    copies_.clear();
    for (const int slot : plan_.held()) {
      if (slot != plan_.rank() || !has_own_) copy(kept(slot, chunk).values.data, slot, chunk);
    }
    run_codec(r_, copies_);
    wait_for_transfer(r_, *own_[chunk], 1);
    wait_for_transfer(r_, *others_[chunk], 1);
    if (is_scattered_) scatter(chunk);
    own_[chunk].reset();
    others_[chunk].reset();
  }
  void end() override {
    kept_.hashes->mark_use(r_.stream);
    look_for_errors();
  }

 protected:
  KeptChunk kept(int slot, std::int64_t chunk) const { return kept_chunk(plan_, kept_, slot, chunk); }
  // Looks for errors that this call's jobs find: at once on a CPU, when the call is over on a GPU.
  void look_for_errors() {
    r_.transport.watch([hashes = kept_.hashes] { return hashes->finding(); });
  }
  // Looks before values are passed on, where jobs are done by then.
  void look_at_once() {
    if (kept_.hashes->are_at_once()) look_for_errors();
  }
  // Sends each rank's own slot; those of other nodes.
  void start_own(std::int64_t chunk) { own_[chunk] = exchange(chunk, /*own=*/true); }
  void start_others(std::int64_t chunk) { others_[chunk] = exchange(chunk, /*own=*/false); }

  const Resources& r_;
  const LosslessPlan& plan_;
  Kept& kept_;
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;

 private:
  std::unique_ptr<Transfer> exchange(std::int64_t chunk, bool own) {
    sends_.clear();
    recvs_.clear();
    for (const Move& move : plan_.intra_node_hop().sends) {
      if ((move.slot == plan_.rank()) != own) continue;
      const TensorView values = kept(move.slot, chunk).values;
      sends_.push_back({move.peer, values.data, values.num_bytes()});
    }
    for (const Move& move : plan_.intra_node_hop().recvs) {
      if ((move.slot == move.peer) != own) continue;
      const TensorView values = slots_(move.slot, plan_.chunk(chunk));
      recvs_.push_back(is_scattered_ ? received_.recv(move.peer, move.slot, chunk, chunk_bytes(chunk))
                                     : Recv{move.peer, values.data, values.num_bytes()});
    }
    return start_transfer(r_, sends_, recvs_, 1);
  }
  // Copies what was received into its views.
  void scatter(std::int64_t chunk) {
    copies_.clear();
    for (const Move& move : plan_.intra_node_hop().recvs) copy(received_.data(move.slot, chunk), move.slot, chunk);
    run_codec(r_, copies_);
  }
  void copy(const std::byte* values, int slot, std::int64_t chunk) {
    for (const Piece<BlockFormat>& piece : plan_.pieces(chunk)) {
      const TensorView to = slots_(slot, piece);
      copies_.push_back({{values, {}, to.dtype}, to});
      values += to.num_bytes();
    }
  }
  std::size_t chunk_bytes(std::int64_t chunk) const {
    return element_size(plan_.slots().dtype) * static_cast<std::size_t>(plan_.chunk(chunk).count);
  }
  static std::size_t longest(const LosslessPlan& plan) { return static_cast<std::size_t>(plan.longest_chunk()); }

  static constexpr int kDepth = 3;  // chunks in progress

  const SlotViews<TensorView> slots_;
  const bool is_scattered_;
  const bool has_own_;
  ReceivedMessages received_;
  Ring<std::unique_ptr<Transfer>> own_{kDepth};
  Ring<std::unique_ptr<Transfer>> others_{2};
  std::vector<Decode> copies_;
};

// Gathers from the owners of slots to their holders in other nodes, then within the nodes.
class GatherStages final : public NodeGather {
 public:
  GatherStages(const Resources& r, const LosslessPlan& plan, Kept& kept, std::span<const TensorView> views,
               std::unique_ptr<LosslessMessages> messages)
      : NodeGather(r, plan, kept, views, messages->kept_from),
        messages_(std::move(messages)),
        received_(r, static_cast<int>(owners().size()), messages_->longest(), kDepth) {
    kept_.generation = 0;
    kept_.hashes->begin_gather(messages_->base);
  }

  int num_hops() const override { return 2; }

 private:
  static constexpr int kDepth = 2;  // chunks whose messages have arrived

  const std::vector<Move>& owners() const { return plan_.inter_node_hop().recvs; }

  // Sends this rank's values to other nodes, and plain values to the ranks of its node.
  void first_hop(std::int64_t chunk) override {
    sends_.clear();
    recvs_.clear();
    messages_->list(r_, chunk, received_, sends_, recvs_);
    exchanged_[chunk] = start_transfer(r_, sends_, recvs_);
    start_own(chunk);
  }
  // Decodes messages of other nodes, and sends the values to the ranks of its node.
  void second_hop(std::int64_t chunk) override {
    finish_transfer(r_, exchanged_[chunk]);
    if (!owners().empty()) decode(chunk);
    start_others(chunk);
  }
  void end() override {
    NodeGather::end();
    if (messages_->stream.handle != r_.stream.handle) kept_.hashes->make_wait(messages_->stream);
    kept_.sent_bytes = messages_->sent_bytes;
    kept_.generation = messages_->base + 1;
  }
  void decode(std::int64_t chunk) {
    jobs_.clear();
    for (std::size_t i = 0; i < owners().size(); ++i) {
      const std::byte* const message = received_.data(static_cast<int>(i), chunk);
      const KeptChunk to = kept(owners()[i].slot, chunk);
      jobs_.push_back(
          {message, messages_->received_bytes(i, chunk, message), to.values, messages_->base, to.hash, to.status});
    }
    run_codec(r_, jobs_);
    look_at_once();
  }

  const std::unique_ptr<LosslessMessages> messages_;
  const MessageBuffers received_;
  Ring<std::unique_ptr<Transfer>> exchanged_{kDepth};
  std::vector<DecodeLossless> jobs_;
};

// Gathers kept values again, within the node.
class NodeGatherAgain final : public NodeGather {
 public:
  NodeGatherAgain(const Resources& r, const LosslessPlan& plan, Kept& kept, std::span<const TensorView> views)
      : NodeGather(r, plan, kept, views, nullptr) {}

 private:
  // Checks values and passes them on.
  void first_hop(std::int64_t chunk) override {
    jobs_.clear();
    for (const int slot : plan_.held()) {
      const KeptChunk of = kept(slot, chunk);
      jobs_.push_back({of.values, of.values, of.hash, of.status});
    }
    run_codec(r_, jobs_);
    look_at_once();
    start_own(chunk);
    start_others(chunk);
  }

  std::vector<CheckHash> jobs_;
};

class LosslessGather final : public Operation {
 public:
  LosslessGather(std::shared_ptr<const LosslessPlan> plan, std::shared_ptr<Kept> kept)
      : plan_(std::move(plan)), kept_(std::move(kept)) {}

  const World& world() const override { return plan_->world(); }
  const std::string& description() const override { return plan_->description(); }
  std::int64_t num_chunks() const override { return plan_->num_chunks(); }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return {}; }
  std::size_t kept_bytes() const override { return plan_->kept_bytes(); }
  std::size_t largest_kept_bytes() const override { return plan_->largest_kept_bytes(); }
  OperationPtr keeping(std::shared_ptr<Kept> kept) const override {
    return make_lossless_gather(plan_, std::move(kept));
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
    check_argument(kept_->generation > 0, [] {
      return std::string(
          "kept: expected shards that an all_gather by differences has filled, got those of generation 0");
    });
    check_argument(!r.preparations.is_prepared(*kept_), [] {
      return std::string("kept: expected shards that were gathered, got those of a gather that is only prepared");
    });
  }
  std::string words(const Arguments& arguments) const override {
    if (is_again(arguments)) return "gather_secondary " + description() + kUnchanged;
    return "all_gather " + description() + ", of weights that may have changed";
  }
  std::string turn() const override { return ", generation " + std::to_string(kept_->generation); }
  std::vector<int> peers(const Arguments& arguments) const override {
    return is_again(arguments) ? plan_->topology().node_peers(plan_->rank()) : plan_->topology().peers(plan_->rank());
  }
  Pipeline stages(const Resources& r, const Arguments& arguments) override {
    const std::span<const TensorView> views = arguments.outputs;
    if (is_again(arguments)) return {{}, std::make_unique<NodeGatherAgain>(r, *plan_, *kept_, views)};
    auto messages = r.preparations.messages(r, difference(arguments.inputs.front()));
    return {{}, std::make_unique<GatherStages>(r, *plan_, *kept_, views, std::move(messages))};
  }

  LosslessShard difference(ConstTensorView shard) const { return {*plan_, shard, *kept_}; }

  void check_shard(const Resources& r, ConstTensorView shard) const {
    const std::int64_t length = plan_->slots().lengths[static_cast<std::size_t>(world().rank)];
    check_argument(shard.num_elements == length && shard.dtype == plan_->slots().dtype, [&] {
      return "inputs: expected " + std::to_string(length) + " elements of " +
             std::string(to_string(plan_->slots().dtype)) + ", as was planned, got " +
             std::to_string(shard.num_elements) + " of " + std::string(to_string(shard.dtype));
    });
    check_plan(r, *plan_, plan_->slots());
    check_memory(r);
  }

 private:
  void check_memory(const Resources& r) const {
    check_argument(r.codec.lossless() != nullptr,
                   [] { return std::string("codec: expected one of lossless differences, got one without"); });
    check_argument(kept_ != nullptr, [] { return std::string("kept: expected memory, got none"); });
    check_kept(*kept_, plan_->kept_bytes());
    check_argument(!r.preparations.are_needed() || !is_capturing(r.stream), [] {
      return std::string(
          "stream: expected one that runs, got one that records a CUDA graph: the sizes of differences change, and a "
          "graph's do not");
    });
  }

  const std::shared_ptr<const LosslessPlan> plan_;
  const std::shared_ptr<Kept> kept_;
};

class PreparationOperation final : public Operation {
 public:
  explicit PreparationOperation(std::vector<OperationPtr> gathers) {
    check_argument(!gathers.empty(), [] { return std::string("gathers: expected at least one, got none"); });
    for (OperationPtr& gather : gathers) {
      auto lossless = std::dynamic_pointer_cast<LosslessGather>(std::move(gather));
      check_argument(lossless != nullptr,
                     [] { return std::string("gathers: expected lossless ones, got one that encodes"); });
      check_argument(std::find(gathers_.begin(), gathers_.end(), lossless) == gathers_.end(),
                     [] { return std::string("gathers: expected each once, got one twice"); });
      gathers_.push_back(std::move(lossless));
    }
    description_ = std::to_string(gathers_.size()) + " gathers, the first of " + gathers_.front()->description();
    std::string all;
    for (const auto& gather : gathers_) all += gather->description() + "\n";
    words_ = "prepare " + description_ + ", #" + std::to_string(call_fingerprint(all));
  }

  const World& world() const override { return gathers_.front()->world(); }
  const std::string& description() const override { return description_; }
  std::int64_t num_chunks() const override { return 0; }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return {}; }

  void check(const Resources& r, const Arguments& arguments) const override {
    check_argument(r.preparations.are_needed(), [] {
      return std::string(
          "codec: expected that of a GPU, got one of host memory: there sizes are sent with each gather");
    });
    check_argument(arguments.inputs.size() == gathers_.size(), [&] {
      return "inputs: expected the shards of " + std::to_string(gathers_.size()) + " gathers, got " +
             std::to_string(arguments.inputs.size());
    });
    for (std::size_t i = 0; i < gathers_.size(); ++i) gathers_[i]->check_shard(r, arguments.inputs[i]);
  }
  std::string words(const Arguments&) const override { return words_; }
  Pipeline stages(const Resources& r, const Arguments& arguments) override {
    std::vector<LosslessShard> shards;
    shards.reserve(gathers_.size());
    for (std::size_t i = 0; i < gathers_.size(); ++i) shards.push_back(gathers_[i]->difference(arguments.inputs[i]));
    r.preparations.prepare(r, shards);
    return {};
  }

 private:
  std::vector<std::shared_ptr<LosslessGather>> gathers_;
  std::string description_;
  std::string words_;
};

}  // namespace

OperationPtr make_lossless_gather(std::shared_ptr<const LosslessPlan> plan, std::shared_ptr<Kept> kept) {
  return std::make_shared<LosslessGather>(std::move(plan), std::move(kept));
}

OperationPtr make_preparation(std::vector<OperationPtr> gathers) {
  return std::make_shared<PreparationOperation>(std::move(gathers));
}

}  // namespace zcomm
