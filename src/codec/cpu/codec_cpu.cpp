// Codec for host memory: checks every job, splits all jobs into tasks and composes the kernels.
#include <algorithm>
#include <cfenv>
#include <cstring>

#include "codec/checks.hpp"
#include "codec/cpu/isa.hpp"
#include "codec/cpu/tiles.hpp"
#include "host/thread_pool.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace cpu {
namespace {

// Elements per task: enough to amortize scheduling, few enough to balance the load. Large calls get large tasks,
// because the first values of a task are not prefetched. Both are multiples of the tile.
constexpr std::int64_t kMinTaskElements = 32768;
constexpr std::int64_t kMaxTaskElements = 524288;
constexpr std::int64_t kTasksPerThread = 8;

// Calls with more values than this write past the caches: the output would be evicted before it is used. A normal store
// reads the line from memory first, which costs decode a third of its speed.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

// Elements per decode step. A sum takes a whole tile, because it makes more calls per step.
constexpr std::int64_t kDecodeTile = 1024;

// Sets the floating-point mode that kernels need: rounding to nearest even, with subnormals. The caller's thread may
// use another mode (torch.set_flush_denormal).
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

// --- Tasks

std::int64_t num_elements(const Encode& job) { return job.values.num_elements; }
std::int64_t num_elements(const Decode& job) { return job.values.num_elements; }
std::int64_t num_elements(const DecodeSum& job) { return job.values.num_elements; }
std::int64_t num_elements(const DecodeSumEncode& job) { return job.num_elements; }

// Returns the elements per task: at most `elements`, and whole blocks if the job writes a wire.
template <class Job>
std::int64_t task_elements(const Job& job, std::int64_t elements) {
  if constexpr (requires { job.format; }) {
    if (job.format.has_scales()) return elements / job.format.block_size * job.format.block_size;
  }
  return elements;
}

template <class Job>
std::int64_t task_elements(std::span<const Job> jobs) {
  std::int64_t all = 0;
  for (const Job& job : jobs) all += num_elements(job);
  const std::int64_t of_thread = all / num_threads() / kTasksPerThread / kTileElements * kTileElements;
  return std::clamp(of_thread, kMinTaskElements, kMaxTaskElements);
}

// Checks all jobs, then calls run(job, begin, count) for element ranges that cover them, in parallel.
template <class Job, class Run>
void run_jobs(std::span<const Job> jobs, const Run& run) {
  for (const Job& job : jobs) check(job);
  thread_local std::vector<std::int64_t> ends;  // running count of tasks; kept to avoid allocation
  ends.clear();
  const std::int64_t elements = task_elements(jobs);
  std::int64_t num_tasks = 0;
  for (const Job& job : jobs) {
    const std::int64_t of_task = task_elements(job, elements);
    num_tasks += (num_elements(job) + of_task - 1) / of_task;
    ends.push_back(num_tasks);
  }
  parallel_for(num_tasks, [&run, jobs, elements, ends = std::span<const std::int64_t>(ends)](std::int64_t task) {
    const auto end = std::upper_bound(ends.begin(), ends.end(), task);
    const Job& job = jobs[static_cast<std::size_t>(end - ends.begin())];
    const std::int64_t first_task = end == ends.begin() ? 0 : *(end - 1);
    const std::int64_t of_task = task_elements(job, elements), begin = (task - first_task) * of_task;
    const DefaultFloatEnvironment environment;
    run(job, begin, std::min(of_task, num_elements(job) - begin));
  });
}

// --- Tiles

template <class Job>
bool writes_past_caches(std::span<const Job> jobs) {
  std::size_t num_bytes = 0;
  for (const Job& job : jobs) num_bytes += job.values.num_bytes();
  return num_bytes >= kStreamBytes;
}

// Calls write(tile, i, stream) for tiles of kElements of `values` that begin at element i.
template <std::int64_t kElements, class Write>
void write_tiles(const Kernels& kernels, TensorView values, bool stream, const Write& write) {
  constexpr std::size_t kLine = 64;
  if (!stream || reinterpret_cast<std::uintptr_t>(values.data) % kLine == 0) {
    for (std::int64_t i = 0; i < values.num_elements; i += kElements) write(values.slice(i, kElements), i, stream);
    if (stream) kernels.end_stream();
    return;
  }
  // Buffers partial lines: a line that is written in parts is slow, so the rest of a tile waits for the next one.
  alignas(kLine) std::byte buffer[kLine + kElements * sizeof(float)];
  std::byte* destination = values.data;
  std::size_t waiting = 0;  // bytes at the front of the buffer
  for (std::int64_t i = 0; i < values.num_elements; i += kElements) {
    const TensorView tile = values.slice(i, kElements);
    write(TensorView{buffer + waiting, tile.num_elements, tile.dtype}, i, false);
    const std::size_t ready = waiting + tile.num_bytes();
    const bool is_last = i + kElements >= values.num_elements;
    waiting = is_last ? 0 : (reinterpret_cast<std::uintptr_t>(destination) + ready) % kLine;
    const std::size_t whole = ready - waiting;
    kernels.stream(buffer, static_cast<std::int64_t>(whole), destination);
    std::memcpy(buffer, buffer + whole, waiting);
    destination += whole;
  }
  kernels.end_stream();
}

// --- Encoding

// Encodes tiles of `values` into a wire with scales; the first tile begins at element `begin` of the wire.
void encode_tiles(const Kernels& kernels, ConstTensorView values, BlockFormat format, const Rounding& rounding,
                  const WireLayout& layout, std::int64_t begin, std::byte* wire) {
  const CodedBlocks blocks = blocks_of(format);
  constexpr std::int64_t kElements = kEncodeTileBytes / sizeof(float) / 2;  // encode_tile makes a float32 copy
  const std::int64_t tile_elements = std::max(kElements / format.block_size, std::int64_t{1}) * format.block_size;
  for (std::int64_t i = 0; i < values.num_elements; i += tile_elements) {
    const ConstTensorView tile = values.slice(i, tile_elements);
    const Random random{rounding.seed, rounding.first_element + begin + i};
    kernels.encode_tile[index_of(values.dtype)](
        tile.data, tile.num_elements, blocks, format.stochastic ? &random : nullptr,
        wire + layout.scale_offset(begin + i), wire + layout.code_offset(begin + i));
  }
}

// Encodes elements [begin, begin + values.num_elements) of a wire of `num_elements`; `begin` starts a block. The last
// range also writes the padding. `stream`: see Kernels.
void encode_range(const Kernels& kernels, ConstTensorView values, BlockFormat format, const Rounding& rounding,
                  std::int64_t num_elements, std::int64_t begin, std::byte* wire, bool stream) {
  const WireLayout layout(format, values.dtype, num_elements);
  std::byte* scales = wire + layout.scale_offset(begin);
  std::byte* codes = wire + layout.code_offset(begin);
  const std::size_t dtype = index_of(values.dtype);
  if (format.hadamard || format.stochastic || format.kind == ElementKind::fp8) {
    encode_tiles(kernels, values, format, rounding, layout, begin, wire);
  } else if (format.has_scales()) {
    kernels.encode[dtype](values.data, values.num_elements, blocks_of(format), scales, codes, stream);
    if (stream) kernels.end_stream();
  } else if (format.kind == ElementKind::exact || values.dtype == DType::bfloat16) {
    std::memcpy(codes, values.data, values.num_bytes());
  } else if (values.dtype == DType::float32) {
    kernels.store_values[index_of(DType::bfloat16)](reinterpret_cast<const float*>(values.data), values.num_elements,
                                                    1.0f, codes, false);
  } else {
    alignas(64) float terms[kTileElements];
    for (std::int64_t i = 0; i < values.num_elements; i += kTileElements) {
      const ConstTensorView tile = values.slice(i, kTileElements);
      kernels.load_values[dtype](tile.data, tile.num_elements, terms);
      kernels.store_values[index_of(DType::bfloat16)](terms, tile.num_elements, 1.0f, codes + 2 * i, false);
    }
  }
  if (begin + values.num_elements == num_elements) {
    std::memset(wire + layout.scales_bytes(), 0, layout.codes_offset - layout.scales_bytes());
    const std::size_t codes_end = layout.codes_offset + layout.codes_bytes;
    std::memset(wire + codes_end, 0, layout.num_bytes - codes_end);
  }
}

// --- The codec

class CpuCodec final : public Codec {
 public:
  explicit CpuCodec(std::string_view isa) : kernels_(*find_isa(isa).kernels), lossless_(isa) {}

