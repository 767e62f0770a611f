#include "zcomm/shard_mark.hpp"

#include <atomic>
#include <utility>

#include "zcomm/cuda.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm {
namespace {

class DeviceMark final : public ShardMark {
 public:
  explicit DeviceMark(std::unique_ptr<Workspace> workspace)
      : workspace_(std::move(workspace)),
        codec_(make_cuda_codec(*workspace_)),
        memory_(codec_->lossless()->make_memory(sizeof(std::uint64_t), sizeof(std::uint32_t))) {}

  void note(ConstTensorView shard, StreamView stream) override {
    const NoteHash job{halves(shard.data, shard.num_bytes()), hash()};
    codec_->lossless()->note({&job, 1}, stream);
  }

  void check(ConstTensorView shard, std::span<std::byte> kept, StreamView stream) override {
    const auto num_halves = static_cast<std::int64_t>(kept.size() / 2);
    const CheckHash job{
        halves(shard.data, shard.num_bytes()), {kept.data(), num_halves, DType::bfloat16}, hash(), status()};
    codec_->lossless()->check({&job, 1}, stream);
  }

  bool has_changed() const override { return std::atomic_ref(*status()).load() != 0; }

 private:
  // Views bytes as 16-bit values for the hash kernels; their real type does not matter.
  static ConstTensorView halves(const std::byte* data, std::size_t num_bytes) {
    return {data, static_cast<std::int64_t>(num_bytes / 2), DType::bfloat16};
  }
  std::uint64_t* hash() const { return reinterpret_cast<std::uint64_t*>(memory_->data()); }
  std::uint32_t* status() const { return reinterpret_cast<std::uint32_t*>(memory_->shared()); }

  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<JobMemory> memory_;  // the hash, and a status word
};

}  // namespace

std::unique_ptr<ShardMark> make_shard_mark(std::unique_ptr<Workspace> workspace) {
  return std::make_unique<DeviceMark>(std::move(workspace));
}

}  // namespace zcomm
