// Pipeline of a collective's stages, over its chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "zcomm/collectives.hpp"

namespace zcomm {

// Stages of a collective, called for each chunk.
class Stages {
 public:
  Stages() = default;
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;
  virtual ~Stages() = default;

  virtual std::int64_t num_chunks() const = 0;
  virtual int num_hops() const { return 1; }          // or 2
  virtual int second_hop_delay() const { return 1; }  // steps after the first hop
  virtual int window() const { return 1; }            // steps from the start of a chunk's last transfers to finish()
  virtual void first_hop(std::int64_t chunk) = 0;     // starts transfers
  virtual void second_hop(std::int64_t) {}            // waits for the first hop and starts other transfers
  virtual void meanwhile(std::int64_t) {}             // work that can wait until the last transfers start
  virtual void finish(std::int64_t chunk) = 0;        // waits for the last transfers
  virtual void end() {}                               // after the last chunk

  std::shared_ptr<const void> held = {};  // owner of data that the stages refer to
  std::unique_ptr<Stages> second = {};    // those of a second collective with the same chunks
};

// Runs each stage of chunk k together with the previous stage of chunk k+1: while a stage waits for bytes of chunk k,
// those of chunk k+1 are in flight. All transfers of a step form one group of the transport: one group per chunk, and
// with two hops as many more as the second one is delayed by.
//
// A second hop that works on what it has received is best delayed by two steps: then a group is in flight meanwhile.
//
// The second collective starts a chunk when the first has finished it, while later chunks of the first are in progress.
// Their transfers share groups: n chunks take n + 2 groups, or n + 4 if both have two hops, one more if that of the
// first is delayed by two steps.
void run_pipeline(const Resources& r, Stages& first);

// Returns the window of one hop whose chunks have `wire_bytes`, of all ranks. Between nodes, on transports that start
// transfers at once, several chunks are in flight: a far link is busy while bytes and their announcements travel.
int window_of(const Resources& r, std::size_t wire_bytes, std::int64_t num_chunks);

// Value per chunk in progress; chunks that are `depth` apart share a place. Of one hop, window() + 1 chunks are in
// progress at a time. Of two hops, second_hop_delay() + 1 are between the hops, two behind the second,
// second_hop_delay() + 2 in all.
template <class T>
class Ring {
 public:
  explicit Ring(int depth) : items_(static_cast<std::size_t>(depth)) {}
  T& operator[](std::int64_t chunk) { return items_[static_cast<std::size_t>(chunk) % items_.size()]; }

 private:
  std::vector<T> items_;
};

}  // namespace zcomm
