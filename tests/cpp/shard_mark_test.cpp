#include "zcomm/shard_mark.hpp"

#include <cmath>

#include "cuda_helpers.hpp"
#include "lossless_cuda_cases.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {

using namespace test;

namespace {

// Checks that bytes decode to NaN in their format: plain values, or wires whose scales are NaN.
void check_all_nan(const DeviceBuffer& kept, BlockFormat format, DType dtype, std::int64_t n) {
  const Bytes bytes = kept.bytes();
  HostBuffer wire(bytes);
  std::vector<float> values(static_cast<std::size_t>(n));
  const Decode job{{wire.data(), format, dtype}, {reinterpret_cast<std::byte*>(values.data()), n, DType::float32}};
  make_cpu_codec()->decode({&job, 1}, {});
  for (const float value : values) REQUIRE(std::isnan(value));
}

}  // namespace

TEST_CASE("shard mark: any changed bit of a shard is found, and all that was made of it becomes NaN") {
  const NoTraces no_traces;
  std::mt19937 random(1);
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const char* name : {"exact", "int8:256", "int4:32", "fp8:64", "eden2:128"}) {
      const BlockFormat format = BlockFormat::parse(name);
      for (const std::int64_t n : {1, 100, 5000}) {
        Bytes shard(static_cast<std::size_t>(n) * element_size(dtype));
        for (std::byte& byte : shard) byte = static_cast<std::byte>(random());
        const WireLayout layout(format, dtype, n);
        const Bytes wire(align_wire(layout.num_bytes), std::byte{0x11});
        DeviceBuffer values(shard), kept(wire);
        ShardMark own(make_cuda_workspace());
        own.note({values.data(), n, dtype}, {});
        own.check({values.data(), n, dtype}, {kept.data(), wire.size()}, {});
        synchronize({});
        CHECK(!own.has_changed());
        CHECK(kept.bytes() == wire);
        shard[random() % shard.size()] ^= std::byte{1};
        values.set(shard);
        own.check({values.data(), n, dtype}, {kept.data(), wire.size()}, {});
        synchronize({});
        CHECK(own.has_changed());
        check_all_nan(kept, format, dtype, n);
      }
    }
  }
}

TEST_CASE("shard mark: noted and checked in a graph, whose replays see the values of then") {
  const NoTraces no_traces;
  const Patterns first(3000, 0x3c00), second(3000, 0x3c01);
  ShardMark mark(make_cuda_workspace());
  DeviceBuffer values(bytes_of(first)), kept(Bytes(6000, std::byte{1}));
  const ConstTensorView shard{values.data(), 3000, DType::bfloat16};
  Stream stream;
  mark.note(shard, stream.view());  // allocates scratch
  synchronize(stream.view());
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  mark.note(shard, stream.view());
  mark.check(shard, {kept.data(), 6000}, stream.view());
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  for (const Patterns& now : {first, second}) {
    values.set(bytes_of(now));
    REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
    synchronize(stream.view());
    CHECK(!mark.has_changed());
  }
  values.set(bytes_of(first));  // after the replay's note
  mark.check(shard, {kept.data(), 6000}, stream.view());
  synchronize(stream.view());
  CHECK(mark.has_changed());
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

}  // namespace zcomm
