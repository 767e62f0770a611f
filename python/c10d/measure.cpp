#include "measure.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace zcomm::c10d_binding {

Measured measure_on_host(const at::Tensor& original, const at::Tensor& decoded) {
  std::array<double, 6> totals{};
  double largest = 0.0;
  const float* x = original.const_data_ptr<float>();
  const float* y = decoded.const_data_ptr<float>();
  const std::int64_t block = original.size(1);
  for (const float* const end = x + original.numel(); x != end; x += block, y += block) {
    double size = 0.0;
    double error = 0.0;
    double signal = 0.0;
    double noise = 0.0;
    int nonzero = 0;
    int zeroed = 0;
    bool finite = true;
    for (std::int64_t i = 0; i < block; ++i) {
      const double value = x[i];
      const double off = static_cast<double>(y[i]) - value;
      size = std::max(size, std::abs(value));
      error = std::max(error, std::abs(off));
      signal += value * value;
      noise += off * off;
      nonzero += value != 0.0;
      zeroed += value != 0.0 && y[i] == 0.0f;
      finite = finite && std::isfinite(x[i]) && std::isfinite(y[i]);
    }
    if (!finite) continue;
    const double block_error = size > 0.0 ? error / size : 0.0;
    largest = std::max(largest, block_error);
    const std::array<double, 6> sums{
        1.0, static_cast<double>(nonzero), static_cast<double>(zeroed), signal, noise, block_error};
    for (std::size_t i = 0; i < sums.size(); ++i) totals[i] += sums[i];
  }
  return {at::tensor(totals, at::kDouble), at::scalar_tensor(largest, at::kDouble)};
}

Measured measure_on_device(const at::Tensor& original, const at::Tensor& decoded) {
  const at::Tensor x = original.to(at::kDouble);
  const at::Tensor error = decoded.to(at::kDouble).sub_(x).abs_();
  const at::Tensor size = x.abs().amax(1);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor largest_error = error.amax(1);
  const at::Tensor finite = (size < kInfinity).logical_and_(largest_error < kInfinity);  // false for NaN
  const at::Tensor nonzero = x != 0;
  const at::Tensor block_errors = largest_error / size.clamp_min(std::numeric_limits<double>::min());
  const at::Tensor by_block = at::stack({at::ones_like(size), nonzero.sum(1, false, at::kDouble),
                                         nonzero.logical_and(decoded == 0).sum(1, false, at::kDouble),
                                         x.square().sum(1), error.square().sum(1), block_errors});
  const at::Tensor kept = by_block.masked_fill(finite.logical_not(), 0);
  return {kept.sum(1), kept[5].amax()};
}

}  // namespace zcomm::c10d_binding
