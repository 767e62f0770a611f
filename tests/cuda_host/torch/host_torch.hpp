// Makes "cuda:0" a device of a CPU build of torch, over the CUDA runtime on the host, and logs what torch does with its
// streams and events.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace cuda_host::torch {

// Streams have numbers: 0 is the default one, those of the pool count from 101, others are a test's own.
cudaStream_t stream(std::int64_t number);
std::int64_t current_stream();
void set_stream(std::int64_t number);

// "record e1 s7": event 1 is recorded on stream 7. "block s101 e1", "query e1", "pool s101", "pool s101 high". Events
// are numbered in the order of their first use since restart_log().
void log(const std::string& line);
std::vector<std::string> take_log();
void restart_log();

// An allocator as torch's caching one: a freed piece is handed out again at once, to the stream that it was made on.
void install_allocator();
// Pieces that are handed out now, and all that were ever made.
std::int64_t num_live_pieces();
std::int64_t num_made_pieces();
// Bytes of these, and the most there may be, beyond which torch's error is thrown; negative: no limit.
std::int64_t num_made_bytes();
void set_memory_limit(std::int64_t num_bytes);

}  // namespace cuda_host::torch
