// Detection of a shard that has changed since a secondary shard was filled from it, on a GPU and without blocking the
// host.
#pragma once

#include <memory>
#include <span>

#include "zcomm/codec.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm {

// Hash of a shard, in memory of the device that was current at construction.
//
// Shards have values of any type, aligned to 2 bytes. note() and check() only queue kernels on their stream, and do not
// block the host. A graph can capture them; the mark must outlive such graphs.
class ShardMark {
 public:
  // Takes a workspace of device memory, such as make_cuda_workspace(). Throws Error in a build without CUDA.
  explicit ShardMark(std::unique_ptr<Workspace> workspace);

  // Records the hash of `shard` on `stream`.
  void note(ConstTensorView shard, StreamView stream);

  // Compares the hash of `shard` with the recorded one on `stream`.
  // If they differ, has_changed() becomes true and `secondary` is filled with NaN, so that stale values are not used
  // unnoticed. `secondary` holds encoded or plain values, aligned to kWireAlignment.
  // You must order `stream` after the last call of note() if that used another stream.
  void check(ConstTensorView shard, std::span<std::byte> secondary, StreamView stream);

  // Returns true if a completed check has found a different hash. It stays true. Does not block; thread-safe.
  bool has_changed() const;

 private:
  std::uint64_t* hash() const;
  std::uint32_t* status() const;

  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<JobMemory> memory_;  // the hash, and a status word
};

}  // namespace zcomm
