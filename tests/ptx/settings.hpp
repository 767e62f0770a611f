// Choices that PTX and CUDA leave open, for this run, and faults that a run has found.
#pragma once

#include <map>
#include <string>

#include "integers.hpp"

namespace ptx {

enum class Order { forward, backward, random };

struct Settings {
  std::string modules;             // files, with colons between them; from ZCOMM_PTX
  i32 reciprocal_error = 0;        // of rcp.approx, in units of the last place; from ZCOMM_PTX_RCP
  bool random_reciprocal = false;  // or a random one of -1, 0 and 1 for each lane; "random" in ZCOMM_PTX_RCP
  bool random_nans = false;        // payloads and signs of the NaNs that instructions make; "random" in ZCOMM_PTX_NAN
  Order order = Order::forward;    // of CTAs, and of warps between barriers; from ZCOMM_PTX_ORDER
};

// Returns the settings, read once from the variables; throws std::runtime_error on an invalid value. Tests change them.
Settings& settings();

// Returns random bits of the calling thread, the same in every run.
u32 random_bits();

// Reports an illegal act of a kernel.
struct Report {
  std::string first_place;
  u64 count = 0;
};
using Reports = std::map<std::string, Report>;  // by what it is
void report(const std::string& what, const std::string& where);
// Returns and clears the reports since the last call.
Reports take_reports();

}  // namespace ptx
