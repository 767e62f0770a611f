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

// The same of two collectives that have the same chunks: the second begins with a chunk when the first has finished it,
// beside later chunks of the first. Their transfers share groups: of n chunks there are n + 2, or n + 4 if both have
// two hops, and no more than one after the other takes.
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
