// Gathers by lossless differences in the memory of a GPU.
//
// NCCL must be told on both hosts how long a message is. So the differences of many gathers are encoded ahead of them,
// their headers are exchanged at once, and the host waits for these: once for all. See Communicator.
#pragma once

#include <memory>
#include <span>

#include "zcomm/collectives.hpp"

namespace zcomm {

// Those of one communicator.
class DeviceGathers {
 public:
  virtual ~DeviceGathers() = default;

  // Encodes, exchanges headers, and waits for them. A shard that is prepared already is prepared anew, as whole values:
  // what its holders have is not what it was encoded for.
  virtual void prepare(const Resources& resources, std::span<const ShardDifference> shards) = 0;
  virtual bool is_prepared(const KeptShards& kept) const = 0;
  // As those of collectives.hpp. The first one prepares its shard unless that is done, and does not read it otherwise.
  virtual void all_gather(const Resources& resources, const ShardDifference& shard,
                          std::span<const TensorView> slots) = 0;
  virtual void gather_secondary(const Resources& resources, const DifferencePlan& plan, const KeptShards& kept,
                                std::span<const TensorView> slots) = 0;
};

std::unique_ptr<DeviceGathers> make_device_gathers();

}  // namespace zcomm
