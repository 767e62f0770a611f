#include "zcomm/operation.hpp"

#include "zcomm/error.hpp"

namespace zcomm {

// NOLINTNEXTLINE(performance-unnecessary-value-param): others take it over
OperationPtr Operation::keeping(std::shared_ptr<Kept>) const {
  throw ArgumentError("kept: expected none for " + description() + ", which keeps nothing, got memory");
}

}  // namespace zcomm
