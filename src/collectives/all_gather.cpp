#include "all_gather.hpp"

#include "gathered_wires.hpp"
#include "random_seed.hpp"

namespace zcomm {
namespace {

class AllGather final : public Stages {
 public:
  AllGather(const Resources& r, const GatherPlan& plan, ConstTensorView shard, std::span<const TensorView> slots,
            GatherExtras extras)
      : r_(r),
        plan_(plan),
        shard_(shard),
        slots_(slots),
        differences_only_(extras.reference != nullptr),
        reference_{extras.reference, shard.num_elements, shard.dtype},
        uses_own_all_gather_(!plan.topology().is_hierarchical() && extras.secondary == nullptr &&
                             plan.slots().is_even()),
        wires_(r, plan, extras.secondary, extras.secondary, plan.topology().is_hierarchical() ? kDepth : 2) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  int num_hops() const override { return plan_.topology().is_hierarchical() ? 2 : 1; }

 private:
  static constexpr int kDepth = 3;  // chunks that are under way at most

  void first_hop(std::int64_t chunk) override {
    encode(chunk);
    if (uses_own_all_gather_) {  // the wires are equal and side by side
      first_hop_[chunk] = start_all_gather(r_, wires_.room(0, chunk), plan_.slot_bytes(chunk));
      return;
    }
    wires_.list(plan_.hops()[0], chunk, sends_, recvs_);
    first_hop_[chunk] = start_transfer(r_, sends_, recvs_);
  }

  void encode(std::int64_t chunk) {
    encodes_.clear();
    differences_.clear();
    terms_.clear();
    MessageWriter message(wires_.room(plan_.rank(), chunk), shard_.dtype);
    for (const Piece<BlockFormat>& piece : plan_.pieces(chunk)) {
      const ConstTensorView values = shard_.slice(piece.begin, piece.count);
      std::byte* const wire = message.next(piece.format, values.num_elements);
      const Rounding rounding = rounding_of(r_, plan_.rank(), piece, piece.format);
      if (!differences_only_ || piece.format.kind == ElementKind::exact) {
        encodes_.push_back({values, piece.format, wire, rounding});
        continue;
      }
      terms_.begin_sum();
      terms_.add({values.data, {}, values.dtype});
      // As add_differences() takes it: values that are finite again arrive whole.
      terms_.add({reference_.slice(piece.begin, piece.count).data, {}, values.dtype, -1.0f, true});
      differences_.push_back({terms_.sum(), values.num_elements, piece.format, wire, rounding});
    }
    const Timed timed(r_.stats.codec_time);
    r_.codec.encode(encodes_, r_.stream);
    r_.codec.decode_sum_encode(differences_, r_.stream);
  }

  void second_hop(std::int64_t chunk) override {  // inside the node
    finish_transfer(r_, first_hop_[chunk]);
    wires_.list(plan_.hops()[1], chunk, sends_, recvs_);
    second_hop_[chunk] = start_transfer(r_, sends_, recvs_, 1);
  }

  void finish(std::int64_t chunk) override {
    if (num_hops() == 2) {
      finish_transfer(r_, second_hop_[chunk], 1);
    } else {
      finish_transfer(r_, first_hop_[chunk]);
    }
    if (differences_only_) {
      add_differences(chunk);
    } else {
      wires_.decode(r_, slots_, chunk, decodes_);
    }
  }

  // Adds the differences of a chunk to what all slots hold, and the own slot to the reference, which has what it held.
  // A NaN is held as 0, or it would stay.
  void add_differences(std::int64_t chunk) {
    decodes_.clear();
    sums_.clear();
    terms_.clear();
    wires_.for_each(slots_, chunk, [&](int slot, TensorView values, const Piece<BlockFormat>& piece, const Wire& wire) {
      const bool is_own = slot == plan_.rank();
      const TensorView target = is_own ? reference_.slice(piece.begin, piece.count) : values;
      if (piece.format.kind == ElementKind::exact) {
        decodes_.push_back({wire, target});
        return;
      }
      terms_.begin_sum();
      terms_.add({target.data, {}, target.dtype, 1.0f, true});
      terms_.add(wire);
      sums_.push_back({terms_.sum(), 1.0f, target});
    });
    const Timed timed(r_.stats.codec_time);
    r_.codec.decode(decodes_, r_.stream);
    r_.codec.decode_sum(sums_, r_.stream);
    copy_reference(chunk);
  }

  // Into the own slot.
  void copy_reference(std::int64_t chunk) {
    decodes_.clear();
    for (const Piece<BlockFormat>& piece : plan_.pieces(chunk)) {
      const ConstTensorView held = reference_.slice(piece.begin, piece.count);
      const TensorView own = slots_[static_cast<std::size_t>(plan_.rank())].slice(piece.begin, piece.count);
      decodes_.push_back({{held.data, {}, held.dtype}, own});
    }
    r_.codec.decode(decodes_, r_.stream);
  }

  const Resources& r_;
  const GatherPlan& plan_;
  const ConstTensorView shard_;
  const std::span<const TensorView> slots_;
  const bool differences_only_;
  const TensorView reference_;  // of the own slot, with differences_only_
  const bool uses_own_all_gather_;
  const GatheredWires wires_;
  Ring<std::unique_ptr<Transfer>, kDepth> first_hop_;
  Ring<std::unique_ptr<Transfer>, kDepth> second_hop_;
  // Kept from chunk to chunk, for their memory.
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Encode> encodes_;
  std::vector<DecodeSumEncode> differences_;
  std::vector<Decode> decodes_;
  std::vector<DecodeSum> sums_;
  TermList terms_;
};

}  // namespace

std::unique_ptr<Stages> all_gather_stages(const Resources& resources, const GatherPlan& plan, ConstTensorView shard,
                                          std::span<const TensorView> slots, GatherExtras extras) {
  return std::make_unique<AllGather>(resources, plan, shard, slots, extras);
}

void all_gather(const Resources& resources, const GatherPlan& plan, ConstTensorView shard,
                std::span<const TensorView> slots, GatherExtras extras) {
  if (plan.num_chunks() == 0) return;
  run_pipeline(resources, *all_gather_stages(resources, plan, shard, slots, extras));
}

}  // namespace zcomm
