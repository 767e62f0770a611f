// Comparison of two functions for one ABI: parameters of equal sizes, pointers in the same places. See
// test_nccl_front.py.
#pragma once

#include <type_traits>

template <class A, class B>
constexpr bool same_layout() {
  return sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;
}

template <class A, class... As, class B, class... Bs>
constexpr bool same_parameters(A (*)(As...), B (*)(Bs...)) {
  if constexpr (sizeof...(As) == sizeof...(Bs)) {
    return same_layout<A, B>() && (same_layout<As, Bs>() && ...);
  } else {
    return false;
  }
}
