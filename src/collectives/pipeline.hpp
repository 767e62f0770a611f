// Stages of a collective, one chunk behind the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "zcomm/collectives.hpp"

namespace zcomm {

// What a collective does with a chunk.
class Stages {
 public:
  Stages() = default;
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;
  virtual ~Stages() = default;

  virtual std::int64_t num_chunks() const = 0;
  virtual int num_hops() const { return 1; }       // or 2
  virtual void first_hop(std::int64_t chunk) = 0;  // starts transfers
  virtual void second_hop(std::int64_t) {}         // waits for those of the first hop and starts others
  virtual void meanwhile(std::int64_t) {}          // what need not be done before the last transfers start
  virtual void finish(std::int64_t chunk) = 0;     // waits for the last transfers
};

// Runs each stage of chunk k beside the one before of chunk k+1: when a stage waits for bytes of chunk k, those of
// chunk k+1 are already under way. The transfers of a step, of both hops, are one group of the transport's: there is
// one group for each chunk, and one more if there are two hops.
void run_pipeline(const Resources& r, Stages& stages);

// Two collectives that have the same chunks. The second one starts a chunk when the first one has finished it, while
// later chunks of the first are still under way. Their transfers share groups. n chunks take n + 2 groups, or n + 4 if
// both have two hops, and never more than the two calls in turn.
void run_pipeline(const Resources& r, Stages& first, Stages& second);

// One value per chunk that is under way; chunks that are `Depth` apart share a place.
template <class T, int Depth>
class Ring {
 public:
  T& operator[](std::int64_t chunk) { return items_[static_cast<std::size_t>(chunk % Depth)]; }

 private:
  std::array<T, Depth> items_{};
};

}  // namespace zcomm
