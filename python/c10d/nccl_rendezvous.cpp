#include "nccl_rendezvous.hpp"

#include <algorithm>
#include <cstring>

#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm::c10d_binding {
namespace {

constexpr const char* kNcclIdKey = "nccl/unique_id";
constexpr const char* kNcclFailureKey = "nccl/failure";

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
  options.connect_timeout = options_->timeout;
  options.on_failure = [this, failure](const std::string& reason) {
    failure->set(errors_.record(TransportError(reason)));
    store_->compareSet(kNcclFailureKey, "", "rank " + std::to_string(group_.getRank()) + " gave up: " + reason);
  };
  options.peer_failure = [this]() -> std::string {
    if (!store_->check({kNcclFailureKey})) return {};
    const std::vector<std::uint8_t> text = store_->get(kNcclFailureKey);
    return {text.begin(), text.end()};
  };
  return make_nccl_transport(options);
}

}  // namespace zcomm::c10d_binding
