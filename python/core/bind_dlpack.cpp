// Readers of DLPack capsules. They borrow: the capsule keeps the array and is not consumed.
#include <tuple>

#include "bind.hpp"
#include "zcomm/error.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

// DLPack's ABI, the part that a reader of capsules needs: https://dmlc.github.io/dlpack/latest/c_api.html
namespace dlpack {

// Content of a capsule "dltensor", from its beginning.
struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t code;  // of the type
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row by row
  std::uint64_t byte_offset;
};

// Content of a capsule "dltensor_versioned". Readers of major version 1 understand all of its minor versions.
struct VersionedTensor {
  std::uint32_t major;
  std::uint32_t minor;
  void* manager;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

constexpr std::uint32_t kMajor = 1;
constexpr std::uint64_t kReadOnly = 1;
constexpr std::uint64_t kIsCopied = 2;

static_assert(sizeof(Tensor) == 48 && sizeof(VersionedTensor) == 80);

}  // namespace dlpack

// Address, number of elements, dtype, device number, and whether the array is contiguous, read-only, and a copy.
using DlpackArray = std::tuple<std::uintptr_t, std::int64_t, std::string, int, bool, bool, bool>;

// Returns NumPy's name of a type, also of types that no codec takes: error messages need it.
std::string name_of(const dlpack::Tensor& tensor) {
  static constexpr const char* kNames[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  std::string name =
      tensor.code < std::size(kNames) ? kNames[tensor.code] : "DLPack type " + std::to_string(tensor.code);
  if (name == "bool" && tensor.bits == 8) return name;
  name += (tensor.code < std::size(kNames) ? "" : " of bits ") + std::to_string(tensor.bits);
  if (tensor.lanes != 1) name += "x" + std::to_string(tensor.lanes);
  return name;
}

DlpackArray read(const dlpack::Tensor& tensor, std::uint64_t flags) {
  std::int64_t num_elements = 1;
  for (int i = 0; i < tensor.ndim; ++i) num_elements *= tensor.shape[i];
  bool contiguous = true;
  std::int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0 && tensor.strides != nullptr && num_elements > 1; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) contiguous = false;
    stride *= tensor.shape[i];
  }
  return {reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset,
          num_elements,
          name_of(tensor),
          tensor.device_id,
          contiguous,
          (flags & dlpack::kReadOnly) != 0,
          (flags & dlpack::kIsCopied) != 0};
}

DlpackArray read_capsule(const py::handle& capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* versioned =
        static_cast<dlpack::VersionedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    check_argument(versioned->major == dlpack::kMajor, "DLPack version: expected 1.x, got ", versioned->major, ".",
                   versioned->minor);
    return read(versioned->tensor, versioned->flags);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    return read(*static_cast<dlpack::Tensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor")), 0);
  }
  throw ArgumentError("expected a capsule named dltensor or dltensor_versioned from __dlpack__, got " +
                      py::repr(capsule).cast<std::string>());
}

}  // namespace

void bind_dlpack(py::module_& module) { module.def("read_dlpack", &read_capsule, py::arg("capsule")); }

}  // namespace zcomm
