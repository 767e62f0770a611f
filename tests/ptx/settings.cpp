#include "settings.hpp"

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace ptx {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

[[noreturn]] void refuse(const char* name, const std::string& value, const char* expected) {
  throw std::runtime_error(std::string(name) + ": expected " + expected + ", got '" + value + "'");
}

Settings read_settings() {
  Settings all;
  all.modules = variable("ZCOMM_PTX");
  const std::string reciprocal = variable("ZCOMM_PTX_RCP");
  if (reciprocal == "random") {
    all.random_reciprocal = true;
  } else if (!reciprocal.empty()) {
    char* end = nullptr;
    all.reciprocal_error = static_cast<i32>(std::strtol(reciprocal.c_str(), &end, 10));
    if (*end != '\0') refuse("ZCOMM_PTX_RCP", reciprocal, "an integer or random");
  }
  const std::string nans = variable("ZCOMM_PTX_NAN");
  if (!nans.empty() && nans != "random") refuse("ZCOMM_PTX_NAN", nans, "random");
  all.random_nans = !nans.empty();
  const std::string order = variable("ZCOMM_PTX_ORDER");
  if (order == "backward") {
    all.order = Order::backward;
  } else if (order == "random") {
    all.order = Order::random;
  } else if (!order.empty() && order != "forward") {
    refuse("ZCOMM_PTX_ORDER", order, "forward, backward or random");
  }
  return all;
}

std::mutex reports_mutex;
Reports& reports() {
  static auto& all = *new Reports;
  return all;
}

}  // namespace

Settings& settings() {
  static Settings& all = *new Settings(read_settings());
  return all;
}

u32 random_bits() {
  thread_local u64 state = 0x9e3779b97f4a7c15u;  // xorshift64
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return static_cast<u32>(state >> 16);
}

void report(const std::string& what, const std::string& where) {
  const std::lock_guard lock(reports_mutex);
  Report& all = reports().try_emplace(what, Report{where}).first->second;
  ++all.count;
}

Reports take_reports() {
  const std::lock_guard lock(reports_mutex);
  return std::exchange(reports(), {});
}

}  // namespace ptx
