// Tests of the GPU's codec with the kernels that nvcc compiled: cudaLaunchKernelEx of tests/cuda_host runs the kernels
// of the modules named by ZCOMM_PTX.
#define DOCTEST_CONFIG_IMPLEMENT
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>

#include "cuda_host.hpp"
#include "grid.hpp"
#include "settings.hpp"

namespace ptx {
namespace {

// Joins the modules of all files.
const Module& module() {
  static const Module& loaded = *new Module([] {
    Module all;
    std::istringstream names(settings().modules);
    for (std::string name; std::getline(names, name, ':');) {
      std::ifstream file(name);
      std::stringstream text;
      text << file.rdbuf();
      if (!file) throw std::runtime_error("ZCOMM_PTX: expected PTX files, got '" + name + "'");
      all.kernels.merge(parse(text.str()).kernels);
    }
    return all;
  }());
  return loaded;
}

std::mutex launched_mutex;
std::set<std::string> launched;  // kernels

// Runs a kernel on a stream's thread, where nobody catches exceptions.
void run_kernel(const void* function, dim3 grid, dim3 block, const void* parameter, std::size_t num_bytes) {
  Dl_info info{};
  const bool is_found = dladdr(function, &info) != 0 && info.dli_sname != nullptr && info.dli_saddr == function;
  const auto kernel = module().kernels.find(is_found ? info.dli_sname : "");
  if (kernel == module().kernels.end()) {
    std::fprintf(stderr, "PTX: expected a kernel of %s, got %s\n", settings().modules.c_str(),
                 is_found ? info.dli_sname : "a function without a name");
    std::abort();
  }
  {
    const std::lock_guard lock(launched_mutex);
    launched.insert(kernel->first);
  }
  run_grid(kernel->second, grid.x, block.x, parameter, num_bytes);
}

// Prints the faults that the checks have counted, and, if `all_tests_ran`, the kernels that have not run. Returns
// whether there are none.
bool is_clean(bool all_tests_ran) {
  bool clean = true;
  for (const auto& [what, all] : take_reports()) {
    std::printf("PTX: %s, %llu times, first at %s\n", what.c_str(), static_cast<unsigned long long>(all.count),
                all.first_place.c_str());
    clean = false;
  }
  for (const auto& [name, kernel] : module().kernels) {
    if (!all_tests_ran || launched.contains(name)) continue;
    std::printf("PTX: expected every kernel to run, got no launch of %s\n", name.c_str());
    clean = false;
  }
  return clean;
}

}  // namespace
}  // namespace ptx

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  try {
    ptx::module();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
  cuda_host::set_kernel_runner(ptx::run_kernel);
  const bool passed = context.run() == 0;
  return ptx::is_clean(argc == 1) && passed ? EXIT_SUCCESS : EXIT_FAILURE;
}
