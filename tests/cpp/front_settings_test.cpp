// Tests of the file of rules: which calls they match, and that wrong ones leave every call exact.
#include "front_ranks.hpp"

namespace zcomm {
namespace {

using test::Comm;
using test::count_of;
using test::require_nccl;
using test::Stream;

// Runs the process case below with these rules.
test::Written written_with(const std::string& rules) {
  const std::string file = "/tmp/zcomm-front-rules-" + std::to_string(getpid());
  std::ofstream(file) << rules;
  test::Written written =
      test::written_by("front process: some calls",
                       {"ZCOMM_RULES=" + file, "ZCOMM_NODE_SIZE=1", "ZCOMM_ALL_GATHER=int8:128", "ZCOMM_MIN_BYTES=0"});
  std::filesystem::remove(file);
  return written;
}

}  // namespace

TEST_CASE("front process: some calls" * doctest::skip()) {
  test::run_program(
      2,
      [](int, Comm comm, const Stream& stream) {
        const test::DeviceArray<float> values(8000);
        values.set(std::vector<float>(8000, 1.0f), stream);
        for (const std::size_t count : {1000, 2000}) {
          require_nccl(
              nccl::ncclAllReduce(values.data(), values.data(), count, test::kFloat32, test::kSum, comm, stream));
        }
        require_nccl(
            nccl::ncclAllReduce(values.data(), values.data(), 2000, test::kBfloat16, test::kSum, comm, stream));
        require_nccl(nccl::ncclAllGather(values.data(), values.data() + 2000, 1000, test::kFloat32, comm, stream));
        require_nccl(nccl::ncclBroadcast(values.data(), values.data(), 1000, test::kFloat32, 0, comm, stream));
        require_nccl(nccl::ncclAlltoAll(values.data(), values.data() + 2000, 500, test::kFloat32, comm, stream));
      },
      /*blocks=*/true, "data parallel");
}

TEST_CASE("front: the first rule that matches decides, else the variables") {
  const auto all_reduces = [](const std::string& rules) {
    const std::string stats = written_with("# a comment\n\n" + rules).stats;
    CHECK(count_of(stats, "\"name\": \"data parallel\"") == 2);
    CHECK(count_of(stats, "\"all_gather\": {\"calls\": {\"compressed\": 1}") == 2);
    const auto begin = stats.find("\"all_reduce\": ");
    return begin == std::string::npos ? stats : stats.substr(begin + 25, stats.find('}', begin) - begin - 25);
  };
  CHECK(all_reduces("all_reduce int8:128 # all") == "\"compressed\": 3");
  CHECK(all_reduces("all_reduce bytes=8000- int8:128") == "\"compressed\": 1, \"format_exact\": 2");
  CHECK(all_reduces("all_reduce bytes=0-7999 int8:128") == "\"compressed\": 2, \"format_exact\": 1");
  CHECK(all_reduces("all_reduce dtype=bfloat16 int8:128/int4:128") == "\"compressed\": 1, \"format_exact\": 2");
  CHECK(all_reduces("all_reduce ranks=3 int8:128") == "\"format_exact\": 3");
  CHECK(all_reduces("all_reduce name=data* int8:128") == "\"compressed\": 3");
  CHECK(all_reduces("all_reduce name=other int8:128") == "\"format_exact\": 3");
  CHECK(all_reduces("all_reduce in_place=yes int8:128") == "\"compressed\": 3");
  CHECK(all_reduces("all_reduce in_place=no int8:128") == "\"format_exact\": 3");
  CHECK(all_reduces("all_reduce caller=ran* int8:128") == "\"compressed\": 3");
  CHECK(all_reduces("all_reduce caller=libtorch* int8:128") == "\"format_exact\": 3");
  CHECK(all_reduces("all_reduce ranks=2 dtype=float32 exact\nall_reduce int8:128") ==
        "\"compressed\": 1, \"format_exact\": 2");
}

TEST_CASE("front: a rule for one exchange leaves the others exact, and a broadcast has the format between nodes") {
  const std::string stats = written_with("all_to_all exact/int8:128\nbroadcast int8:128/exact").stats;
  CHECK(count_of(stats, "\"all_to_all\": {\"calls\": {\"compressed\": 1}") == 2);
  CHECK(count_of(stats, "\"broadcast\": {\"calls\": {\"format_exact\": 1}") == 2);
}

TEST_CASE("front process: calls in place and not" * doctest::skip()) {
  test::run_program(2, [](int rank, Comm comm, const Stream& stream) {
    const test::DeviceArray<float> from(8000), to(8000);
    from.set(std::vector<float>(8000, 1.0f), stream);
    const std::size_t own = rank == 0 ? 0 : 4000;
    for (const float* slot : {from.data() + own, to.data()}) {
      require_nccl(nccl::ncclAllGather(slot, from.data(), 4000, test::kFloat32, comm, stream));
    }
    for (float* slot : {from.data() + own, to.data()}) {
      require_nccl(nccl::ncclReduceScatter(from.data(), slot, 4000, test::kFloat32, test::kSum, comm, stream));
    }
  });
}

TEST_CASE("front: a rule can tell calls in place from others") {
  const std::string file = "/tmp/zcomm-front-in-place-" + std::to_string(getpid());
  std::ofstream(file) << "all_gather in_place=yes int8:128\nreduce_scatter in_place=no int8:128";
  const std::string stats = test::stats_of("front process: calls in place and not",
                                           {"ZCOMM_RULES=" + file, "ZCOMM_NODE_SIZE=1", "ZCOMM_MIN_BYTES=0"});
  std::filesystem::remove(file);
  CHECK(count_of(stats, "{\"calls\": {\"compressed\": 1, \"format_exact\": 1}") == 4);
}

TEST_CASE("front: a rule that no call matched is named at the end") {
  const std::string errors = written_with("all_reduce ranks=3 int8:128\nall_reduce int8:128").errors;
  CHECK(errors == "ZCOMM_RULES: no call matched 'all_reduce ranks=3 int8:128'\n");
}

TEST_CASE("front: a wrong file of rules leaves every call exact") {
  for (const char* rules :
       {"all_reduce", "all_reduces int8:128", "all_reduce int9:128", "all_reduce ranks=0 int8:128",
        "all_reduce bytes=5 int8:128", "all_reduce bytes=5-4 int8:128", "all_reduce a=b int8:128",
        "all_reduce dtype=int8 int8:128", "all_gather int8:128/int4:128", "all_reduce in_place=1 int8:128",
        "broadcast in_place=yes int8:128", "all_reduce caller= x"}) {
    const test::Written written = written_with(rules);
    CHECK(written.stats.empty());
    CHECK(count_of(written.errors, "zcomm's front of NCCL leaves every call exact: ZCOMM_RULES, line 1: ") == 1);
  }
}

}  // namespace zcomm
