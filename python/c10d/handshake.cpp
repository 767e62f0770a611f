#include "handshake.hpp"

#include "python_hooks.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {

const Topology& Handshake::topology() {
  if (is_done_.load(std::memory_order_acquire)) return *topology_;
  const std::lock_guard lock(mutex_);
  if (is_done_.load(std::memory_order_relaxed)) return *topology_;
  try {
    topology_.emplace(call_python(compare_));
  } catch (const Error& error) {
    std::rethrow_exception(errors_.record(error));
  }
  is_done_.store(true, std::memory_order_release);
  return *topology_;
}

}  // namespace zcomm::c10d_binding
