#include "zcomm/communicator.hpp"

#include <utility>

#include "collectives/lossless_preparation.hpp"
#include "collectives/operation_checks.hpp"
#include "collectives/random_seed.hpp"
#include "collectives/stages.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {

Communicator::Communicator(std::unique_ptr<Transport> transport, Topology topology, std::unique_ptr<Codec> codec,
                           std::unique_ptr<Workspace> workspace, std::size_t chunk_bytes)
    : workspace_(std::move(workspace)),
      codec_(std::move(codec)),
      transport_(std::move(transport)),
      preparations_(std::make_shared<Preparations>()),
      world_{std::move(topology), transport_->rank(), chunk_bytes} {
  check_argument(size() == transport_->size(), "topology: expected ", transport_->size(), " ranks, got ", size());
  check_argument(chunk_bytes > 0, "chunk_bytes: expected at least 1, got 0");
}

CallStats Communicator::run(Operation& operation, const Arguments& arguments, std::chrono::milliseconds timeout,
                            StreamView stream, BeginRange begin_range) {
  CallStats stats;
  Resources resources{*codec_, *transport_, world_, *workspace_, stream, stats, *preparations_, begin_range};
  operation.check(resources, arguments);
  check_addresses(arguments);
  transport_->check_stream(stream);
  // No graph records the null stream, which traces of a GPU's calls have on a host without one.
  const bool is_captured = stream.handle != nullptr && transport_->is_stream_ordered() && is_capturing(stream);
  if (is_captured) {
    for (const Segment<HopFormats>& segment : operation.segments()) {
      check_drawn_anew(segment.format.intra_node, stream);
      check_drawn_anew(segment.format.inter_node, stream);
    }
  }
  if (!arguments.wires.empty()) check_wires(operation, arguments.wires);
  const std::string call = operation.signature(arguments, !transport_->is_stream_ordered());
  resources.seed = seed_ = next_seed(seed_);
  // Takes scratch before the call is announced. Where there is none nothing has happened, and the group stays whole.
  const bool sends_first = operation.sends_in_stages(resources, arguments);
  std::unique_ptr<Stages> stages = sends_first ? nullptr : operation.stages(resources, arguments);
  try {
    transport_->begin(call, operation.peers(arguments), timeout, stream);
    if (sends_first) stages = operation.stages(resources, arguments);
    if (stages != nullptr) {
      if (stages->num_chunks() > 1) resources.lanes = transport_->lanes();
      stages->begin();
      run_pipeline(resources, *stages);
    }
  } catch (const std::exception& error) {
    // Aborts, because peers wait for bytes that this rank will not send. The stages drop their transfers afterwards, so
    // that all peers learn why.
    transport_->abort("in " + call + ": " + error.what());
    throw;
  }
  return stats;
}

void Communicator::round_trip(ConstTensorView values, BlockFormat format, TensorView decoded, StreamView stream) const {
  check_argument(decoded.num_elements == values.num_elements, "decoded: expected the ", values.num_elements,
                 " elements of `values`, got ", decoded.num_elements);
  const Scratch wire(*workspace_, WireLayout(format, values.dtype, values.num_elements).num_bytes, stream);
  const Encode encode{values, format, wire.data(), {}};
  codec_->encode({&encode, 1}, stream);
  const Decode decode{{wire.data(), format, values.dtype}, decoded};
  codec_->decode({&decode, 1}, stream);
}

std::unique_ptr<Communicator> make_nccl_communicator(const Topology& topology, NcclOptions options,
                                                     std::size_t chunk_bytes) {
  options.size = topology.size();
  if (options.peers.empty()) options.peers = topology.peers(options.rank);
  options.node_ids.clear();
  options.agreement += concat("a communicator with chunks of ", chunk_bytes, " bytes, on nodes");
  for (int rank = 0; rank < options.size; ++rank) {
    options.node_ids.push_back(topology.node(rank));
    options.agreement += concat(" ", topology.node(rank));
  }
  auto workspace = make_cuda_workspace();
  auto codec = make_cuda_codec(*workspace);
  return std::make_unique<Communicator>(make_nccl_transport(options), topology, std::move(codec), std::move(workspace),
                                        chunk_bytes);
}

}  // namespace zcomm
