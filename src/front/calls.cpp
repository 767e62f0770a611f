#include "front/calls.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <future>
#include <set>
#include <thread>

#include "front/functions.hpp"
#include "zcomm/error.hpp"

namespace zcomm::front {
namespace {

using nccl::Result;

// Copy of a call's configuration, without vendor options, which NCCL ignores.
class KeptConfig {
 public:
  explicit KeptConfig(const nccl::CollConfig* config) {
    if (config == nullptr) return;
    const char* text = config->size > offsetof(nccl::CollConfig, algorithms) ? config->algorithms : nullptr;
    const std::size_t text_bytes = text == nullptr ? 0 : std::strlen(text) + 1;
    bytes_.resize(std::max(config->size, sizeof(nccl::CollConfig)) + text_bytes);
    std::memcpy(bytes_.data(), config, config->size);
    auto* const own = reinterpret_cast<nccl::CollConfig*>(bytes_.data());
    own->ext = nullptr;
    if (text == nullptr) return;
    char* const own_text = reinterpret_cast<char*>(bytes_.data() + bytes_.size() - text_bytes);
    own->algorithms = std::strcpy(own_text, text);
  }
  const nccl::CollConfig* get() const { return reinterpret_cast<const nccl::CollConfig*>(bytes_.data()); }

 private:
  std::vector<std::byte> bytes_;  // empty, so that data() is null: there is none
};

struct Queued {
  std::shared_ptr<Parent> parent;
  Request request;
  KeptConfig config;
  ExactCall exact;
};

struct Group {
  int depth = 0;
  std::vector<Queued> queue;
  std::set<nccl::Comm> exact;  // communicators with exact calls
  std::vector<std::shared_ptr<Parent>> ended;
};
thread_local Group group;

// Calls `work` and returns its result, or NCCL's for what it throws.
template <class Work>
Result result_of(Work&& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "zcomm's front of NCCL: %s\n", error.what());
    if (dynamic_cast<const ArgumentError*>(&error) != nullptr) return Result::invalid_argument;
    const bool is_lost = dynamic_cast<const TransportError*>(&error) != nullptr;
    return is_lost ? Result::remote_error : Result::unhandled_cuda_error;
  }
}

// Waits until the real library has put exact calls on their streams, as compressed ones are to follow them there.
Result settle(const std::set<nccl::Comm>& communicators) {
  for (const nccl::Comm comm : communicators) {
    Result state = Result::in_progress;
    while (state == Result::in_progress) {
      if (const Result asked = nccl::library().CommGetAsyncError(comm, &state); asked != Result::success) return asked;
      if (state == Result::in_progress) std::this_thread::yield();
    }
    if (state != Result::success) return state;
  }
  return Result::success;
}

// Lets all communicators of a group meet at the same time: other ranks may have them in another order, and may be ranks
// of this thread.
void meet_all(const std::vector<Queued>& queue) {
  std::vector<std::pair<Parent*, bool>> fresh;  // and whether an exchange is among its calls
  for (const Queued& each : queue) {
    Parent* const parent = each.parent.get();
    if (parent->has_met()) continue;
    auto found = std::ranges::find(fresh, parent, [](const auto& entry) { return entry.first; });
    if (found == fresh.end()) found = fresh.insert(found, {parent, false});
    found->second = found->second || is_exchange(each.request.collective);
  }
  std::vector<std::future<void>> meetings;
  for (std::size_t i = 1; i < fresh.size(); ++i) {
    meetings.push_back(std::async(std::launch::async, [entry = fresh[i]] { entry.first->meet(entry.second); }));
  }
  if (!fresh.empty()) fresh[0].first->meet(fresh[0].second);
  for (std::future<void>& meeting : meetings) meeting.get();
}

// Makes the calls that cannot be compressed after all, in one group of NCCL's.
Result call_exact(const std::vector<Queued>& queue) {
  if (queue.empty()) return Result::success;
  std::set<nccl::Comm> communicators;
  Result result = nccl::library().GroupStart();
  for (const Queued& each : queue) {
    communicators.insert(each.request.comm);
    if (const Result added = each.exact(each.config.get()); result == Result::success) result = added;
  }
  const Result ended = nccl::library().GroupEnd();
  if (result != Result::success) return result;
  return ended == Result::in_progress ? settle(communicators) : ended;
}

// Queues calls on their streams. Calls of one communicator keep their order. All ranks take communicators in the same
// order.
Result launch(std::vector<Queued> queue) {
  meet_all(queue);
  std::vector<Queued> exact;
  std::vector<Queued> compressed;
  for (Queued& each : queue) {
    const Reason reason = each.parent->decide(each.request);
    each.parent->count(each.request, reason);
    (reason == Reason::compressed ? compressed : exact).push_back(std::move(each));
  }
  if (const Result result = call_exact(exact); result != Result::success) return result;
  std::ranges::stable_sort(compressed, {}, [](const Queued& each) { return each.parent->identity(); });
  for (const Queued& each : compressed) each.parent->run(each.request);
  return Result::success;
}

}  // namespace

Result answer(Request request, const nccl::CollConfig* config, ExactCall exact) {
  return result_of([&] {
    const std::shared_ptr<Parent> parent = parent_of(request.comm);
    request.formats = parent->formats_of(request, config);
    const Reason reason = parent->decide(request);
    if (reason == Reason::compressed) {
      group.queue.push_back({parent, request, KeptConfig(config), std::move(exact)});
      return group.depth > 0 ? Result::success : launch(std::exchange(group.queue, {}));
    }
    parent->count(request, reason);
    if (group.depth > 0) group.exact.insert(request.comm);
    return exact(config);
  });
}

void start_group() { ++group.depth; }

Result end_group(const std::function<Result()>& end) {
  if (group.depth > 0) --group.depth;
  if (group.depth > 0) return end();
  const std::vector<Queued> queue = std::exchange(group.queue, {});
  const std::set<nccl::Comm> exact = std::exchange(group.exact, {});
  Result result = end();
  group.ended.clear();
  if (queue.empty()) return result;
  return result_of([&] {
    if (result == Result::in_progress) result = settle(exact);
    return result == Result::success ? launch(queue) : result;
  });
}

void keep_in_group(std::shared_ptr<Parent> ended) {
  if (group.depth > 0) group.ended.push_back(std::move(ended));
}

void drop_group() {
  group.depth = std::max(group.depth - 1, 0);
  if (group.depth > 0) return;
  group.queue.clear();
  group.exact.clear();
}

}  // namespace zcomm::front