  void encode(std::span<const Encode> jobs, StreamView) const override {
    const bool stream = writes_past_caches(jobs);
    run_jobs(jobs, [this, stream](const Encode& job, std::int64_t begin, std::int64_t count) {
      encode_range(kernels_, job.values.slice(begin, count), job.format, job.rounding, job.values.num_elements, begin,
                   job.wire, stream);
    });
  }

  void decode(std::span<const Decode> jobs, StreamView) const override {
    const bool stream = writes_past_caches(jobs);
    run_jobs(jobs, [this, stream](const Decode& job, std::int64_t begin, std::int64_t count) {
      const TensorView values = job.values.slice(begin, count);
      if (!job.wire.format.has_scales() && value_dtype(job.wire) == values.dtype) {
        std::memcpy(values.data, value_at(job.wire, begin), values.num_bytes());
        return;
      }
      write_tiles<kDecodeTile>(kernels_, values, stream, [&](TensorView tile, std::int64_t i, bool past_caches) {
        decode_tile(kernels_, job.wire, job.values.num_elements, begin + i, tile, past_caches);
      });
    });
  }

  void decode_sum(std::span<const DecodeSum> jobs, StreamView) const override {
    const bool all_stream = writes_past_caches(jobs);
    run_jobs(jobs, [this, all_stream](const DecodeSum& job, std::int64_t begin, std::int64_t count) {
      const TensorView values = job.values.slice(begin, count);
      const bool stream = all_stream || job.read_late;
      write_tiles<kTileElements>(kernels_, values, stream, [&](TensorView tile, std::int64_t i, bool past_caches) {
        decode_sum_tile(kernels_, job, begin + i, tile, past_caches);
      });
    });
  }

