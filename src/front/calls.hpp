// Calls of one thread: which are compressed, and the groups that they are in.
#pragma once

#include <span>

#include "front/parent.hpp"

namespace zcomm::front {

// Answers a call of NCCL: compresses it, queues it in the thread's group, or calls `exact`. `config` may be null. The
// caller may free it after this call.
nccl::Result answer(Request request, const nccl::CollConfig* config, ExactCall exact);

// Notes communicators that the real library makes, whose call has had this result. At the end of the thread's group, if
// it has one, their ranks find each other. `config` may be null, and so may `parent`, which one is split off.
nccl::Result follow(nccl::Result result, std::span<nccl::Comm> made, const nccl::Config* config, nccl::Comm parent);

// Follow the thread's groups. end_group() calls `end`, the real function, and queues compressed calls if that ends the
// outermost group: behind its exact ones. drop_group() calls `end`, too, and drops them.
void start_group();
nccl::Result end_group(const std::function<nccl::Result()>& end);
nccl::Result drop_group(const std::function<nccl::Result()>& end);

// Keeps what end_communicator() returned until the thread's group ends, if it has one.
void keep_in_group(std::shared_ptr<Parent> ended);

}  // namespace zcomm::front
