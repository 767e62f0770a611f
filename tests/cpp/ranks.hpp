// Ranks as threads: runs a body once per rank and rethrows the first failure.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "zcomm/communicator.hpp"

namespace zcomm::test {

// Calls body(rank) on `size` threads.
template <class Body>
void run_ranks(int size, Body&& body) {
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

// Node shapes as ranks per node: {2, 2} is 2x2, {3, 1} is uneven. `interleaved` deals the ranks out to the nodes in
// turn, as a launcher that fills nodes round-robin does.
inline std::vector<int> node_ids(const std::vector<int>& shape, bool interleaved = false) {
  std::vector<int> ids;
  if (!interleaved) {
    for (std::size_t node = 0; node < shape.size(); ++node)
      ids.insert(ids.end(), static_cast<std::size_t>(shape[node]), static_cast<int>(node));
    return ids;
  }
  std::vector<int> left = shape;
  for (bool any = true; any;) {
    any = false;
    for (std::size_t node = 0; node < shape.size(); ++node) {
      if (left[node]-- > 0) {
        ids.push_back(static_cast<int>(node));
        any = true;
      }
    }
  }
  return ids;
}

// Makes one transport per rank, for tests of transports, collectives, secondary shards and feedback.
inline std::vector<std::unique_ptr<Transport>> make_transports(int size) { return make_local_transports(size); }

// Makes one communicator per rank.
inline std::vector<std::unique_ptr<Communicator>> make_communicators(const std::vector<int>& ids,
                                                                     std::size_t chunk_bytes = kDefaultChunkBytes) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& transport : make_transports(static_cast<int>(ids.size()))) {
    communicators.push_back(std::make_unique<Communicator>(std::move(transport), Topology(ids), make_cpu_codec(),
                                                           make_host_workspace(), chunk_bytes));
  }
  return communicators;
}

}  // namespace zcomm::test
