// Launch of a kernel.
#pragma once

#include "module.hpp"

namespace ptx {

// Runs the CTAs one after the other on the calling thread; thread-safe. `parameter` holds the `num_bytes` of the
// kernel's only parameter. Global memory is the memory that the CUDA runtime on the host has allocated.
void run_grid(const Kernel& kernel, u32 num_ctas, u32 cta_threads, const void* parameter, std::size_t num_bytes);

}  // namespace ptx
