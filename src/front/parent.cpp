#include "front/parent.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <thread>

#include "front/registry.hpp"
#include "hash.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/exchange.hpp"
#include "zcomm/gather.hpp"

namespace zcomm::front {
namespace {

using nccl::Result;

constexpr auto kForever = std::chrono::milliseconds::max();  // NCCL's calls have no time limit
constexpr std::size_t kMostPrepared = 256;

// Identifies this host, as zcomm/_node.py does: by the boot id, else the host's name. Never 0.
std::uint64_t host_token() {
  std::string text;
  if (std::ifstream file("/proc/sys/kernel/random/boot_id"); !std::getline(file, text)) {
    char name[256] = {};
    gethostname(name, sizeof(name) - 1);
    text = name;
  }
  return fnv1a(text) | 1;
}

std::vector<int> nodes_of(const std::vector<std::uint64_t>& hosts) {
  std::vector<int> nodes;
  for (const std::uint64_t& host : hosts) {
    const int node_size = settings().node_size;
    const auto first =
        node_size > 0 ? (&host - hosts.data()) / node_size : std::ranges::find(hosts, host) - hosts.begin();
    nodes.push_back(static_cast<int>(first));
  }
  return nodes;
}

TensorView view_of(const void* data, std::size_t count, DType dtype) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), static_cast<std::int64_t>(count), dtype};
}

}  // namespace

std::string Parent::where() const {
  return concat("zcomm's front of NCCL, rank ", rank_, " of ", size_, name_.empty() ? "" : " of " + name_);
}

std::size_t Parent::bytes_of(const Request& request) const {
  const std::size_t bytes = request.count * bytes_of_type(request.type);
  return has_one_slot(request.collective) ? bytes : bytes * static_cast<std::size_t>(size_);
}

void Parent::ask_size() {
  if (size_ != 0) return;
  nccl::library().CommCount(comm_, &size_);
  nccl::library().CommUserRank(comm_, &rank_);
}

HopFormats Parent::formats_of(const Request& request, const nccl::CollConfig* config) {
  ask_size();
  if (const char* own = formats_of_call(config)) return parse_formats("formats of a call", request.collective, own);
  return settings().formats_of(request, name_, rank_, size_, bytes_of(request));
}

Reason Parent::decide(const Request& request) {
  if (request.collective == Collective::other) return Reason::collective;
  if (request.formats.is_exact()) return Reason::format_exact;
  if (!dtype_of(request.type)) return Reason::dtype;
  if (request.op != kSum && request.op != kAverage) return Reason::operation;
  if (request.collective == Collective::all_to_all && request.from == request.to) return Reason::in_place;
  const std::size_t bytes = bytes_of(request);
  if (bytes == 0 || bytes < settings().min_bytes) return Reason::min_bytes;
  if (request.wants_event) return Reason::event;
  if (request.collective == Collective::message) return messages_.decide(request);
  if (state_ == State::one_node || size_ == 1) return Reason::one_node;
  if (state_ == State::refused) return Reason::no_meeting;
  if (state_ == State::met && is_exchange(request.collective) && !has_all_pairs_) return Reason::no_pairs;
  if (state_ == State::met) return decide_met(request);
  return is_capturing({request.stream}) ? Reason::capture : Reason::compressed;
}

// A graph can record what has its scratch already: a call that was made before on the same stream.
Reason Parent::decide_met(const Request& request) {
  const Prepared& prepared = prepare(request);
  if (prepared.operation == nullptr) return Reason::format;
  try {
    communicator()->check_stream({request.stream});
  } catch (const ArgumentError&) {
    return Reason::capture;  // of another stream
  }
  const bool can_be_recorded = prepared.streams.contains(request.stream) && !request.formats.intra_node.stochastic &&
                               !request.formats.inter_node.stochastic;
  return can_be_recorded || !is_capturing({request.stream}) ? Reason::compressed : Reason::capture;
}

Parent::Prepared& Parent::prepare(const Request& request) {
  if (prepared_.size() >= kMostPrepared) prepared_.clear();
  const auto [found, is_new] =
      prepared_.try_emplace(Key(request.collective, request.count, request.type, request.root, request.formats));
  if (is_new) {
    try {
      found->second.operation = make_operation(request);
    } catch (const ArgumentError& error) {
      std::fprintf(stderr, "%s: calls stay exact: %s\n", where().c_str(), error.what());
    }
  }
  return found->second;
}

