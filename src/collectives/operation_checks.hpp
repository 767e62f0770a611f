// Argument checks of plans and operations. All throw ArgumentError.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "codec/checks.hpp"
#include "zcomm/error.hpp"
#include "zcomm/gather.hpp"

namespace zcomm {

inline void check_rank(const Topology& topology, int rank, const char* name) {
  check_argument(rank >= 0 && rank < topology.size(), name, ": expected 0 to ", topology.size() - 1, ", got ", rank);
}

inline void check(const World& world) {
  check_rank(world.topology, world.rank, "rank");
  check_argument(world.chunk_bytes > 0, "chunk_bytes: expected at least 1, got 0");
}

// Returns the fewest digits that identify a float.
inline std::string exact_digits(float value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof(digits), value).ptr};
}

template <class Views>
const typename Views::value_type& only(const Views& views, const char* name) {
  check_argument(views.size() == 1, name, ": expected one, got ", views.size());
  return views.front();
}

// Checks that there are as many slots as ranks, with this rank's length and `dtype`; `own_name` is for messages.
template <class Views>
void check_slots(const Resources& r, const Views& slots, std::int64_t own_elements, DType dtype, const char* own_name) {
  const int size = r.world.topology.size();
  check_argument(slots.size() == static_cast<std::size_t>(size), "slots: expected one for each of ", size,
                 " ranks, got ", slots.size());
  for (const auto& slot : slots) {
    check_argument(slot.dtype == dtype, "slots: expected dtype ", to_string(dtype), " as in `", own_name, "`, got ",
                   to_string(slot.dtype));
  }
  const std::int64_t slot_elements = slots[static_cast<std::size_t>(r.world.rank)].num_elements;
  check_argument(slot_elements == own_elements, own_name, ": expected the ", slot_elements, " elements of slot ",
                 r.world.rank, ", got ", own_elements);
}

