#include "zcomm/exchange.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "operation_checks.hpp"
#include "random_seed.hpp"
#include "stages.hpp"

namespace zcomm {
namespace {

// Returns `name` and the elements and formats of a call between equals.
std::string describe(const std::string& name, std::int64_t num_elements, DType dtype, HopFormats formats) {
  return name + " " + SlotShape{{num_elements}, dtype}.to_string() + " " + formats.to_string();
}

// Returns lengths for each rank: `length` for one, 0 for the others.
ExchangePlan::Lengths only_for(int rank, std::int64_t length, const World& world) {
  ExchangePlan::Lengths lengths(static_cast<std::size_t>(world.topology.size()), 0);
  lengths[static_cast<std::size_t>(rank)] = length;
  return lengths;
}

}  // namespace

ExchangePlan::ExchangePlan(World world, Lengths sent, Lengths received, DType dtype, HopFormats formats,
                           std::size_t min_bytes, std::string description, std::vector<int> peers)
    : world_(std::move(world)),
      sent_(std::move(sent)),
      received_(std::move(received)),
      dtype_(dtype),
      formats_(formats),
      min_bytes_(min_bytes),
      description_(std::move(description)),
      peers_(std::move(peers)) {
  const auto size = static_cast<std::size_t>(world_.topology.size());
  const auto own = static_cast<std::size_t>(world_.rank);
  check(world_);
  check_format(formats, dtype);
  for (const auto& [lengths, name] : {std::pair(&sent_, "sent"), std::pair(&received_, "received")}) {
    check_argument(lengths->size() == size, name, ": expected one length for each of ", size, " ranks, got ",
                   lengths->size());
    const std::int64_t least = *std::min_element(lengths->begin(), lengths->end());
    check_argument(least >= 0, name, ": expected 0 or more elements for each rank, got ", least);
  }
  check_argument(sent_[own] == received_[own], "received: expected the ", sent_[own], " elements that rank ", own,
                 " sends to itself, got ", received_[own]);
  chunk_elements_ = zcomm::chunk_elements(world_, dtype_, granule_of(formats));
  sends_ = messages(sent_, 1);
  recvs_ = messages(received_, -1);
  for (const auto* const lengths : {&sent_, &received_}) {
    const std::int64_t longest = *std::max_element(lengths->begin(), lengths->end());
    num_chunks_ = std::max(num_chunks_, (longest + chunk_elements_ - 1) / chunk_elements_);
  }
}

// Lists the peers at distance `direction`, twice that and so on, those in other nodes first.
std::vector<ExchangePlan::Message> ExchangePlan::messages(const Lengths& lengths, int direction) const {
  std::vector<Message> all;
  const int size = world_.topology.size();
  for (int shift = 1; shift < size; ++shift) {
    const int peer = (world_.rank + direction * shift + size) % size;
    const std::int64_t length = lengths[static_cast<std::size_t>(peer)];
    if (length == 0) continue;
    const bool is_exact = static_cast<std::size_t>(length) * element_size(dtype_) < min_bytes_;
    all.push_back({peer, length, is_exact ? BlockFormat{} : formats_.on(world_.topology.link(world_.rank, peer))});
  }
  std::stable_partition(all.begin(), all.end(), [this](const Message& message) {
    return !world_.topology.same_node(world_.rank, message.peer);
  });
  return all;
}

ExchangePlan ExchangePlan::all_to_all(World world, Lengths sent, Lengths received, DType dtype, HopFormats formats,
                                      std::size_t min_bytes) {
  std::string signature = "all_to_all " + std::string(to_string(dtype)) + " " + formats.to_string();
  if (min_bytes > 0) signature += " from " + std::to_string(min_bytes) + " bytes on";
  std::vector<int> peers = world.topology.others(world.rank);
  return {std::move(world), std::move(sent), std::move(received),  dtype,
          formats,          min_bytes,       std::move(signature), std::move(peers)};
}

ExchangePlan ExchangePlan::gather(World world, int root, std::int64_t num_elements, DType dtype, HopFormats formats) {
  check_rank(world.topology, root, "root");
  Lengths sent = only_for(root, num_elements, world);
  Lengths received(sent.size(), world.rank == root ? num_elements : 0);
  std::vector<int> peers = world.topology.others(world.rank);
  std::string signature = describe("gather to " + std::to_string(root), num_elements, dtype, formats);
  return {std::move(world),     std::move(sent), std::move(received), dtype, formats, 0,
          std::move(signature), std::move(peers)};
}

ExchangePlan ExchangePlan::scatter(World world, int root, std::int64_t num_elements, DType dtype, HopFormats formats) {
  ExchangePlan plan = gather(std::move(world), root, num_elements, dtype, formats);
  std::swap(plan.sent_, plan.received_);
  std::swap(plan.sends_, plan.recvs_);
  plan.description_ = describe("scatter from " + std::to_string(root), num_elements, dtype, formats);
  return plan;
}

ExchangePlan ExchangePlan::message(World world, int from, int to, std::int64_t num_elements, DType dtype,
                                   HopFormats formats) {
  check_rank(world.topology, from, "from");
  check_rank(world.topology, to, "to");
  const bool is_sender = world.rank == from;
  check_argument(from != to && (is_sender || world.rank == to), "to: expected a message between rank ", world.rank,
                 " and another one, got one from ", from, " to ", to);
  Lengths sent = only_for(to, is_sender ? num_elements : 0, world);
  Lengths received = only_for(from, is_sender ? 0 : num_elements, world);
  const std::string name = "message from " + std::to_string(from) + " to " + std::to_string(to);
  std::string signature = describe(name, num_elements, dtype, formats);
  std::vector<int> peers{is_sender ? to : from};
  return {std::move(world),     std::move(sent), std::move(received), dtype, formats, 0,
          std::move(signature), std::move(peers)};
}

std::size_t ExchangePlan::num_bytes(const Message& message, std::int64_t chunk) const {
  const std::int64_t left = message.num_elements - chunk * chunk_elements_;
  const std::int64_t count = std::clamp<std::int64_t>(left, 0, chunk_elements_);
  if (message.format.kind == ElementKind::exact) return static_cast<std::size_t>(count) * element_size(dtype_);
  return wire_bytes(message.format, dtype_, count);
}

LinkBytes ExchangePlan::bytes() const {
  LinkBytes total;
  for (const Message& message : sends_) {
    std::size_t& sent = total.on(world_.topology.link(world_.rank, message.peer));
    for (std::int64_t chunk = 0; chunk < num_chunks_; ++chunk) sent += num_bytes(message, chunk);
  }
  return total;
}

namespace {

using Message = ExchangePlan::Message;

class Exchange final : public Stages {
 public:
  Exchange(const Resources& r, const ExchangePlan& plan, const Arguments& arguments)
      : r_(r),
        plan_(plan),
        arguments_(arguments),
        outgoing_(r, static_cast<int>(plan.sends().size()), largest(plan.sends()), kDepth),
        incoming_(r, static_cast<int>(plan.recvs().size()), largest(plan.recvs()), kDepth) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

