// Headers, tables of tiles and parallel tasks around the loops of kernels.inl.
#include "zcomm/lossless.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "codec/cpu/isa.hpp"
#include "codec/lossless/checks.hpp"
#include "codec/lossless/kernels.hpp"
#include "hash.hpp"
#include "host/thread_pool.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace lossless {
namespace {

constexpr HashKeys make_keys() {
  HashKeys keys{};
  std::uint64_t number = 0;
  for (std::uint32_t& key : keys.words) key = static_cast<std::uint32_t>(mix(++number * kGoldenGamma) >> 32);
  return keys;
}

// Returns the share of tile number `tile` in a message's hash.
std::uint64_t hash_of_tile(const std::uint64_t* lanes, std::int64_t tile) {
  std::uint64_t hash = 0;
  for (int lane = 0; lane < kNumLanes; ++lane) {
    hash += mix(lanes[lane] + static_cast<std::uint64_t>(tile * kNumLanes + lane + 1) * kGoldenGamma);
  }
  return hash;
}

const Kernels& kernels_of([[maybe_unused]] std::string_view isa) {
#ifdef ZCOMM_X86_KERNELS
  if (isa == "avx512") return kAvx512Kernels;
  // Avoids AVX2 kernels on AMD Zen 1 and 2, where pext and pdep take hundreds of cycles.
  if (isa == "avx2" && !__builtin_cpu_is("amdfam17h")) return kAvx2Kernels;
#endif
  return kBaselineKernels;
}

// Returns the place of a dtype in Kernels.
std::size_t index_of(DType dtype) {
  return static_cast<std::size_t>(dtype) - static_cast<std::size_t>(DType::bfloat16);
}

std::int64_t num_tiles(std::int64_t num_elements) { return (num_elements + kTileValues - 1) / kTileValues; }

int count_of(std::int64_t tile, std::int64_t num_elements) {
  return static_cast<int>(std::min<std::int64_t>(num_elements - tile * kTileValues, kTileValues));
}

std::size_t table_bytes(std::int64_t tiles) { return static_cast<std::size_t>(tiles + 1) / 2 * 4; }

// Tiles [first, end) of a message: one task.
struct Run {
  std::int64_t first;
  std::int64_t end;
  std::uint64_t hash = 0;
  std::size_t num_bytes = 0;
};

constexpr std::int64_t kRunTiles = 32;

std::vector<Run> cut(std::int64_t tiles) {
  std::vector<Run> runs;
  for (std::int64_t first = 0; first < tiles; first += kRunTiles) {
    runs.push_back({first, std::min(first + kRunTiles, tiles)});
  }
  return runs;
}

// Calls work(run) for each run, in parallel; returns the sum of their hashes.
template <class Work>
std::uint64_t for_each_run(std::vector<Run>& runs, const Work& work) {
  parallel_for(static_cast<std::int64_t>(runs.size()),
               [&](std::int64_t i) { work(runs[static_cast<std::size_t>(i)]); });
  std::uint64_t hash = 0;
  for (const Run& run : runs) hash += run.hash;
  return hash;
}

template <class Bytes>
Bytes* tile_at(BasicTensorView<Bytes> values, std::int64_t tile) {
  return values.data + tile * kTileBytes;
}

}  // namespace

constinit const HashKeys kHashKeys = make_keys();

}  // namespace lossless

using namespace lossless;

std::size_t max_lossless_bytes(std::int64_t num_elements) {
  return align_wire(table_bytes(num_tiles(num_elements)) + static_cast<std::size_t>(num_elements + 1) / 2 * 4);
}

// --- Headers

namespace {

constexpr std::uint64_t kMagic = 0x3631445a;  // "ZD16"
constexpr std::uint64_t kVersion = 1;

}  // namespace

void write_header(const LosslessHeader& header, std::byte* wire) {
  const std::uint64_t fields[kLosslessHeaderBytes / 8] = {
      kMagic | kVersion << 32 | std::uint64_t{header.is_difference} << 40, kLosslessHeaderBytes + header.body_bytes,
      header.generation, header.base_hash, header.result_hash};
  std::memcpy(wire, fields, sizeof fields);
}

