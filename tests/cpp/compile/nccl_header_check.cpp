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

static_assert(kUndefined == NCCL_CONFIG_UNDEF_INT);

// NCCL's configuration is a prefix of zcomm's, with the size that config_of() has for this release.
constexpr ncclConfig_t kInitializer = NCCL_CONFIG_INITIALIZER;
constexpr Config kConfig = config_of(NCCL_VERSION_CODE);
constexpr bool kIsNewer = NCCL_VERSION_CODE > kNewestConfig;  // than what zcomm declares
static_assert(kConfig.size <= sizeof(ncclConfig_t) && kConfig.version <= kInitializer.version);
static_assert(kIsNewer || (kConfig.size == sizeof(ncclConfig_t) && kConfig.version == kInitializer.version));
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));

#define ZCOMM_SAME(ours, theirs)                                                              \
  static_assert(offsetof(Config, ours) == offsetof(ncclConfig_t, theirs) &&                   \
                    std::is_same_v<decltype(Config::ours), decltype(ncclConfig_t::theirs)> && \
                    kConfig.ours == kInitializer.theirs,                                      \
                #ours)
ZCOMM_SAME(magic, magic);
ZCOMM_SAME(blocking, blocking);
ZCOMM_SAME(cga_cluster_size, cgaClusterSize);
ZCOMM_SAME(min_ctas, minCTAs);
ZCOMM_SAME(max_ctas, maxCTAs);
ZCOMM_SAME(net_name, netName);
ZCOMM_SAME(split_share, splitShare);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 26, 0)
ZCOMM_SAME(traffic_class, trafficClass);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
ZCOMM_SAME(comm_name, commName);
ZCOMM_SAME(collnet_enable, collnetEnable);
ZCOMM_SAME(cta_policy, CTAPolicy);
ZCOMM_SAME(shrink_share, shrinkShare);
ZCOMM_SAME(nvls_ctas, nvlsCTAs);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
ZCOMM_SAME(n_channels_per_net_peer, nChannelsPerNetPeer);
ZCOMM_SAME(nvlink_centric_sched, nvlinkCentricSched);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
ZCOMM_SAME(graph_usage_mode, graphUsageMode);
ZCOMM_SAME(num_rma_ctx, numRmaCtx);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 0)
ZCOMM_SAME(max_p2p_peers, maxP2pPeers);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 5)
ZCOMM_SAME(graph_stream_ordering, graphStreamOrdering);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 31, 0)
ZCOMM_SAME(launch_order_implicit, launchOrderImplicit);
ZCOMM_SAME(num_rma_sig, numRmaSig);
ZCOMM_SAME(rma_eager_init, rmaEagerInit);
ZCOMM_SAME(host_cft_mode, hostCftMode);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
ZCOMM_SAME(nvls_host_mode, nvlsHostMode);
#endif
#undef ZCOMM_SAME

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
static_assert(sizeof(CollConfig) == sizeof(ncclCollConfig_t) && sizeof(ConfigExt) == sizeof(ncclConfigExt_t));
static_assert(offsetof(CollConfig, size) == offsetof(ncclCollConfig_t, size));
static_assert(offsetof(CollConfig, ext) == offsetof(ncclCollConfig_t, ext));
static_assert(offsetof(CollConfig, limits) == offsetof(ncclCollConfig_t, minCTAs));
static_assert(offsetof(CollConfig, algorithms) == offsetof(ncclCollConfig_t, algSelection));
static_assert(offsetof(CollConfig, launch_completion_event) == offsetof(ncclCollConfig_t, launchCompletionEvent));
static_assert(offsetof(ConfigExt, next) == offsetof(ncclConfigExt_t, next));
static_assert(offsetof(ConfigExt, vendor_id) == offsetof(ncclConfigExt_t, key.vendorId));
static_assert(offsetof(ConfigExt, option_id) == offsetof(ncclConfigExt_t, key.optionId));
static_assert(offsetof(ConfigExt, value) == offsetof(ncclConfigExt_t, val));
#endif

}  // namespace
}  // namespace zcomm::nccl
