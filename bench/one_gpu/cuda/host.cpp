// What Python calls: functions that return null, or what went wrong. Batches of the codec's jobs, NCCL groups with
// their host time, memory of other processes, and the kernels of kernels.cu.
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "probes.hpp"
#include "transport/nccl_symbols.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"

namespace {

using Clock = std::chrono::steady_clock;
using zcomm::nccl::Comm;
using zcomm::nccl::Result;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw zcomm::Error(cudaGetErrorName(error));
}

template <class Body>
const char* said(const Body& body) {
  thread_local std::string text;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

const zcomm::Codec& codec() {
  static auto& workspace = *zcomm::make_cuda_workspace().release();
  static auto& made = *zcomm::make_cuda_codec(workspace).release();
  return made;
}

// A communicator of this rank alone, which sends to itself.
struct Loop {
  Comm communicator = nullptr;
  cudaStream_t stream = nullptr;
  std::byte* bytes = nullptr;  // of all messages, sent ones first
  int most_messages = 0;
};
constexpr std::size_t kMessageBytes = 1024;

const zcomm::nccl::Library& nccl() { return zcomm::nccl::library(); }

void check(Result result) {
  if (result == Result::success || result == Result::in_progress) return;
  throw zcomm::Error(std::string("NCCL: ") + nccl().GetErrorString(result));
}

// As the transport does it: until the group is on its stream.
void settle(const Loop& loop) {
  for (Result state = Result::in_progress; state == Result::in_progress; std::this_thread::yield()) {
    check(nccl().CommGetAsyncError(loop.communicator, &state));
    check(state);
  }
}

// Host seconds of a group: until NCCL returns, and until it is on its stream.
std::pair<double, double> group(const Loop& loop, int num_messages) {
  const Clock::time_point start = Clock::now();
  check(nccl().GroupStart());
  for (int i = 0; i < num_messages; ++i) {
    std::byte* const message = loop.bytes + static_cast<std::size_t>(i) * kMessageBytes;
    check(i < num_messages / 2
              ? nccl().Send(message, kMessageBytes, zcomm::nccl::kInt8, 0, loop.communicator, loop.stream)
              : nccl().Recv(message, kMessageBytes, zcomm::nccl::kInt8, 0, loop.communicator, loop.stream));
  }
  check(nccl().GroupEnd());
  const double returned = since(start);
  settle(loop);
  return {returned, since(start)};
}

// The same while a graph is captured; and host seconds of the launch of that graph.
std::pair<double, double> captured(const Loop& loop, int num_messages) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamBeginCapture(loop.stream, cudaStreamCaptureModeThreadLocal));
  const double seconds = group(loop, num_messages).second;
  check(cudaStreamEndCapture(loop.stream, &graph));
  check(cudaGraphInstantiate(&exec, graph, 0));
  check(cudaGraphLaunch(exec, loop.stream));
  check(cudaStreamSynchronize(loop.stream));
  const Clock::time_point start = Clock::now();
  check(cudaGraphLaunch(exec, loop.stream));
  const double launched = since(start);
  check(cudaStreamSynchronize(loop.stream));
  check(cudaGraphExecDestroy(exec));
  check(cudaGraphDestroy(graph));
  return {seconds, launched};
}

}  // namespace

