// Error texts of gathers by differences.
#pragma once

#include <cstdint>
#include <string>

#include "zcomm/error.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm {

inline std::string in_slot(int slot, const std::string& what) {
  return "differences of slot " + std::to_string(slot) + ": " + what;
}

// Describes a message with another base. The owner of a slot has the slot's number; `base` is this rank's generation.
inline std::string other_base(int slot, std::uint64_t base) {
  return in_slot(slot, "generation " + std::to_string(base) + " of this rank and of rank " + std::to_string(slot) +
                           " are not the same");
}
inline std::string other_result(int slot, std::uint64_t base, const std::string& why) {
  return in_slot(slot, "what this rank has made of generation " + std::to_string(base) + " is not generation " +
                           std::to_string(base + 1) + " of rank " + std::to_string(slot) + ": " + why);
}
inline constexpr const char* kOtherBody = "difference: expected what an encoder wrote, got other bytes";
inline constexpr const char* kStrayWrite = "something has written into what one of the two keeps";
inline std::string written_to(int slot, std::uint64_t generation, int rank) {
  return in_slot(slot, "generation " + std::to_string(generation) + " was written to on rank " + std::to_string(rank) +
                           " since it was gathered: something has written into what it keeps, or its weights have "
                           "changed in a way that PyTorch does not count");
}

// Reads the header of a message for `values` of `slot`. Throws TransportError unless it refers to generation `base` or,
// if that is 0, has whole values. Does not check hashes.
inline LosslessHeader checked_header(const std::byte* wire, int slot, std::uint64_t base, ConstTensorView values) {
  LosslessHeader header;
  try {
    header = read_header(wire);
  } catch (const Error& error) {
    throw TransportError(in_slot(slot, error.what()));
  }
  if (header.generation != base || (header.kind == LosslessHeader::Kind::difference) != (base > 0)) {
    throw TransportError(in_slot(slot, "this rank holds generation " + std::to_string(base) + ", rank " +
                                           std::to_string(slot) + " sent what goes with generation " +
                                           std::to_string(header.generation)));
  }
  const std::size_t most = base > 0 ? max_lossless_bytes(values.num_elements) : values.num_bytes();
  if (header.body_bytes > most || (base == 0 && header.body_bytes != most)) {
    throw TransportError(in_slot(slot, "rank " + std::to_string(slot) + " announced " +
                                           std::to_string(header.body_bytes) + " bytes, expected " +
                                           (base > 0 ? "at most " : "") + std::to_string(most)));
  }
  return header;
}

}  // namespace zcomm
