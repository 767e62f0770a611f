#include "zcomm/operation.hpp"

#include "zcomm/error.hpp"

namespace zcomm {

// NOLINTNEXTLINE(performance-unnecessary-value-param): others take it over
OperationPtr Operation::keeping(std::shared_ptr<Kept>) const {
  throw ArgumentError("kept: expected none for " + description() + ", which keeps nothing, got memory");
}

void Operation::decode(const Codec&, const Arguments&, StreamView) const {
  throw ArgumentError("wires: expected a gather in a format, got " + description());
}

}  // namespace zcomm
