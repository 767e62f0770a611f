// Detection, on a GPU and without blocking the host, that a shard has changed since a secondary shard was filled from
// it.
#pragma once

#include <memory>
#include <span>

#include "zcomm/codec.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm {

// Hash of a shard, in memory of the device that was current at construction. Values are of any type, aligned to 2
// bytes. Calls only queue kernels and can be captured in a graph; the mark must outlive such graphs.
class ShardMark {
 public:
  // Throws Error in a build without CUDA.
  explicit ShardMark(std::unique_ptr<Workspace> workspace);

  // Records the hash of `shard`.
  void note(ConstTensorView shard, StreamView stream);
  // Compares the hash of `shard` with the recorded one. If they differ, has_changed() becomes true and `secondary` is
  // filled with NaN, so that nobody reads stale values. `secondary` holds encoded or plain values, aligned to
  // kWireAlignment.
  void check(ConstTensorView shard, std::span<std::byte> secondary, StreamView stream);
  // Tells whether a completed check has found a different hash. Thread-safe.
  bool has_changed() const;

 private:
  std::uint64_t* hash() const;
  std::uint32_t* status() const;

  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<JobMemory> memory_;  // the hash, and a status word
};

}  // namespace zcomm
