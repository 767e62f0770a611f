// A launch of a kernel.
#pragma once

#include "module.hpp"

namespace ptx {

// Runs the CTAs one after the other on the calling thread, in which any number of threads of the host can do the same.
// `parameter`: `num_bytes` of the kernel's only one. Global memory is what the CUDA runtime on the host has allocated.
void run_grid(const Kernel& kernel, u32 num_ctas, u32 cta_threads, const void* parameter, std::size_t num_bytes);

}  // namespace ptx
