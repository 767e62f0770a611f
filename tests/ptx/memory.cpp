#include "memory.hpp"

#include <bit>
#include <cstring>

#include "settings.hpp"

namespace ptx {

void SharedMemory::begin() {
  for (u8& byte : bytes_) byte = static_cast<u8>(random_bits());
  history_.assign(history_.size(), {});
}

bool SharedMemory::note(std::size_t begin, std::size_t num_bytes, Unit unit, const Moment& now) {
  bool is_ordered = true;
  for (std::size_t i = begin; i < begin + num_bytes; ++i) {
    History& history = history_[i];
    const auto follows = [&](const History::Access& earlier) {
      if (earlier.is_there && !earlier.last.is_ordered_with(now)) is_ordered = false;
    };
    follows(history.store);
    if (unit != Unit::load) follows(history.load);
    if (unit != Unit::atomic) follows(history.atomic);
    History::Access& access = unit == Unit::load ? history.load : unit == Unit::store ? history.store : history.atomic;
    access = {true, now};
  }
  return is_ordered;
}

bool SharedMemory::is_written(std::size_t begin, std::size_t num_bytes) const {
  for (std::size_t i = begin; i < begin + num_bytes; ++i) {
    if (!history_[i].store.is_there && !history_[i].atomic.is_there) return false;
  }
  return true;
}

u8* Memory::find_variable(u64 address, std::size_t num_bytes) {
  for (const auto& [name, variable] : *kernel_.variables) {
    const u64 offset = address - variable.address(), size = variable.bytes.size();
    if (offset <= size && num_bytes <= size - offset) return reinterpret_cast<u8*>(address);
  }
  return nullptr;
}

u8* Memory::find_global(u64 address, std::size_t num_bytes) {
  const auto holds = [&](const cuda_host::Allocation& allocation) {
    const auto begin = reinterpret_cast<u64>(allocation.data);
    return address >= begin && address - begin <= allocation.num_bytes &&
           num_bytes <= allocation.num_bytes - (address - begin);
  };
  for (const cuda_host::Allocation& allocation : recent_) {
    if (holds(allocation)) return reinterpret_cast<u8*>(address);
  }
  const cuda_host::Allocation found = cuda_host::find_allocation(reinterpret_cast<const void*>(address));
  if (!holds(found)) return nullptr;
  recent_[oldest_++ % recent_.size()] = found;
  return reinterpret_cast<u8*>(address);
}

u8* Memory::find_shared(const Instruction& instruction, u64 address, std::size_t num_bytes, Moment now,
                        const std::function<std::string()>& where) {
  if (address > shared_.size() || num_bytes > shared_.size() - address) {
    report("out of bounds of shared memory", where());
    return nullptr;
  }
  if (instruction.unit != Unit::store && !shared_.is_written(address, num_bytes)) {
    report("shared memory read before it is written", where());
  }
  if (!shared_.note(address, num_bytes, instruction.unit, now)) report("race in shared memory", where());
  return shared_.data() + address;
}

u8* Memory::find(const Instruction& instruction, u64 address, std::size_t num_bytes, Moment now,
                 const std::function<std::string()>& where) {
  if (address % num_bytes != 0) {
    report("misaligned access", where());
    return nullptr;
  }
  if (instruction.space == Space::shared) return find_shared(instruction, address, num_bytes, now, where);
  if (instruction.space == Space::parameter) {
    const u64 offset = address - reinterpret_cast<u64>(parameter_);
    if (offset <= kernel_.parameter_bytes && num_bytes <= kernel_.parameter_bytes - offset) {
      return reinterpret_cast<u8*>(address);
    }
    report("out of bounds of the parameter", where());
    return nullptr;
  }
  if (instruction.space == Space::variable) {
    u8* const data = find_variable(address, num_bytes);
    if (data == nullptr) report("load out of bounds of a variable", where());
    return data;
  }
  u8* const data = find_global(address, num_bytes);
  if (data == nullptr) {
    const bool is_load = instruction.unit == Unit::load;
    report(is_load ? "load out of bounds of global memory" : "store out of bounds of global memory", where());
  }
  return data;
}

void Memory::access(Registers& registers, const Instruction& instruction, u32 active, Moment now,
                    const std::function<std::string()>& where) {
  const std::size_t num_elements = instruction.unit == Unit::load ? instruction.num_targets : instruction.num_sources;
  if ((registers.undefined(instruction.address) & active) != 0) report("undefined address", where());
  if ((registers.undefined_sources(instruction) & active) != 0) report("undefined value stored", where());
  const u32 first_thread = now.thread;
  for (u32 rest = active; rest != 0; rest &= rest - 1) {
    const u32 lane = static_cast<u32>(std::countr_zero(rest));
    now.thread = first_thread + lane;
    u64 address = registers.value(instruction.address, lane) + static_cast<u64>(instruction.offset);
    if (instruction.address.kind == Kind::bits32) address &= 0xffffffffu;
    move(registers, instruction, lane,
         find(instruction, address, instruction.element_bytes * num_elements, now, where));
  }
  for (u32 i = 0; i < instruction.num_targets; ++i) registers.set_undefined(instruction.targets[i], 0, active);
}

void Memory::move(Registers& registers, const Instruction& instruction, u32 lane, u8* data) {
  constexpr u64 kPattern = 0xdeadbeefdeadbeefu;
  const std::size_t size = instruction.element_bytes;
  const auto load = [&](u32 i) {
    u64 value = data == nullptr ? kPattern >> (64 - 8 * size) : 0;
    if (data != nullptr) std::memcpy(&value, data + i * size, size);
    return value;
  };
  const auto store = [&](u32 i, u64 value) {
    if (data != nullptr) std::memcpy(data + i * size, &value, size);
  };
  switch (instruction.unit) {
    case Unit::load:
      for (u32 i = 0; i < instruction.num_targets; ++i) registers.set_value(instruction.targets[i], lane, load(i));
      break;
    case Unit::store:
      for (u32 i = 0; i < instruction.num_sources; ++i) store(i, registers.value(instruction.sources[i], lane));
      break;
    default: {  // an atomic
      const u64 before = load(0);
      store(0, instruction.update(before, registers.value(instruction.sources[0], lane)));
      if (instruction.num_targets > 0) registers.set_value(instruction.targets[0], lane, before);
    }
  }
}

}  // namespace ptx
