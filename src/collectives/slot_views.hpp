// Values of all slots of a call, each in one view, or in one view for each segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "zcomm/chunks.hpp"
#include "zcomm/error.hpp"

namespace zcomm {

template <class View>
class SlotViews {
 public:
  SlotViews(std::span<const View> views, std::size_t num_slots) : views_(views), per_slot_(views.size() / num_slots) {}

  template <class Format>
  View operator()(int slot, const Piece<Format>& piece) const {
    const std::size_t first = static_cast<std::size_t>(slot) * per_slot_;
    if (per_slot_ == 1) return views_[first].slice(piece.begin, piece.count);
    return views_[first + piece.segment].slice(piece.in_segment, piece.count);
  }

 private:
  std::span<const View> views_;
  std::size_t per_slot_;
};

// Returns the first slot that `view` overlaps, or -1. Ignores slot `own` if it is the same memory.
template <class View, class Slots>
int overlapped_slot(const View& view, const Slots& slots, int own) {
  const auto begin_of = [](const auto& each) { return reinterpret_cast<std::uintptr_t>(each.data); };
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uintptr_t begin = begin_of(slots[i]);
    const bool is_same =
        static_cast<int>(i) == own && begin == begin_of(view) && slots[i].num_bytes() == view.num_bytes();
    if (!is_same && begin < begin_of(view) + view.num_bytes() && begin_of(view) < begin + slots[i].num_bytes()) {
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

}  // namespace zcomm