 private:
  static constexpr int kDepth = 2;  // chunks in progress

  static bool is_exact(const Message& message) { return message.format.kind == ElementKind::exact; }

  // Returns the bytes of the largest wire of a chunk; exact messages are sent from and to the caller's memory.
  std::size_t largest(std::span<const Message> messages) const {
    std::size_t num_bytes = 0;
    for (const Message& message : messages) {
      if (!is_exact(message)) num_bytes = std::max(num_bytes, plan_.num_bytes(message, 0));
    }
    return num_bytes;
  }

  template <class View>
  View part(std::span<const View> views, int rank, std::int64_t chunk) const {
    return views[static_cast<std::size_t>(rank)].slice(chunk * plan_.chunk_elements(), plan_.chunk_elements());
  }

  // Sends each message while the next one is encoded, on transports that start transfers at once.
  void first_hop(std::int64_t chunk) override {
    for (std::size_t i = 0; i < plan_.recvs().size(); ++i) {
      const Message& message = plan_.recvs()[i];
      std::byte* const data = is_exact(message) ? part(arguments_.outputs, message.peer, chunk).data
                                                : incoming_.data(static_cast<int>(i), chunk);
      recvs_.push_back({.peer = message.peer,
                        .data = data,
                        .num_bytes = plan_.num_bytes(message, chunk),
                        .num_elements = message.num_elements});
    }
    const bool one_by_one = !r_.transport.is_stream_ordered();
    if (one_by_one) start_listed(chunk);
    for (std::size_t i = 0; i < plan_.sends().size(); ++i) {
      list_send(i, chunk);
      if (one_by_one) start_listed(chunk);
    }
    if (!one_by_one) start_listed(chunk);
  }

  void list_send(std::size_t index, std::int64_t chunk) {
    const Message& message = plan_.sends()[index];
    const ConstTensorView values = part(arguments_.inputs, message.peer, chunk);
    if (values.num_elements == 0) return;
    Send send{message.peer, values.data, values.num_bytes(), false, message.num_elements};
    if (is_exact(message)) return sends_.push_back(send);
    const std::int64_t begin = chunk * plan_.chunk_elements();
    const Piece<BlockFormat> piece{begin, values.num_elements, message.format, 0, begin};
    std::byte* const wire = outgoing_.data(static_cast<int>(index), chunk);
    encodes_.push_back({values, message.format, wire, rounding_of(r_, message.peer, piece, message.format)});
    send.data = wire;
    send.num_bytes = plan_.num_bytes(message, chunk);
    sends_.push_back(send);
  }

  // Encodes the listed jobs, starts the listed messages, and clears the lists.
  void start_listed(std::int64_t chunk) {
    run_codec(r_, encodes_);
    if (!sends_.empty() || !recvs_.empty()) transfers_[chunk].push_back(start_transfer(r_, sends_, recvs_));
    encodes_.clear();
    sends_.clear();
    recvs_.clear();
  }

