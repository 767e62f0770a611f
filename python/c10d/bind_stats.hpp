// Statistics and samples as Python has them.
#pragma once

#include "bind.hpp"
#include "stats.hpp"
#include "telemetry.hpp"

namespace zcomm::c10d_binding {

py::dict stats_of(Stats& stats);
py::list losses_of(Telemetry& telemetry);

}  // namespace zcomm::c10d_binding