OperationPtr Parent::make_operation(const Request& request) const {
  const World& world = world_.value();
  const HopFormats& formats = request.formats;
  const auto count = static_cast<std::int64_t>(request.count);
  const DType dtype = dtype_of(request.type).value();
  const auto slots = [&] {
    return shape_of(split(view_of(nullptr, request.count * static_cast<std::size_t>(size_), dtype), size_, count));
  };
  switch (request.collective) {
    case Collective::all_gather: {
      const Segment<BlockFormat> whole{count, formats.inter_node};
      return make_all_gather(std::make_shared<const GatherPlan>(world, slots(), GatherSegments(&whole, 1)));
    }
    case Collective::reduce_scatter: {
      const Segment<HopFormats> whole{count, formats};
      return make_reduce_scatter({world, slots(), ReduceSegments(&whole, 1)});
    }
    case Collective::all_reduce:
      return make_all_reduce({world, count, dtype, formats});
    case Collective::broadcast:
      return make_broadcast(world, request.root, count, dtype, formats.inter_node);
    case Collective::gather:
      return make_exchange(ExchangePlan::gather(world, request.root, count, dtype, formats));
    case Collective::scatter:
      return make_exchange(ExchangePlan::scatter(world, request.root, count, dtype, formats));
    default: {
      const ExchangePlan::Lengths each(static_cast<std::size_t>(size_), count);
      return make_exchange(ExchangePlan::all_to_all(world, each, each, dtype, formats));
    }
  }
}

std::shared_ptr<Communicator> Parent::communicator() const {
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) throw TransportError("the communicator was aborted");
  return communicator_;
}