extern "C" {

const char* probe_floor(int floor, void* data, std::int64_t num_bytes, void* stream) {
  return said([&] { check(run_floor(floor, static_cast<std::byte*>(data), num_bytes, stream)); });
}

// A batch of alike jobs, by operation: 0 encodes values, 1 decodes wires to values, 2 sums `own` and the terms of each
// job to values, 3 encodes that sum. A job has `num_terms` terms, one job's behind the other's.
const char* probe_codec(int operation, std::int64_t num_jobs, const std::int64_t* num_elements, void* const* values,
                        const char* dtype_name, void* const* wires, const char* format_name, int num_terms,
                        void* const* terms, const char* term_format_name, void* const* own, void* stream) {
  return said([&] {
    const auto dtype = zcomm::parse_dtype(dtype_name);
    const auto format = zcomm::BlockFormat::parse(format_name);
    const auto bytes = [](void* data) { return static_cast<std::byte*>(data); };
    std::vector<zcomm::Encode> encodes;
    std::vector<zcomm::Decode> decodes;
    std::vector<zcomm::DecodeSum> sums;
    std::vector<zcomm::DecodeSumEncode> sum_encodes;
    const auto per_job = static_cast<std::size_t>(num_terms) + 1;
    std::vector<zcomm::Wire> all_terms(operation < 2 ? 0 : static_cast<std::size_t>(num_jobs) * per_job);
    for (std::int64_t i = 0; i < num_jobs; ++i) {
      const std::int64_t size = num_elements[i];
      if (operation == 0) encodes.push_back({{bytes(values[i]), size, dtype}, format, bytes(wires[i])});
      if (operation == 1) decodes.push_back({{bytes(wires[i]), format, dtype}, {bytes(values[i]), size, dtype}});
      if (operation < 2) continue;
      const std::span<zcomm::Wire> of_job(all_terms.data() + static_cast<std::size_t>(i) * per_job, per_job);
      of_job[0] = {bytes(own[i]), zcomm::BlockFormat::parse("exact"), dtype};
      for (int k = 0; k < num_terms; ++k) {
        of_job[static_cast<std::size_t>(k) + 1] = {bytes(terms[i * num_terms + k]),
                                                   zcomm::BlockFormat::parse(term_format_name), dtype};
      }
      if (operation == 2) sums.push_back({of_job, 1.0f, {bytes(values[i]), size, dtype}});
      if (operation == 3) sum_encodes.push_back({of_job, size, format, bytes(wires[i])});
    }
    if (!encodes.empty()) codec().encode(encodes, {stream});
    if (!decodes.empty()) codec().decode(decodes, {stream});
    if (!sums.empty()) codec().decode_sum(sums, {stream});
    if (!sum_encodes.empty()) codec().decode_sum_encode(sum_encodes, {stream});
  });
}

const char* probe_nccl_open(const char* wheel, int is_blocking, int most_messages, void** opened) {
  return said([&] {
    const int version = zcomm::nccl::library(wheel).version;
    auto loop = std::make_unique<Loop>();
    zcomm::NcclUniqueId id;
    zcomm::nccl::Config config = zcomm::nccl::config_of(version);
    config.blocking = is_blocking;
    check(nccl().GetUniqueId(&id));
    check(nccl().CommInitRankConfig(&loop->communicator, 1, id, 0, &config));
    settle(*loop);
    check(cudaStreamCreateWithFlags(&loop->stream, cudaStreamNonBlocking));
    check(cudaMalloc(&loop->bytes, static_cast<std::size_t>(most_messages) * kMessageBytes));
    loop->most_messages = most_messages;
    *opened = loop.release();
  });
}

// Two seconds for each of `repeats` groups: of group(), or of captured(). The first group connects and does not count.
const char* probe_nccl_groups(void* opened, int num_messages, int is_captured, int repeats, double* seconds) {
  return said([&] {
    const Loop& loop = *static_cast<Loop*>(opened);
    if (num_messages > loop.most_messages) throw zcomm::Error("more messages than there is memory for");
    for (int i = -1; i < repeats; ++i) {
      const auto [first, second] = is_captured && i >= 0 ? captured(loop, num_messages) : group(loop, num_messages);
      check(cudaStreamSynchronize(loop.stream));
      if (i < 0) continue;
      seconds[2 * i] = first;
      seconds[2 * i + 1] = second;
    }
  });
}

const char* probe_nccl_close(void* opened) {
  return said([&] {
    const std::unique_ptr<Loop> loop(static_cast<Loop*>(opened));
    check(nccl().CommFinalize(loop->communicator));
    settle(*loop);
    check(nccl().CommDestroy(loop->communicator));
    check(cudaFree(loop->bytes));
    check(cudaStreamDestroy(loop->stream));
  });
}

// Host seconds of a kernel's launch, and of an event's record with a wait for it, each the mean of a batch that fits
// the launch queue.
const char* probe_launches(void* data, int num_launches, double* kernel, double* event) {
  return said([&] {
    cudaStream_t stream = nullptr;
    cudaEvent_t mark = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming));
    for (const bool is_counted : {false, true}) {
      Clock::time_point start = Clock::now();
      for (int i = 0; i < num_launches; ++i) check(run_write_pattern(data, 4, 1, stream));
      if (is_counted) *kernel = since(start) / num_launches;
      check(cudaStreamSynchronize(stream));
      start = Clock::now();
      for (int i = 0; i < num_launches; ++i) {
        check(cudaEventRecord(mark, stream));
        check(cudaStreamWaitEvent(stream, mark, 0));
      }
      if (is_counted) *event = since(start) / (2 * num_launches);
      check(cudaStreamSynchronize(stream));
    }
    check(cudaEventDestroy(mark));
    check(cudaStreamDestroy(stream));
  });
}

const char* probe_new_stream(void** stream) {
  return said([&] {
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    *stream = made;
  });
}

const char* probe_synchronize() {
  return said([&] { check(cudaDeviceSynchronize()); });
}

// Device memory for the next three, whose bytes are all 0.
const char* probe_malloc(std::size_t num_bytes, void** data) {
  return said([&] {
    check(cudaMalloc(data, num_bytes));
    check(cudaMemsetAsync(*data, 0, num_bytes, nullptr));
    check(cudaDeviceSynchronize());
  });
}

const char* probe_free(void* data) {
  return said([&] { check(cudaFree(data)); });
}

const char* probe_copy(void* target, const void* source, std::size_t num_bytes) {
  return said([&] { check(cudaMemcpy(target, source, num_bytes, cudaMemcpyDefault)); });
}

// `handle`: 64 bytes.
const char* probe_export(void* data, void* handle) {
  return said([&] {
    cudaIpcMemHandle_t made;
    check(cudaIpcGetMemHandle(&made, data));
    std::memcpy(handle, &made, sizeof made);
  });
}

const char* probe_open(const void* handle, void** data) {
  return said([&] {
    cudaIpcMemHandle_t given;
    std::memcpy(&given, handle, sizeof given);
    check(cudaIpcOpenMemHandle(data, given, cudaIpcMemLazyEnablePeerAccess));
  });
}

const char* probe_close(void* data) {
  return said([&] { check(cudaIpcCloseMemHandle(data)); });
}

const char* probe_write_pattern(void* data, std::int64_t num_bytes, unsigned seed) {
  return said([&] {
    check(run_write_pattern(data, num_bytes, seed, nullptr));
    check(cudaDeviceSynchronize());
  });
}

// How many of the pattern's words are others; `counter`: 8 bytes of device memory.
const char* probe_count_differences(const void* data, std::int64_t num_bytes, unsigned seed, void* counter,
                                    unsigned long long* differences) {
  return said([&] {
    auto* const count = static_cast<unsigned long long*>(counter);
    check(cudaMemsetAsync(count, 0, sizeof *count, nullptr));
    check(run_count_differences(data, num_bytes, seed, count, nullptr));
    check(cudaMemcpy(differences, count, sizeof *count, cudaMemcpyDeviceToHost));
  });
}

const char* probe_meet(const Meeting* meeting, void* stream) {
  return said([&] { check(run_meet(*meeting, stream)); });
}

}  // extern "C"
