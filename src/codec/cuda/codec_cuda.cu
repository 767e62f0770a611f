// Codec for the memory of NVIDIA GPUs. Each call checks all jobs, then visits them once per kernel, so that jobs of one
// kind share a launch.
#include <algorithm>
#include <iterator>
#include <limits>
#include <list>
#include <type_traits>
#include <vector>

#include "codec/cuda/any_codes.cuh"
#include "codec/cuda/copy.cuh"
#include "codec/cuda/launcher.hpp"
#include "codec/cuda/lossless_cuda.hpp"
#include "codec/cuda/reduce.cuh"
#include "zcomm/cuda.hpp"

namespace zcomm {
namespace gpu {
namespace {

// --- Kernels, by DType and kind of codes

constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16};
std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }

// Kernel families by code: int8 and int4, rounded to nearest, have their own; the others share one.
constexpr Source kOwnKernels[] = {Source::int8, Source::int4};
std::size_t index_of(Source coding) {
  return static_cast<std::size_t>(coding) - static_cast<std::size_t>(Source::int8);
}

Source coding_of(BlockFormat format) {
  if (!format.has_scales()) return Source::float32;  // or other values: there are no codes
  if (format.rotation() != 0 || format.stochastic) return Source::any;
  if (format.kind == ElementKind::int8) return Source::int8;
  return format.kind == ElementKind::int4 ? Source::int4 : Source::any;
}

// Selects the decoding kernel, which does not depend on how codes were rounded.
Source decoding_of(BlockFormat format) {
  format.stochastic = false;
  return coding_of(format);
}

constexpr Kernel<EncodeTable> kEncode[3][2] = {{encode_kernel<Float32, Int8>, encode_kernel<Float32, Int4>},
                                               {encode_kernel<Bfloat16, Int8>, encode_kernel<Bfloat16, Int4>},
                                               {encode_kernel<Float16, Int8>, encode_kernel<Float16, Int4>}};
constexpr std::uint32_t kEncodeUnrolls[3] = {kEncodeUnroll<Float32>, kEncodeUnroll<Bfloat16>, kEncodeUnroll<Float16>};
constexpr Kernel<DecodeTable> kDecode[3][2] = {{decode_kernel<Float32, Int8>, decode_kernel<Float32, Int4>},
                                               {decode_kernel<Bfloat16, Int8>, decode_kernel<Bfloat16, Int4>},
                                               {decode_kernel<Float16, Int8>, decode_kernel<Float16, Int4>}};
constexpr Kernel<SumTable> kSum[3] = {sum_kernel<Float32>, sum_kernel<Bfloat16>, sum_kernel<Float16>};
constexpr Kernel<SumEncodeTable> kSumEncode[3] = {sum_encode_kernel<Int8>, sum_encode_kernel<Int4>,
                                                  sum_encode_kernel<void>};

constexpr float kLargestFinite[3] = {Float32::kLargestFinite, Bfloat16::kLargestFinite, Float16::kLargestFinite};
constexpr float kNoLimit = std::numeric_limits<float>::infinity();

// --- Steps

// Copies values; `num_zeros` pads the wire that they are copied to.
void add_copy(Launcher<CopyTable>& launcher, ConstTensorView values, std::byte* target, std::uint32_t num_zeros = 0) {
  const auto offset = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(target) % kCopyBytes);
  const std::int64_t n = values.num_elements;
  for_pieces(n, kCopyBytes, [&](std::int64_t begin, std::int64_t count) {
    const ConstTensorView part = values.slice(begin, count);
    const auto num_bytes = static_cast<std::uint32_t>(part.num_bytes());
    const CopyPiece piece{part.data, target + (part.data - values.data), num_bytes, begin + count == n ? num_zeros : 0};
    launcher.add(piece, divide_up(offset + num_bytes + piece.num_zeros, kThreads * kCopyUnroll * kCopyBytes));
  });
}

std::uint32_t padding_of(const TensorView& wire) {
  return static_cast<std::uint32_t>(align_wire(wire.num_bytes()) - wire.num_bytes());
}

