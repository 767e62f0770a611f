#include "warp.hpp"

#include <bit>

#include "settings.hpp"

namespace ptx {

Warp::Warp(CtaState& cta, u32 first_thread, u32 num_lanes, std::unique_ptr<Registers> registers)
    : cta_(cta),
      first_thread_(first_thread),
      live_(num_lanes == kLanes ? ~0u : (1u << num_lanes) - 1),
      registers_(std::move(registers)),
      groups_{{0, live_, false}} {}

void Warp::run() {
  while (state_ == State::ready) {
    if (groups_.empty()) {
      state_ = State::done;
    } else {
      run_group(take_group());
    }
  }
}

// The one that is the furthest behind, as lanes that parted meet at later instructions.
Warp::Group Warp::take_group() {
  auto chosen = groups_.end();
  for (auto group = groups_.begin(); group != groups_.end(); ++group) {
    if (!group->waits && (chosen == groups_.end() || group->at < chosen->at)) chosen = group;
  }
  if (chosen == groups_.end()) {
    report("lanes wait for each other at different instructions", cta_.where(groups_.front().at));
    groups_.clear();
    return {0, 0, false};
  }
  const Group group = *chosen;
  groups_.erase(chosen);
  return group;
}

void Warp::run_group(Group group) {
  const std::vector<Instruction>& code = cta_.kernel.code;
  while (group.lanes != 0) {
    const Instruction& instruction = code[group.at];
    if (instruction.is_meeting && !groups_.empty() && !meet(group)) return;
    const u32 active = guarded(instruction, group);
    const bool has_effect = active != 0 || instruction.unit == Unit::branch;
    const Flow flow = has_effect ? execute(instruction, group, active) : Flow::next;
    if (flow == Flow::stopped) return;
    if (flow == Flow::next) ++group.at;
  }
}

// Joins the lanes of other groups at the same place to `group`. Returns whether it may go on: groups that are behind it
// go first.
bool Warp::meet(Group& group) {
  std::erase_if(groups_, [&](const Group& other) {
    if (other.at != group.at) return false;
    group.lanes |= other.lanes;
    return true;
  });
  for (const Group& other : groups_) {
    if (!other.waits && other.at < group.at) {
      groups_.push_back(group);
      return false;
    }
  }
  return true;
}

u32 Warp::guarded(const Instruction& instruction, const Group& group) {
  if (!instruction.guard.is_there()) return group.lanes;
  if ((registers_->undefined(instruction.guard) & group.lanes) != 0) report("undefined guard", cta_.where(group.at));
  const u32 guard = registers_->predicate(instruction.guard);
  return group.lanes & (instruction.guard_is_negated ? ~guard : guard);
}

Warp::Flow Warp::execute(const Instruction& instruction, Group& group, u32 active) {
  const auto wait = [&] {
    groups_.push_back({group.at, group.lanes, true});
    return Flow::stopped;
  };
  switch (instruction.unit) {
    case Unit::arithmetic:
      instruction.execute(*registers_, instruction, active);
      return Flow::next;
    case Unit::load:
    case Unit::store:
    case Unit::atomic:
      cta_.memory.access(*registers_, instruction, active, {first_thread_, cta_.barriers, barriers_},
                         [&] { return cta_.where(group.at); });
      return Flow::next;
    case Unit::shuffle:
      return shuffle(instruction, group.at, active) ? Flow::next : wait();
    case Unit::warp_barrier:
      return pass_warp_barrier(instruction, group.at, active) ? Flow::next : wait();
    case Unit::barrier:
      if (active != live_) return wait();
      groups_.push_back({group.at + 1, group.lanes, false});
      state_ = State::at_barrier;
      return Flow::stopped;
    case Unit::branch:
      return branch(instruction, group, active);
    case Unit::exit:
      return exit(group, active);
  }
  return Flow::stopped;
}

// Splits a group: lanes that go to the earlier instruction run first.
Warp::Flow Warp::branch(const Instruction& instruction, Group& group, u32 taken) {
  const u32 others = group.lanes & ~taken;
  if (taken == 0) return Flow::next;
  Group jumping{instruction.jump, taken, false}, staying{group.at + 1, others, false};
  if (others == 0) {
    group = jumping;
  } else {
    const bool jumps_back = jumping.at < staying.at;
    group = jumps_back ? jumping : staying;
    groups_.push_back(jumps_back ? staying : jumping);
  }
  return Flow::jumped;
}

Warp::Flow Warp::exit(Group& group, u32 active) {
  live_ &= ~active;
  group.lanes &= ~active;
  for (Group& other : groups_) other.waits = false;  // the awaited lanes may have left
  return Flow::next;
}

// Returns false if lanes that `members` names have not arrived.
bool Warp::meet_all(Operand members, u32 at, u32 active) {
  const u32 named = registers_->words(members)[std::countr_zero(active)];
  if ((named & live_ & ~active) != 0) return false;
  if ((active & ~named) != 0) report("a lane comes that a shuffle or barrier does not name", cta_.where(at));
  return true;
}

bool Warp::pass_warp_barrier(const Instruction& instruction, u32 at, u32 active) {
  if (!meet_all(instruction.sources[0], at, active)) return false;
  ++barriers_;
  return true;
}

// shfl.sync.bfly; false as of meet_all().
bool Warp::shuffle(const Instruction& instruction, u32 at, u32 active) {
  const auto& [value, distance, clamp, members] = instruction.sources;
  if (!meet_all(members, at, active)) return false;
  const u32 sources_undefined = registers_->undefined_sources(instruction);
  const u32* values = registers_->words(value);
  u32 results[kLanes] = {}, undefined = 0, in_range = 0;
  for (u32 l = 0; l < kLanes; ++l) {
    if ((active >> l & 1u) == 0) continue;
    const u32 control = registers_->words(clamp)[l], segment = control >> 8 & 31u;
    const u32 last = (l & segment) | (control & 31u & ~segment);
    u32 from = l ^ (registers_->words(distance)[l] & 31u);
    if (from <= last) {
      in_range |= 1u << l;
    } else {
      from = l;
    }
    if ((active >> from & 1u) == 0) report("a shuffle reads a lane that takes no part", cta_.where(at));
    undefined |= ((sources_undefined | ~active) >> from & 1u) << l;
    results[l] = values[from];
  }
  for (u32 l = 0; l < kLanes; ++l) {
    if ((active >> l & 1u) != 0) registers_->words(instruction.targets[0])[l] = results[l];
  }
  registers_->set_undefined(instruction.targets[0], undefined, active);
  if (instruction.num_targets > 1) registers_->set_predicate(instruction.targets[1], in_range, 0, active);
  return true;
}

}  // namespace ptx
