// Tests of calls that ask by their own configuration: NCCL's ncclCollConfig_t with an option of this vendor. A case
// that calls NCCL is skipped by default: another one runs it in a process with its variables.
#include "front_cases.hpp"

namespace zcomm {
namespace {

using front::Collective;
using test::Buffers;
using test::Case;
using test::Comm;
using test::compressed;
using test::count_of;
using test::input_of;
using test::require_nccl;
using test::Stream;

constexpr int kSize = 4;

}  // namespace

TEST_CASE("front process: a call with a configuration" * doctest::skip()) {
  const Case the_case{Collective::all_reduce, 3000};
  const auto right = compressed(the_case);
  test::NoTraces no_traces;
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    const test::DeviceArray<std::uint8_t> from(12000), to(12000);
    from.set(input_of(the_case, rank), stream);
    nccl::ConfigExt ours{nullptr, front::kVendorId, front::kFormatsOption, {}};
    ours.value.text = "int8:128/int4:128";
    nccl::ConfigExt theirs{&ours, 77, 1, {}};
    nccl::CollConfig config;
    config.size = sizeof(config);
    for (const nccl::ConfigExt* options : {static_cast<nccl::ConfigExt*>(nullptr), &theirs}) {
      config.ext = options;
      require_nccl(nccl::ncclAllReduceConfig(from.data(), to.data(), the_case.count, test::kFloat32, test::kSum, comm,
                                             stream, &config));
      const bool is_compressed = to.get(stream) == right[static_cast<std::size_t>(rank)];
      if (is_compressed != (options != nullptr)) throw Error("the configuration was not heeded");
    }
    int event = 0;  // that NCCL would record
    config.launch_completion_event = &event;
    require_nccl(nccl::ncclAllReduceConfig(from.data(), to.data(), the_case.count, test::kFloat32, test::kSum, comm,
                                           stream, &config));
  });
}

TEST_CASE("front process: exchanges by their own configuration" * doctest::skip()) {
  const Case exchange{Collective::all_to_all, 3000}, reduction{Collective::all_reduce, 3000};
  const auto right = compressed(exchange);
  const bool reduces_first = std::getenv("ZCOMM_ALL_REDUCE") != nullptr;
  const bool is_old = std::getenv("NCCL_HOST_VERSION") != nullptr;
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    const Buffers buffers(reduction, rank, stream);
    if (reduces_first) require_nccl(buffers.call(comm, stream));
    const test::DeviceArray<std::uint8_t> from(48000), to(48000);
    from.set(input_of(exchange, rank), stream);
    nccl::ConfigExt ours{nullptr, front::kVendorId, front::kFormatsOption, {}};
    ours.value.text = "int8:128/int4:128";
    nccl::CollConfig config;
    config.size = sizeof(config);
    config.ext = &ours;
    require_nccl(nccl::ncclAlltoAllConfig(from.data(), to.data(), 3000, test::kFloat32, comm, stream, &config));
    const bool is_compressed = to.get(stream) == right[static_cast<std::size_t>(rank)];
    CHECK(is_compressed == !(reduces_first || is_old));
  });
}

TEST_CASE("front: an exchange that asks for itself alone is compressed if all ranks are connected") {
  constexpr const char* kProcess = "front process: exchanges by their own configuration";
  const std::string first = test::stats_of(kProcess, {"ZCOMM_NODE_SIZE=2", "ZCOMM_MIN_BYTES=0"});
  CHECK(count_of(first, "\"all_to_all\": {\"calls\": {\"compressed\": 1}") == kSize);
  const std::string later =
      test::stats_of(kProcess, {"ZCOMM_NODE_SIZE=2", "ZCOMM_MIN_BYTES=0", "ZCOMM_ALL_REDUCE=int8:128/int4:128"});
  CHECK(count_of(later, "\"all_to_all\": {\"calls\": {\"no_pairs\": 1}") == kSize);
}

TEST_CASE("front: a call that asks where nothing can be compressed is told so once") {
  constexpr const char* kProcess = "front process: exchanges by their own configuration";
  const test::Written written = test::written_by(kProcess, {"ZCOMM_MIN_BYTES=0", "NCCL_HOST_VERSION=22602"});
  CHECK(written.stats.empty());
  CHECK(count_of(written.errors, "zcomm's front of NCCL leaves every call exact: ") == 1);
  CHECK(count_of(written.errors, "expected 2.27.3 or later, got 2.26.2") == 1);
}

// NCCL reads a configuration during the call, so a program may free it before the group ends.
TEST_CASE("front process: a configuration that ends before its group" * doctest::skip()) {
  const Case the_case{Collective::all_reduce, 3000};
  const char* const node_size = std::getenv("ZCOMM_NODE_SIZE");
  const auto right = std::string(node_size) == "2" ? compressed(the_case) : test::exact(the_case);
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    const test::DeviceArray<std::uint8_t> from(12000), to(12000);
    from.set(input_of(the_case, rank), stream);
    require_nccl(nccl::ncclGroupStart());
    auto text = std::make_unique<std::string>("int8:128/int4:128");
    auto option =
        std::make_unique<nccl::ConfigExt>(nccl::ConfigExt{nullptr, front::kVendorId, front::kFormatsOption, {}});
    option->value.text = text->c_str();
    auto config = std::make_unique<nccl::CollConfig>();
    config->size = sizeof(*config);
    config->ext = option.get();
    require_nccl(nccl::ncclAllReduceConfig(from.data(), to.data(), the_case.count, test::kFloat32, test::kSum, comm,
                                           stream, config.get()));
    *config = {};
    config.reset(), option.reset(), text.reset();
    require_nccl(nccl::ncclGroupEnd());
    CHECK(to.get(stream) == right[static_cast<std::size_t>(rank)]);
  });
}

TEST_CASE("front: a configuration is read during the call, also if the call waits for the end of a group") {
  constexpr const char* kProcess = "front process: a configuration that ends before its group";
  const std::string stats = test::stats_of(kProcess, {"ZCOMM_NODE_SIZE=2", "ZCOMM_MIN_BYTES=0"});
  CHECK(count_of(stats, "\"all_reduce\": {\"calls\": {\"compressed\": 1}") == kSize);
  const std::string of_one_node = test::stats_of(kProcess, {"ZCOMM_NODE_SIZE=4", "ZCOMM_MIN_BYTES=0"});
  CHECK(count_of(of_one_node, "\"all_reduce\": {\"calls\": {\"one_node\": 1}") == kSize);
}

TEST_CASE("front: a call's own configuration asks, whatever the environment says") {
  const std::string stats =
      test::stats_of("front process: a call with a configuration", {"ZCOMM_NODE_SIZE=2", "ZCOMM_MIN_BYTES=0"});
  CHECK(count_of(stats, "\"all_reduce\": {\"calls\": {\"compressed\": 1, \"event\": 1}") == kSize);
}

}  // namespace zcomm
