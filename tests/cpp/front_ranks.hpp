// Ranks of a program that calls NCCL itself: with the front before it, over the NCCL of tests/cuda_host.
//
// The front reads its variables once in a process. So cases named "front process:" are skipped by default, and others
// run them in processes of their own.
#pragma once

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cuda_helpers.hpp"
#include "front/request.hpp"
#include "rank_process.hpp"
#include "values.hpp"

namespace zcomm::nccl {

extern "C" {
#define ZCOMM_DECLARE(name, result, parameters) result nccl##name parameters;
ZCOMM_NCCL_FUNCTIONS(ZCOMM_DECLARE)
#undef ZCOMM_DECLARE
Result ncclReduceScatter(const void*, void*, std::size_t, unsigned, unsigned, Comm, Stream);
Result ncclAllReduce(const void*, void*, std::size_t, unsigned, unsigned, Comm, Stream);
Result ncclAlltoAll(const void*, void*, std::size_t, unsigned, Comm, Stream);
Result ncclAlltoAllConfig(const void*, void*, std::size_t, unsigned, Comm, Stream, const CollConfig*);
Result ncclBcast(void*, std::size_t, unsigned, int, Comm, Stream);
Result ncclBroadcast(const void*, void*, std::size_t, unsigned, int, Comm, Stream);
Result ncclGather(const void*, void*, std::size_t, unsigned, int, Comm, Stream);
Result ncclScatter(const void*, void*, std::size_t, unsigned, int, Comm, Stream);
Result ncclAllReduceConfig(const void*, void*, std::size_t, unsigned, unsigned, Comm, Stream, const CollConfig*);
const char* zcomm_front_library();
}

}  // namespace zcomm::nccl

namespace zcomm::test {

using nccl::Comm;
using nccl::Result;

inline constexpr unsigned kInt32 = 2;
inline constexpr unsigned kFloat32 = 7;
inline constexpr unsigned kBfloat16 = 9;
inline constexpr unsigned kSum = 0;
inline constexpr unsigned kMax = 2;
inline constexpr unsigned kAverage = 4;

inline void require_nccl(Result result) {
  if (result != Result::success) throw Error("NCCL returned " + std::to_string(static_cast<unsigned>(result)));
}

inline void settle(Comm comm) {
  for (Result state = Result::in_progress; state == Result::in_progress;) {
    require_nccl(nccl::ncclCommGetAsyncError(comm, &state));
    if (state != Result::in_progress) require_nccl(state);
  }
}

// Communicator of a program's, as one rank has it.
class ProgramComm {
 public:
  ProgramComm(const NcclUniqueId& id, int rank, int size, bool blocks, const char* name = nullptr) {
    nccl::Config config = nccl::config_of(22809);
    config.blocking = blocks ? 1 : 0;
    config.comm_name = name;
    const Result result = nccl::ncclCommInitRankConfig(&comm_, size, id, rank, &config);
    if (result != Result::in_progress) require_nccl(result);
    settle(comm_);
  }
  // Of the same ranks, split off.
  ProgramComm(Comm parent, int rank, bool blocks) {
    nccl::Config config = nccl::config_of(22809);
    config.blocking = blocks ? 1 : 0;
    const Result result = nccl::ncclCommSplit(parent, 0, rank, &comm_, &config);
    if (result != Result::in_progress) require_nccl(result);
    settle(parent);
    settle(comm_);
  }
  ~ProgramComm() {
    if (comm_ != nullptr) nccl::ncclCommDestroy(comm_);
  }
  ProgramComm(const ProgramComm&) = delete;
  ProgramComm& operator=(const ProgramComm&) = delete;
  operator Comm() const { return comm_; }
  void abort() { require_nccl(nccl::ncclCommAbort(std::exchange(comm_, nullptr))); }

 private:
  Comm comm_ = nullptr;
};

inline NcclUniqueId new_id() {
  NcclUniqueId id;
  require_nccl(nccl::ncclGetUniqueId(&id));
  return id;
}

// Calls body(rank, communicator, stream) on a thread and a device per rank.
template <class Body>
void run_program(int size, Body&& body, bool blocks = true, const char* name = nullptr) {
  const NcclUniqueId id = new_id();
  run_ranks(size, [&](int rank) {
    const CudaDeviceGuard device(rank);
    const ProgramComm comm(id, rank, size, blocks, name);
    const Stream stream;
    body(rank, comm, stream);
    require_cuda(cudaStreamSynchronize(stream));
  });
}

struct Written {
  std::string stats;  // of ZCOMM_STATS: a line for each communicator and rank
  std::string errors;
};

// Runs a skipped case of this program with these variables, and returns what it wrote.
inline Written written_by(const char* test_case, std::vector<std::string> variables) {
  REQUIRE(std::string(test_case).find(',') == std::string::npos);  // which would name two cases
  const std::string file = "/tmp/zcomm-front-" + std::to_string(getpid()), errors = file + ".txt";
  std::filesystem::remove(file);
  variables.push_back("ZCOMM_STATS=" + file);
  const std::string outcome = outcome_of(spawn_case(test_case, variables, errors.c_str()));
  const auto take = [](const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    std::filesystem::remove(path);
    return text.str();
  };
  Written written{take(file), take(errors)};
  INFO(written.errors);
  CHECK(outcome == "ends well");
  return written;
}

inline std::string stats_of(const char* test_case, std::vector<std::string> variables) {
  return written_by(test_case, std::move(variables)).stats;
}

inline int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace zcomm::test