// Returns the first slot that `view` overlaps, or -1. Ignores slot `own` if it is the same memory.
template <class View, class Slots>
int overlapped_slot(const View& view, const Slots& slots, int own) {
  const auto begin_of = [](const auto& each) { return reinterpret_cast<std::uintptr_t>(each.data); };
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uintptr_t begin = begin_of(slots[i]);
    const bool is_same =
        static_cast<int>(i) == own && begin == begin_of(view) && slots[i].num_bytes() == view.num_bytes();
    const bool is_empty = view.num_elements == 0 || slots[i].num_elements == 0;
    if (!is_same && !is_empty && begin < begin_of(view) + view.num_bytes() &&
        begin_of(view) < begin + slots[i].num_bytes()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// Returns views that have the slots' lengths and, of each slot, the address of its first view. Throws ArgumentError if
// the views are one for each segment and one has another length.
template <class View, class Format>
std::vector<View> joined_slots(std::span<const View> views, std::span<const Segment<Format>> segments,
                               std::size_t num_slots) {
  if (segments.size() < 2 || views.size() != num_slots * segments.size()) return {views.begin(), views.end()};
  std::vector<View> slots;
  for (std::size_t i = 0; i < views.size(); ++i) {
    const std::size_t segment = i % segments.size();
    const View& view = views[i];
    check_argument(view.num_elements == segments[segment].num_elements && view.dtype == views.front().dtype,
                   "slots: expected ", segments[segment].num_elements, " elements of ", to_string(views.front().dtype),
                   " in segment ", segment, ", got ", view.num_elements, " of ", to_string(view.dtype));
    if (segment == 0) {
      slots.push_back(view);
    } else {
      slots.back().num_elements += view.num_elements;
    }
  }
  return slots;
}

// Checks that a shard or a sum overlaps no slot but the rank's own. Checks nothing where segments have views of their
// own.
template <class Views, class Slots>
void check_apart(const Resources& r, const Views& views, const Slots& slots, const char* name) {
  if (views.size() != 1 || slots.size() != static_cast<std::size_t>(r.world.topology.size())) return;
  const int slot = overlapped_slot(views.front(), slots, r.world.rank);
  check_argument(slot < 0, name, ": expected memory that overlaps no slot but its own, got some of slot ", slot);
}

// Checks that a plan is for this rank, topology and chunk size.
inline void check_world(const Resources& r, const World& planned) {
  const World& world = r.world;
  check_argument(planned.rank == world.rank && planned.topology == world.topology, "plan: expected one of rank ",
                 world.rank, " in ", world.topology, ", got rank ", planned.rank, " in ", planned.topology);
  check_argument(planned.chunk_bytes == world.chunk_bytes, "plan: expected one with a chunk_bytes of ",
                 world.chunk_bytes, ", got ", planned.chunk_bytes);
}

// Checks that a plan is for this world, and for slots of this shape.
template <class Plan>
void check_plan(const Resources& r, const Plan& plan, const SlotShape& slots) {
  check_world(r, plan.world());
  check_argument(plan.slots() == slots, "plan: expected one of slots ", slots, ", got ", plan.slots());
}

inline void check_secondary(const SecondaryShard& secondary, std::size_t num_bytes) {
  check_argument(secondary.memory.size() == num_bytes, "secondary: expected ", num_bytes, " bytes, got ",
                 secondary.memory.size());
  check_aligned("secondary", secondary.memory.data(), kWireAlignment);
}

// Checks a format for values of this dtype.
inline void check_format(BlockFormat format, DType dtype) {
  check_format(format);
  if (format.kind != ElementKind::exact) check_float(dtype);
}

inline void check_format(HopFormats formats, DType dtype) {
  check_format(formats.intra_node, dtype);
  check_format(formats.inter_node, dtype);
}

// Checks the addresses of a call's values. Outputs whose wires are left have none.
inline void check_addresses(const Arguments& arguments) {
  for (const ConstTensorView& input : arguments.inputs) {
    check_aligned("inputs", input.data, element_size(input.dtype), input.num_elements);
  }
  for (const TensorView& output : arguments.wires.empty() ? arguments.outputs : std::span<const TensorView>()) {
    check_aligned("outputs", output.data, element_size(output.dtype), output.num_elements);
  }
}

inline void check_wires(const Operation& operation, std::span<const std::byte> wires) {
  const std::size_t num_bytes = operation.memory().wires;
  check_argument(num_bytes > 0 || operation.num_chunks() == 0, "wires: expected a gather in a format, got ",
                 operation.description());
  check_argument(wires.size() == num_bytes, "wires: expected ", num_bytes, " bytes, got ", wires.size());
  check_aligned("wires", wires.data(), kWireAlignment);
}

// Checks `feedback` against `planned`, the residual's format in the plan.
inline void check_feedback(const Feedback* feedback, const std::optional<BlockFormat>& planned, std::size_t num_bytes) {
  const auto name = [](const std::optional<BlockFormat>& format) { return format ? format->to_string() : "none"; };
  const std::optional<BlockFormat> given = feedback == nullptr ? std::nullopt : std::optional(feedback->format);
  check_argument(given == planned, [&] {
    return "feedback: expected a residual in the plan's format, " + name(planned) + ", got " + name(given);
  });
  if (feedback == nullptr) return;
  const BlockFormat& format = feedback->format;
  check_argument(format.kind != ElementKind::exact && !format.stochastic,
                 "feedback.format: expected a lossy format that rounds to nearest, got ", format);
  check_aligned("feedback.residual", feedback->residual, kWireAlignment, static_cast<std::int64_t>(num_bytes));
  check_argument(feedback->decay >= 0.0f && feedback->decay <= 1.0f, "feedback.decay: expected 0 to 1, got ",
                 [&] { return exact_digits(feedback->decay); });
}

// Returns " times FACTOR" and the format of the feedback, which ranks compare.
inline std::string words_of_sum(const Arguments& arguments) {
  std::string text = " times " + exact_digits(arguments.factor);
  if (arguments.feedback != nullptr) text.append(" with feedback in ").append(arguments.feedback->format.to_string());
  return text;
}

}  // namespace zcomm
