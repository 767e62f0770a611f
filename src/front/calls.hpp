// Calls of one thread: which are compressed, and the groups that they are in.
#pragma once

#include <span>

#include "front/parent.hpp"

namespace zcomm::front {

// Answers a call of NCCL: compresses it, queues it in the thread's group, or calls `exact`. `config` may be null. The
// caller may free it after this call.
nccl::Result answer(Request request, const nccl::CollConfig* config, ExactCall exact);

// Follows communicators that the real library has made with this result, or makes at the end of the thread's group.
// `config` may be null, and so may `parent`, which they are split off.
nccl::Result follow(nccl::Result result, std::span<nccl::Comm> made, const nccl::Config* config, nccl::Comm parent);

// Follow the thread's groups. end_group() calls `end`, the real function, and queues compressed calls if that ends the
// outermost group: behind its exact ones. The last function drops them.
void start_group();
nccl::Result end_group(const std::function<nccl::Result()>& end);
void drop_group();

// Keeps what end_communicator() returned until the thread's group ends, if it has one.
void keep_in_group(std::shared_ptr<Parent> ended);

}  // namespace zcomm::front
