// Gathers by lossless differences in GPU memory.
//
// NCCL needs the length of a message on both hosts. So the differences of many gathers are encoded ahead of them, and
// their headers are exchanged together, which blocks the host once for all. See Communicator.
#pragma once

#include <memory>
#include <span>

#include "difference_gather.hpp"

namespace zcomm {

// Gathers of one communicator.
class DeviceGathers {
 public:
  virtual ~DeviceGathers() = default;

  // Encodes, exchanges headers, and waits for them. A shard that is prepared already is prepared again as whole values,
  // because the holders' base is not the one it was encoded for.
  virtual void prepare(const Resources& resources, std::span<const ShardDifference> shards) = 0;
  virtual bool is_prepared(const Kept& kept) const = 0;
  // Makes stages as in difference_gather.hpp. Prepares the shard unless that is done; otherwise ignores it.
  virtual std::unique_ptr<Stages> difference_stages(const Resources& resources, const ShardDifference& shard,
                                                    std::span<const TensorView> slots) = 0;
  virtual std::unique_ptr<Stages> kept_stages(const Resources& resources, const DifferencePlan& plan, const Kept& kept,
                                              std::span<const TensorView> slots) = 0;
};

std::unique_ptr<DeviceGathers> make_device_gathers();

}  // namespace zcomm
