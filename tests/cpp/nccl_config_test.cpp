// Tests of what NCCL is asked for when a communicator is made, in each release, and of the channels that it then gives.
#include <cstdlib>

#include "nccl_tensors.hpp"
#include "transport/nccl_symbols.hpp"

namespace zcomm {
namespace {

using nccl::kUndefined;
using test::kChunkBytes;
using test::make_cuda_communicator;
using test::NoTraces;
using test::run_nccl_ranks;

constexpr const char* kVariable = "NCCL_NCHANNELS_PER_NET_PEER";

struct Settings {
  Settings() { unsetenv(kVariable); }
  ~Settings() {
    nccl_host_set_version(0);
    cuda_host::set_compute_major(9);
    unsetenv(kVariable);
    unsetenv("NCCL_MIN_CTAS");
  }
};

enum class Of { group, node };

// Makes the communicators of two nodes of two, and returns the configuration of the group's or of a node's.
nccl::Config configuration_in(int version, Of of = Of::group) {
  nccl_host_set_version(version);
  run_nccl_ranks(
      4, [](int, const NcclOptions& options) { make_cuda_communicator(test::node_ids({2, 2}), kChunkBytes, options); });
  return *static_cast<const nccl::Config*>(nccl_host_last_config(of == Of::node));
}

}  // namespace

TEST_CASE("nccl: a communicator is made with the configuration of the release that was loaded") {
  const NoTraces no_traces;
  const Settings settings;
  struct Release {
    int version;
    std::size_t num_bytes;
    int known;  // the version that is sent
    bool has_channels;
    bool has_peers;
  };
  for (const auto& [version, num_bytes, known, has_channels, has_peers] :
       {Release{22703, 72, 22703, false, false}, Release{22707, 72, 22707, false, false},
        Release{22803, 80, 22803, true, false}, Release{22809, 80, 22809, true, false},
        Release{22907, 88, 22907, true, false}, Release{23003, 96, 23003, true, true},
        Release{23007, 96, 23007, true, true}, Release{23102, 112, 23102, true, true},
        Release{23203, 120, 23203, true, true}, Release{23207, 120, 23203, true, true},
        Release{30001, 120, 23203, true, true}}) {
    CAPTURE(version);
    const nccl::Config sent = configuration_in(version);
    CHECK(sent.size == num_bytes);
    CHECK(sent.version == static_cast<unsigned>(known));
    CHECK(sent.blocking == 0);
    CHECK(sent.max_ctas == 16);
    CHECK(std::string(sent.comm_name) == "zcomm");
    CHECK(sent.n_channels_per_net_peer == (has_channels ? 4 : kUndefined));
    CHECK(sent.max_p2p_peers == (has_peers ? 1 : kUndefined));
    const nccl::Config inside = configuration_in(version, Of::node);
    CHECK(inside.size == num_bytes);
    CHECK(inside.version == static_cast<unsigned>(known));
    CHECK(inside.blocking == 0);
    CHECK(inside.max_ctas == 16);
    CHECK(std::string(inside.comm_name) == "zcomm in a node");
    CHECK(inside.n_channels_per_net_peer == kUndefined);
    CHECK(inside.max_p2p_peers == (has_peers ? 1 : kUndefined));
  }
}

TEST_CASE("nccl: a rank without peers asks for none") {
  const NoTraces no_traces;
  const Settings settings;
  nccl_host_set_version(23007);
  run_nccl_ranks(1, [](int, const NcclOptions& options) { make_cuda_communicator({0}, kChunkBytes, options); });
  CHECK(static_cast<const nccl::Config*>(nccl_host_last_config(false))->max_p2p_peers == kUndefined);
}

// Rule: NVLink of Blackwell is twice as fast, so that it needs more channels.
TEST_CASE("nccl: from Blackwell on, NCCL decides how many multiprocessors it takes") {
  const NoTraces no_traces;
  const Settings settings;
  for (const auto& [major, max_ctas] : {std::pair{8, 16}, {9, 16}, {10, kUndefined}, {12, kUndefined}}) {
    cuda_host::set_compute_major(major);
    CHECK(configuration_in(22809).max_ctas == max_ctas);
    CHECK(configuration_in(22809, Of::node).max_ctas == max_ctas);
  }
}

// Rule: all pairs of a communicator have as many channels as the one with the fewest, and those from a rank to the
// others of its node share theirs if there are other nodes.
TEST_CASE("nccl: pairs of two nodes have four channels, pairs of one have sixteen") {
  const NoTraces no_traces;
  const Settings settings;
  for (const int version : {22803, 22809, 22907, 23007, 23203}) {
    CAPTURE(version);
    configuration_in(version);
    for (const int num_nodes : {2, 8, 64}) {
      CHECK(nccl_host_channels_per_pair(false, num_nodes, 8) == 4);
      CHECK(nccl_host_channels_in_node(false, num_nodes, 8) == 4);
    }
    for (const bool is_of_split : {false, true}) {
      CHECK(nccl_host_channels_per_pair(is_of_split, 1, 8) == 16);
      CHECK(nccl_host_channels_in_node(is_of_split, 1, 8) == 16);
    }
  }
  configuration_in(22707);
  CHECK(nccl_host_channels_per_pair(false, 2, 8) == 2);
  CHECK(nccl_host_channels_per_pair(false, 8, 8) == 1);
  CHECK(nccl_host_channels_in_node(true, 1, 8) == 16);
}

// Rule: NCCL may hang if many ranks exchange with all others over four channels.
TEST_CASE("nccl: where many ranks exchange with all others, NCCL decides how many channels a pair has") {
  const Settings settings;
  for (const auto& [size, num_channels] : {std::pair{32, 4}, {33, kUndefined}}) {
    const NcclUniqueId id = make_nccl_unique_id();
    NcclOptions options;
    options.unique_id = id;
    options.size = size;
    CHECK_THROWS_AS(make_nccl_transport(options), TransportError);  // more ranks than the NCCL on the host has
    CHECK(static_cast<const nccl::Config*>(nccl_host_last_config(false))->n_channels_per_net_peer == num_channels);
  }
}

// Rule: NCCL bounds NCCL_MIN_CTAS by the configuration's max_ctas.
TEST_CASE("nccl: the user's least number of multiprocessors is not bounded") {
  const NoTraces no_traces;
  const Settings settings;
  setenv("NCCL_MIN_CTAS", "32", 1);
  CHECK(configuration_in(22809).max_ctas == kUndefined);
}

TEST_CASE("nccl: the user's variable decides how many channels a pair has") {
  const NoTraces no_traces;
  const Settings settings;
  setenv(kVariable, "8", 1);
  for (const int version : {22707, 22809}) {
    configuration_in(version);
    CHECK(std::string(std::getenv(kVariable)) == "8");
    CHECK(nccl_host_channels_per_pair(false, 8, 8) == 8);
  }
}

}  // namespace zcomm
