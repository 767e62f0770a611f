// The machines and sizes of the table that `make gpu-model` prints.
#pragma once

#include <array>
#include <vector>

#include "simulated_gpu.hpp"

namespace zcomm::model {

inline constexpr std::array<std::size_t, 6> kMebibytes{1, 4, 16, 64, 256, 1024};

// Each GPU has a share of the network of its own, of that many Gbit/s. NVLink of an H100: 450 GB/s in each direction.
inline std::vector<Machine> machines() {
  constexpr double kNvlink = 450e9;
  constexpr double kPcie4 = 32e9;
  constexpr double kGbit = 1e9 / 8;
  return {{"8, NVLink", 1, 8, kNvlink, 0},
          {"2x8, NVLink, 400 Gbit/s", 2, 8, kNvlink, 400 * kGbit},
          {"2x8, NVLink, 100 Gbit/s", 2, 8, kNvlink, 100 * kGbit},
          {"16x8, NVLink, 400 Gbit/s", 16, 8, kNvlink, 400 * kGbit},
          {"16x8, NVLink, 100 Gbit/s", 16, 8, kNvlink, 100 * kGbit},
          {"64x8, NVLink, 400 Gbit/s", 64, 8, kNvlink, 400 * kGbit},
          {"8, PCIe 4", 1, 8, kPcie4, 0},
          {"2x8, PCIe 4, 100 Gbit/s", 2, 8, kPcie4, 100 * kGbit}};
}

}  // namespace zcomm::model
