// What a build without CUDA says.
#pragma once

namespace zcomm {

// Throws Error that says what to install.
[[noreturn]] void throw_cuda_missing();

}  // namespace zcomm