// Zeros the padding after the values of a wire without scales.
void add_padding(Launcher<CopyTable>& launcher, const TensorView& wire) {
  std::byte* const end = wire.data + wire.num_bytes();
  if (const std::uint32_t num_zeros = padding_of(wire); num_zeros > 0) launcher.add({end, end, 0, num_zeros}, 1);
}

// Returns the values of a wire without scales.
TensorView values_of(std::byte* wire, BlockFormat format, DType dtype, std::int64_t num_elements) {
  return {wire, num_elements, format.kind == ElementKind::bf16 ? DType::bfloat16 : dtype};
}

// Adds an encode by a kernel whose threads have `unroll` groups each.
template <class Table>
void add(Launcher<Table>& launcher, const Encode& job, std::uint32_t unroll) {
  const std::int64_t n = job.values.num_elements;
  for_pieces(n, job.format.block_size, [&](std::int64_t begin, std::int64_t count) {
    typename Table::Piece piece{};
    piece.values = job.values.slice(begin, count).data;
    piece.out = blocks_out(job.wire, job.format, n, begin, count, kGroup);
    if constexpr (std::is_same_v<Table, EncodeAnyTable>) {
      piece.any = any_out(job.format, job.rounding, begin);
      piece.dtype = job.values.dtype;
    }
    launcher.add(piece, divide_up(num_lanes(piece.out), kThreads * unroll));
  });
}

void add(Launcher<DecodeTable>& launcher, const Decode& job) {
  const std::int64_t n = job.values.num_elements;
  const std::uint32_t groups = decoding_of(job.wire.format) == Source::any ? 1 : kDecodeUnroll;  // per thread
  for_pieces(n, 1, [&](std::int64_t begin, std::int64_t count) {
    const TensorView values = job.values.slice(begin, count);
    launcher.add({wire_part(job.wire, n, begin), values.data, static_cast<std::uint32_t>(count),
                  static_cast<std::uint16_t>(job.wire.format.rotation()), values.dtype},
                 divide_up(count, kThreads * groups * kGroup));
  });
}

// Adds a sum; finite results beyond +-`limit` are set to it.
void add_sum(Launcher<SumTable>& launcher, std::span<const Wire> wires, float factor, float limit, TensorView values,
             Rotated rotated = {}) {
  const std::int64_t n = values.num_elements;
  for_pieces(n, 1, [&](std::int64_t begin, std::int64_t count) {
    launcher.add(
        {values.slice(begin, count).data, static_cast<std::uint32_t>(count), factor, limit},
        divide_up(count, kSumThreads * kSumElements), wires,
        [&](const Wire& wire) { return wire_part(wire, n, begin); }, rotated);
  });
}

void add_sum_encode(Launcher<SumEncodeTable>& launcher, std::span<const Wire> wires, const DecodeSumEncode& job,
                    Rotated rotated) {
  const std::int64_t n = job.num_elements;
  for_pieces(n, job.format.block_size, [&](std::int64_t begin, std::int64_t count) {
    const SumEncodePiece piece{blocks_out(job.wire, job.format, n, begin, count, kSumElements),
                               any_out(job.format, job.rounding, begin)};
    launcher.add(
        piece, divide_up(num_lanes(piece.out), kSumThreads), wires,
        [&](const Wire& wire) { return wire_part(wire, n, begin); }, rotated);
  });
}

// --- The codec

class CudaCodec final : public Codec {
 public:
  explicit CudaCodec(Workspace& workspace) : workspace_(workspace), lossless_(make_cuda_lossless(workspace)) {}

