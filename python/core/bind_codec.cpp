// Python bindings of the codecs, also of lossless differences. Memory comes as addresses: zcomm/_arrays.py has checked
// the arrays.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/lossless.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

using WireTuple = std::tuple<std::uintptr_t, std::string, std::string>;  // address, format, dtype

using TermTuple = std::tuple<std::uintptr_t, std::string, std::string, float>;  // and the wire's factor

Wire wire_of(std::uintptr_t address, const std::string& format, const std::string& dtype, float factor = 1.0f) {
  return {reinterpret_cast<const std::byte*>(address), BlockFormat::parse(format), parse_dtype(dtype), factor};
}

std::vector<Wire> wires_of(const std::vector<TermTuple>& tuples) {
  std::vector<Wire> wires;
  for (const auto& [address, format, dtype, factor] : tuples) wires.push_back(wire_of(address, format, dtype, factor));
  return wires;
}

// Returns the codec for the current device. It lives as long as the process: CUDA may shut down before static objects.
const Codec& cuda_codec() {
  static auto& workspace = *make_cuda_workspace().release();
  static auto& codec = *make_cuda_codec(workspace).release();
  return codec;
}

// Calls body(codec, stream) while `device`, a GPU's index or kCurrentDevice, is the current one.
template <class Body>
void on_gpu(int device, std::uintptr_t stream, Body&& body) {
  check_argument(device != kHost, [] { return std::string("device: expected a GPU, got the host"); });
  const auto guard = make_current(device);
  std::forward<Body>(body)(cuda_codec(), stream_of(stream));
}

// Calls body(codec, stream) with the codec for `device`: a GPU's index, kHost or kCurrentDevice.
template <class Body>
void on_device(int device, std::uintptr_t stream, const std::string& isa, Body&& body) {
  if (device == kHost) return body(*make_cpu_codec(isa), StreamView{});
  on_gpu(device, stream, std::forward<Body>(body));
}

void encode(const ArrayTuple& values, const std::string& format, std::uintptr_t wire, const std::string& isa,
            int device, std::uintptr_t stream, std::uint64_t seed, std::int64_t first_element) {
  const Encode job{
      view_of(values), BlockFormat::parse(format), reinterpret_cast<std::byte*>(wire), {seed, first_element}};
  on_device(device, stream, isa, [&](const Codec& codec, StreamView queue) { codec.encode({&job, 1}, queue); });
}

void decode(const WireTuple& wire, const ArrayTuple& values, const std::string& isa, int device,
            std::uintptr_t stream) {
  const auto& [address, format, dtype] = wire;
  const Decode job{wire_of(address, format, dtype), view_of(values)};
  on_device(device, stream, isa, [&](const Codec& codec, StreamView queue) { codec.decode({&job, 1}, queue); });
}

void decode_sum(const std::vector<TermTuple>& wires, float factor, const ArrayTuple& values, const std::string& isa,
                int device, std::uintptr_t stream) {
  const std::vector<Wire> sources = wires_of(wires);
  const DecodeSum job{sources, factor, view_of(values)};
  on_device(device, stream, isa, [&](const Codec& codec, StreamView queue) { codec.decode_sum({&job, 1}, queue); });
}

void decode_sum_encode(const std::vector<TermTuple>& wires, std::int64_t num_elements, const std::string& format,
                       std::uintptr_t wire, const std::string& isa, int device, std::uintptr_t stream,
                       std::uint64_t seed, std::int64_t first_element) {
  const std::vector<Wire> sources = wires_of(wires);
  const DecodeSumEncode job{
      sources, num_elements, BlockFormat::parse(format), reinterpret_cast<std::byte*>(wire), {seed, first_element}};
  on_device(device, stream, isa,
            [&](const Codec& codec, StreamView queue) { codec.decode_sum_encode({&job, 1}, queue); });
}

// --- Lossless differences

std::pair<std::size_t, std::uint64_t> encode_difference(const ArrayTuple& values, const ArrayTuple& base,
                                                        std::uintptr_t body, const std::string& isa) {
  return HostLosslessCodec(isa).encode(view_of(values), view_of(base), reinterpret_cast<std::byte*>(body));
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
  return {view_of(values), view_of(values), pointer<std::uint64_t>(hash), pointer<std::uint32_t>(status)};
}

// Queues `operation` of LosslessCodec for a list of tuples.
template <class Job, class Tuple, void (LosslessCodec::*operation)(std::span<const Job>, StreamView) const>
void run_on_device(const std::vector<Tuple>& tuples, int device, std::uintptr_t stream) {
  std::vector<Job> jobs;
  for (const Tuple& tuple : tuples) jobs.push_back(job_of(tuple));
  on_gpu(device, stream, [&](const Codec& codec, StreamView queue) { (codec.lossless()->*operation)(jobs, queue); });
}

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

}  // namespace

void bind_codec(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  const auto isa = py::arg("isa") = "";
  const auto device = py::arg("device") = kHost;
  const auto stream = py::arg("stream") = 0;
  const auto seed = py::arg("seed") = 0;
  const auto first_element = py::arg("first_element") = 0;
  module.def("encode", &encode, py::arg("values"), py::arg("format"), py::arg("wire"), isa, device, stream, seed,
             first_element, no_gil);
  module.def("decode", &decode, py::arg("wire"), py::arg("values"), isa, device, stream, no_gil);
  module.def("decode_sum", &decode_sum, py::arg("wires"), py::arg("factor"), py::arg("values"), isa, device, stream,
             no_gil);
  module.def("decode_sum_encode", &decode_sum_encode, py::arg("wires"), py::arg("num_elements"), py::arg("format"),
             py::arg("wire"), isa, device, stream, seed, first_element, no_gil);
  bind_lossless(module);
  module.def("cpu_isas", &cpu_isas);
  module.def("set_num_threads", &set_num_threads, py::arg("num_threads"));
  module.def("num_threads", &num_threads);
}

}  // namespace zcomm
