// Memory of a CTA: the reach of its loads and stores, and their legality.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "cuda_host.hpp"
#include "registers.hpp"

namespace ptx {

// Time of a lane's access to shared memory. Two accesses of one byte, one of them a store, must be ordered: by the same
// thread, by both being atomic, or by a barrier of the CTA or warp between them. Shuffles order no memory.
struct Moment {
  u32 thread = 0;
  u32 barriers = 0;       // passed by the CTA
  u32 warp_barriers = 0;  // passed by the warp

  bool is_ordered_with(const Moment& other) const {
    if (thread == other.thread || barriers != other.barriers) return true;
    return thread / kLanes == other.thread / kLanes && warp_barriers != other.warp_barriers;
  }
};

class SharedMemory {
 public:
  explicit SharedMemory(std::size_t num_bytes) : bytes_(num_bytes), history_(num_bytes) {}

  // Makes the contents undefined and marks all bytes as not written.
  void begin();
  std::size_t size() const { return bytes_.size(); }
  u8* data() { return bytes_.data(); }
  // Records an access by a load, a store or an atomic; returns whether it is ordered with earlier ones.
  bool note(std::size_t begin, std::size_t num_bytes, Unit unit, const Moment& now);
  bool is_written(std::size_t begin, std::size_t num_bytes) const;

 private:
  // History of one byte: the last load, store and atomic, if any.
  struct History {
    struct Access {
      bool is_there = false;
      Moment last{};
    };
    Access load, store, atomic;
  };
  std::vector<u8> bytes_;
  std::vector<History> history_;
};

class Memory {
 public:
  Memory(const Kernel& kernel, const std::byte* parameter)
      : kernel_(kernel), parameter_(parameter), shared_(kernel.shared_bytes) {}

  void begin_cta() { shared_.begin(); }
  // A load, store or atomic of the lanes of `active`; `now` is that of lane 0. A lane whose access is not allowed
  // stores nothing, and loads a pattern.
  void access(Registers& registers, const Instruction& instruction, u32 active, Moment now,
              const std::function<std::string()>& where);

 private:
  u8* find(const Instruction& instruction, u64 address, std::size_t num_bytes, Moment now,
           const std::function<std::string()>& where);
  u8* find_variable(u64 address, std::size_t num_bytes);
  u8* find_global(u64 address, std::size_t num_bytes);
  u8* find_shared(const Instruction& instruction, u64 address, std::size_t num_bytes, Moment now,
                  const std::function<std::string()>& where);

  // Moves one lane's data between registers and the location found, if any.
  void move(Registers& registers, const Instruction& instruction, u32 lane, u8* data);

  const Kernel& kernel_;
  const std::byte* parameter_;
  SharedMemory shared_;
  std::array<cuda_host::Allocation, 4> recent_{};  // what a kernel reads and writes is not freed while it runs
  std::size_t oldest_ = 0;
};

}  // namespace ptx
