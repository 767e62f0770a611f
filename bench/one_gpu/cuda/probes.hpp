// What the kernels of bench/one_gpu are launched by.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

// A rank's side of a meeting. The words of arrivals lie apart, so that no two ranks write to one line of memory.
inline constexpr int kMostRanks = 8;
inline constexpr int kWordsApart = 32;

struct Meeting {
  unsigned* theirs[kMostRanks];  // arrivals at each peer
  unsigned* arrived;             // at this rank, written by peers
  unsigned* epoch;               // rounds so far
  unsigned* missing;             // a bit for each peer that did not come; written at the end
  int rank;
  int size;
  unsigned rounds;
  std::uint64_t limit_ns;  // of a round
};

// 0: cudaMemset, 1 and 2: stores as a decoder makes them, of 4 and 2 bytes a value, 3: row by row, 4: loads.
cudaError_t run_floor(int floor, std::byte* data, std::int64_t num_bytes, void* stream);
cudaError_t run_write_pattern(void* data, std::int64_t num_bytes, unsigned seed, void* stream);
cudaError_t run_count_differences(const void* data, std::int64_t num_bytes, unsigned seed,
                                  unsigned long long* differences, void* stream);
cudaError_t run_meet(const Meeting& meeting, void* stream);
