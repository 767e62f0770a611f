#include "grid.hpp"

#include <cstring>
#include <numeric>

#include "settings.hpp"
#include "warp.hpp"

namespace ptx {
namespace {

std::vector<u32> make_order(u32 count) {
  std::vector<u32> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (settings().order == Order::backward) std::reverse(order.begin(), order.end());
  if (settings().order == Order::random) {
    for (u32 i = count; i > 1; --i) std::swap(order[i - 1], order[random_bits() % i]);
  }
  return order;
}

// A kernel's only parameter, at an address that is aligned as the module says and no better.
class Parameter {
 public:
  Parameter(const Kernel& kernel, const void* data, std::size_t num_bytes)
      : room_(num_bytes + 3 * kernel.parameter_alignment) {
    const auto begin = reinterpret_cast<std::uintptr_t>(room_.data()), alignment = kernel.parameter_alignment;
    std::uintptr_t at = (begin + alignment - 1) / alignment * alignment;
    if (at % (2 * alignment) == 0) at += alignment;
    data_ = room_.data() + (at - begin);
    std::memcpy(data_, data, num_bytes);
  }
  const std::byte* data() const { return data_; }

 private:
  std::vector<std::byte> room_;
  std::byte* data_;
};

class Grid {
 public:
  Grid(const Kernel& kernel, u32 num_ctas, u32 cta_threads, const std::byte* parameter)
      : kernel_(kernel),
        num_ctas_(num_ctas),
        cta_threads_(cta_threads),
        parameter_(parameter),
        memory_(kernel, parameter) {}

  void run() {
    for (const u32 index : make_order(num_ctas_)) run_cta(index);
  }

 private:
  void run_cta(u32 index) {
    CtaState cta{kernel_, memory_, index};
    memory_.begin_cta();
    std::vector<std::unique_ptr<Warp>> warps((cta_threads_ + kLanes - 1) / kLanes);
    for (std::size_t num_done = 0; num_done < warps.size(); ++cta.barriers) {
      for (const u32 w : make_order(static_cast<u32>(warps.size()))) {
        if (warps[w] != nullptr && warps[w]->state() == Warp::State::done) continue;
        if (warps[w] == nullptr) {
          warps[w] = make_warp(cta, w * kLanes);
        } else {
          warps[w]->pass_barrier();
        }
        warps[w]->run();
        if (warps[w]->state() != Warp::State::done) continue;
        ++num_done;
        unused_.push_back(warps[w]->give_back_registers());
      }
    }
  }

  std::unique_ptr<Warp> make_warp(CtaState& cta, u32 first_thread) {
    if (unused_.empty()) unused_.push_back(std::make_unique<Registers>(kernel_));
    std::unique_ptr<Registers> registers = std::move(unused_.back());
    unused_.pop_back();
    registers->begin(first_thread, cta.index, cta_threads_, num_ctas_, reinterpret_cast<u64>(parameter_));
    return std::make_unique<Warp>(cta, first_thread, std::min(kLanes, cta_threads_ - first_thread),
                                  std::move(registers));
  }

  const Kernel& kernel_;
  const u32 num_ctas_, cta_threads_;
  const std::byte* const parameter_;
  Memory memory_;
  std::vector<std::unique_ptr<Registers>> unused_;
};

}  // namespace

void run_grid(const Kernel& kernel, u32 num_ctas, u32 cta_threads, const void* parameter, std::size_t num_bytes) {
  if (num_bytes != kernel.parameter_bytes) {
    report("parameter of " + std::to_string(num_bytes) + " bytes on the host, of " +
               std::to_string(kernel.parameter_bytes) + " in the module",
           kernel.name);
    return;
  }
  if (kernel.max_threads != 0 && cta_threads > kernel.max_threads) report("more threads than .maxntid", kernel.name);
  const Parameter copy(kernel, parameter, num_bytes);
  Grid(kernel, num_ctas, cta_threads, copy.data()).run();
}

}  // namespace ptx