LosslessHeader read_header(const std::byte* wire) {
  std::uint64_t fields[kLosslessHeaderBytes / 8], expected[kLosslessHeaderBytes / 8];
  std::memcpy(fields, wire, sizeof fields);
  const std::uint64_t kind = fields[0] >> 40 & 0xff, num_bytes = fields[1];
  const LosslessHeader header{kind == 1, num_bytes - kLosslessHeaderBytes, fields[2], fields[3], fields[4]};
  write_header(header, reinterpret_cast<std::byte*>(expected));
  if (num_bytes < kLosslessHeaderBytes || !std::equal(fields, std::end(fields), expected)) {
    throw Error("difference: expected a header of magic " + std::to_string(kMagic) + ", version " +
                std::to_string(kVersion) + ", kind 0 or 1, at least " + std::to_string(kLosslessHeaderBytes) +
                " bytes, and zeros in the rest, got magic " + std::to_string(fields[0] & 0xffffffff) + ", version " +
                std::to_string(fields[0] >> 32 & 0xff) + ", kind " + std::to_string(kind) + " and " +
                std::to_string(num_bytes) + " bytes");
  }
  return header;
}

// --- Bodies

HostLosslessCodec::HostLosslessCodec(std::string_view isa) : kernels_(&kernels_of(cpu::find_kernels(isa).isa)) {}

std::pair<std::size_t, std::uint64_t> HostLosslessCodec::encode(ConstTensorView values, TensorView base,
                                                                std::byte* body) const {
  check_values_and_base(values, base);
  check_aligned("body", body, kWireAlignment, values.num_elements);
  const auto encode_tile = kernels_->encode[index_of(base.dtype)];
  const std::int64_t tiles = num_tiles(values.num_elements);
  std::byte* const first_tile = body + table_bytes(tiles);
  std::memset(body, 0, table_bytes(tiles));
  std::vector<Run> runs = cut(tiles);
  // Encodes each run at its latest possible position, then moves all runs together.
  const std::uint64_t hash = for_each_run(runs, [&](Run& run) {
    std::byte* const begin = first_tile + run.first * kTileBytes;
    for (std::int64_t tile = run.first; tile < run.end; ++tile) {
      std::uint64_t lanes[kNumLanes];
      const int size = encode_tile(tile_at(values, tile), tile_at(base, tile), count_of(tile, values.num_elements),
                                   begin + run.num_bytes, lanes);
      reinterpret_cast<std::uint16_t*>(body)[tile] = static_cast<std::uint16_t>(size);
      run.num_bytes += 4 * static_cast<std::size_t>(size);
      run.hash += hash_of_tile(lanes, tile);
    }
  });
  std::size_t end = table_bytes(tiles);
  for (const Run& run : runs) {
    std::memmove(body + end, first_tile + run.first * kTileBytes, run.num_bytes);
    end += run.num_bytes;
  }
  std::memset(body + end, 0, align_wire(end) - end);
  return {align_wire(end), hash};
}

std::uint64_t HostLosslessCodec::decode(std::span<const std::byte> body, TensorView base) const {
  check_16_bits("base", base);
  const auto decode_tile = kernels_->decode[index_of(base.dtype)];
  const std::int64_t tiles = num_tiles(base.num_elements);
  const auto fail = [&](const std::string& what) {
    throw Error("difference: expected what an encoder wrote for " + std::to_string(base.num_elements) +
                " values, got other " + std::to_string(body.size()) + " bytes: " + what);
  };
  if (body.size() < table_bytes(tiles)) fail("the table is cut off");
  const auto size_of = [&](std::int64_t tile) {
    std::uint16_t size;
    std::memcpy(&size, body.data() + 2 * tile, sizeof size);
    return size;
  };
  std::vector<Run> runs = cut(tiles);
  std::size_t end = table_bytes(tiles);
  std::vector<std::size_t> begins;  // offset of each run
  for (const Run& run : runs) {
    begins.push_back(end);
    for (std::int64_t tile = run.first; tile < run.end; ++tile) end += 4 * std::size_t{size_of(tile)};
  }
  if (align_wire(end) != body.size()) fail("its tiles have " + std::to_string(end) + " bytes");
  return for_each_run(runs, [&](Run& run) {
    const std::byte* next = body.data() + begins[static_cast<std::size_t>(run.first / kRunTiles)];
    for (std::int64_t tile = run.first; tile < run.end; ++tile) {
      std::uint64_t lanes[kNumLanes];
      const int size = size_of(tile);
      if (!decode_tile(next, size, tile_at(base, tile), count_of(tile, base.num_elements), lanes)) {
        fail("tile " + std::to_string(tile));
      }
      next += 4 * size;
      run.hash += hash_of_tile(lanes, tile);
    }
  });
}

