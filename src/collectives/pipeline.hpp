// Stages of a collective, one chunk behind the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace zcomm {

// Runs stage s of chunk k after stage s of chunk k-1 and stage s-1 of chunk k, later stages of earlier chunks last:
// when a stage waits for bytes of chunk k, those of chunk k+1 are already under way. A stage is a method of `object`.
template <class Object, class... Stages>
void run_pipeline(std::int64_t num_chunks, Object& object, Stages... stages) {
  constexpr std::int64_t kNumStages = sizeof...(Stages);
  for (std::int64_t step = 0; step < num_chunks + kNumStages - 1; ++step) {
    std::int64_t chunk = step;
    const auto run = [&](auto stage) {
      if (chunk >= 0 && chunk < num_chunks) (object.*stage)(chunk);
      --chunk;
    };
    (run(stages), ...);
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
