// Lanes of a GPU.
#pragma once

#include <array>
#include <cstddef>

#include "cuda/owned.hpp"
#include "zcomm/transport.hpp"

namespace zcomm {

// Streams of the device that is current when they are made. A graph that captures a caller's stream captures them, too.
class CudaLanes final : public Lanes {
 public:
  StreamView fork(StreamView stream) override;
  void join(StreamView stream) override;

 private:
  struct Lane {
    CudaStream stream;
    Event done;
  };

  // A step of a reduction in two hops has so many kernels. More share lanes in turn.
  std::array<Lane, 4> lanes_;
  std::size_t num_forks_ = 0;  // since the last join
  Event caller_;
};

}  // namespace zcomm
