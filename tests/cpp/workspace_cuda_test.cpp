#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "cuda_helpers.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::Stream;

void block(cudaStream_t stream, std::atomic<bool>& open) {
  cuda_host::enqueue(stream, [&open] {
    while (!open) std::this_thread::sleep_for(100us);
  });
}

}  // namespace

TEST_CASE("cuda workspace: released pieces go to the same stream at once, to others when the work on them is done") {
  const cuda_host::Counts before = cuda_host::counts();
  {
    const auto workspace = make_cuda_workspace();
    Stream first;
    Stream second;
    std::atomic<bool> open = false;
    std::byte* piece = workspace->acquire(100'000, first.view());
    CHECK(reinterpret_cast<std::uintptr_t>(piece) % 64 == 0);
    block(first, open);
    workspace->release(piece, first.view());

    CHECK(workspace->acquire(99'000, first.view()) == piece);
    workspace->release(piece, first.view());
    std::byte* other = workspace->acquire(99'000, second.view());
    CHECK(other != piece);
    workspace->release(other, second.view());

    open = true;
    synchronize(first.view());
    std::byte* again = workspace->acquire(60'000, second.view());
    CHECK((again == piece || again == other));
    std::byte* both = workspace->acquire(60'000, second.view());
    CHECK((both == piece || both == other));
    CHECK(both != again);
    workspace->release(again, second.view());
    workspace->release(both, second.view());
  }
  CHECK(cuda_host::counts() == before);
}

TEST_CASE(
    "cuda workspace: a released piece of one thread's default stream is none of another's, until its work is done") {
  const auto workspace = make_cuda_workspace();
  const StreamView own_of_each_thread{cudaStreamPerThread};
  std::atomic<bool> open = false;
  std::byte* piece = nullptr;
  std::thread([&] {
    piece = workspace->acquire(5000, own_of_each_thread);
    block(cudaStreamPerThread, open);
    workspace->release(piece, own_of_each_thread);
  }).join();
  std::byte* other = workspace->acquire(5000, own_of_each_thread);
  CHECK(other != piece);
  open = true;
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(workspace->acquire(5000, own_of_each_thread) == piece);
  workspace->release(other, own_of_each_thread);
  workspace->release(piece, own_of_each_thread);
}

TEST_CASE("cuda workspace: pieces stay on their device, live ones are never shared, empty ones are valid") {
  const auto workspace = make_cuda_workspace();
  Stream stream;
  std::byte* const empty = workspace->acquire(0, stream.view());
  CHECK(empty != nullptr);
  workspace->release(empty, stream.view());
  std::byte* piece = workspace->acquire(5000, stream.view());
  workspace->release(piece, stream.view());
  synchronize(stream.view());
  const CudaDeviceGuard device(1);
  Stream elsewhere;
  const Scratch a(*workspace, 5000, elsewhere.view());
  const Scratch b(*workspace, 5000, elsewhere.view());
  CHECK(a.data() != piece);
  CHECK(a.data() != b.data());
}

TEST_CASE("cuda workspace: the steady state allocates nothing") {
  const auto workspace = make_cuda_workspace();
  Stream stream;
  const auto use = [&] {
    const Scratch a(*workspace, 10'000, stream.view());
    const Scratch b(*workspace, 20'000, stream.view());
    cudaMemsetAsync(a.data(), 1, 10'000, stream);
    cudaMemsetAsync(b.data(), 2, 20'000, stream);
  };
  use();
  const std::int64_t created = cuda_host::num_creations();
  for (int i = 0; i < 100; ++i) use();
  CHECK(cuda_host::num_creations() == created);
}

TEST_CASE("cuda workspace: a capture gets what is there and keeps it; it never allocates") {
  const auto workspace = make_cuda_workspace();
  Stream stream;
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK_THROWS_WITH_AS(workspace->acquire(5000, stream.view()), doctest::Contains("a CUDA graph is captured"), Error);
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);  // the capture is whole
  cudaGraphDestroy(graph);

  std::byte* piece = workspace->acquire(5000, stream.view());
  workspace->release(piece, stream.view());
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    std::byte* captured = workspace->acquire(5000, stream.view());
    CHECK(captured == piece);
    workspace->release(captured, stream.view());
  }
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  const Scratch after(*workspace, 5000, stream.view());
  CHECK(after.data() != piece);  // the graph may use it at any time
  cudaGraphDestroy(graph);
}

TEST_CASE(
    "cuda workspace: a piece of queued work that a dropped graph had, too, goes to no other stream before its end") {
  for (const bool released_before : {true, false}) {
    CAPTURE(released_before);
    const auto workspace = make_cuda_workspace();
    Stream first;
    Stream second;
    std::atomic<bool> open = false;
    std::byte* const piece = workspace->acquire(5000, first.view());
    block(first, open);
    if (released_before) workspace->release(piece, first.view());
    REQUIRE(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    if (released_before) CHECK(workspace->acquire(5000, first.view()) == piece);
    workspace->release(piece, first.view());
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamEndCapture(first, &graph) == cudaSuccess);
    REQUIRE(cudaGraphDestroy(graph) == cudaSuccess);
    const auto is_reused = [&] {
      const Scratch other(*workspace, 5000, second.view());
      return other.data() == piece;
    };
    for (int i = 0; i < 50; ++i, std::this_thread::sleep_for(1ms)) CHECK(!is_reused());  // CUDA lets go of graphs later
    open = true;
    synchronize(first.view());
  }
}

TEST_CASE("cuda workspace: many threads") {
  const auto workspace = make_cuda_workspace();
  test::run_ranks(4, [&](int rank) {
    Stream stream;
    for (int i = 0; i < 300; ++i) {
      const auto size = static_cast<std::size_t>(1 + (i * 37) % 20'000);
      const Scratch scratch(*workspace, size, stream.view());
      cudaMemsetAsync(scratch.data(), rank, size, stream);
      cuda_host::enqueue(stream, [data = scratch.data(), rank] { CHECK(*data == std::byte(rank)); });
    }
    synchronize(stream.view());
  });
}

}  // namespace zcomm
