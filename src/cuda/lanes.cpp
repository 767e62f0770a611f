#include "cuda/lanes.hpp"

#include <algorithm>
#include <utility>

namespace zcomm {

StreamView CudaLanes::fork(StreamView stream) {
  const StreamView lane = lanes_[num_forks_ % lanes_.size()].stream.view();
  caller_.record(stream);
  caller_.make_wait(lane);
  ++num_forks_;
  return lane;
}

void CudaLanes::join(StreamView stream) {
  const std::size_t num_used = std::min(std::exchange(num_forks_, 0), lanes_.size());
  for (std::size_t i = 0; i < num_used; ++i) {
    lanes_[i].done.record(lanes_[i].stream.view());
    lanes_[i].done.make_wait(stream);
  }
}

}  // namespace zcomm
