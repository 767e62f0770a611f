// Headers, tables of tiles and parallel tasks around the loops of kernels.inl.
#include "zcomm/lossless.hpp"

#include <algorithm>
#include <cstring>
#include <string>
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

const Kernels::Coder& coder_of(const Kernels& kernels, DType dtype) {
  if (dtype == DType::bfloat16) return kernels.bfloat16;
  return dtype == DType::float16 ? kernels.float16 : kernels.byte_pairs;
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

constexpr std::uint32_t kMagic = 0x3631445a;  // "ZD16"
constexpr std::uint8_t kVersion = 1;

template <class T>
T load_field(const std::byte* wire, std::size_t offset) {
  T value;
  std::memcpy(&value, wire + offset, sizeof value);
  return value;
}

template <class T>
void store_field(std::byte* wire, std::size_t offset, T value) {
  std::memcpy(wire + offset, &value, sizeof value);
}

}  // namespace

void write_header(const LosslessHeader& header, std::byte* wire) {
  std::memset(wire, 0, kLosslessHeaderBytes);
  store_field(wire, 0, kMagic);
  store_field(wire, 4, kVersion);
  store_field(wire, 5, static_cast<std::uint8_t>(header.kind));
  store_field(wire, 8, kLosslessHeaderBytes + header.body_bytes);
  store_field(wire, 16, header.generation);
  store_field(wire, 24, header.base_hash);
  store_field(wire, 32, header.result_hash);
}

LosslessHeader read_header(const std::byte* wire) {
  const auto kind = load_field<std::uint8_t>(wire, 5);
  const auto num_bytes = load_field<std::uint64_t>(wire, 8);
  const LosslessHeader header{static_cast<LosslessHeader::Kind>(kind), num_bytes - kLosslessHeaderBytes,
                              load_field<std::uint64_t>(wire, 16), load_field<std::uint64_t>(wire, 24),
                              load_field<std::uint64_t>(wire, 32)};
  std::byte expected[kLosslessHeaderBytes];
  write_header(header, expected);
  if (kind > 1 || num_bytes < kLosslessHeaderBytes || std::memcmp(wire, expected, sizeof expected) != 0) {
    throw Error("difference: expected a header of magic " + std::to_string(kMagic) + ", version " +
                std::to_string(kVersion) + ", kind 0 or 1, at least " + std::to_string(kLosslessHeaderBytes) +
                " bytes, and zeros in the rest, got magic " + std::to_string(load_field<std::uint32_t>(wire, 0)) +
                ", version " + std::to_string(load_field<std::uint8_t>(wire, 4)) + ", kind " + std::to_string(kind) +
                " and " + std::to_string(num_bytes) + " bytes");
  }
  return header;
}

// --- Bodies

HostLosslessCodec::HostLosslessCodec(std::string_view isa) : kernels_(&kernels_of(cpu::find_isa(isa).name)) {}

HostLosslessCodec::Encoded HostLosslessCodec::encode(ConstTensorView values, TensorView base, std::byte* body) const {
  check_values_and_base(values, base);
  check_aligned("body", body, kWireAlignment, values.num_elements);
  const auto encode_tile = coder_of(*kernels_, base.dtype).encode;
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
      store_field(body, 2 * static_cast<std::size_t>(tile), static_cast<std::uint16_t>(size));
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
  const auto decode_tile = coder_of(*kernels_, base.dtype).decode;
  const std::int64_t tiles = num_tiles(base.num_elements);
  const auto fail = [&](const std::string& what) {
    throw Error("difference: expected what an encoder wrote for " + std::to_string(base.num_elements) +
                " values, got other " + std::to_string(body.size()) + " bytes: " + what);
  };
  if (body.size() < table_bytes(tiles)) fail("the table is cut off");
  const auto size_of = [&](std::int64_t tile) {
    return load_field<std::uint16_t>(body.data(), 2 * static_cast<std::size_t>(tile));
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
    LosslessHeader header{LosslessHeader::Kind::whole_values, job.values.num_bytes(), 0, 0, 0};
    if (body == nullptr || job.generation == 0) {
      header.result_hash = copy(job.values, job.base.data, body);
    } else {
      const Encoded encoded = encode(job.values, job.base, body);
      header = {LosslessHeader::Kind::difference, encoded.num_bytes, job.generation, *job.hash, encoded.hash};
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
  const bool is_whole = header.kind == LosslessHeader::Kind::whole_values;
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

void HostLosslessCodec::note(std::span<const NoteHash> jobs, StreamView) const {
  for (const NoteHash& job : jobs) check_job(job);
  for (const NoteHash& job : jobs) *job.hash = hash(job.values);
}

void HostLosslessCodec::check(std::span<const CheckHash> jobs, StreamView) const {
  for (const CheckHash& job : jobs) check_job(job);
  for (const CheckHash& job : jobs) {
    if (hash(job.values) == *job.hash) continue;
    *job.status |= kKeptError;
    fill_with_nan(job.spoiled);
  }
}

std::unique_ptr<JobMemory> HostLosslessCodec::make_memory(std::size_t num_bytes, std::size_t num_shared_bytes) const {
  return std::make_unique<JobMemory>(num_bytes, num_shared_bytes);
}

}  // namespace zcomm
