// Python bindings of the lossless difference codec. Memory comes as addresses.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "gpu_codec.hpp"
#include "views.hpp"
#include "zcomm/lossless.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

std::pair<std::size_t, std::uint64_t> encode_difference(const ArrayTuple& values, const ArrayTuple& base,
                                                        std::uintptr_t body, const std::string& isa) {
  const auto encoded =
      HostLosslessCodec(isa).encode(view_of(values), view_of(base), reinterpret_cast<std::byte*>(body));
  return {encoded.num_bytes, encoded.hash};
}

std::uint64_t decode_difference(std::uintptr_t body, std::size_t num_bytes, const ArrayTuple& base,
                                const std::string& isa) {
  return HostLosslessCodec(isa).decode({reinterpret_cast<const std::byte*>(body), num_bytes}, view_of(base));
}

std::uint64_t hash_of_values(const ArrayTuple& values, const std::string& isa) {
  return HostLosslessCodec(isa).hash(view_of(values));
}

// --- Jobs in GPU memory, as in lossless.hpp

using EncodeTuple = std::tuple<ArrayTuple, ArrayTuple, std::uint64_t, std::uintptr_t, std::uintptr_t, std::uintptr_t>;
using DecodeTuple = std::tuple<std::uintptr_t, std::size_t, ArrayTuple, std::uint64_t, std::uintptr_t, std::uintptr_t>;
using CheckTuple = std::tuple<ArrayTuple, std::uintptr_t, std::uintptr_t>;

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

EncodeLossless job_of(const EncodeTuple& tuple) {
  const auto& [values, base, generation, message, hash, num_bytes] = tuple;
  return {view_of(values),
          view_of(base),
          generation,
          pointer<std::byte>(message),
          pointer<std::uint64_t>(hash),
          pointer<std::uint64_t>(num_bytes)};
}

DecodeLossless job_of(const DecodeTuple& tuple) {
  const auto& [message, num_bytes, base, generation, hash, status] = tuple;
  return {pointer<const std::byte>(message), num_bytes, view_of(base), generation, pointer<std::uint64_t>(hash),
          pointer<std::uint32_t>(status)};
}

CheckHash job_of(const CheckTuple& tuple) {
  const auto& [values, hash, status] = tuple;
  return {view_of(values), view_of(values), pointer<const std::uint64_t>(hash), pointer<std::uint32_t>(status)};
}

// Queues `operation` of LosslessCodec for a list of tuples.
template <class Job, class Tuple, void (LosslessCodec::*operation)(std::span<const Job>, StreamView) const>
void run_on_device(const std::vector<Tuple>& tuples, int device, std::uintptr_t stream) {
  std::vector<Job> jobs;
  for (const Tuple& tuple : tuples) jobs.push_back(job_of(tuple));
  on_gpu(device, stream, [&](const Codec& codec, StreamView queue) { (codec.lossless()->*operation)(jobs, queue); });
}

}  // namespace

void bind_lossless(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  const auto isa = py::arg("isa") = "";
  module.def("max_lossless_bytes", &max_lossless_bytes, py::arg("num_elements"));
  module.def("encode_difference", &encode_difference, py::arg("values"), py::arg("base"), py::arg("body"), isa, no_gil);
  module.def("decode_difference", &decode_difference, py::arg("body"), py::arg("num_bytes"), py::arg("base"), isa,
             no_gil);
  module.def("hash_of_values", &hash_of_values, py::arg("values"), isa, no_gil);
  const auto jobs = py::arg("jobs");
  const auto device = py::arg("device") = kCurrentDevice;
  const auto stream = py::arg("stream") = 0;
  module.def("encode_lossless_on_device", &run_on_device<EncodeLossless, EncodeTuple, &LosslessCodec::encode>, jobs,
             device, stream, no_gil);
  module.def("decode_lossless_on_device", &run_on_device<DecodeLossless, DecodeTuple, &LosslessCodec::decode>, jobs,
             device, stream, no_gil);
  module.def("check_hashes_on_device", &run_on_device<CheckHash, CheckTuple, &LosslessCodec::check>, jobs, device,
             stream, no_gil);
}

}  // namespace zcomm
