#include "node_memory.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "call_watch.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

constexpr const char* kRefused = "refused: ";
constexpr const char* kWorks = "works";
constexpr const char* kLost = "lost rank ";
constexpr const char* kOff = "ZCOMM_NODE_MEMORY=off";
constexpr const char* kOtherHost = "another host";
constexpr std::chrono::seconds kPatienceOfNode{30};  // with ranks that have met a moment ago
constexpr std::size_t kTokenBytes = 64;              // at the end of an outbox: tells that it is the one

[[noreturn]] void fail_of_system(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

class Descriptor {
 public:
  Descriptor(int fd, const std::string& what) : fd_(fd) {
    if (fd < 0) fail_of_system(what);
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Returns the host, and the name space of processes, in which ranks find each other's processes by number.
std::pair<std::string, std::string> home() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  std::getline(file, boot_id);
  struct stat space{};
  if (boot_id.empty() || stat("/proc/self/ns/pid", &space) != 0) fail_of_system("/proc");
  return {boot_id, std::to_string(space.st_ino)};
}

std::string random_token() {
  std::random_device device;
  std::ostringstream text;
  for (int i = 0; i < 4; ++i) text << std::hex << device() << '-';
  return text.str().substr(0, kTokenBytes - 1);
}

std::string ended(int rank) { return kLost + std::to_string(rank) + ": its process has ended"; }

// Texts that the ranks of a node leave for one another in a store.
class Texts {
 public:
  Texts(StorePtr store, std::chrono::milliseconds limit, const std::function<bool()>& is_over)
      : store_(std::move(store)),
        limit_(std::min<std::chrono::milliseconds>(limit, kPatienceOfNode)),
        deadline_(std::chrono::steady_clock::now() + limit_),
        is_over_(is_over) {}

  // Waits for the text of a rank. Throws if `has_ended()`, or it takes too long.
  template <class HasEnded>
  std::string wait_for(const char* name, int rank, const HasEnded& has_ended) const {
    for (std::chrono::milliseconds pause{1};; pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
      const bool is_last = has_ended();  // before the look: the rank may have written since the one before
      const auto text = ask([store = store_, key = name + std::to_string(rank)] { return text_in(*store, key); });
      if (text && *text) return **text;
      if (is_last) throw TransportError(ended(rank));
      const std::string who = "rank " + std::to_string(rank);
      if (is_over_()) throw TransportError("aborted while " + who + " was to tell how it shares memory");
      if (std::chrono::steady_clock::now() > deadline_) {
        throw TimeoutError(who + " did not tell within " + std::to_string(limit_.count()) +
                           " ms how it shares memory: it has ended or is stuck");
      }
      std::this_thread::sleep_for(pause);
    }
  }

 private:
  const StorePtr store_;
  const std::chrono::milliseconds limit_;
  const std::chrono::steady_clock::time_point deadline_;
  const std::function<bool()>& is_over_;
};

}  // namespace

// Mappings of outboxes, until the last user is gone.
class NodeMemory::Mappings {
 public:
  explicit Mappings(std::size_t num_bytes) : num_bytes_(num_bytes) {}
  ~Mappings() {
    for (std::byte* const outbox : outboxes_) munmap(outbox, num_bytes_);
  }
  Mappings(const Mappings&) = delete;
  Mappings& operator=(const Mappings&) = delete;

  void add(int fd) {
    void* const data = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) fail_of_system("mmap");
    outboxes_.push_back(static_cast<std::byte*>(data));
  }
  // Makes an outbox. Returns the text by which peers open it, as long as `file` is open.
  std::string make(std::optional<Descriptor>& file) {
    const char* const wanted = std::getenv("ZCOMM_NODE_MEMORY");
    if (wanted != nullptr && std::string(wanted) == "off") throw std::runtime_error(kOff);
    file.emplace(memfd_create("zcomm", MFD_CLOEXEC), "memfd_create");
    if (ftruncate(file->get(), static_cast<off_t>(num_bytes_)) != 0) fail_of_system("ftruncate");
    add(file->get());
    const std::string mark = random_token();
    std::memcpy(token(), mark.c_str(), mark.size() + 1);
    const auto [host, space] = home();
    std::ostringstream text;
    text << host << ' ' << space << ' ' << getpid() << ' ' << file->get() << ' ' << mark;
    return text.str();
  }
  char* token() const { return reinterpret_cast<char*>(outboxes_.back() + num_bytes_ - kTokenBytes); }
  std::size_t num_bytes() const { return num_bytes_; }
  const std::vector<std::byte*>& outboxes() const { return outboxes_; }

 private:
  const std::size_t num_bytes_;
  std::vector<std::byte*> outboxes_;
};

