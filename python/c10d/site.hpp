// Where in a program collectives are called from: counted by themselves.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "stats.hpp"

namespace zcomm::c10d_binding {

struct Site {
  explicit Site(std::string site_name) : name(std::move(site_name)) {}

  void add(const CallStats& stats) {
    ++calls;
    cost.add(stats);
  }

  const std::string name;
  Stats::Counter calls{0};
  Stats::Compressed cost;
};

using SitePtr = std::shared_ptr<Site>;  // none: of no known place

}  // namespace zcomm::c10d_binding
