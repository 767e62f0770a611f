// Declarations of NCCL's ABI, so that no nccl.h is needed to build, and the functions of the library found at run time.
// The declarations follow NCCL 2.18; test_nccl_headers.py in tests/python compares them with every installed nccl.h.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "zcomm/nccl.hpp"

struct CUstream_st;
struct ncclComm;

namespace zcomm::nccl {

enum class Result : unsigned {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
};

inline constexpr unsigned kInt8 = 0;  // an ncclDataType_t

using Comm = ::ncclComm*;
using Stream = ::CUstream_st*;

inline constexpr int kUndefined = INT_MIN;

// Configuration. Newer libraries append fields: `size` tells them which fields exist, `version` what they mean.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21801;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

// F(name after "nccl", result, parameters)
#define ZCOMM_NCCL_FUNCTIONS(F)                                            \
  F(GetVersion, Result, (int*))                                            \
  F(GetUniqueId, Result, (NcclUniqueId*))                                  \
  F(GetErrorString, const char*, (Result))                                 \
  F(GetLastError, const char*, (Comm))                                     \
  F(CommInitRankConfig, Result, (Comm*, int, NcclUniqueId, int, Config*))  \
  F(CommCount, Result, (Comm, int*))                                       \
  F(CommUserRank, Result, (Comm, int*))                                    \
  F(CommCuDevice, Result, (Comm, int*))                                    \
  F(CommGetAsyncError, Result, (Comm, Result*))                            \
  F(CommFinalize, Result, (Comm))                                          \
  F(CommDestroy, Result, (Comm))                                           \
  F(CommAbort, Result, (Comm))                                             \
  F(GroupStart, Result, ())                                                \
  F(GroupEnd, Result, ())                                                  \
  F(Send, Result, (const void*, std::size_t, unsigned, int, Comm, Stream)) \
  F(Recv, Result, (void*, std::size_t, unsigned, int, Comm, Stream))       \
  F(AllGather, Result, (const void*, void*, std::size_t, unsigned, Comm, Stream))

struct Library {
  std::string path;
  int version = 0;
#define ZCOMM_DECLARE(name, result, parameters) result(*name) parameters = nullptr;
  ZCOMM_NCCL_FUNCTIONS(ZCOMM_DECLARE)
#undef ZCOMM_DECLARE
};

// Opens a library as load_nccl() does; `named_path` is the value of ZCOMM_NCCL_LIB.
Library open_library(const std::string& named_path, const std::string& wheel_path);

// Returns the library of load_nccl().
const Library& library(const std::string& wheel_path = {});

}  // namespace zcomm::nccl
