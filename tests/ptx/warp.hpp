// Warp: 32 lanes, in groups that are at different instructions.
#pragma once

#include <memory>

#include "memory.hpp"

namespace ptx {

// State shared by the threads of a CTA.
struct CtaState {
  const Kernel& kernel;
  Memory& memory;
  u32 index = 0;
  u32 barriers = 0;  // passed so far

  std::string where(u32 at) const { return kernel.where(at, index); }
};

class Warp {
 public:
  enum class State { ready, at_barrier, done };

  Warp(CtaState& cta, u32 first_thread, u32 num_lanes, std::unique_ptr<Registers> registers);

  // Runs until all lanes are at the CTA's barrier or have left the kernel.
  void run();

  State state() const { return state_; }
  void pass_barrier() { state_ = State::ready; }
  std::unique_ptr<Registers> give_back_registers() { return std::move(registers_); }

 private:
  struct Group {
    u32 at;  // an instruction
    u32 lanes;
    bool waits;  // for lanes that are elsewhere
  };
  enum class Flow { next, jumped, stopped };

  Group take_group();
  void run_group(Group group);
  bool meet(Group& group);
  u32 guarded(const Instruction& instruction, const Group& group);
  Flow execute(const Instruction& instruction, Group& group, u32 active);
  Flow branch(const Instruction& instruction, Group& group, u32 taken);
  Flow exit(Group& group, u32 active);
  bool meet_all(Operand members, u32 at, u32 active);
  bool pass_warp_barrier(const Instruction& instruction, u32 at, u32 active);
  bool shuffle(const Instruction& instruction, u32 at, u32 active);

  CtaState& cta_;
  u32 first_thread_;
  u32 live_;  // lanes that have not left
  std::unique_ptr<Registers> registers_;
  std::vector<Group> groups_;  // but the one that runs
  u32 barriers_ = 0;           // of the warp, that it has passed
  State state_ = State::ready;
};

}  // namespace ptx
