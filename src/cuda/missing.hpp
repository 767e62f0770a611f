// Error of a build without CUDA.
#pragma once

namespace zcomm {

// Throws Error that names what to install.
[[noreturn]] void throw_cuda_missing();

}  // namespace zcomm
