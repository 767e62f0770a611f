#include "host/thread_pool.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "sanitizers.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

struct Threads {
  explicit Threads(int count) { set_num_threads(count); }
  ~Threads() { set_num_threads(1); }
};

bool runs_each_once(std::int64_t num_tasks) {
  std::vector<std::atomic<int>> calls(static_cast<std::size_t>(num_tasks));
  parallel_for(num_tasks, [&](std::int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
  for (const auto& count : calls) {
    if (count != 1) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("every task runs once") {
  for (int num_threads : {1, 2, 5}) {
    const Threads threads(num_threads);
    CHECK(zcomm::num_threads() == num_threads);
    for (std::int64_t num_tasks : {0, 1, 2, 1000}) CHECK(runs_each_once(num_tasks));
  }
}

TEST_CASE("several threads submit at once while the number of workers changes") {
  const Threads threads(3);
  std::atomic<int> failures{0};
  std::vector<std::thread> submitters;
  for (int i = 0; i < 4; ++i) {
    submitters.emplace_back([&] {
      for (int round = 0; round < 200; ++round) failures += !runs_each_once(50);
    });
  }
  for (int i = 0; i < 50; ++i) set_num_threads(1 + i % 4);
  for (std::thread& submitter : submitters) submitter.join();
  CHECK(failures == 0);
}

TEST_CASE("a task may submit tasks") {
  const Threads threads(3);
  std::atomic<int> failures{0};
  parallel_for(20, [&](std::int64_t) { failures += !runs_each_once(20); });
  CHECK(failures == 0);
}

TEST_CASE("an exception reaches the caller and the pool stays usable") {
  for (int num_threads : {1, 3}) {
    const Threads threads(num_threads);
    const auto fail = [](std::int64_t i) {
      if (i == 7) throw std::runtime_error("seven");
    };
    for (int round = 0; round < 20; ++round) CHECK_THROWS_WITH(parallel_for(100, fail), "seven");
    CHECK(runs_each_once(100));
  }
}

TEST_CASE("a forked child has no workers and finishes") {
  if (test::kThreadSanitizer) return;  // it cannot start threads after a fork
  const Threads threads(3);
  REQUIRE(runs_each_once(100));
  const pid_t child = fork();
  if (child == 0) _exit(runs_each_once(100) && runs_each_once(100) ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("fewer than one thread is refused") {
  CHECK_THROWS_WITH_AS(set_num_threads(0), "num_threads: expected 1 or more, got 0", ArgumentError);
}

}  // namespace zcomm
