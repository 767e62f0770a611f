// All communicators of the program that the front knows.
#pragma once

#include <memory>

#include "front/parent.hpp"

namespace zcomm::front {

// Returns the entry of a communicator, which the first call makes, with this name. Thread-safe.
std::shared_ptr<Parent> parent_of(nccl::Comm comm, const char* name = "");
// Returns the entry, or null if there is none.
std::shared_ptr<Parent> known_parent_of(nccl::Comm comm);

// Removes the entry of a communicator that ends, and writes its counts. zcomm's communicator ends before the program's.
// After an abort, it ends when the result is destroyed, because its end waits for all work of the device. Returns null
// if there is no entry.
std::shared_ptr<Parent> end_communicator(nccl::Comm comm, bool aborts);

// Notes that a call was compressed. A process that compressed none says so when it ends.
void note_compressed();

}  // namespace zcomm::front
