// Stages of a collective, one chunk behind the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "counted.hpp"

namespace zcomm {

// What a collective does with a chunk: methods of `Object`. Those that are null are left out.
template <class Object>
struct Stages {
  using Stage = void (Object::*)(std::int64_t chunk);
  Stage first_hop;             // starts transfers
  Stage second_hop = nullptr;  // waits for those of the first hop and starts others
  Stage meanwhile = nullptr;   // what need not be done before the last transfers start
  Stage finish;                // waits for the last transfers
};

// Runs each stage of chunk k beside the one before of chunk k+1: when a stage waits for bytes of chunk k, those of
// chunk k+1 are already under way. The transfers of a step, of both hops, are one group of the transport's: there is
// one group for each chunk, and one more if there are two hops.
template <class Object>
void run_pipeline(const Resources& r, std::int64_t num_chunks, Object& object, const Stages<Object>& stages) {
  const std::int64_t num_hops = stages.second_hop == nullptr ? 1 : 2;
  const auto run = [&](auto stage, std::int64_t chunk) {
    if (stage != nullptr && chunk >= 0 && chunk < num_chunks) (object.*stage)(chunk);
  };
  for (std::int64_t step = 0; step < num_chunks + num_hops; ++step) {
    r.transport.begin_group();
    run(stages.first_hop, step);
    run(stages.second_hop, step - 1);
    end_group(r);
    run(stages.meanwhile, step + 1 - num_hops);
    run(stages.finish, step - num_hops);
  }
}

// One value per chunk that is under way; chunks that are `Depth` apart share a place.
template <class T, int Depth>
class Ring {
 public:
  T& operator[](std::int64_t chunk) { return items_[static_cast<std::size_t>(chunk % Depth)]; }

 private:
  std::array<T, Depth> items_{};
};

}  // namespace zcomm