std::uint64_t HostLosslessCodec::hash(ConstTensorView values) const {
  check_16_bits("values", values);
  return copy(values, nullptr, nullptr);
}

std::uint64_t HostLosslessCodec::copy(ConstTensorView values, std::byte* first, std::byte* second) const {
  std::vector<Run> runs = cut(num_tiles(values.num_elements));
  return for_each_run(runs, [&](Run& run) {
    const ConstTensorView part = values.slice(run.first * kTileValues, kRunTiles * kTileValues);
    for (std::byte* const target : {first, second}) {
      if (target != nullptr) std::memcpy(target + run.first * kTileBytes, part.data, part.num_bytes());
    }
    for (std::int64_t tile = run.first; tile < run.end; ++tile) {
      std::uint64_t lanes[kNumLanes];
      kernels_->hash(tile_at(values, tile), count_of(tile, values.num_elements), lanes);
      run.hash += hash_of_tile(lanes, tile);
    }
  });
}

// --- Jobs

namespace {

void fill_with_nan(TensorView values) {
  std::fill_n(reinterpret_cast<std::uint16_t*>(values.data), values.num_elements, nan_of(values.dtype));
}

}  // namespace

void HostLosslessCodec::encode(std::span<const EncodeLossless> jobs, StreamView) const {
  for (const EncodeLossless& job : jobs) check_job(job);
  for (const EncodeLossless& job : jobs) {
    std::byte* const body = job.message == nullptr ? nullptr : job.message + kLosslessHeaderBytes;
    LosslessHeader header{.body_bytes = job.values.num_bytes()};
    if (body == nullptr || job.generation == 0) {
      header.result_hash = copy(job.values, job.base.data, body);
    } else {
      const auto [num_bytes, hash] = encode(job.values, job.base, body);
      header = {true, num_bytes, job.generation, *job.hash, hash};
    }
    *job.hash = header.result_hash;
    if (body == nullptr) continue;
    write_header(header, job.message);
    *job.num_bytes = kLosslessHeaderBytes + header.body_bytes;
  }
}

void HostLosslessCodec::decode(std::span<const DecodeLossless> jobs, StreamView) const {
  for (const DecodeLossless& job : jobs) check_job(job);
  for (const DecodeLossless& job : jobs) {
    const std::uint32_t errors = update(job);
    *job.status |= errors;
    if (errors != 0) fill_with_nan(job.base);
  }
}

std::uint32_t HostLosslessCodec::update(const DecodeLossless& job) const {
  const std::size_t num_body_bytes = job.num_bytes - kLosslessHeaderBytes;
  LosslessHeader header;
  try {
    if (job.num_bytes < kLosslessHeaderBytes) return kHeaderError;
    header = read_header(job.message);
  } catch (const Error&) {
    return kHeaderError;
  }
  if (header.body_bytes != num_body_bytes) return kHeaderError;
  const bool is_whole = !header.is_difference;
  std::uint32_t errors = 0;
  if (header.generation != job.generation || is_whole != (job.generation == 0)) errors |= kGenerationError;
  if (job.generation != 0 && header.base_hash != *job.hash) errors |= kBaseError;
  if (errors != 0) return errors;
  const std::byte* const body = job.message + kLosslessHeaderBytes;
  if (is_whole && num_body_bytes != job.base.num_bytes()) return kBodyError;
  std::uint64_t result = 0;
  try {
    result = is_whole ? copy({body, job.base.num_elements, job.base.dtype}, job.base.data, nullptr)
                      : decode({body, num_body_bytes}, job.base);
  } catch (const Error&) {
    return kBodyError;
  }
  if (result != header.result_hash) return kResultError;
  *job.hash = result;
  return 0;
}

void HostLosslessCodec::check(std::span<const CheckHash> jobs, StreamView) const {
  for (const CheckHash& job : jobs) check_job(job);
  for (const CheckHash& job : jobs) {
    const std::uint64_t hash_now = hash(job.values);
    if (job.status == nullptr) {
      *job.hash = hash_now;
    } else if (hash_now != *job.hash) {
      *job.status |= kSecondaryError;
      fill_with_nan(job.spoiled);
    }
  }
}

std::unique_ptr<JobMemory> HostLosslessCodec::make_memory(std::size_t num_bytes, std::size_t num_shared_bytes) const {
  return std::make_unique<JobMemory>(num_bytes, num_shared_bytes);
}

}  // namespace zcomm
