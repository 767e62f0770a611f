#include "front/messages.hpp"

#include <atomic>

#include "collectives/random_seed.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm::front {

void Messages::locate(const Topology& topology, int rank, int device) {
  topology_ = topology;
  rank_ = rank;
  device_ = device;
  static std::atomic<std::uint64_t> num_located{0};  // communicators
  seed_ = mix_seed(mix_seed(++num_located) ^ static_cast<std::uint64_t>(rank));
}

const BlockFormat& Messages::format_of(const Request& request) const {
  return request.formats.on(topology_.value().link(rank_, request.root));
}

Reason Messages::decide(const Request& request) const {
  if (!topology_) return Reason::no_meeting;
  if (topology_->num_nodes() == 1) return Reason::one_node;
  const bool has_peer = request.root >= 0 && request.root < topology_->size() && request.root != rank_;
  if (!has_peer || format_of(request).kind == ElementKind::exact) return Reason::format_exact;
  return is_capturing({request.stream}) ? Reason::capture : Reason::compressed;
}

Message Messages::take(const Request& request) {
  const auto address = reinterpret_cast<std::uintptr_t>(request.from != nullptr ? request.from : request.to);
  const std::size_t element = bytes_of_type(request.type);
  check_argument(address != 0 && address % element == 0, "buffer: expected an address that is a multiple of ", element,
                 ", got ", address);
  const CudaDeviceGuard guard(device_);
  if (workspace_ == nullptr) {
    workspace_ = make_cuda_workspace();
    codec_ = make_cuda_codec(*workspace_);
  }
  const BlockFormat format = format_of(request);
  const std::size_t num_bytes =
      wire_bytes(format, dtype_of(request.type).value(), static_cast<std::int64_t>(request.count));
  return {request, format, Scratch(*workspace_, num_bytes, {request.stream}), num_bytes, seed_ = next_seed(seed_)};
}

nccl::Result Messages::post(const Message& message) {
  const auto& [request, format, wire, num_bytes, seed] = message;
  const nccl::Library& nccl = nccl::library();
  return request.from != nullptr
             ? nccl.Send(wire.data(), num_bytes, nccl::kInt8, request.root, request.comm, request.stream)
             : nccl.Recv(wire.data(), num_bytes, nccl::kInt8, request.root, request.comm, request.stream);
}

void Messages::encode(std::span<const Message* const> messages) const {
  std::vector<Encode> jobs;
  for (const Message* const each : messages) {
    const auto& [request, format, wire, num_bytes, seed] = *each;
    if (request.from == nullptr) continue;
    const ConstTensorView values{static_cast<const std::byte*>(request.from), static_cast<std::int64_t>(request.count),
                                 dtype_of(request.type).value()};
    jobs.push_back({values, format, wire.data(), {mix_seed(seed)}});
  }
  if (jobs.empty()) return;
  const CudaDeviceGuard guard(device_);
  codec_->encode(jobs, {messages[0]->request.stream});
}

void Messages::decode(std::span<const Message* const> messages) const {
  std::vector<Decode> jobs;
  for (const Message* const each : messages) {
    const auto& [request, format, wire, num_bytes, seed] = *each;
    if (request.to == nullptr) continue;
    const TensorView values{static_cast<std::byte*>(request.to), static_cast<std::int64_t>(request.count),
                            dtype_of(request.type).value()};
    jobs.push_back({{wire.data(), format, values.dtype}, values});
  }
  if (jobs.empty()) return;
  const CudaDeviceGuard guard(device_);
  codec_->decode(jobs, {messages[0]->request.stream});
}

}  // namespace zcomm::front
