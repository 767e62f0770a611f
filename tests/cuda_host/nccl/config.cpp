// The configuration of a communicator, and the channels that NCCL gives a pair of ranks by it.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>

#include "communicator.hpp"
#include "nccl_host.hpp"

namespace nccl_host {
namespace {

using zcomm::nccl::Config;
using zcomm::nccl::kUndefined;

constexpr int kVersion = 22809;
constexpr unsigned kMagic = 0xcafebeef;
constexpr int kMaxChannels = 64;

// H100, as NCCL reports them: channels of a communicator in one node and over several, and those that NVLink would
// take to one peer. A network card of 400 Gbit/s, by NCCL_P2P_PER_CHANNEL_NET_BW.
constexpr int kChannelsInNode = 32;
constexpr int kChannelsBetweenNodes = 16;
constexpr int kChannelsOfNvlink = 32;
constexpr int kChannelsOfCard = 4;
constexpr int kPeersOfBatch = 8;

// sizeof(ncclConfig_t) in nccl.h of each release.
std::size_t size_in(int version) {
  if (version < 22700) return 48;
  if (version < 22800) return 72;
  if (version < 22900) return 80;
  if (version < 23000) return 88;
  if (version < 23100) return 96;
  return version < 23200 ? 112 : 120;
}

struct Last {
  std::mutex mutex;
  std::optional<Config> configs[2];  // of communicators, and of those that others were split into
};
Last& last() {
  static auto& one = *new Last;
  return one;
}

// What NCCL refuses. Callers here have no use for the other fields.
bool is_valid(const Config& config) {
  const auto in = [](int value, int least, int most) {
    return value == kUndefined || (value >= least && value <= most);
  };
  const auto are_undefined = [](auto... values) { return ((values == kUndefined) && ...); };
  return in(config.blocking, 0, 1) && in(config.max_ctas, 1, kMaxChannels) &&
         in(config.n_channels_per_net_peer, 1, kMaxChannels) && in(config.max_p2p_peers, 1, 1 << 20) &&
         config.net_name == nullptr &&
         are_undefined(config.cga_cluster_size, config.min_ctas, config.split_share, config.traffic_class,
                       config.collnet_enable, config.cta_policy, config.shrink_share, config.nvls_ctas,
                       config.nvlink_centric_sched, config.graph_usage_mode, config.num_rma_ctx,
                       config.graph_stream_ordering, config.launch_order_implicit, config.num_rma_sig,
                       config.rma_eager_init, config.host_cft_mode, config.nvls_host_mode);
}

// Of the variable, or of the configuration, if the release has that field.
int net_channels(const Config& config) {
  if (const char* text = std::getenv("NCCL_NCHANNELS_PER_NET_PEER")) return std::atoi(text);
  return config.n_channels_per_net_peer;
}

int divided(int number, int by) { return (number + by - 1) / by; }

// All that a rank has.
int channels_in(const Config& config, int num_nodes) {
  const int total = num_nodes > 1 ? kChannelsBetweenNodes : kChannelsInNode;
  return config.max_ctas == kUndefined ? total : std::min(total, config.max_ctas);
}

int channels_per_pair(const Config& config, int num_nodes, int ranks_per_node) {
  const int num_ranks = num_nodes * ranks_per_node;
  const int total = channels_in(config, num_nodes);
  const int in_node = ranks_per_node > 1 ? std::min(total, kChannelsOfNvlink) : total;
  if (num_nodes == 1) return in_node;
  if (const int asked = net_channels(config); asked != kUndefined) return std::min(in_node, asked);
  if (version() < 22900) {
    int channels = 2;
    while (channels * num_ranks > total * 4 && channels > 1) channels /= 2;
    return std::min(in_node, channels);
  }
  const int num_peers = config.max_p2p_peers == kUndefined ? num_ranks : config.max_p2p_peers;
  int channels = std::min(in_node, kChannelsOfCard);
  while (channels * divided(num_peers, kPeersOfBatch) > total && channels > 1) channels /= 2;
  return channels;
}

// By ncclP2pChannelBaseForRound: over several nodes the pairs of a batch begin at one channel, in a node at the next
// ones.
int channels_in_node(const Config& config, int num_nodes, int ranks_per_node) {
  const int of_pair = channels_per_pair(config, num_nodes, ranks_per_node);
  const int total = channels_in(config, num_nodes);
  const int num_starts = num_nodes > 1 ? divided(ranks_per_node, kPeersOfBatch) : ranks_per_node - 1;
  return std::min(total, num_starts * of_pair);
}

}  // namespace

int version() {
  if (const int set = settings().version) return set;
  const char* text = std::getenv("NCCL_HOST_VERSION");
  return text == nullptr ? kVersion : std::atoi(text);
}

bool accept(const Config& config, bool is_of_split) {
  Config read;
  read.magic = 0;  // as if it had no bytes
  std::memcpy(&read, &config, std::min({config.size, size_in(version()), sizeof(Config)}));
  const auto known = static_cast<int>(read.version);
  // Padding, to who does not know them.
  if (known < 22500) read.traffic_class = kUndefined;
  if (known < 23005) read.graph_stream_ordering = kUndefined;
  if (read.size != size_in(known) || known > version()) {
    note_misuse("a configuration of " + std::to_string(read.size) + " bytes of release " + std::to_string(known) +
                " for release " + std::to_string(version()));
  }
  if (read.magic != kMagic || !is_valid(read)) {
    set_last_error("a configuration that NCCL refuses");
    return false;
  }
  const std::lock_guard lock(last().mutex);
  last().configs[is_of_split] = read;
  return true;
}

}  // namespace nccl_host

using namespace nccl_host;

extern "C" {

const void* nccl_host_last_config(int is_of_split) {
  thread_local std::optional<zcomm::nccl::Config> copies[2];
  auto& copy = copies[is_of_split != 0];
  const std::lock_guard lock(last().mutex);
  copy = last().configs[is_of_split != 0];
  return copy ? &*copy : nullptr;
}

int nccl_host_channels_per_pair(int is_of_split, int num_nodes, int ranks_per_node) {
  const std::lock_guard lock(last().mutex);
  const zcomm::nccl::Config config = last().configs[is_of_split != 0].value_or(zcomm::nccl::Config{});
  return channels_per_pair(config, num_nodes, ranks_per_node);
}

int nccl_host_channels_in_node(int is_of_split, int num_nodes, int ranks_per_node) {
  const std::lock_guard lock(last().mutex);
  const zcomm::nccl::Config config = last().configs[is_of_split != 0].value_or(zcomm::nccl::Config{});
  return channels_in_node(config, num_nodes, ranks_per_node);
}

}  // extern "C"
