// What transports say of their failures.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace zcomm::test {

// Texts that on_failure or on_stuck was called with.
class Reasons {
 public:
  std::function<void(const std::string&)> recorder() {
    return [this](const std::string& reason) {
      const std::lock_guard lock(mutex_);
      reasons_.push_back(reason);
    };
  }
  // Waits for a reason and returns it; there must be exactly one.
  std::string only() {
    for (const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(30);
         std::chrono::steady_clock::now() < latest; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      const std::lock_guard lock(mutex_);
      if (!reasons_.empty()) break;
    }
    const std::lock_guard lock(mutex_);
    REQUIRE(reasons_.size() == 1);
    return reasons_[0];
  }
  bool none() {
    const std::lock_guard lock(mutex_);
    return reasons_.empty();
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> reasons_;
};

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace zcomm::test
