#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <random>

#include "calls.hpp"
#include "ranks.hpp"
#include "sanitizers.hpp"
#include "values.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

using Bytes = std::vector<std::byte>;

// Returns finite values of both signs and several magnitudes.
Bytes random_bytes(std::int64_t num_elements, DType dtype) {
  std::mt19937 generator(7);
  Bytes bytes(static_cast<std::size_t>(num_elements) * element_size(dtype));
  for (std::size_t at = 0; at < bytes.size(); at += element_size(dtype)) {
    std::uint32_t bits = static_cast<std::uint32_t>(generator());
    bits = dtype == DType::float32 ? (bits & 0x87ffffffu) | 0x38000000u : (bits & 0x87ffu) | 0x3800u;
    std::memcpy(bytes.data() + at, &bits, element_size(dtype));
  }
  return bytes;
}

// Returns what all ranks have after a broadcast: the values encoded and decoded as a whole.
Bytes rounded(Bytes values, std::int64_t num_elements, DType dtype, BlockFormat format) {
  if (num_elements == 0) return values;
  const TensorView view{values.data(), num_elements, dtype};
  make_communicators({0})[0]->round_trip(view, format, view);
  return values;
}

TensorView view_of(Bytes& bytes, DType dtype) {
  return {bytes.data(), static_cast<std::int64_t>(bytes.size() / element_size(dtype)), dtype};
}

}  // namespace

TEST_CASE("broadcast: the bits of encoding the whole tensor, for every shape, root, length, format and chunk size") {
  for (const char* text : {"exact", "int8:256", "int4:64"}) {
    const BlockFormat format = BlockFormat::parse(text);
    for (const Shape& shape : kShapes) {
      const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
      const int size = static_cast<int>(ids.size());
      for (const int root : {0, size / 2, size - 1}) {
        for (const std::int64_t n : {0, 1, 65, 3000}) {
          for (const DType dtype : {DType::float32, DType::bfloat16}) {
            for (const std::size_t chunk_bytes : {std::size_t{700}, kDefaultChunkBytes}) {
              if (kSanitizers && root != size / 2) continue;
              const Bytes values = random_bytes(n, dtype);
              std::vector<Bytes> tensors(ids.size(), Bytes(values.size(), std::byte{0x5a}));
              tensors[static_cast<std::size_t>(root)] = values;
              auto communicators = make_communicators(ids, chunk_bytes);
              LinkBytes total;
              std::mutex mutex;
              run_ranks(size, [&](int rank) {
                Communicator& communicator = *communicators[static_cast<std::size_t>(rank)];
                const LinkBytes planned =
                    make_broadcast(communicator.world(), root, n, dtype, format)->bytes({}).value();
                const TensorView tensor = view_of(tensors[static_cast<std::size_t>(rank)], dtype);
                const CallStats stats = test::broadcast(communicator, tensor, root, format, 20s);
                CHECK(stats.intra_node_bytes == planned.intra_node);
                CHECK(stats.inter_node_bytes == planned.inter_node);
                const std::scoped_lock lock(mutex);
                total.intra_node += planned.intra_node;
                total.inter_node += planned.inter_node;
              });
              const Bytes expected = rounded(values, n, dtype, format);
              for (const Bytes& tensor : tensors) REQUIRE(tensor == expected);
              // Every node but the root's receives each byte once, every other rank once from its node.
              const Topology topology(ids);
              const std::size_t nodes = static_cast<std::size_t>(topology.num_nodes());
              CHECK(total.inter_node * (ids.size() - nodes) == total.intra_node * (nodes - 1));
              if (nodes > 1 && format.kind == ElementKind::exact) {
                CHECK(total.inter_node == values.size() * (nodes - 1));
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("broadcast: stochastic rounding does not depend on the chunk size") {
  const Bytes values = random_bytes(3000, DType::float32);
  std::vector<Bytes> results;
  for (const std::size_t chunk_bytes : {std::size_t{700}, kDefaultChunkBytes}) {
    auto communicators = make_communicators({0, 1, 1}, chunk_bytes);
    std::vector<Bytes> tensors(3, values);
    run_ranks(3, [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      test::broadcast(*communicators[r], view_of(tensors[r], DType::float32), 1,
                      BlockFormat::parse("int4:128:stochastic"), 20s);
    });
    CHECK(tensors[0] == tensors[1]);
    CHECK(tensors[0] == tensors[2]);
    results.push_back(tensors[0]);
  }
  CHECK(results[0] == results[1]);
}

TEST_CASE("broadcast: on GPUs four chunks for each node, of 16 to 64 MiB, whatever the number of ranks") {
  const auto num_chunks = [](const std::vector<int>& nodes, std::int64_t mebibytes) {
    const World world{Topology(node_ids(nodes)), 0, kDefaultGpuChunkBytes};
    return make_broadcast(world, 0, mebibytes << 18, DType::float32, BlockFormat::parse("int8:128"))->num_chunks();
  };
  CHECK(num_chunks({1, 1}, 1024) == 16);
  CHECK(num_chunks({8, 8}, 256) == 8);
  CHECK(num_chunks({64}, 256) == 4);
  CHECK(num_chunks(std::vector<int>(8, 8), 1024) == 32);
  CHECK(num_chunks(std::vector<int>(64, 8), 1024) == 64);
  CHECK(num_chunks({1, 1}, 8) == 1);
}

TEST_CASE("broadcast: what cannot be planned or run is refused before a byte moves") {
  auto communicators = make_communicators({0, 0});
  const World& world = communicators[0]->world();
  CHECK_THROWS_WITH_AS(make_broadcast(world, 2, 1, DType::float32, {}), "root: expected 0 to 1, got 2", ArgumentError);
  CHECK_THROWS_WITH_AS(make_broadcast(world, 0, -1, DType::float32, {}), "num_elements: expected 0 or more, got -1",
                       ArgumentError);
  Bytes values = random_bytes(4, DType::float32);
  const TensorView tensor = view_of(values, DType::float32);
  const auto operation = make_broadcast(world, 0, 5, DType::float32, {});
  CHECK_THROWS_WITH_AS(communicators[0]->run(*operation, {{}, {&tensor, 1}}, 1s),
                       "outputs: expected float32[1 x 5], got float32[1 x 4]", ArgumentError);
}

TEST_CASE("broadcast: ranks that name different roots learn so") {
  auto communicators = make_communicators({0, 0, 1});
  std::vector<std::string> errors(3);
  run_ranks(3, [&](int rank) {
    Bytes values = random_bytes(4, DType::float32);
    const int root = rank == 2 ? 1 : 0;
    try {
      test::broadcast(*communicators[static_cast<std::size_t>(rank)], view_of(values, DType::float32), root, {}, 20s);
    } catch (const TransportError& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  for (const std::string& error : errors) {
    CHECK(error.find("broadcast from 0 ") != std::string::npos);
    CHECK(error.find("broadcast from 1 ") != std::string::npos);
  }
}

}  // namespace zcomm
