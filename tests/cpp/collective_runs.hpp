// Runs a collective on all ranks of a world of threads.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "calls.hpp"
#include "ranks.hpp"
#include "values.hpp"

namespace zcomm::test {

inline const std::vector<std::int64_t> kShardElements{0, 1, 31, 32, 33, 127, 128, 1000, 4097};

struct Result {
  std::vector<Values> per_rank;
  std::vector<CallStats> stats;
};

inline Result run_all_gather(const std::vector<int>& ids, const std::vector<Values>& shards, BlockFormat format,
                             std::size_t chunk_bytes = kDefaultChunkBytes) {
  const int size = static_cast<int>(ids.size());
  auto communicators = make_communicators(ids, chunk_bytes);
  Result result{std::vector<Values>(ids.size()), std::vector<CallStats>(ids.size())};
  run_ranks(size, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    Values& gathered = result.per_rank[r];
    gathered.assign(shards[r].size() * ids.size(), -1.0f);
    const auto slots = split(view(gathered), size, static_cast<std::int64_t>(shards[r].size()));
    std::copy(shards[r].begin(), shards[r].end(), reinterpret_cast<float*>(slots[r].data));  // in place, as FSDP2 calls
    result.stats[r] = test::all_gather(*communicators[r], slots[r], slots, format, std::chrono::seconds(20));
  });
  return result;
}

inline Result run_reduce_scatter(const std::vector<int>& ids, const std::vector<Values>& inputs, HopFormats formats,
                                 float factor = 1, std::size_t chunk_bytes = kDefaultChunkBytes) {
  const int size = static_cast<int>(ids.size());
  auto communicators = make_communicators(ids, chunk_bytes);
  Result result{std::vector<Values>(ids.size()), std::vector<CallStats>(ids.size())};
  run_ranks(size, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    result.per_rank[r].assign(inputs[r].size() / ids.size(), -1.0f);
    result.stats[r] = test::reduce_scatter(*communicators[r], const_split(inputs[r], size), view(result.per_rank[r]),
                                           formats, factor, std::chrono::seconds(20));
  });
  return result;
}

inline Result run_all_reduce(const std::vector<int>& ids, const std::vector<Values>& tensors, HopFormats formats,
                             float factor = 1) {
  auto communicators = make_communicators(ids, 512);
  Result result{tensors, std::vector<CallStats>(ids.size())};
  run_ranks(static_cast<int>(ids.size()), [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    result.stats[r] =
        test::all_reduce(*communicators[r], view(result.per_rank[r]), formats, factor, std::chrono::seconds(20));
  });
  return result;
}

}  // namespace zcomm::test
