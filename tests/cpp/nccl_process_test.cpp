// NCCL ranks that are processes.
#include "cuda_helpers.hpp"
#include "rank_process.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::DeviceArray;
using test::Stream;

// Starts rank `rank` of that test case.
pid_t spawn_rank(const char* test_case, const NcclUniqueId& id, int rank, int size) {
  return test::spawn_case(test_case, {"NCCL_TEST_ID=" + test::to_hex(id), "NCCL_TEST_RANK=" + std::to_string(rank),
                                      "NCCL_TEST_SIZE=" + std::to_string(size)});
}

// Reads the options that spawn_rank() passed on. Returns false in any other process.
bool read_options(NcclOptions& options) {
  if (std::getenv("NCCL_TEST_RANK") == nullptr) return false;
  options.unique_id = test::id_from_hex(std::getenv("NCCL_TEST_ID"));
  options.rank = std::atoi(std::getenv("NCCL_TEST_RANK"));
  options.size = std::atoi(std::getenv("NCCL_TEST_SIZE"));
  options.connect_timeout = 60s;
  test::require_cuda(cudaSetDevice(options.rank));
  return true;
}

// Size of a slot. Every byte of a rank's slot is its number plus one.
constexpr std::size_t kSlot = 50'001;

void fill_own_slot(const DeviceArray<unsigned char>& slots, const NcclOptions& options, cudaStream_t stream) {
  std::vector<unsigned char> initial(kSlot * static_cast<std::size_t>(options.size));
  const auto own = initial.begin() + static_cast<std::ptrdiff_t>(kSlot) * options.rank;
  std::fill_n(own, kSlot, static_cast<unsigned char>(options.rank + 1));
  slots.set(initial, stream);
}

}  // namespace

// Skipped by default: a case below runs it in a separate process.
TEST_CASE("a rank that gathers" * doctest::skip()) {
  NcclOptions options;
  if (!read_options(options)) return;
  const auto transport = make_nccl_transport(options);
  Stream stream;
  DeviceArray<unsigned char> slots(kSlot * static_cast<std::size_t>(options.size));
  fill_own_slot(slots, options, stream);
  for (int i = 0; i < 3; ++i) {
    transport->begin("gather", {}, 60s);
    transport->all_gather(slots.bytes(), kSlot, stream.view())->wait(stream.view());
  }
  const auto gathered = slots.get(stream);
  for (std::size_t i = 0; i < gathered.size(); ++i) REQUIRE(gathered[i] == i / kSlot + 1);
}

// Skipped by default: a case below runs it in a separate process.
TEST_CASE("a rank that loses its peer" * doctest::skip()) {
  NcclOptions options;
  if (!read_options(options)) return;
  const auto transport = make_nccl_transport(options);
  if (options.rank == 1) std::raise(SIGKILL);
  Stream stream;
  DeviceArray<unsigned char> slots(kSlot * static_cast<std::size_t>(options.size));
  fill_own_slot(slots, options, stream);
  transport->begin("gather", {}, 2s);
  transport->all_gather(slots.bytes(), kSlot, stream.view())->wait(stream.view());
  synchronize(stream.view());
  CHECK_THROWS_AS(transport->begin("next", {}, 1s), TimeoutError);
}

TEST_CASE("nccl: ranks may be processes") {
  constexpr int kSize = 3;
  const NcclUniqueId id = make_nccl_unique_id();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kSize; ++rank) ranks.push_back(spawn_rank("a rank that gathers", id, rank, kSize));
  for (const pid_t pid : ranks) CHECK(test::outcome_of(pid) == "ends well");
}

TEST_CASE("nccl: a process that dies is a timeout for the others") {
  constexpr int kSize = 3;
  const NcclUniqueId id = make_nccl_unique_id();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kSize; ++rank) ranks.push_back(spawn_rank("a rank that loses its peer", id, rank, kSize));
  for (int rank = 0; rank < kSize; ++rank) {
    CHECK(test::outcome_of(ranks[static_cast<std::size_t>(rank)]) == (rank == 1 ? "fails" : "ends well"));
  }
}

}  // namespace zcomm
