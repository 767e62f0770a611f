#include "front/calls.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <future>
#include <map>
#include <set>

#include "front/functions.hpp"
#include "front/registry.hpp"
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
  std::shared_ptr<Parent> parent;  // owns the memory of the wire
  Message message;
};

// Communicators that the real library makes.
struct Made {
  std::vector<nccl::Comm> communicators;
  std::shared_ptr<Parent> parent;  // that one is split off, or null
  nccl::Comm* split;               // where NCCL writes that one when the parent is ready
  std::string name;
};

using Parents = std::set<std::shared_ptr<Parent>>;

struct Group {
  int depth = 0;
  std::vector<Queued> queue;
  std::vector<Posted> posted;
  std::vector<Made> made;
  Parents exact;  // with exact calls, or with messages
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
Result settle(const Parents& parents) {
  for (const std::shared_ptr<Parent>& parent : parents) {
    if (const Result state = parent->settle(); state != Result::success) return state;
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
  for (const auto& [communicators, parent, split, name] : all) {
    std::vector<nccl::Comm> known = communicators;
    if (split != nullptr && parent->settle() == Result::success) known.push_back(*split);
    for (const nccl::Comm comm : known) {
      if (comm == nullptr) continue;  // this rank is in no part of a split
      const std::shared_ptr<Parent> entry = parent_of(comm, name.c_str());
      if (settings().asks_messages && entry->settle() == Result::success) {
        meetings.emplace_back([entry] { entry->locate(); });
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

// Makes the real library refuse the open group, so that it launches none of its calls.
void spoil_group(const Request& request) {
  const nccl::Library& nccl = nccl::library();
  nccl.Send(nullptr, 0, nccl::kInt8, /*peer=*/-1, request.comm, request.stream);
}

// Gives the real library the wire of a message, in a group.
Result post(const std::shared_ptr<Parent>& parent, const Request& request) {
  const bool is_alone = group.depth == 0;
  try {
    group.posted.push_back({parent, parent->take_message(request)});
  } catch (...) {
    if (!is_alone) spoil_group(request);
    throw;
  }
  group.exact.insert(parent);
  if (is_alone) {
    start_group();
    nccl::library().GroupStart();
  }
  const Result posted = Messages::post(group.posted.back().message);
  const Result ended = is_alone ? end_group([] { return nccl::library().GroupEnd(); }) : posted;
  return posted == Result::success ? ended : posted;
}

// Makes the calls that cannot be compressed after all, in one group of NCCL's.
Result call_exact(const std::vector<Queued>& queue) {
  if (queue.empty()) return Result::success;
  Parents parents;
  Result result = nccl::library().GroupStart();
  for (const Queued& each : queue) {
    parents.insert(each.parent);
    if (const Result added = each.exact(each.config.get()); result == Result::success) result = added;
  }
  const Result ended = nccl::library().GroupEnd();
  if (result != Result::success) return result;
  return ended == Result::in_progress ? settle(parents) : ended;
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
  if (request.collective == Collective::broadcast && is_of_real_library(request.caller)) return exact(config);
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
    if (group.depth > 0) group.exact.insert(parent);
    return exact(config);
  });
}

Result follow(Result result, std::span<nccl::Comm> made, const nccl::Config* config, nccl::Comm parent) {
  const bool is_made = result == Result::success || result == Result::in_progress;
  if (!is_made || !settings().is_asked || !settings().is_possible) return result;
  const bool is_split = parent != nullptr;
  const bool has_name = config != nullptr && config->size > offsetof(nccl::Config, comm_name) && config->comm_name;
  const std::shared_ptr<Parent> of = is_split ? parent_of(parent) : nullptr;
  const std::string name = has_name ? config->comm_name : is_split ? of->name() : "";
  if (name.empty() && !settings().asks_messages) return result;
  // NCCL writes those that are not split off at once, and the caller's memory may be gone when its group ends.
  std::vector<nccl::Comm> at_once;
  if (!is_split) at_once.assign(made.begin(), made.end());
  group.made.push_back({std::move(at_once), of, is_split ? made.data() : nullptr, name});
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
  const Group all = std::exchange(group, {});
  return result_of([&] {
    try {
      for_each_stream(all.posted, [](Messages& own, const auto& messages) { own.encode(messages); });
    } catch (...) {
      spoil_group(all.posted.front().message.request);
      end();
      throw;
    }
    Result result = end();
    if (result == Result::in_progress && !(all.queue.empty() && all.posted.empty())) result = settle(all.exact);
    if (result == Result::in_progress || result == Result::success) {
      for_each_stream(all.posted, [](const Messages& own, const auto& messages) { own.decode(messages); });
      locate_all(all.made);
    }
    return result == Result::success ? launch(all.queue) : result;
  });
}

void keep_in_group(std::shared_ptr<Parent> ended) {
  if (group.depth > 0) group.ended.push_back(std::move(ended));
}

Result drop_group(const std::function<Result()>& end) {
  group.depth = std::max(group.depth - 1, 0);
  if (group.depth > 0) return end();
  const Group all = std::exchange(group, {});
  if (!all.posted.empty()) spoil_group(all.posted.front().message.request);  // whose wires would be lost
  const Result result = end();
  return result_of([&] {
    if (result == Result::success || result == Result::in_progress) locate_all(all.made);
    return result;
  });
}

}  // namespace zcomm::front
