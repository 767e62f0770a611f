#include "zcomm/shard_mark.hpp"

#include <atomic>
#include <utility>

#include "zcomm/cuda.hpp"

namespace zcomm {
namespace {

// Views bytes as 16-bit values for the hash kernels; their real type does not matter.
ConstTensorView halves(ConstTensorView shard) {
  return {shard.data, static_cast<std::int64_t>(shard.num_bytes() / 2), DType::bfloat16};
}

}  // namespace

ShardMark::ShardMark(std::unique_ptr<Workspace> workspace)
    : workspace_(std::move(workspace)),
      codec_(make_cuda_codec(*workspace_)),
      memory_(codec_->lossless()->make_memory(sizeof(std::uint64_t), sizeof(std::uint32_t))) {}

void ShardMark::note(ConstTensorView shard, StreamView stream) {
  const CheckHash job{.values = halves(shard), .hash = hash()};
  codec_->lossless()->check({&job, 1}, stream);
}

void ShardMark::check(ConstTensorView shard, std::span<std::byte> secondary, StreamView stream) {
  const auto num_halves = static_cast<std::int64_t>(secondary.size() / 2);
  const CheckHash job{halves(shard), {secondary.data(), num_halves, DType::bfloat16}, hash(), status()};
  codec_->lossless()->check({&job, 1}, stream);
}

bool ShardMark::has_changed() const { return std::atomic_ref(*status()).load() != 0; }

std::uint64_t* ShardMark::hash() const { return reinterpret_cast<std::uint64_t*>(memory_->data()); }
std::uint32_t* ShardMark::status() const { return reinterpret_cast<std::uint32_t*>(memory_->shared()); }

}  // namespace zcomm