// Returns why this rank cannot connect; empty: it has.
std::string Parent::connect(const NcclUniqueId& unique_id, const Topology& topology) {
  NcclOptions options;
  options.unique_id = unique_id;
  options.rank = rank_;
  options.peers = has_all_pairs_ ? topology.others(rank_) : topology.peers(rank_);
  options.agreement = settings().agreement(name_);
  options.interruption = [fate = fate_] { return std::string(fate->is_aborted ? "it was aborted" : ""); };
  options.on_failure = [fate = fate_, text = where()](const std::string& reason) {
    if (!fate->is_in_use || fate->has_failed.exchange(true) || fate->is_aborted) return;
    std::fprintf(stderr, "%s: %s\n", text.c_str(), reason.c_str());
  };
  try {
    const CudaDeviceGuard guard(device_);
    std::shared_ptr<Communicator> made = make_nccl_communicator(topology, options, settings().chunk_bytes);
    world_ = made->world();
    const std::lock_guard lock(mutex_);
    communicator_ = std::move(made);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// Gives all ranks the token of each, over the program's communicator.
NcclBootstrap Parent::exchange(std::uint64_t token, bool makes_id) {
  const auto look = [this] {
    if (is_aborted()) throw TransportError("the communicator was aborted");
  };
  NcclBootstrap met = bootstrap_over_nccl(comm_, token, kForever, look, makes_id);
  kept_.push_back(met.memory);
  look();  // an abort ends the exchange, too, with undefined tokens
  return met;
}

void Parent::locate() {
  ask_size();
  if (size_ == 1) return;
  const std::string own = settings().agreement(name_);
  const std::vector<std::uint64_t> agreements = exchange(fnv1a(own), /*makes_id=*/false).tokens;
  const auto other = std::ranges::find_if(agreements, [&](std::uint64_t each) { return each != agreements[0]; });
  check_argument(other == agreements.end(), "settings: expected the same on all ranks, got others on rank ",
                 other - agreements.begin(), " than on rank 0; rank ", rank_, " has ", own);
  const NcclBootstrap met = exchange(host_token(), /*makes_id=*/false);
  const Topology topology(nodes_of(met.tokens));
  num_nodes_ = topology.num_nodes();
  messages_.locate(topology, rank_, met.device);
}

Message Parent::take_message(const Request& request) {
  Message message = messages_.take(request);
  tally_.add_bytes(request, rank_, size_, request.from != nullptr ? message.num_bytes : 0);
  note_compressed();
  return message;
}

// The ranks exchange who they are, connect, and vote on whether all have.
void Parent::meet(bool all_pairs) {
  has_all_pairs_ = all_pairs || settings().asks_exchanges;
  std::string why;
  try {
    nccl::check_environment();
  } catch (const Error& error) {
    why = error.what();
  }
  const NcclBootstrap met = exchange(why.empty() ? host_token() : 0, /*makes_id=*/true);
  device_ = met.device;
  identity_.assign(reinterpret_cast<const char*>(met.unique_id.data()), met.unique_id.size());
  const Topology topology(nodes_of(met.tokens));
  std::vector<std::uint64_t> votes = met.tokens;
  if (std::ranges::count(votes, 0u) == 0) {
    num_nodes_ = topology.num_nodes();
    if (num_nodes_ == 1) {
      state_ = State::one_node;
      return;
    }
    why = connect(met.unique_id, topology);
    votes = exchange(why.empty() ? 1 : 0, /*makes_id=*/false).tokens;
  }
  const auto against = std::ranges::find(votes, 0u);
  state_ = against == votes.end() ? State::met : State::refused;
  fate_->is_in_use = state_ == State::met;
  if (state_ == State::met) return;
  close();
  if (why.empty()) why = concat("rank ", against - votes.begin(), " cannot connect");
  std::fprintf(stderr, "%s: all calls stay exact: %s\n", where().c_str(), why.c_str());
}

// Returns what an operation reads and writes. What it works on in place is the target, into which run() copies it.
Parent::Views Parent::views_of(const Request& request) const {
  const DType dtype = dtype_of(request.type).value();
  const auto size = static_cast<std::size_t>(size_);
  const auto slots_of = [&](const void* data) {
    return split(view_of(data, request.count * size, dtype), size_, static_cast<std::int64_t>(request.count));
  };
  const auto inputs_of = [&](const void* data) {
    const std::vector<TensorView> slots = slots_of(data);
    return std::vector<ConstTensorView>(slots.begin(), slots.end());
  };
  const TensorView own = view_of(request.from, request.count, dtype);
  const TensorView target = view_of(request.to, request.count, dtype);
  const TensorView none = view_of(nullptr, 0, dtype);
  const bool is_root = rank_ == request.root;
  Views views;
  switch (request.collective) {
    case Collective::all_gather:
      return {{own}, slots_of(request.to)};
    case Collective::reduce_scatter:
      return {inputs_of(request.from), {target}};
    case Collective::all_to_all:
      return {inputs_of(request.from), slots_of(request.to)};
    case Collective::gather:
      views = {std::vector<ConstTensorView>(size, none), is_root ? slots_of(request.to) : std::vector(size, none)};
      views.inputs[static_cast<std::size_t>(request.root)] = own;
      return views;
    case Collective::scatter:
      views = {is_root ? inputs_of(request.from) : std::vector<ConstTensorView>(size, none), std::vector(size, none)};
      views.outputs[static_cast<std::size_t>(request.root)] = target;
      return views;
    default:
      return {{}, {target}};
  }
}

void Parent::run(const Request& request) {
  const CudaDeviceGuard guard(device_);
  Prepared& prepared = prepare(request);
  const StreamView stream{request.stream};
  const float factor = request.op == kAverage ? 1.0f / static_cast<float>(size_) : 1.0f;
  const Views views = views_of(request);
  const bool has_own = request.collective == Collective::all_reduce || rank_ == request.root;
  if (has_one_slot(request.collective) && has_own && request.from != request.to) {
    const TensorView& target = views.outputs.front();
    copy(target.data, static_cast<const std::byte*>(request.from), target.num_bytes(), stream);
  }
  const CallStats stats =
      communicator()->run(*prepared.operation, {views.inputs, views.outputs, factor}, kForever, stream);
  tally_.add_bytes(request, rank_, size_, stats.wire_bytes());
  note_compressed();
  if (!is_capturing(stream)) prepared.streams.insert(request.stream);
}

Result Parent::settle() {
  for (;;) {
    {
      const std::lock_guard lock(poll_mutex_);
      if (has_left_) return Result::remote_error;
      Result state = Result::in_progress;
      const Result asked = nccl::library().CommGetAsyncError(comm_, &state);
      if (asked != Result::success || state != Result::in_progress) return asked != Result::success ? asked : state;
    }
    std::this_thread::yield();
  }
}

void Parent::leave() {
  const std::lock_guard lock(poll_mutex_);
  has_left_ = true;
}

void Parent::abort() noexcept {
  fate_->is_aborted = true;
  const std::lock_guard lock(mutex_);
  if (communicator_ != nullptr) communicator_->abort("the program aborted its communicator");
}

void Parent::close() noexcept {
  try {
    const std::shared_ptr<Communicator> last = communicator();
    if (state_ == State::met) last->finish();  // which abort() ends
    const std::lock_guard lock(mutex_);
    communicator_.reset();
  } catch (const TransportError&) {
    // There is none.
  }
}

void Parent::report() const {
  const std::string text = tally_.to_json();
  if (text.empty()) return;
  if (settings().logs) std::fprintf(stderr, "%s, %d nodes: %s\n", where().c_str(), num_nodes_, text.c_str());
  if (settings().stats_file.empty()) return;
  std::string name;
  for (const char c : name_) {
    if (c != '"' && c != '\\' && static_cast<unsigned char>(c) >= ' ') name += c;  // what JSON would escape
  }
  const std::string line = concat("{\"rank\": ", rank_, ", \"size\": ", size_, ", \"nodes\": ", num_nodes_,
                                  ", \"name\": \"", name, "\", \"collectives\": ", text, "}\n");
  // One write to the end of the file, so that lines of several ranks do not mix.
  const int file = open(settings().stats_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  const bool is_written = file >= 0 && write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  if (!is_written) std::fprintf(stderr, "ZCOMM_STATS: cannot write to %s\n", settings().stats_file.c_str());
  if (file >= 0) ::close(file);
}

}  // namespace zcomm::front