NodeMemory::NodeMemory(Topology topology, int rank)
    : topology_(std::move(topology)), rank_(rank), processes_(topology_.ranks(topology_.node(rank)).size(), -1) {}

NodeMemory::~NodeMemory() {
  for (const int process : processes_) {
    if (process >= 0) close(process);
  }
}

int NodeMemory::find_ended(std::span<const int> local_ranks) const {
  for (const int local : local_ranks) {
    pollfd ended{processes_[static_cast<std::size_t>(local)], POLLIN, 0};
    if (poll(&ended, 1, 0) > 0) return rank_of(local);
  }
  return -1;
}

void NodeMemory::open(Mappings& mappings, int peer, const std::string& text) {
  std::istringstream words(text);
  std::string host, space, token;
  int process = 0, number = 0;
  words >> host >> space >> process >> number >> token;
  const auto [own_host, own_space] = home();
  if (host != own_host) throw std::runtime_error(kOtherHost);
  if (space != own_space) throw std::runtime_error("another container of this host");
  const auto opened = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
  if (opened < 0 && errno == ESRCH) throw TransportError(ended(peer));
  processes_[static_cast<std::size_t>(topology_.local_rank(peer))] = Descriptor(opened, "pidfd_open").release();
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC), path);
  struct stat found{};
  if (fstat(file.get(), &found) != 0 || static_cast<std::size_t>(found.st_size) != mappings.num_bytes())
    throw std::runtime_error(path + " is another file");
  mappings.add(file.get());
  if (token != mappings.token()) throw std::runtime_error(path + " is another file");
}

std::unique_ptr<NodeMemory> NodeMemory::meet(const StorePtr& store, const Topology& topology, int rank,
                                             std::chrono::milliseconds limit, const std::function<bool()>& is_over,
                                             WhyNot& why_not) {
  const std::span<const int> ranks = topology.ranks(topology.node(rank));
  if (ranks.size() == 1) {
    why_not.reason = "one rank in this node";
    return nullptr;
  }
  Texts texts(store, limit, is_over);
  std::unique_ptr<NodeMemory> memory(new NodeMemory(topology, rank));
  const std::size_t num_bytes = MemoryChannels::outbox_bytes(static_cast<int>(ranks.size())) + kTokenBytes;
  Mappings own(num_bytes);
  const auto all = std::make_shared<Mappings>(num_bytes);
  std::optional<Descriptor> file;
  std::string own_text;
  try {
    own_text = own.make(file);
  } catch (const std::exception& error) {
    own_text = kRefused + std::string(error.what());
  }
  store->set("memory/" + std::to_string(rank), own_text);
  std::string verdict = kWorks;
  for (const int peer : ranks) {
    const std::string text = texts.wait_for("memory/", peer, [] { return false; });
    try {
      if (text.starts_with(kRefused)) throw std::runtime_error(text.substr(std::strlen(kRefused)));
      memory->open(*all, peer, text);
    } catch (const TransportError& error) {
      verdict = error.what();
      break;
    } catch (const std::exception& error) {
      if (verdict == kWorks) verdict = "rank " + std::to_string(peer) + ": " + error.what();
    }
  }
  store->set("memory works/" + std::to_string(rank), verdict);
  if (verdict.starts_with(kLost)) throw TransportError(verdict);
  for (const int peer : ranks) {
    const std::array local{topology.local_rank(peer)};
    const std::string text = texts.wait_for("memory works/", peer, [&] { return memory->find_ended(local) >= 0; });
    if (text.starts_with(kLost)) throw TransportError(text);  // else this rank would name the one that found it
    if (text != kWorks && why_not.reason.empty()) why_not.reason = text;
  }
  if (!why_not.reason.empty()) {
    why_not.is_surprising = !why_not.reason.ends_with(kOff) && !why_not.reason.ends_with(kOtherHost);
    return nullptr;
  }
  memory->channels_ = std::make_unique<MemoryChannels>(all->outboxes(), topology.local_rank(rank), all);
  return memory;
}

}  // namespace zcomm::c10d_binding
