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
constexpr const char* kAlone = "one rank in this node";
constexpr std::chrono::seconds kPatienceOfNode{30};  // with ranks that have met a moment ago
constexpr std::size_t kTokenBytes = 64;              // at the end of an outbox: tells that it is the one

// Returns the result of a call of the system, unless it failed.
template <class Result>
Result checked(Result result, const std::string& what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

// Returns the host, and the name space of processes, in which ranks find each other's processes by number.
std::pair<std::string, std::string> home() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  std::getline(file, boot_id);
  struct stat space{};
  checked(boot_id.empty() ? -1 : stat("/proc/self/ns/pid", &space), "/proc");
  return {boot_id, std::to_string(space.st_ino)};
}

std::string random_token() {
  std::random_device device;
  std::ostringstream text;
  for (int i = 0; i < 4; ++i) text << std::hex << device() << '-';
  return text.str().substr(0, kTokenBytes - 1);
}

std::string ended(int rank) { return kLost + std::to_string(rank) + ": its process has ended"; }

}  // namespace

NodeMemory::NodeMemory(Topology topology, int rank)
    : topology_(std::move(topology)),
      rank_(rank),
      processes_(topology_.ranks(topology_.node(rank)).size(), -1),
      num_bytes_(MemoryChannels::outbox_bytes(static_cast<int>(processes_.size())) + kTokenBytes) {}

NodeMemory::~NodeMemory() {
  for (std::byte* const outbox : outboxes_) munmap(outbox, num_bytes_);
  for (const int process : processes_) {
    if (process >= 0) close(process);
  }
  close_file();
}

void NodeMemory::close_file() {
  if (file_ >= 0) close(std::exchange(file_, -1));
}

// A process that is not open yet has not ended.
int NodeMemory::find_ended(std::span<const int> local_ranks) const {
  for (const int local : local_ranks) {
    pollfd ended{processes_[static_cast<std::size_t>(local)], POLLIN, 0};
    if (poll(&ended, 1, 0) > 0) return rank_of(local);
  }
  return -1;
}

std::string NodeMemory::make_outbox() {
  const char* const wanted = std::getenv("ZCOMM_NODE_MEMORY");
  if (wanted != nullptr && std::string(wanted) == "off") throw std::runtime_error(kOff);
  file_ = checked(memfd_create("zcomm", MFD_CLOEXEC | MFD_ALLOW_SEALING), "memfd_create");
  checked(fchmod(file_, S_IRUSR | S_IWUSR), "fchmod");
  checked(ftruncate(file_, static_cast<off_t>(num_bytes_)), "ftruncate");
  // A peer that made it shorter would end this process with SIGBUS.
  checked(fcntl(file_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), "F_ADD_SEALS");
  const std::string token = random_token();
  checked(pwrite(file_, token.c_str(), token.size(), static_cast<off_t>(num_bytes_ - kTokenBytes)), "pwrite");
  const auto [host, space] = home();
  std::ostringstream text;
  text << host << ' ' << space << ' ' << getpid() << ' ' << file_ << ' ' << token;
  return text.str();
}

void NodeMemory::open(int peer, const std::string& text) {
  if (text.starts_with(kRefused)) throw std::runtime_error(text.substr(std::strlen(kRefused)));
  std::istringstream words(text);
  std::string host, space, token;
  int process = 0, number = 0;
  words >> host >> space >> process >> number >> token;
  const auto [own_host, own_space] = home();
  if (host != own_host) throw std::runtime_error(kOtherHost);
  if (space != own_space) throw std::runtime_error("another container of this host");
  if (peer != rank_) {
    const auto opened = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
    if (opened < 0 && errno == ESRCH) throw TransportError(ended(peer));
    processes_[static_cast<std::size_t>(topology_.local_rank(peer))] = checked(opened, "pidfd_open");
  }
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  const int file = checked(::open(path.c_str(), O_RDWR | O_CLOEXEC), path);
  const bool has_size = lseek(file, 0, SEEK_END) == static_cast<off_t>(num_bytes_);
  void* const data = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  checked(data == MAP_FAILED ? -1 : 0, "mmap");
  outboxes_.push_back(static_cast<std::byte*>(data));
  const auto* const mark = reinterpret_cast<const char*>(outboxes_.back() + num_bytes_ - kTokenBytes);
  if (!has_size || token != mark) throw std::runtime_error(path + " is another file");
}

bool NodeMemory::is_expected(const std::string& why_not) {
  return why_not == kAlone || why_not.ends_with(kOff) || why_not.ends_with(kOtherHost);
}

std::unique_ptr<NodeMemory> NodeMemory::meet(const StorePtr& store, const Topology& topology, int rank,
                                             std::chrono::milliseconds limit, const std::function<bool()>& is_over,
                                             std::string& why_not) {
  const std::span<const int> ranks = topology.ranks(topology.node(rank));
  if (ranks.size() == 1) {
    why_not = kAlone;
    return nullptr;
  }
  std::unique_ptr<NodeMemory> memory(new NodeMemory(topology, rank));
  limit = std::min<std::chrono::milliseconds>(limit, kPatienceOfNode);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  // Waits for what a rank of the node tells the others.
  const auto told_by = [&](int peer, const char* name) {
    const std::string who = "rank " + std::to_string(peer);
    const std::array local{topology.local_rank(peer)};
    for (std::chrono::milliseconds pause{1};; pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
      const bool is_last = memory->find_ended(local) >= 0;  // before the look: it may have written since the last one
      const auto text = ask([store, key = name + std::to_string(peer)] { return text_in(*store, key); });
      if (text && *text) return **text;
      if (is_last) throw TransportError(ended(peer));
      if (is_over()) throw TransportError("aborted while " + who + " was to tell how it shares memory");
      if (std::chrono::steady_clock::now() > deadline) {
        throw TimeoutError(who + " did not tell within " + std::to_string(limit.count()) +
                           " ms how it shares memory: it has ended or is stuck");
      }
      std::this_thread::sleep_for(pause);
    }
  };
  std::string own_text;
  try {
    own_text = memory->make_outbox();
  } catch (const std::exception& error) {
    own_text = kRefused + std::string(error.what());
  }
  store->set("memory/" + std::to_string(rank), own_text);
  std::string verdict = kWorks;
  for (const int peer : ranks) {
    const std::string text = told_by(peer, "memory/");
    try {
      memory->open(peer, text);
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
    const std::string text = told_by(peer, "memory works/");
    if (text.starts_with(kLost)) throw TransportError(text);  // else this rank would name the one that found it
    if (text != kWorks && why_not.empty()) why_not = text;
  }
  memory->close_file();
  if (!why_not.empty()) return nullptr;
  memory->channels_ = std::make_unique<MemoryChannels>(memory->outboxes_, topology.local_rank(rank));
  return memory;
}

}  // namespace zcomm::c10d_binding
