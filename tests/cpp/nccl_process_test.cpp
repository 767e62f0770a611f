// NCCL ranks that are processes: this program starts itself once per rank.
#include <doctest/doctest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <cstdlib>

#include "cuda_helpers.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::DeviceArray;
using test::Stream;

std::string to_hex(const NcclUniqueId& id) {
  std::string text;
  for (const std::byte byte : id) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += {kDigits[static_cast<int>(byte) >> 4], kDigits[static_cast<int>(byte) & 15]};
  }
  return text;
}

NcclUniqueId from_hex(std::string_view text) {
  NcclUniqueId id{};
  for (std::size_t i = 0; i < id.size(); ++i) {
    int byte = 0;
    std::from_chars(&text[2 * i], &text[2 * i] + 2, byte, 16);
    id[i] = static_cast<std::byte>(byte);
  }
  return id;
}

// Starts this program as rank `rank`; it runs the test case of that name, which is skipped otherwise.
pid_t spawn_rank(const char* test_case, const NcclUniqueId& id, int rank, int size) {
  std::vector<std::string> variables{"NCCL_TEST_ID=" + to_hex(id), "NCCL_TEST_RANK=" + std::to_string(rank),
                                     "NCCL_TEST_SIZE=" + std::to_string(size)};
  std::vector<char*> environment;
  for (std::string& variable : variables) environment.push_back(variable.data());
  for (char** variable = environ; *variable != nullptr; ++variable) environment.push_back(*variable);
  environment.push_back(nullptr);
  std::vector<std::string> words{"rank", std::string("--test-case=") + test_case, "--no-skip", "--minimal"};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t pid = 0;
  REQUIRE(posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, arguments.data(), environment.data()) == 0);
  return pid;
}

// What spawn_rank() said. Outside of it, nothing.
bool read_options(NcclOptions& options) {
  if (std::getenv("NCCL_TEST_RANK") == nullptr) return false;
  options.unique_id = from_hex(std::getenv("NCCL_TEST_ID"));
  options.rank = std::atoi(std::getenv("NCCL_TEST_RANK"));
  options.size = std::atoi(std::getenv("NCCL_TEST_SIZE"));
  options.connect_timeout = 60s;
  test::require_cuda(cudaSetDevice(options.rank));
  return true;
}

bool ends_well(pid_t pid) {
  int status = 0;
  return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Every rank's slots of this many bytes hold its number plus one.
constexpr std::size_t kSlot = 50'001;

void fill_own_slot(const DeviceArray<unsigned char>& slots, const NcclOptions& options, cudaStream_t stream) {
  std::vector<unsigned char> initial(kSlot * static_cast<std::size_t>(options.size));
  const auto own = initial.begin() + static_cast<std::ptrdiff_t>(kSlot) * options.rank;
  std::fill_n(own, kSlot, static_cast<unsigned char>(options.rank + 1));
  slots.set(initial, stream);
}

}  // namespace

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

TEST_CASE("a rank that loses its peer" * doctest::skip()) {
  NcclOptions options;
  if (!read_options(options)) return;
  const auto transport = make_nccl_transport(options);
  if (options.rank == 1) std::raise(SIGKILL);
  Stream stream;
  DeviceArray<unsigned char> slots(kSlot * static_cast<std::size_t>(options.size));
  fill_own_slot(slots, options, stream);
  transport->begin("gather", {}, 200ms);
  transport->all_gather(slots.bytes(), kSlot, stream.view())->wait(stream.view());
  synchronize(stream.view());
  CHECK_THROWS_AS(transport->begin("next", {}, 1s), TimeoutError);
}

TEST_CASE("nccl: ranks may be processes") {
  constexpr int kSize = 3;
  const NcclUniqueId id = make_nccl_unique_id();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kSize; ++rank) ranks.push_back(spawn_rank("a rank that gathers", id, rank, kSize));
  for (const pid_t pid : ranks) CHECK(ends_well(pid));
}

TEST_CASE("nccl: a process that dies is a timeout for the others") {
  constexpr int kSize = 3;
  const NcclUniqueId id = make_nccl_unique_id();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kSize; ++rank) ranks.push_back(spawn_rank("a rank that loses its peer", id, rank, kSize));
  for (int rank = 0; rank < kSize; ++rank) CHECK(ends_well(ranks[static_cast<std::size_t>(rank)]) == (rank != 1));
}

}  // namespace zcomm