  void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView) const override {
    run_jobs(jobs, [this](const DecodeSumEncode& job, std::int64_t begin, std::int64_t count) {
      alignas(64) float terms[kTileElements];
      const std::int64_t block_size = job.format.has_scales() ? job.format.block_size : 1;
      const std::int64_t tile_elements = kTileElements / block_size * block_size;
      for (std::int64_t i = 0; i < count; i += tile_elements) {
        const std::int64_t tile_count = std::min(tile_elements, count - i);
        sum_tile(kernels_, job.wires, job.num_elements, begin + i, tile_count, terms);
        TensorView tile{reinterpret_cast<std::byte*>(terms), tile_count, DType::float32};
        alignas(64) std::byte sums[kTileElements * sizeof(float)];
        if (job.format.kind == ElementKind::exact) {  // codes do not preserve a NaN's bits, values do
          kernels_.store_values[index_of(DType::float32)](terms, tile_count, 1.0f, sums, false);
          tile.data = sums;
        }
        encode_range(kernels_, tile, job.format, job.rounding, job.num_elements, begin + i, job.wire, false);
      }
    });
  }

  const LosslessCodec* lossless() const override { return &lossless_; }

 private:
  const Kernels& kernels_;
  const HostLosslessCodec lossless_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Codec> make_cpu_codec(std::string_view isa) { return std::make_unique<cpu::CpuCodec>(isa); }

}  // namespace zcomm
