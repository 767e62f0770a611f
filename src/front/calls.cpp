#include "front/calls.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <future>
#include <map>
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
    const auto* const given = reinterpret_cast<const std::byte*>(config);
    bytes_.assign(given, given + config->size);
    bytes_.resize(std::max(config->size, sizeof(nccl::CollConfig)) + text_bytes);
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

// Message whose wire is with the real library.
struct Posted {
  std::shared_ptr<Parent> parent;  // has the memory of the wire
  Message message;
};

// Communicators that the real library makes.
struct Made {
  std::span<nccl::Comm> communicators;
  nccl::Comm parent;  // null: they are not split off
  std::string name;
};

struct Group {
  int depth = 0;
  std::vector<Queued> queue;
  std::vector<Posted> posted;
  std::vector<Made> made;
  std::set<nccl::Comm> exact;  // communicators with exact calls, or with messages
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

// Runs all at the same time, the first one on this thread.
void run_together(const std::vector<std::function<void()>>& all) {
  std::vector<std::future<void>> others;
  for (std::size_t i = 1; i < all.size(); ++i) others.push_back(std::async(std::launch::async, all[i]));
  if (!all.empty()) all[0]();
  for (std::future<void>& other : others) other.get();
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
  std::vector<std::function<void()>> meetings;
  meetings.reserve(fresh.size());
  for (const auto& entry : fresh) meetings.emplace_back([entry] { entry.first->meet(entry.second); });
  run_together(meetings);
}

// Names the communicators that a group has made, and lets their ranks find each other.
void locate_all(const std::vector<Made>& all) {
  std::vector<std::function<void()>> meetings;
  for (const auto& [communicators, of, name] : all) {
    if (of != nullptr) settle({of});  // only then NCCL tells a new one
    for (const nccl::Comm comm : communicators) {
      if (comm == nullptr) continue;  // this rank is in no part of a split
      const std::shared_ptr<Parent> parent = parent_of(comm, name.c_str());
      if (!settings().asks_messages) continue;
      if (const Result result = settle({comm}); result == Result::success) {
        meetings.emplace_back([parent] { parent->locate(); });
      }
    }
  }
  run_together(meetings);
}

// Calls work(messages, theirs) for each communicator and stream that messages have.
template <class Work>
void for_each_stream(const std::vector<Posted>& posted, Work&& work) {
  std::map<std::pair<Parent*, nccl::Stream>, std::vector<const Message*>> by_stream;
  for (const Posted& each : posted) {
    by_stream[{each.parent.get(), each.message.request.stream}].push_back(&each.message);
  }
  for (const auto& [key, messages] : by_stream) work(key.first->messages(), messages);
}

// Gives the real library the wire of a message, in a group.
Result post(const std::shared_ptr<Parent>& parent, const Request& request) {
  Message message = parent->take_message(request);
  const bool is_alone = group.depth == 0;
  if (is_alone) {
    start_group();
    nccl::library().GroupStart();
  }
  group.exact.insert(request.comm);
  group.posted.push_back({parent, std::move(message)});
  const Result posted = Messages::post(group.posted.back().message);
  const Result ended = is_alone ? end_group([] { return nccl::library().GroupEnd(); }) : posted;
  return posted == Result::success ? ended : posted;
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
    if (reason == Reason::compressed && request.collective == Collective::message) {
      parent->count(request, reason);
      return post(parent, request);
    }
    if (reason == Reason::compressed) {
      group.queue.push_back({parent, request, KeptConfig(config), std::move(exact)});
      return group.depth > 0 ? Result::success : launch(std::exchange(group.queue, {}));
    }
    parent->count(request, reason);
    if (group.depth > 0) group.exact.insert(request.comm);
    return exact(config);
  });
}

Result follow(Result result, std::span<nccl::Comm> made, const nccl::Config* config, nccl::Comm parent) {
  const bool is_made = result == Result::success || result == Result::in_progress;
  if (!is_made || !settings().is_asked || !settings().is_possible) return result;
  const bool has_name = config != nullptr && config->size > offsetof(nccl::Config, comm_name) && config->comm_name;
  const auto known = has_name || parent == nullptr ? nullptr : known_parent_of(parent);
  group.made.push_back({made, parent, has_name ? config->comm_name : known != nullptr ? known->name() : ""});
  if (group.depth > 0) return result;
  return result_of([&] {
    locate_all(std::exchange(group.made, {}));
    return result;
  });
}

void start_group() { ++group.depth; }

Result end_group(const std::function<Result()>& end) {
  if (group.depth > 0) --group.depth;
  if (group.depth > 0) return end();
  const std::vector<Queued> queue = std::exchange(group.queue, {});
  const std::vector<Posted> posted = std::exchange(group.posted, {});
  const std::vector<Made> made = std::exchange(group.made, {});
  const std::set<nccl::Comm> exact = std::exchange(group.exact, {});
  return result_of([&] {
    try {
      for_each_stream(posted, [](Messages& all, const auto& messages) { all.encode(messages); });
    } catch (...) {
      end();  // the real library's group is open
      throw;
    }
    Result result = end();
    group.ended.clear();
    const bool is_over = result != Result::success && result != Result::in_progress;
    if (!is_over) locate_all(made);
    if (is_over || (queue.empty() && posted.empty())) return result;
    if (result == Result::in_progress) result = settle(exact);
    if (result != Result::success) return result;
    for_each_stream(posted, [](const Messages& all, const auto& messages) { all.decode(messages); });
    return launch(queue);
  });
}

void keep_in_group(std::shared_ptr<Parent> ended) {
  if (group.depth > 0) group.ended.push_back(std::move(ended));
}

void drop_group() {
  group.depth = std::max(group.depth - 1, 0);
  if (group.depth > 0) return;
  group.queue.clear();
  group.posted.clear();
  group.made.clear();
  group.exact.clear();
}

}  // namespace zcomm::front
