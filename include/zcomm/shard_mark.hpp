// Detection, on a GPU and without blocking the host, that a shard has changed since a secondary shard was filled from
// it.
#pragma once

#include <memory>
#include <span>

#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm {

// Hash of a shard, in memory of the device that was current at construction. Values are of any type, aligned to 2
// bytes. Calls only queue kernels and can be captured in a graph; the mark must outlive such graphs.
class ShardMark {
 public:
  virtual ~ShardMark() = default;

  // Records the hash of `shard`.
  virtual void note(ConstTensorView shard, StreamView stream) = 0;
  // Compares the hash of `shard` with the recorded one. If they differ, has_changed() becomes true and `kept` is filled
  // with NaN, so that nobody reads stale values. `kept` holds encoded or plain values, aligned to kWireAlignment.
  virtual void check(ConstTensorView shard, std::span<std::byte> kept, StreamView stream) = 0;
  // Tells whether a completed check has found a different hash. Thread-safe.
  virtual bool has_changed() const = 0;
};

// Makes a mark. Throws Error in a build without CUDA.
std::unique_ptr<ShardMark> make_shard_mark(std::unique_ptr<Workspace> workspace);

}  // namespace zcomm
