#include "nccl_rendezvous.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "flight_recorder.hpp"
#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm::c10d_binding {
namespace {

constexpr const char* kNcclIdKey = "nccl/unique_id";
constexpr const char* kNcclFailureKey = "nccl/failure";

// Streams go on after a failure, with undefined bytes, and what is computed from them looks like any other result.
void end_process(const std::string& reason) {
  std::fprintf(stderr,
               "zcomm: %s\nCalls that have returned left undefined results on the GPU: this process ends. With "
               "zcomm.Options(end_on_failure=False) the next call raises instead.\n",
               reason.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace

std::unique_ptr<Transport> NcclRendezvous::connect(const std::shared_ptr<Failure>& failure) {
  load_nccl(call_python(meet_));
  NcclOptions options;
  if (group_.getRank() == 0) {
    options.unique_id = make_nccl_unique_id();
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(options.unique_id.data());
    store_->set(kNcclIdKey, std::vector<std::uint8_t>(bytes, bytes + options.unique_id.size()));
  } else {
    const std::vector<std::uint8_t> bytes = store_->get(kNcclIdKey);
    std::memcpy(options.unique_id.data(), bytes.data(), std::min(bytes.size(), options.unique_id.size()));
  }
  options.rank = group_.getRank();
  options.size = group_.getSize();
  options.max_ctas = options_->max_ctas;
  options.connect_timeout = options_->timeout;
  // A connection of their own: a call that waits in the other one keeps it locked. They may outlive this if the store
  // hangs, so that nothing of this is used after the first line.
  const StorePtr store = store_->clone();
  options.on_failure = [errors = &errors_, failure, store, rank = options.rank](const std::string& reason) {
    failure->set(errors->record(TransportError(reason)));
    FlightRecorder::of_process().write_on_failure();
    store->compareSet(kNcclFailureKey, "", "rank " + std::to_string(rank) + " gave up: " + reason);
  };
  if (options_->end_on_failure) options.on_undefined_bytes = end_process;
  options.peer_failure = [store]() -> std::string {
    if (!store->check({kNcclFailureKey})) return {};
    const std::vector<std::uint8_t> text = store->get(kNcclFailureKey);
    return {text.begin(), text.end()};
  };
  return make_nccl_transport(options);
}

}  // namespace zcomm::c10d_binding
