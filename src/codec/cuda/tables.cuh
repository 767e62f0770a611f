// Inputs of a launch as one kernel parameter: calls need no device memory and can be captured in a graph.
#pragma once

#include "codec/cuda/capacity.hpp"
#include "codec/cuda/numbers.cuh"
#include "zcomm/dtype.hpp"
#include "zcomm/element_kind.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm::gpu {

inline constexpr std::uint32_t kThreads = 256;  // per CTA
inline constexpr std::size_t kMaxParameterBytes = 4096;

// Largest piece of a job, in elements, so that 32 bits suffice for an index in it.
#ifdef ZCOMM_CUDA_PIECE_ELEMENTS
inline constexpr std::int64_t kPieceElements = ZCOMM_CUDA_PIECE_ELEMENTS;
#else
inline constexpr std::int64_t kPieceElements = std::int64_t{1} << 26;
#endif
static_assert(kPieceElements % 4096 == 0 && kPieceElements <= std::int64_t{1} << 26);

// Contribution of a wire to a sum: values, codes with a factor of 1, or codes of any kind.
enum class Source : std::uint8_t { float32, bfloat16, float16, int8, int4, any };

// Part of a wire that belongs to a piece.
struct WirePart {
  const std::byte* data;    // values or codes
  const std::byte* scales;  // of the block that holds the first element
  std::uint32_t magic;      // ceil(2^32 / groups in a block); of values: distance to the next repeat, as strides
  float factor;
  std::uint16_t phase;  // groups of the first block that lie before the piece
  Source source;
  std::uint8_t run;  // number of wires from this one on with the same source and rotation
  ElementKind kind;
  std::uint8_t bits;  // per code
  bool nan_is_zero;

  // Returns the scale of the block that holds group `group`. Groups are below 2^22 + 256, blocks have at most 256
  // groups, and magic * groups in a block exceeds 2^32 by less than 256. So group * magic / 2^32 exceeds the true
  // quotient by less than one group's share.
  ZCOMM_DEVICE const std::byte* scale(std::uint32_t group) const {
    return scales + __umulhi(group + phase, magic) * std::uint32_t{kScaleBytes};
  }
};

// Output of an encode: location and shape of blocks.
struct BlocksOut {
  std::byte* scales;
  std::byte* codes;
  std::uint32_t num_elements;
  std::uint16_t block_size;
  std::uint8_t log2_lanes;  // threads that share a block; some idle if its size is no power of two
  bool is_end;              // of the wire: zeros pad scales and codes to 16 bytes
};

struct EncodePiece {
  const std::byte* values;
  BlocksOut out;
};

// Output of an encode with codes of any kind.
struct AnyOut {
  std::uint64_t seed;
  std::uint64_t first_element;  // of the piece, in the whole message
  float max_code;
  float max_code_reciprocal;
  std::uint16_t rotation;  // elements rotated together, or 0
  ElementKind kind;
  std::uint8_t bits;  // per code
  bool stochastic;
  friend bool operator==(const AnyOut&, const AnyOut&) = default;
};

struct EncodeAnyPiece {
  const std::byte* values;
  BlocksOut out;
  AnyOut any;
  DType dtype;
};

struct DecodePiece {
  WirePart wire;
  std::byte* values;
  std::uint32_t num_elements;
  std::uint16_t rotation;  // this and the type are for the kernel for any codes
  DType dtype;
};

inline constexpr std::uint16_t kStaysRotated = 0xffffu;  // a rotated_end: the sum of rotated wires stays rotated

struct SumPiece {
  std::byte* values;
  std::uint32_t num_elements;
  float factor;
  float limit;                       // finite sums beyond it are set to it; infinity: none
  std::uint16_t begin_of_wires = 0;  // in the table
  std::uint16_t rotated_end = 0;     // end of the rotated wires, where the sum is rotated back
  std::uint16_t end_of_wires = 0;
  std::uint16_t rotation = 0;  // of the rotated wires
};

// Returns the bytes from the memory of a piece to that of a repeat.
ZCOMM_DEVICE std::uint64_t distance(std::uint32_t stride, std::uint32_t repeat) {
  return std::uint64_t{stride} * (2 * repeat);
}

// A sum that is encoded, and its repeats: such as those for other nodes.
struct SumEncodePiece {
  BlocksOut out;
  AnyOut any;                                                           // for the kernel for any codes
  std::uint16_t begin_of_wires = 0, rotated_end = 0, end_of_wires = 0;  // as in SumPiece
  std::uint16_t rotation = 0;
  std::uint16_t num_ctas = 0;  // of one repeat: at most 2^15, where blocks leave half of the threads idle
  // Distances from the memory of a piece to that of its next repeat, in units of 2 bytes: of wires with scales by
  // source.
  std::uint32_t codes_stride = 0, any_stride = 0, out_stride = 0;

  ZCOMM_DEVICE BlocksOut out_of(std::uint32_t repeat) const {
    BlocksOut moved = out;
    moved.scales += distance(out_stride, repeat);
    moved.codes += distance(out_stride, repeat);
    return moved;
  }
};

// Copy of bytes. Source and target may be aligned to only 2 bytes, and all lengths are even.
struct CopyPiece {
  const std::byte* source;
  std::byte* target;
  std::uint32_t num_bytes;
  std::uint32_t num_zeros;  // after these, less than 16
};

template <class PieceType, std::size_t kMaxPieces>
struct Pieces {
  using Piece = PieceType;
  static constexpr std::uint32_t kCapacity = kMaxPieces;

  std::uint32_t num_pieces;
  std::uint32_t first_cta[kMaxPieces];
  Piece pieces[kMaxPieces];

  // Returns the piece of this CTA.
  ZCOMM_DEVICE std::uint32_t find() const {
    std::uint32_t begin = 0;
    for (std::uint32_t end = num_pieces; end - begin > 1;) {
      const std::uint32_t middle = (begin + end) / 2;
      if (first_cta[middle] <= blockIdx.x) {
        begin = middle;
      } else {
        end = middle;
      }
    }
    return begin;
  }
};

template <class PieceType, std::size_t kMaxPieces, std::size_t kMaxWires>
struct PiecesOfWires : Pieces<PieceType, kMaxPieces> {
  static constexpr std::size_t kWireCapacity = kMaxWires;
  WirePart wires[kMaxWires];
};

using EncodeTable = Pieces<EncodePiece, kEncodePieces>;
using EncodeAnyTable = Pieces<EncodeAnyPiece, kEncodeAnyPieces>;
using DecodeTable = Pieces<DecodePiece, kDecodePieces>;
using CopyTable = Pieces<CopyPiece, kCopyPieces>;
using SumTable = PiecesOfWires<SumPiece, kSumPieces, kSumWires>;
using SumEncodeTable = PiecesOfWires<SumEncodePiece, kSumEncodePieces, kSumEncodeWires>;

}  // namespace zcomm::gpu
