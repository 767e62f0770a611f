#include "nccl_rendezvous.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "flight_recorder.hpp"
#include "nccl_variables.hpp"
#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm::c10d_binding {
namespace {

constexpr const char* kNcclIdKey = "unique_id";
constexpr const char* kNcclFailureKey = "failure";

// Ends the process: after a failure streams go on with undefined bytes, and results look like any others.
void end_process(const std::string& reason) {
  std::fprintf(stderr,
               "zcomm: %s\nCalls that have returned left undefined results on the GPU: this process ends. With "
               "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 the next call raises instead.\n",
               reason.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace

std::unique_ptr<Transport> NcclRendezvous::connect(const Topology& topology, const std::shared_ptr<Failure>& failure) {
  const auto [path, store] = call_python(meet_);
  load_nccl(path);
  NcclOptions options;
  if (group_.getRank() == 0) {
    options.unique_id = make_nccl_unique_id();
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(options.unique_id.data());
    store->set(kNcclIdKey, std::vector<std::uint8_t>(bytes, bytes + options.unique_id.size()));
  } else {
    const std::vector<std::uint8_t> bytes = store->get(kNcclIdKey);
    std::memcpy(options.unique_id.data(), bytes.data(), std::min(bytes.size(), options.unique_id.size()));
  }
  options.rank = group_.getRank();
  options.size = group_.getSize();
  options.peers = topology.peers(options.rank);
  options.connect_timeout = options_->timeout;
  // Callbacks may outlive this object if the store hangs, so they own copies.
  options.on_failure = [errors = &errors_, failure, store = store, rank = options.rank](const std::string& reason) {
    failure->set(errors->record(TransportError(reason)));
    FlightRecorder::of_process().write_on_failure();
    store->compareSet(kNcclFailureKey, "", "rank " + std::to_string(rank) + " gave up: " + reason);
  };
  if (ends_on_failure()) options.on_undefined_bytes = end_process;
  options.peer_failure = [store = store]() -> std::string {
    if (!store->check({kNcclFailureKey})) return {};
    const std::vector<std::uint8_t> text = store->get(kNcclFailureKey);
    return {text.begin(), text.end()};
  };
  return make_nccl_transport(options);
}

}  // namespace zcomm::c10d_binding
