// Site: a place in a program that calls collectives, with counters of its own.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stats.hpp"

namespace zcomm::c10d_binding {

struct Site {
  Site(std::string site_name, std::vector<std::string> lossy_parts)
      : name(std::move(site_name)), parts(std::move(lossy_parts)) {}

  // Returns the telemetry's name of the `index`-th of `count` segments that are not exact.
  std::string name_of_part(std::size_t index, std::size_t count) const {
    return parts.size() == count ? name + "." + parts[index] : name;
  }

  void add(const CallStats& stats) {
    ++calls;
    cost.add(stats);
  }

  const std::string name;
  const std::vector<std::string> parts;
  Stats::Counter calls{0};
  Stats::Compressed cost;
};

using SitePtr = std::shared_ptr<Site>;  // null: unknown place

}  // namespace zcomm::c10d_binding
