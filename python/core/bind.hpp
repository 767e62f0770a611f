// Bindings of zcomm._core, the torch-free module: one function per source. Also the conversion of arrays from
// zcomm/_arrays.py: tuples of an address and its contents' shape and type.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "zcomm/cuda.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"

namespace zcomm {

void bind_codec(pybind11::module_& module);
void bind_dlpack(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);

using ArrayTuple = std::tuple<std::uintptr_t, std::int64_t, std::string>;  // address, num_elements, dtype

inline TensorView view_of(const ArrayTuple& array) {
  const auto& [address, num_elements, dtype] = array;
  return {reinterpret_cast<std::byte*>(address), num_elements, parse_dtype(dtype)};
}

template <class View>
std::vector<View> views_of(const std::vector<ArrayTuple>& arrays) {
  std::vector<View> views;
  for (const ArrayTuple& array : arrays) views.push_back(view_of(array));
  return views;
}

inline StreamView stream_of(std::uintptr_t handle) { return {reinterpret_cast<void*>(handle)}; }

// Device numbers, as in zcomm/_arrays.py: a GPU's index, the host, or the current GPU.
inline constexpr int kHost = -1;
inline constexpr int kCurrentDevice = -2;

// Makes a GPU the current one while the result lives; does nothing for other numbers.
inline std::optional<CudaDeviceGuard> make_current(int device) {
  if (device < 0) return std::nullopt;
  return std::optional<CudaDeviceGuard>(std::in_place, device);
}

}  // namespace zcomm
