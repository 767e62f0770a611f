// Tests of the way to the real functions: which library they are of, and what the way costs.
#include <dlfcn.h>

#include <algorithm>

#include "front_cases.hpp"

namespace zcomm {
namespace {

using test::Comm;
using test::require_nccl;
using test::Stream;

// Returns the real function of that name.
template <class Function>
Function* real(Function*, const char* name) {
  void* const handle = dlopen(nccl::zcomm_front_library(), RTLD_NOW | RTLD_NOLOAD);
  REQUIRE(handle != nullptr);
  return reinterpret_cast<Function*>(dlsym(handle, name));
}

// Returns the nanoseconds of a call: the median of some rounds.
template <class Call>
double cost_of(Call&& call) {
  std::vector<double> rounds;
  for (int round = 0; round < 9; ++round) {
    constexpr int kCalls = 20'000;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    rounds.push_back(std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() /
                     kCalls);
  }
  std::ranges::sort(rounds);
  return rounds[rounds.size() / 2];
}

}  // namespace

TEST_CASE("front: a call reaches the next library with all its arguments") {
  CHECK(std::string(nccl::zcomm_front_library()).ends_with("libnccl.so.2"));
  CHECK(reinterpret_cast<void*>(&nccl::ncclCommCount) !=
        reinterpret_cast<void*>(real(&nccl::ncclCommCount, "ncclCommCount")));
  CHECK(std::string(nccl::ncclGetErrorString(test::Result::invalid_usage)) == "invalid usage");
  test::NoTraces no_traces;
  test::run_program(3, [](int rank, Comm comm, const Stream&) {
    int size = 0, own = -1, device = -1;
    require_nccl(nccl::ncclCommCount(comm, &size));
    require_nccl(nccl::ncclCommUserRank(comm, &own));
    require_nccl(nccl::ncclCommCuDevice(comm, &device));
    const test::ProgramComm split(comm, rank, /*blocks=*/true);  // has five arguments
    if (size != 3 || own != rank || device != rank) throw Error("wrong arguments");
  });
}

// No measured time decides a test: --no-skip prints them. In a process whose variables ask, calls are looked at, too.
TEST_CASE("front benchmark: nanoseconds of a call with and without the front" * doctest::skip()) {
  test::run_program(2, [](int rank, Comm comm, const Stream& stream) {
    const auto compare = [&](const char* what, auto&& through, auto&& directly) {
      const double without = cost_of(directly), with = cost_of(through);
      if (rank == 0) std::printf("%s: %.0f ns with the front, %.0f ns without\n", what, with, without);
    };
    int size = 0;
    auto* const count = real(&nccl::ncclCommCount, "ncclCommCount");
    compare("ncclCommCount", [&] { nccl::ncclCommCount(comm, &size); }, [&] { count(comm, &size); });
    auto* const reduce = real(&nccl::ncclAllReduce, "ncclAllReduce");
    // An operator that nobody knows: the stand-in refuses it at once.
    compare(
        "ncclAllReduce, refused", [&] { nccl::ncclAllReduce(&size, &size, 1, test::kFloat32, 77, comm, stream); },
        [&] { reduce(&size, &size, 1, test::kFloat32, 77, comm, stream); });
    auto* const start = real(&nccl::ncclGroupStart, "ncclGroupStart");
    auto* const end = real(&nccl::ncclGroupEnd, "ncclGroupEnd");
    compare(
        "an empty group",
        [&] {
          nccl::ncclGroupStart();
          nccl::ncclGroupEnd();
        },
        [&] {
          start();
          end();
        });
  });
}

}  // namespace zcomm