  void encode(std::span<const Encode> jobs, StreamView stream) const override {
    for (const Encode& job : jobs) check(job);
    Launcher<EncodeTable> launcher(stream, "encode", nullptr);
    for (DType dtype : kDTypes) {
      for (Source coding : kOwnKernels) {
        launcher.use(kEncode[index_of(dtype)][index_of(coding)]);
        for (const Encode& job : jobs) {
          if (job.values.dtype == dtype && coding_of(job.format) == coding) {
            add(launcher, job, kEncodeUnrolls[index_of(dtype)]);
          }
        }
      }
    }
    launcher.launch();
    Launcher<EncodeAnyTable> any_launcher(stream, "encode to any codes", encode_any_kernel<>);
    for (const Encode& job : jobs) {
      if (coding_of(job.format) == Source::any) add(any_launcher, job, 1);
    }
    any_launcher.launch();
    Launcher casts(stream, "cast", kSum[index_of(DType::bfloat16)], kSumThreads);
    Launcher<CopyTable> copies(stream, "copy", copy_kernel<>);
    for (const Encode& job : jobs) {
      if (job.format.has_scales()) continue;
      const TensorView out = values_of(job.wire, job.format, job.values.dtype, job.values.num_elements);
      if (job.values.dtype == out.dtype) {
        add_copy(copies, job.values, out.data, padding_of(out));
      } else {
        const Wire values{job.values.data, {}, job.values.dtype};
        add_sum(casts, {&values, 1}, 1.0f, kNoLimit, out);
        add_padding(copies, out);
      }
    }
    casts.launch();
    copies.launch();
  }

  void decode(std::span<const Decode> jobs, StreamView stream) const override {
    for (const Decode& job : jobs) check(job);
    Launcher<DecodeTable> launcher(stream, "decode", nullptr);
    Launcher<SumTable> casts(stream, "cast", nullptr, kSumThreads);
    Launcher<CopyTable> copies(stream, "copy", copy_kernel<>);
    for (DType dtype : kDTypes) {
      for (Source coding : kOwnKernels) {
        launcher.use(kDecode[index_of(dtype)][index_of(coding)]);
        for (const Decode& job : jobs) {
          if (job.values.dtype == dtype && decoding_of(job.wire.format) == coding) add(launcher, job);
        }
      }
      casts.use(kSum[index_of(dtype)]);
      for (const Decode& job : jobs) {
        if (job.values.dtype != dtype || job.wire.format.has_scales() || value_dtype(job.wire) == dtype) continue;
        add_sum(casts, {&job.wire, 1}, 1.0f, kLargestFinite[index_of(dtype)], job.values);
      }
    }
    for (const Decode& job : jobs) {
      if (job.wire.format.has_scales() || value_dtype(job.wire) != job.values.dtype) continue;
      add_copy(copies, {job.wire.data, job.values.num_elements, job.values.dtype}, job.values.data);
    }
    launcher.use(decode_any_kernel<>);
    for (const Decode& job : jobs) {
      if (decoding_of(job.wire.format) == Source::any) add(launcher, job);
    }
    launcher.launch();
    casts.launch();
    copies.launch();
  }

  void decode_sum(std::span<const DecodeSum> jobs, StreamView stream) const override {
    for (const DecodeSum& job : jobs) check(job);
    Launcher<SumTable> launcher(stream, "sum", nullptr, kSumThreads);
    for (DType dtype : kDTypes) {
      launcher.use(kSum[index_of(dtype)]);
      for (const DecodeSum& job : jobs) {
        if (job.values.dtype == dtype) sum(launcher, job.wires, job.factor, job.values, stream);
      }
    }
    launcher.launch();
  }

