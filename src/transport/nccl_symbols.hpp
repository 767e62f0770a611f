// Declarations of NCCL's ABI, so that no nccl.h is needed to build, and the functions of the library found at run time.
// test_nccl_headers.py in tests/python compares them with every installed nccl.h.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
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

inline constexpr unsigned kMagic = 0xcafebeef;  // of configurations

// Configuration, as NCCL 2.32.3 declares it. Releases only append fields, so that the configuration of each is a
// prefix. A library reads `size` bytes of it; `version` says which of these fields the caller knows.
struct Config {
  std::size_t size = 0;
  unsigned magic = kMagic;
  unsigned version = 0;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;            // 2.26
  const char* comm_name = nullptr;           // 2.27
  int collnet_enable = kUndefined;           // 2.27
  int cta_policy = kUndefined;               // 2.27
  int shrink_share = kUndefined;             // 2.27
  int nvls_ctas = kUndefined;                // 2.27
  int n_channels_per_net_peer = kUndefined;  // 2.28
  int nvlink_centric_sched = kUndefined;     // 2.28
  int graph_usage_mode = kUndefined;         // 2.29
  int num_rma_ctx = kUndefined;              // 2.29
  int max_p2p_peers = kUndefined;            // 2.30
  int graph_stream_ordering = kUndefined;    // 2.30.5
  int launch_order_implicit = kUndefined;    // 2.31
  int num_rma_sig = kUndefined;              // 2.31
  int rma_eager_init = kUndefined;           // 2.31
  int host_cft_mode = kUndefined;            // 2.31
  int nvls_host_mode = kUndefined;           // 2.32
};

inline constexpr int kNewestConfig = 23203;  // version of the release that Config follows

// Returns the configuration as the nccl.h of this release initializes it. Later releases than kNewestConfig get the
// configuration of kNewestConfig. NCCL does not read fields beyond `size`.
//
// Compared with the nccl.h of 2.18.1, 2.18.3, 2.21.5, 2.23.4, 2.26.2, 2.27.3, 2.27.7, 2.28.3, 2.28.7, 2.28.9, 2.29.2,
// 2.29.3, 2.29.7, 2.30.3, 2.30.4, 2.30.7, 2.31.2 and 2.32.3.
constexpr Config config_of(int version) {
  struct Release {
    int first;
    std::size_t size;
  };
  constexpr Release kReleases[] = {{21700, 48}, {22700, 72},  {22800, 80}, {22900, 88},
                                   {23000, 96}, {23100, 112}, {23200, 120}};
  Config config;
  config.version = static_cast<unsigned>(version < kNewestConfig ? version : kNewestConfig);
  for (const Release& release : kReleases) {
    if (version >= release.first) config.size = release.size;
  }
  return config;
}

// Vendor option in the configuration of one call. NCCL ignores all of them.
struct ConfigExt {
  const ConfigExt* next;
  int vendor_id;
  int option_id;
  union {
    const char* text;
    void* raw;
  } value;
};

// Configuration of one call, as NCCL 2.32.3 declares it. Releases only append fields.
struct CollConfig {
  std::size_t size = 0;
  unsigned magic = kMagic, version = 0;
  const ConfigExt* ext = nullptr;
  int limits[4] = {};
  const char* algorithms = nullptr;
  std::byte unread[16] = {};  // policies, a profiler's tag
  void* launch_completion_event = nullptr;
};

// F(name after "nccl", result, parameters)
#define ZCOMM_NCCL_FUNCTIONS(F)                                            \
  F(GetVersion, Result, (int*))                                            \
  F(GetUniqueId, Result, (NcclUniqueId*))                                  \
  F(GetErrorString, const char*, (Result))                                 \
  F(GetLastError, const char*, (Comm))                                     \
  F(CommInitRankConfig, Result, (Comm*, int, NcclUniqueId, int, Config*))  \
  F(CommSplit, Result, (Comm, int, int, Comm*, Config*))                   \
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

// Function that only zcomm's front of NCCL has: see src/front.
inline constexpr const char* kFrontMark = "zcomm_front_library";

// Returns the handle of the library that load_nccl() opens; `named_path` is the value of ZCOMM_NCCL_LIB. Throws
// TransportError if there is none.
void* open(const std::string& named_path, const std::string& wheel_path);

// Returns the file of a library.
std::string path_of(void* handle);

// Opens a library as load_nccl() does, with all functions.
Library open_library(const std::string& named_path, const std::string& wheel_path);

// Rejects NCCL_COMM_BLOCKING: it overrides the configuration, and blocking calls can neither time out nor be aborted.
void check_environment();

// Returns the library of load_nccl().
const Library& library(const std::string& wheel_path = {});

}  // namespace zcomm::nccl
