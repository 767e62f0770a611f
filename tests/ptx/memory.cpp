#include "memory.hpp"

#include <bit>
#include <cstring>

#include "settings.hpp"

namespace ptx {

void SharedMemory::begin() {
  for (u8& byte : bytes_) byte = static_cast<u8>(random_bits());
  history_.assign(history_.size(), {});
}

bool SharedMemory::note(std::size_t begin, std::size_t num_bytes, bool is_store, const Moment& now) {
  bool is_ordered = true;
  for (std::size_t i = begin; i < begin + num_bytes; ++i) {
    History& history = history_[i];
    if (history.is_written && !history.last_store.is_ordered_with(now)) is_ordered = false;
    if (is_store && history.is_read && !history.last_load.is_ordered_with(now)) is_ordered = false;
    (is_store ? history.is_written : history.is_read) = true;
    (is_store ? history.last_store : history.last_load) = now;
  }
  return is_ordered;
}

bool SharedMemory::is_written(std::size_t begin, std::size_t num_bytes) const {
  for (std::size_t i = begin; i < begin + num_bytes; ++i) {
    if (!history_[i].is_written) return false;
  }
  return true;
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
  const bool is_store = instruction.unit == Unit::store;
  if (!is_store && !shared_.is_written(address, num_bytes)) report("shared memory read before it is written", where());
  if (!shared_.note(address, num_bytes, is_store, now)) report("race in shared memory", where());
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
  u8* const data = find_global(address, num_bytes);
  if (data == nullptr) {
    const bool is_load = instruction.unit == Unit::load;
    report(is_load ? "load out of bounds of global memory" : "store out of bounds of global memory", where());
  }
  return data;
}

void Memory::access(Registers& registers, const Instruction& instruction, u32 active, Moment now,
                    const std::function<std::string()>& where) {
  constexpr u64 kPattern = 0xdeadbeefdeadbeefu;
  const bool is_load = instruction.unit == Unit::load;
  const std::size_t size = instruction.element_bytes;
  const u32 num_elements = is_load ? instruction.num_targets : instruction.num_sources;
  if ((registers.undefined(instruction.address) & active) != 0) report("undefined address", where());
  if ((registers.undefined_sources(instruction) & active) != 0) report("undefined value stored", where());
  const u32 first_thread = now.thread;
  for (u32 rest = active; rest != 0; rest &= rest - 1) {
    const u32 lane = static_cast<u32>(std::countr_zero(rest));
    now.thread = first_thread + lane;
    u64 address = registers.value(instruction.address, lane) + static_cast<u64>(instruction.offset);
    if (instruction.address.kind == Kind::bits32) address &= 0xffffffffu;
    u8* const data = find(instruction, address, size * num_elements, now, where);
    for (u32 i = 0; i < num_elements; ++i) {
      if (is_load) {
        u64 value = data == nullptr ? kPattern >> (64 - 8 * size) : 0;
        if (data != nullptr) std::memcpy(&value, data + i * size, size);
        registers.set_value(instruction.targets[i], lane, value);
      } else if (data != nullptr) {
        const u64 value = registers.value(instruction.sources[i], lane);
        std::memcpy(data + i * size, &value, size);
      }
    }
  }
  if (!is_load) return;
  for (u32 i = 0; i < num_elements; ++i) registers.set_undefined(instruction.targets[i], 0, active);
}

}  // namespace ptx