  void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView stream) const override {
    for (const DecodeSumEncode& job : jobs) check(job);
    Launcher<SumEncodeTable> launcher(stream, "sum to codes", nullptr, kSumThreads);
    for (Source coding : {Source::int8, Source::int4, Source::any}) {
      launcher.use(kSumEncode[index_of(coding)]);
      for (const DecodeSumEncode& job : jobs) {
        if (coding_of(job.format) != coding) continue;
        with_few_wires(
            launcher, job.wires, job.num_elements, stream,
            [&](std::span<const Wire> wires, Rotated rotated) { add_sum_encode(launcher, wires, job, rotated); });
      }
    }
    launcher.launch();
    Launcher<SumTable> sums(stream, "sum", nullptr, kSumThreads);
    Launcher<CopyTable> padding(stream, "copy", copy_kernel<>);
    for (ElementKind kind : {ElementKind::exact, ElementKind::bf16}) {
      sums.use(kSum[index_of(kind == ElementKind::bf16 ? DType::bfloat16 : DType::float32)]);
      for (const DecodeSumEncode& job : jobs) {
        if (job.format.kind != kind) continue;
        const TensorView out = values_of(job.wire, job.format, DType::float32, job.num_elements);
        sum(sums, job.wires, 1.0f, out, stream);
        add_padding(padding, out);
      }
    }
    sums.launch();
    padding.launch();
  }

  const LosslessCodec* lossless() const override { return lossless_.get(); }

 private:
  void sum(Launcher<SumTable>& launcher, std::span<const Wire> wires, float factor, TensorView values,
           StreamView stream) const {
    with_few_wires(launcher, wires, values.num_elements, stream, [&](std::span<const Wire> few, Rotated rotated) {
      add_sum(launcher, few, factor, kNoLimit, values, rotated);
    });
  }

  // Calls add(wires, rotated) with at most as many wires as fit a launch, and of one rotation; the others are summed by
  // earlier launches.
  template <class Table, class Add>
  void with_few_wires(Launcher<Table>& launcher, std::span<const Wire> wires, std::int64_t num_elements,
                      StreamView stream, const Add& add_job) const {
    constexpr std::size_t kCapacity = std::min(Table::kWireCapacity, SumTable::kWireCapacity);
    const Rotations rotations(wires);
    if (rotations.end() - rotations.begin() > 1) return rotate_first(launcher, wires, num_elements, stream, add_job);
    if (wires.size() <= kCapacity) {
      add_job(wires, Rotated{});
      return;
    }
    if (num_elements == 0) return;
    const Scratch scratch(workspace_, static_cast<std::size_t>(num_elements) * sizeof(float), stream);
    const TensorView sums{scratch.data(), num_elements, DType::float32};
    std::vector<Wire> rest(wires.begin(), wires.end());
    const auto is_rotated = [](const Wire& wire) { return wire.format.rotation() != 0; };
    std::stable_partition(rest.begin(), rest.end(), is_rotated);
    std::vector<Wire> few;
    Rotated rotated;
    while (few.size() + rest.size() > kCapacity) {
      const auto count = static_cast<std::ptrdiff_t>(kCapacity - few.size());
      few.insert(few.end(), rest.begin(), rest.begin() + count);
      rest.erase(rest.begin(), rest.begin() + count);
      rotated.stays = is_rotated(rest[0]);
      Launcher first(stream, "sum", kSum[index_of(DType::float32)], kSumThreads);
      add_sum(first, few, 1.0f, kNoLimit, sums, rotated);
      first.launch();
      few = {{sums.data, {}, DType::float32}};
      rotated = {rotated.stays, false};
    }
    few.insert(few.end(), rest.begin(), rest.end());
    add_job(few, rotated);
    launcher.launch();  // before the scratch is released
  }

  // Sums the wires of each rotation to scratch memory, then calls with_few_wires() with these sums and the other wires.
  template <class Table, class Add>
  void rotate_first(Launcher<Table>& launcher, std::span<const Wire> wires, std::int64_t num_elements,
                    StreamView stream, const Add& add_job) const {
    if (num_elements == 0) return;
    std::list<Scratch> scratch;
    std::vector<Wire> rest;
    for (const int rotation : Rotations(wires)) {
      std::vector<Wire> alike;
      std::copy_if(wires.begin(), wires.end(), std::back_inserter(alike),
                   [rotation](const Wire& wire) { return wire.format.rotation() == rotation; });
      scratch.emplace_back(workspace_, static_cast<std::size_t>(num_elements) * sizeof(float), stream);
      const DecodeSum job{alike, 1.0f, {scratch.back().data(), num_elements, DType::float32}};
      decode_sum({&job, 1}, stream);
      rest.push_back({scratch.back().data(), {}, DType::float32});
    }
    std::copy_if(wires.begin(), wires.end(), std::back_inserter(rest),
                 [](const Wire& wire) { return wire.format.rotation() == 0; });
    with_few_wires(launcher, rest, num_elements, stream, add_job);
    launcher.launch();  // before the scratch is released
  }

  Workspace& workspace_;
  std::unique_ptr<LosslessCodec> lossless_;
};

}  // namespace
}  // namespace gpu

std::unique_ptr<Codec> make_cuda_codec(Workspace& workspace) { return std::make_unique<gpu::CudaCodec>(workspace); }

}  // namespace zcomm
