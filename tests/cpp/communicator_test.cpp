#include "zcomm/communicator.hpp"

#include <doctest/doctest.h>

#include <future>
#include <optional>
#include <string>

#include "collectives/stages.hpp"
#include "ranks.hpp"
#include "zcomm/error.hpp"
#include "zcomm/operation.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;

// What the two ranks of a call that fails wait for.
struct Meeting {
  std::promise<void> has_dropped;  // rank 1, its transfers
  std::promise<void> has_failed;   // rank 0
};

// Rank 0 sends a message when rank 1 no longer wants it.
class Sending final : public Stages {
 public:
  Sending(const Resources& r, Meeting& meeting) : r_(r), meeting_(meeting) {}
  std::int64_t num_chunks() const override { return 1; }
  void first_hop(std::int64_t) override {
    meeting_.has_dropped.get_future().wait_for(20s);
    const std::byte byte{};
    const Send send{1, &byte, 1};
    r_.transport.start({&send, 1}, {}, {})->wait({});
  }
  void finish(std::int64_t) override {}

 private:
  const Resources& r_;
  Meeting& meeting_;
};

// Rank 1 fails while it waits for a message, and takes long to clean up.
class Failing final : public Stages {
 public:
  Failing(const Resources& r, Meeting& meeting) : r_(r), meeting_(meeting) {}
  ~Failing() override {
    transfer_.reset();
    meeting_.has_dropped.set_value();
    meeting_.has_failed.get_future().wait_for(20s);
  }
  std::int64_t num_chunks() const override { return 1; }
  void first_hop(std::int64_t) override {
    const Recv recv{0, &byte_, 1};
    transfer_ = r_.transport.start({}, {&recv, 1}, {});
    throw Error("the values are wrong");
  }
  void finish(std::int64_t) override {}

 private:
  const Resources& r_;
  Meeting& meeting_;
  std::byte byte_{};
  std::unique_ptr<Transfer> transfer_;
};

class FailingCall final : public Operation {
 public:
  FailingCall(const World& world, Meeting& meeting) : world_(world), meeting_(meeting) {}
  const World& world() const override { return world_; }
  const std::string& description() const override { return description_; }
  std::int64_t num_chunks() const override { return 1; }
  std::optional<LinkBytes> bytes(const Arguments&) const override { return {}; }
  void check(const Resources&, const Arguments&) const override {}
  std::string signature(const Arguments&, bool) const override { return description_; }
  std::unique_ptr<Stages> stages(const Resources& r, const Arguments&) override {
    if (r.world.rank == 0) return std::make_unique<Sending>(r, meeting_);
    return std::make_unique<Failing>(r, meeting_);
  }

 private:
  const World& world_;
  Meeting& meeting_;
  const std::string description_ = "a call that fails";
};

}  // namespace

TEST_CASE("communicator: peers of a rank that fails learn why, also while it cleans up") {
  Meeting meeting;
  const auto communicators = test::make_communicators({0, 1});
  test::run_ranks(2, [&](int rank) {
    Communicator& communicator = *communicators[static_cast<std::size_t>(rank)];
    FailingCall call(communicator.world(), meeting);
    std::string failure;
    try {
      communicator.run(call, {}, 20s);
    } catch (const Error& error) {
      failure = error.what();
    }
    CHECK(failure.find("the values are wrong") != std::string::npos);
    if (rank == 0) meeting.has_failed.set_value();
  });
}

}  // namespace zcomm
