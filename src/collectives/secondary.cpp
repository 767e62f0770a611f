#include "all_gather.hpp"
#include "gathered_wires.hpp"

namespace zcomm {
namespace {

class SecondaryGather final : public Stages {
 public:
  SecondaryGather(const Resources& r, const GatherPlan& plan, const std::byte* secondary,
                  std::span<const TensorView> slots, std::span<std::byte> wires)
      : r_(r),
        plan_(plan),
        slots_(slots),
        leaves_wires_(!wires.empty()),
        wires_(r, plan, secondary, nullptr, kDepth, wires) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

 private:
  static constexpr int kDepth = 2;  // chunks in progress

  void first_hop(std::int64_t chunk) override {
    wires_.list(plan_.secondary_hop(), chunk, sends_, recvs_);
    transfers_[chunk] = start_transfer(r_, sends_, recvs_);
  }

  void finish(std::int64_t chunk) override {
    finish_transfer(r_, transfers_[chunk]);
    if (!leaves_wires_) wires_.decode(r_, slots_, chunk, decodes_);
  }

  const Resources& r_;
  const GatherPlan& plan_;
  const std::span<const TensorView> slots_;
  const bool leaves_wires_;
  const GatheredWires wires_;
  Ring<std::unique_ptr<Transfer>> transfers_{kDepth};
  // Buffers reused by all chunks.
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Decode> decodes_;
};

}  // namespace

std::unique_ptr<Stages> secondary_stages(const Resources& resources, const GatherPlan& plan, const std::byte* secondary,
                                         std::span<const TensorView> slots, std::span<std::byte> wires) {
  return std::make_unique<SecondaryGather>(resources, plan, secondary, slots, wires);
}

}  // namespace zcomm
