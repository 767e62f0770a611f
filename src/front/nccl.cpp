// Functions of NCCL that the front implements. A test compares their parameters with nccl.h.
#include "front/calls.hpp"
#include "front/functions.hpp"
#include "front/registry.hpp"

using namespace zcomm::front;
using zcomm::nccl::CollConfig;
using zcomm::nccl::Comm;
using zcomm::nccl::Config;
using zcomm::nccl::Result;
using zcomm::nccl::Stream;

#define ZCOMM_LIST(...) __VA_ARGS__
// Name, parameters and their names as far as the stream, those behind it, the configuration, and fields of the request.
#define ZCOMM_CALL(name, parameters, arguments, last_parameters, last_arguments, config, ...)                    \
  Result name(ZCOMM_LIST parameters, Comm comm, Stream stream ZCOMM_LIST last_parameters) {                      \
    const auto exact = [=]([[maybe_unused]] const CollConfig* kept) {                                            \
      return ZCOMM_REAL(name)(ZCOMM_LIST arguments, comm, stream ZCOMM_LIST last_arguments);                     \
    };                                                                                                           \
    if (!are_asked(config)) return exact(config);                                                                \
    return answer({__VA_ARGS__, comm, stream, __builtin_return_address(0), wants_event(config)}, config, exact); \
  }
// A call and its variant with a configuration: name, parameters between type and communicator, and their names.
#define ZCOMM_CALLS(name, parameters, arguments, collective, op, root)                                               \
  ZCOMM_CALL(name, (const void* from, void* to, std::size_t count, unsigned type ZCOMM_LIST parameters),             \
             (from, to, count, type ZCOMM_LIST arguments), (), (), nullptr, Collective::collective, from, to, count, \
             type, op, root)                                                                                         \
  ZCOMM_CALL(name##Config, (const void* from, void* to, std::size_t count, unsigned type ZCOMM_LIST parameters),     \
             (from, to, count, type ZCOMM_LIST arguments), (, const CollConfig* given), (, kept), given,             \
             Collective::collective, from, to, count, type, op, root)
// A call that makes communicators: parameters and their names, where the communicators are, their number, a
// configuration or null, and the communicator that they are split off, or null.
#define ZCOMM_MAKE(name, parameters, arguments, made, number, config, parent)                                        \
  Result name(ZCOMM_LIST parameters) {                                                                               \
    return follow(ZCOMM_REAL(name)(ZCOMM_LIST arguments), {made, static_cast<std::size_t>(number)}, config, parent); \
  }
// A call that ends a communicator.
#define ZCOMM_END(name, parameters, arguments, aborts)                 \
  Result name(Comm comm ZCOMM_LIST parameters) {                       \
    auto ended = end_communicator(comm, aborts);                       \
    const Result result = ZCOMM_REAL(name)(comm ZCOMM_LIST arguments); \
    keep_in_group(std::move(ended));                                   \
    return result;                                                     \
  }

#pragma GCC visibility push(default)
extern "C" {

ZCOMM_CALLS(ncclAllGather, (), (), all_gather, kSum, 0)
ZCOMM_CALLS(ncclReduceScatter, (, unsigned op), (, op), reduce_scatter, op, 0)
ZCOMM_CALLS(ncclAllReduce, (, unsigned op), (, op), all_reduce, op, 0)
ZCOMM_CALLS(ncclAlltoAll, (), (), all_to_all, kSum, 0)
ZCOMM_CALLS(ncclBroadcast, (, int root), (, root), broadcast, kSum, root)
ZCOMM_CALLS(ncclReduce, (, unsigned op, int root), (, op, root), other, op, root)
ZCOMM_CALLS(ncclGather, (, int root), (, root), gather, kSum, root)
ZCOMM_CALLS(ncclScatter, (, int root), (, root), scatter, kSum, root)
ZCOMM_CALL(ncclBcast, (void* to, std::size_t count, unsigned type, int root), (to, count, type, root), (), (), nullptr,
           Collective::broadcast, to, to, count, type, kSum, root)
ZCOMM_CALL(ncclSend, (const void* from, std::size_t count, unsigned type, int peer), (from, count, type, peer), (), (),
           nullptr, Collective::message, from, nullptr, count, type, kSum, peer)
ZCOMM_CALL(ncclRecv, (void* to, std::size_t count, unsigned type, int peer), (to, count, type, peer), (), (), nullptr,
           Collective::message, nullptr, to, count, type, kSum, peer)

ZCOMM_END(ncclCommFinalize, (), (), false)
ZCOMM_END(ncclCommDestroy, (), (), false)
ZCOMM_END(ncclCommAbort, (), (), true)

Result ncclCommRevoke(Comm comm, int flags) {  // which leaves a communicator that can be split
  if (const auto parent = known_parent_of(comm)) parent->abort();
  return ZCOMM_REAL(ncclCommRevoke)(comm, flags);
}

Result ncclGroupStart() {
  start_group();
  return ZCOMM_REAL(ncclGroupStart)();
}

Result ncclGroupEnd() {
  return end_group([] { return ZCOMM_REAL(ncclGroupEnd)(); });
}

Result ncclGroupSimulateEnd(void* info) {
  return drop_group([=] { return ZCOMM_REAL(ncclGroupSimulateEnd)(info); });
}

ZCOMM_MAKE(ncclCommInitRank, (Comm * made, int size, zcomm::NcclUniqueId id, int rank), (made, size, id, rank), made, 1,
           nullptr, nullptr)
ZCOMM_MAKE(ncclCommInitRankConfig, (Comm * made, int size, zcomm::NcclUniqueId id, int rank, Config* config),
           (made, size, id, rank, config), made, 1, config, nullptr)
ZCOMM_MAKE(ncclCommInitRankScalable,
           (Comm * made, int size, int rank, int num_ids, zcomm::NcclUniqueId* ids, Config* config),
           (made, size, rank, num_ids, ids, config), made, 1, config, nullptr)
ZCOMM_MAKE(ncclCommInitAll, (Comm * made, int number, const int* devices), (made, number, devices), made, number,
           nullptr, nullptr)
ZCOMM_MAKE(ncclCommSplit, (Comm parent, int color, int key, Comm* made, Config* config),
           (parent, color, key, made, config), made, 1, config, parent)
ZCOMM_MAKE(ncclCommShrink, (Comm parent, int* excluded, int number, Comm* made, Config* config, int flags),
           (parent, excluded, number, made, config, flags), made, 1, config, parent)
ZCOMM_MAKE(ncclCommGrow, (Comm parent, int size, const zcomm::NcclUniqueId* id, int rank, Comm* made, Config* config),
           (parent, size, id, rank, made, config), made, 1, config, nullptr)

Result ncclCommGetAsyncError(Comm comm, Result* state) {
  const Result result = ZCOMM_REAL(ncclCommGetAsyncError)(comm, state);
  if (result != Result::success || *state != Result::success) return result;
  const auto parent = known_parent_of(comm);
  const bool is_asked_by_program = parent != nullptr && !is_of_real_library(__builtin_return_address(0));
  if (is_asked_by_program && parent->has_failed()) *state = Result::remote_error;
  return result;
}

}  // extern "C"
#pragma GCC visibility pop
