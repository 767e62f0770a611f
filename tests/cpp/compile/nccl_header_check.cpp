// Check of zcomm's NCCL declarations against a real nccl.h, when this compiles. See test_nccl_headers.py.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "transport/nccl_symbols.hpp"

namespace zcomm::nccl {
namespace {

// Maps zcomm's types to NCCL's.
template <class T>
struct Theirs {
  using Type = T;
};
template <>
struct Theirs<Result> {
  using Type = ncclResult_t;
};
template <>
struct Theirs<unsigned> {
  using Type = ncclDataType_t;
};
template <>
struct Theirs<NcclUniqueId> {
  using Type = ncclUniqueId;
};
template <>
struct Theirs<Config> {
  using Type = ncclConfig_t;
};
template <class T>
struct Theirs<T*> {
  using Type = typename Theirs<T>::Type*;
};
template <class R, class... Parameters>
struct Theirs<R (*)(Parameters...)> {
  using Type = typename Theirs<R>::Type (*)(typename Theirs<Parameters>::Type...);
};

#define ZCOMM_CHECK(name, result, parameters)                                                            \
  static_assert(std::is_same_v<typename Theirs<decltype(Library::name)>::Type, decltype(&::nccl##name)>, \
                "nccl" #name " has another signature");
ZCOMM_NCCL_FUNCTIONS(ZCOMM_CHECK)
#undef ZCOMM_CHECK

static_assert(std::is_same_v<Comm, ncclComm_t>);
static_assert(std::is_same_v<Stream, cudaStream_t>);

template <class Ours, class Real>
constexpr bool same_enum() {
  return std::is_same_v<std::underlying_type_t<Ours>, std::underlying_type_t<Real>>;
}
static_assert(same_enum<Result, ncclResult_t>());
static_assert(std::is_same_v<std::underlying_type_t<ncclDataType_t>, unsigned>);
static_assert(static_cast<int>(Result::success) == ncclSuccess);
static_assert(static_cast<int>(Result::unhandled_cuda_error) == ncclUnhandledCudaError);
static_assert(static_cast<int>(Result::system_error) == ncclSystemError);
static_assert(static_cast<int>(Result::internal_error) == ncclInternalError);
static_assert(static_cast<int>(Result::invalid_argument) == ncclInvalidArgument);
static_assert(static_cast<int>(Result::invalid_usage) == ncclInvalidUsage);
static_assert(static_cast<int>(Result::remote_error) == ncclRemoteError);
static_assert(static_cast<int>(Result::in_progress) == ncclInProgress);
static_assert(kInt8 == ncclInt8);

static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));

// zcomm's Config is a prefix of NCCL's.
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(kUndefined == NCCL_CONFIG_UNDEF_INT);

constexpr ncclConfig_t kInitializer = NCCL_CONFIG_INITIALIZER;
static_assert(Config{}.magic == kInitializer.magic);
static_assert(Config{}.version <= kInitializer.version && Config{}.version >= NCCL_VERSION(2, 18, 0));
static_assert(Config{}.net_name == kInitializer.netName);

}  // namespace
}  // namespace zcomm::nccl
