#include "node_memory.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace zcomm::c10d_binding {
namespace {

constexpr const char* kRefused = "refused: ";
constexpr const char* kWorks = "works";
constexpr std::size_t kTokenBytes = 64;  // at the end of an outbox: tells that it is the one

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

// Returns the host and the name space of processes, in which ranks find each other's processes by number.
std::string home() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  std::getline(file, boot_id);
  struct stat space{};
  if (boot_id.empty() || stat("/proc/self/ns/pid", &space) != 0) fail_of_system("/proc");
  return boot_id + "/" + std::to_string(space.st_ino);
}

std::string random_token() {
  std::random_device device;
  std::ostringstream text;
  for (int i = 0; i < 4; ++i) text << std::hex << device() << '-';
  return text.str().substr(0, kTokenBytes - 1);
}

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
  char* token() const { return reinterpret_cast<char*>(outboxes_.back() + num_bytes_ - kTokenBytes); }
  std::size_t num_bytes() const { return num_bytes_; }
  const std::vector<std::byte*>& outboxes() const { return outboxes_; }

 private:
  const std::size_t num_bytes_;
  std::vector<std::byte*> outboxes_;
};

NodeMemory::~NodeMemory() {
  for (const int process : processes_) close(process);
}

int NodeMemory::find_ended(std::span<const int> local_ranks) const {
  for (const int local : local_ranks) {
    pollfd ended{processes_[static_cast<std::size_t>(local)], POLLIN, 0};
    if (poll(&ended, 1, 0) > 0) return rank_of(local);
  }
  return -1;
}

void NodeMemory::open(Mappings& mappings, const std::string& text) {
  std::istringstream words(text);
  std::string place, token;
  int process = 0, number = 0;
  words >> place >> process >> number >> token;
  if (place != home()) throw std::runtime_error("another host, or another container");
  processes_.push_back(Descriptor(static_cast<int>(syscall(SYS_pidfd_open, process, 0)), "pidfd_open").release());
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC), path);
  struct stat found{};
  if (fstat(file.get(), &found) != 0 || static_cast<std::size_t>(found.st_size) != mappings.num_bytes())
    throw std::runtime_error(path + " is another file");
  mappings.add(file.get());
  if (token != mappings.token()) throw std::runtime_error(path + " is another file");
}

std::unique_ptr<NodeMemory> NodeMemory::meet(::c10d::Store& store, const Topology& topology, int rank,
                                             std::string& why_not) {
  const std::span<const int> ranks = topology.ranks(topology.node(rank));
  if (ranks.size() == 1) {
    why_not = "one rank in this node";
    return nullptr;
  }
  const auto put = [&](const char* name, const std::string& text) {
    store.set(name + std::to_string(rank), std::vector<std::uint8_t>(text.begin(), text.end()));
  };
  const auto get = [&](const char* name, int of) {
    const std::vector<std::uint8_t> text = store.get(name + std::to_string(of));
    return std::string(text.begin(), text.end());
  };
  std::unique_ptr<NodeMemory> memory(new NodeMemory(topology, rank));
  const std::size_t num_bytes = MemoryChannels::outbox_bytes(static_cast<int>(ranks.size())) + kTokenBytes;
  const auto own = std::make_unique<Mappings>(num_bytes);
  const auto all = std::make_shared<Mappings>(num_bytes);
  std::optional<Descriptor> file;
  try {
    const char* const wanted = std::getenv("ZCOMM_NODE_MEMORY");
    if (wanted != nullptr && std::string(wanted) == "off") throw std::runtime_error("ZCOMM_NODE_MEMORY=off");
    file.emplace(memfd_create("zcomm", MFD_CLOEXEC), "memfd_create");
    if (ftruncate(file->get(), static_cast<off_t>(num_bytes)) != 0) fail_of_system("ftruncate");
    own->add(file->get());
    const std::string token = random_token();
    std::memcpy(own->token(), token.c_str(), token.size() + 1);
    std::ostringstream text;
    text << home() << ' ' << getpid() << ' ' << file->get() << ' ' << token;
    put("memory/", text.str());
  } catch (const std::exception& error) {
    put("memory/", kRefused + std::string(error.what()));
  }
  std::string verdict = kWorks;
  for (const int peer : ranks) {
    const std::string text = get("memory/", peer);
    try {
      if (text.starts_with(kRefused)) throw std::runtime_error(text.substr(std::strlen(kRefused)));
      memory->open(*all, text);
    } catch (const std::exception& error) {
      if (verdict == kWorks) verdict = "rank " + std::to_string(peer) + ": " + error.what();
    }
  }
  put("memory works/", verdict);
  for (const int peer : ranks) {
    if (const std::string text = get("memory works/", peer); text != kWorks && why_not.empty()) why_not = text;
  }
  if (!why_not.empty()) return nullptr;
  memory->channels_ = std::make_unique<MemoryChannels>(all->outboxes(), topology.local_rank(rank), all);
  return memory;
}

}  // namespace zcomm::c10d_binding
