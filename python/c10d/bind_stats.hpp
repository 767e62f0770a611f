// Conversion of statistics and samples to Python.
#pragma once

#include "auto_policy.hpp"
#include "bind.hpp"
#include "send_recv.hpp"
#include "stats.hpp"
#include "telemetry.hpp"

namespace zcomm::c10d_binding {

py::dict stats_of(Stats& stats);
py::dict sent_of(const std::map<int, SendRecv::Sent>& sent);
py::list decisions_of(const AutoPolicy& policy);
py::object step_decision_of(const AutoPolicy& policy);  // None without a decision by steps
py::list losses_of(Telemetry& telemetry);

}  // namespace zcomm::c10d_binding
