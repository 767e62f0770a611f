#include <algorithm>
#include <iterator>
#include <utility>

#include "operation_checks.hpp"
#include "random_seed.hpp"
#include "stages.hpp"

namespace zcomm {
namespace {

// Returns the upper bound of a chunk, in elements. A chunk passes one node after the other, so that four for each node
// keep all links busy. Larger ones cost scratch, smaller ones launches of NCCL.
std::int64_t longest_chunk(std::int64_t num_elements, int num_nodes, DType dtype) {
  const auto elements_of = [dtype](std::size_t mebibytes) {
    return static_cast<std::int64_t>((mebibytes << 20) / element_size(dtype));
  };
  return std::clamp(num_elements / (std::int64_t{4} * num_nodes), elements_of(16), elements_of(64));
}

class BroadcastOperation final : public Operation {
 public:
  BroadcastOperation(World world, int root, std::int64_t num_elements, DType dtype, BlockFormat format)
      : world_(std::move(world)), root_(root), num_elements_(num_elements), dtype_(dtype), format_(format) {
    const Topology& topology = world_.topology;
    zcomm::check(world_);
    check_rank(topology, root, "root");
    check_format(format, dtype);
    const int num_nodes = topology.num_nodes();
    check_argument(num_elements >= 0, "num_elements: expected 0 or more, got ", num_elements);
    description_ = "broadcast from " + std::to_string(root) + " " + SlotShape{{num_elements}, dtype}.to_string() + " " +
                   format.to_string();
    const auto head = [&](int node) { return node == topology.node(root) ? root : topology.ranks(node).front(); };
    const auto neighbor = [&](int node, int step) { return head((node + step + num_nodes) % num_nodes); };
    const int node = topology.node(world_.rank);
    source_ = head(node);
    if (world_.rank == source_) {
      source_ = neighbor(node, -1);
      const int next = neighbor(node, 1);
      if (next != root) targets_.push_back(next);
      std::ranges::copy_if(topology.ranks(node), std::back_inserter(targets_),
                           [this](int r) { return r != world_.rank; });
    }
    const std::int64_t granule = granule_of(format);
    const std::int64_t chunk = bounded_chunk(world_.chunk_bytes, longest_chunk(num_elements, num_nodes, dtype), dtype);
    chunk_elements_ = std::max<std::int64_t>(chunk / granule, 1) * granule;
  }

  const World& world() const override { return world_; }
  const std::string& description() const override { return description_; }
  std::int64_t num_chunks() const override { return (num_elements_ + chunk_elements_ - 1) / chunk_elements_; }
  std::vector<Segment<HopFormats>> segments() const override { return {{num_elements_, {format_, format_}}}; }
  std::optional<LinkBytes> bytes(const Arguments&) const override {
    LinkBytes total;
    for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
      for (const int target : targets_) total.on(world_.topology.link(world_.rank, target)) += num_bytes(chunk);
    }
    return total;
  }
  void check(const Resources& r, const Arguments& arguments) const override {
    check_world(r, world_);
    const TensorView& values = only(arguments.outputs, "outputs");
    check_argument(values.num_elements == num_elements_ && values.dtype == dtype_, [&] {
      return "outputs: expected " + SlotShape{{num_elements_}, dtype_}.to_string() + ", got " +
             SlotShape{{values.num_elements}, values.dtype}.to_string();
    });
  }
  std::string signature(const Arguments&, bool) const override { return description_; }
  // Names all ranks. Ranks that name different roots might otherwise share no peer, and never compare their calls.
  std::vector<int> peers(const Arguments&) const override { return world_.topology.others(world_.rank); }
  std::unique_ptr<Stages> stages(const Resources& r, const Arguments& arguments) override {
    if (num_chunks() == 0) return nullptr;
    return std::make_unique<Broadcast>(r, *this, arguments.outputs.front());
  }

 private:
  class Broadcast final : public Stages {
   public:
    Broadcast(const Resources& r, const BroadcastOperation& plan, TensorView values)
        : r_(r), plan_(plan), values_(values), wires_(r, 1, plan.is_exact() ? 0 : plan.num_bytes(0), kDepth) {}

    std::int64_t num_chunks() const override { return plan_.num_chunks(); }
    int num_hops() const override { return 2; }

   private:
    static constexpr int kDepth = 3;  // chunks in progress

    TensorView part(std::int64_t chunk) const {
      return values_.slice(chunk * plan_.chunk_elements_, plan_.chunk_elements_);
    }
    // Returns the wire of a chunk; exact values are sent from and to the caller's memory.
    std::byte* wire(std::int64_t chunk) const { return plan_.is_exact() ? part(chunk).data : wires_.data(0, chunk); }

    void first_hop(std::int64_t chunk) override {
      if (plan_.is_root()) {
        encode(chunk);
        send(chunk);
      } else {
        const Recv recv{plan_.source_, wire(chunk), plan_.num_bytes(chunk)};
        received_[chunk] = start_transfer(r_, {}, {&recv, 1});
      }
    }

    void encode(std::int64_t chunk) {
      if (plan_.is_exact()) return;
      const TensorView values = part(chunk);
      const std::int64_t begin = chunk * plan_.chunk_elements_;
      const Piece<BlockFormat> piece{begin, values.num_elements, plan_.format_, 0, begin};
      const Encode job{values, plan_.format_, wire(chunk), rounding_of(r_, plan_.root_, piece, plan_.format_)};
      run_codec(r_, {&job, 1});
    }

    void send(std::int64_t chunk) {
      sends_.clear();
      for (const int target : plan_.targets_) sends_.push_back({target, wire(chunk), plan_.num_bytes(chunk)});
      if (!sends_.empty()) sent_[chunk] = start_transfer(r_, sends_, {});
    }

    void second_hop(std::int64_t chunk) override {
      if (plan_.is_root()) return;
      finish_transfer(r_, received_[chunk]);
      send(chunk);
    }

    // Decodes while the wires are on their way to the targets.
    void finish(std::int64_t chunk) override {
      if (!plan_.is_exact()) {
        const Decode job{{wire(chunk), plan_.format_, values_.dtype}, part(chunk)};
        run_codec(r_, {&job, 1});
      }
      if (sent_[chunk] != nullptr) finish_transfer(r_, sent_[chunk]);
    }

    const Resources& r_;
    const BroadcastOperation& plan_;
    const TensorView values_;
    const MessageBuffers wires_;
    Ring<std::unique_ptr<Transfer>> received_{kDepth};
    Ring<std::unique_ptr<Transfer>> sent_{kDepth};
    std::vector<Send> sends_;  // reused by all chunks
  };

  bool is_root() const { return world_.rank == root_; }
  bool is_exact() const { return format_.kind == ElementKind::exact; }
  std::size_t num_bytes(std::int64_t chunk) const {
    const std::int64_t count = std::min(num_elements_ - chunk * chunk_elements_, chunk_elements_);
    if (is_exact()) return static_cast<std::size_t>(count) * element_size(dtype_);
    return wire_bytes(format_, dtype_, count);
  }

  const World world_;
  const int root_;
  const std::int64_t num_elements_;
  const DType dtype_;
  const BlockFormat format_;
  std::string description_;
  int source_;                // the rank that the wires come from; none sends to the root
  std::vector<int> targets_;  // the ranks that this one sends to: the head of the next node first
  std::int64_t chunk_elements_;
};

}  // namespace

OperationPtr make_broadcast(World world, int root, std::int64_t num_elements, DType dtype, BlockFormat format) {
  return std::make_shared<BroadcastOperation>(std::move(world), root, num_elements, dtype, format);
}

}  // namespace zcomm