  void finish(std::int64_t chunk) override {
    const int rank = plan_.world().rank;
    const ConstTensorView own = part(arguments_.inputs, rank, chunk);
    decodes_.clear();
    if (own.num_elements > 0) {
      decodes_.push_back({{own.data, {}, own.dtype}, part(arguments_.outputs, rank, chunk)});
      if (decodes_.back().values.data == own.data) decodes_.clear();
    }
    for (std::size_t i = 0; i < plan_.recvs().size(); ++i) {
      const Message& message = plan_.recvs()[i];
      const TensorView values = part(arguments_.outputs, message.peer, chunk);
      if (is_exact(message) || values.num_elements == 0) continue;
      decodes_.push_back({{incoming_.data(static_cast<int>(i), chunk), message.format, values.dtype}, values});
    }
    for (std::unique_ptr<Transfer>& transfer : transfers_[chunk]) finish_transfer(r_, transfer);
    transfers_[chunk].clear();
    run_codec(r_, decodes_);
  }

  const Resources& r_;
  const ExchangePlan& plan_;
  const Arguments arguments_;
  const MessageBuffers outgoing_;  // one wire for each message
  const MessageBuffers incoming_;
  Ring<std::vector<std::unique_ptr<Transfer>>> transfers_{kDepth};
  // Buffers reused by all chunks.
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Encode> encodes_;
  std::vector<Decode> decodes_;
};

template <class Views>
void check_views(const Views& views, const std::vector<std::int64_t>& lengths, DType dtype, const char* name) {
  check_argument(views.size() == lengths.size(), name, ": expected one for each of ", lengths.size(), " ranks, got ",
                 views.size());
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    const bool fits = views[rank].num_elements == lengths[rank] && views[rank].dtype == dtype;
    check_argument(fits, [&] {
      return std::string(name) + ": expected " + SlotShape{{lengths[rank]}, dtype}.to_string() + " for rank " +
             std::to_string(rank) + ", got " + SlotShape{{views[rank].num_elements}, views[rank].dtype}.to_string();
    });
  }
}

// Checks that no output overlaps an input, other than the own one at its place.
void check_all_apart(const Arguments& arguments, std::size_t own) {
  const bool same_own = arguments.inputs[own].data == arguments.outputs[own].data;
  std::vector<std::tuple<const std::byte*, const std::byte*, bool>> ranges;  // begin, end, whether it is an output
  for (std::size_t rank = 0; rank < arguments.inputs.size(); ++rank) {
    const ConstTensorView input = arguments.inputs[rank];
    const ConstTensorView output = arguments.outputs[rank];
    if (input.num_elements > 0) ranges.emplace_back(input.data, input.data + input.num_bytes(), false);
    if (output.num_elements > 0 && !(same_own && rank == own)) {
      ranges.emplace_back(output.data, output.data + output.num_bytes(), true);
    }
  }
  std::sort(ranges.begin(), ranges.end());
  const std::byte* end_of_inputs = nullptr;
  const std::byte* end_of_outputs = nullptr;
  for (const auto& [begin, end, is_output] : ranges) {
    check_argument(begin >= (is_output ? end_of_inputs : end_of_outputs),
                   "outputs: expected memory apart from the inputs, got some of theirs");
    const std::byte*& latest = is_output ? end_of_outputs : end_of_inputs;
    latest = std::max(latest, end);
  }
}

class ExchangeOperation final : public Operation {
 public:
  explicit ExchangeOperation(ExchangePlan plan) : plan_(std::move(plan)) {}

  const World& world() const override { return plan_.world(); }
  const std::string& description() const override { return plan_.description(); }
  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  std::vector<Segment<HopFormats>> segments() const override {
    std::int64_t num_elements = 0;
    for (const std::int64_t length : plan_.sent()) num_elements += length;
    return {{num_elements, plan_.formats()}};
  }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return plan_.bytes(); }
  std::size_t min_bytes() const override { return plan_.min_bytes(); }

  void check(const Resources& r, const Arguments& arguments) const override {
    check_world(r, plan_.world());
    check_views(arguments.inputs, plan_.sent(), plan_.dtype(), "inputs");
    check_views(arguments.outputs, plan_.received(), plan_.dtype(), "outputs");
    check_all_apart(arguments, static_cast<std::size_t>(plan_.world().rank));
  }
  std::string signature(const Arguments&, bool) const override { return plan_.description(); }
  std::vector<int> peers(const Arguments&) const override { return plan_.peers(); }
  std::unique_ptr<Stages> stages(const Resources& r, const Arguments& arguments) override {
    if (plan_.num_chunks() == 0) return nullptr;
    return std::make_unique<Exchange>(r, plan_, arguments);
  }

 private:
  const ExchangePlan plan_;
};

}  // namespace

OperationPtr make_exchange(ExchangePlan plan) { return std::make_shared<ExchangeOperation>(std::move(plan)); }

}  // namespace zcomm
