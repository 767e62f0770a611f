// Call of NCCL that may be compressed, as its caller gave it.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <iterator>
#include <optional>
#include <string_view>

#include "transport/nccl_symbols.hpp"
#include "zcomm/block_format.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm::front {

enum class Collective : unsigned char {
  all_gather,
  reduce_scatter,
  all_reduce,
  all_to_all,  // from here on the exchanges, which have one variable
  broadcast,
  gather,
  scatter,
  message,  // a send or a receive
  other     // none that the front compresses
};
inline constexpr int kVendorId = 0x7a636d;  // of ncclConfigExt_t: "zcm"
inline constexpr int kFormatsOption = 1;    // a text such as "int8:128/int4:128" or "exact"

inline constexpr std::array<std::string_view, 9> kCollectiveNames{
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather", "scatter", "message", "other"};

// Of NCCL's ncclRedOp_t and ncclDataType_t.
inline constexpr unsigned kSum = 0;
inline constexpr unsigned kAverage = 4;
constexpr std::optional<DType> dtype_of(unsigned type) {
  if (type == 7) return DType::float32;
  if (type == 9) return DType::bfloat16;
  return type == 6 ? std::optional(DType::float16) : std::nullopt;
}
// Returns the bytes of an element; 0 for a type that NCCL 2.32 does not have.
constexpr std::size_t bytes_of_type(unsigned type) {
  constexpr std::size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type < std::size(kBytes) ? kBytes[type] : 0;
}

struct Request {
  Collective collective = Collective::other;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t count = 0;  // of a slot; of an all-reduce, a broadcast and a message, of the tensor
  unsigned type = 0;      // ncclDataType_t
  unsigned op = kSum;     // ncclRedOp_t
  int root = 0;           // of a broadcast, a gather and a scatter; the other rank of a message
  nccl::Comm comm = nullptr;
  nccl::Stream stream = nullptr;
  const void* caller = nullptr;  // address in the library that made the call
  bool wants_event = false;      // that only NCCL records
  HopFormats formats = {};       // that the call asks for
};

// Tells whether any two ranks may exchange bytes. Gathers and reductions connect fewer pairs.
constexpr bool is_exchange(Collective collective) {
  return collective >= Collective::all_to_all && collective <= Collective::scatter;
}

// Tells whether a call's tensor is one slot, and not one of each rank.
constexpr bool has_one_slot(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::broadcast ||
         collective == Collective::message;
}

// Calls the real function with the request's arguments and a configuration, which only some functions have.
using ExactCall = std::function<nccl::Result(const nccl::CollConfig*)>;

}  // namespace zcomm::front
