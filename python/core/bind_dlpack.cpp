// Readers of DLPack capsules. They borrow: the capsule keeps the array and is not consumed.
#include "bind.hpp"
#include "zcomm/error.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

// DLPack's ABI, the part that a reader of capsules needs: https://dmlc.github.io/dlpack/latest/c_api.html
namespace dlpack {

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row by row
  std::uint64_t byte_offset;
};

// Content of a capsule "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

// Content of a capsule "dltensor_versioned". Readers of major version 1 understand all of its minor versions.
struct ManagedTensorVersioned {
  std::uint32_t major;
  std::uint32_t minor;
  void* manager;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

constexpr std::uint32_t kMajor = 1;
constexpr std::uint64_t kReadOnly = 1;
constexpr std::uint64_t kIsCopied = 2;

static_assert(sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64 && sizeof(ManagedTensorVersioned) == 80);

}  // namespace dlpack

struct DlpackArray {
  std::uintptr_t address = 0;
  std::int64_t num_elements = 1;
  std::string dtype;
  int device_type = 0;
  int device_id = 0;
  bool contiguous = true;
  bool read_only = false;
  bool copied = false;
};

// Returns NumPy's name of a type, also of types that no codec takes: error messages need it.
std::string name_of(dlpack::DataType dtype) {
  static constexpr const char* kNames[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  std::string name = dtype.code < std::size(kNames) ? kNames[dtype.code] : "DLPack type " + std::to_string(dtype.code);
  if (name == "bool" && dtype.bits == 8) return name;
  name += (dtype.code < std::size(kNames) ? "" : " of bits ") + std::to_string(dtype.bits);
  if (dtype.lanes != 1) name += "x" + std::to_string(dtype.lanes);
  return name;
}

DlpackArray read(const dlpack::Tensor& tensor, std::uint64_t flags) {
  DlpackArray array;
  for (int i = 0; i < tensor.ndim; ++i) array.num_elements *= tensor.shape[i];
  std::int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0 && tensor.strides != nullptr && array.num_elements > 1; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) array.contiguous = false;
    stride *= tensor.shape[i];
  }
  array.address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
  array.dtype = name_of(tensor.dtype);
  array.device_type = tensor.device.type;
  array.device_id = tensor.device.id;
  array.read_only = (flags & dlpack::kReadOnly) != 0;
  array.copied = (flags & dlpack::kIsCopied) != 0;
  return array;
}

DlpackArray read_capsule(const py::handle& capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed =
        static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    check_argument(managed->major == dlpack::kMajor, [&] {
      return "DLPack version: expected 1.x, got " + std::to_string(managed->major) + "." +
             std::to_string(managed->minor);
    });
    return read(managed->tensor, managed->flags);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    return read(static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor, 0);
  }
  throw ArgumentError("expected a capsule named dltensor or dltensor_versioned from __dlpack__, got " +
                      py::repr(capsule).cast<std::string>());
}

}  // namespace

void bind_dlpack(py::module_& module) {
  py::class_<DlpackArray>(module, "DlpackArray")
      .def_readonly("address", &DlpackArray::address)
      .def_readonly("num_elements", &DlpackArray::num_elements)
      .def_readonly("dtype", &DlpackArray::dtype)
      .def_readonly("device_type", &DlpackArray::device_type)
      .def_readonly("device_id", &DlpackArray::device_id)
      .def_readonly("contiguous", &DlpackArray::contiguous)
      .def_readonly("read_only", &DlpackArray::read_only)
      .def_readonly("copied", &DlpackArray::copied);
  module.def("read_dlpack", &read_capsule, py::arg("capsule"));
}

}  // namespace zcomm
