#include "zcomm/exchange.hpp"

#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>

#include "ranks.hpp"
#include "sanitizers.hpp"
#include "values.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

using Bytes = std::vector<std::byte>;
using Lengths = std::vector<std::int64_t>;

// Values of one rank for each rank, or from each, side by side in memory.
struct Tensor {
  Tensor(const Lengths& all_lengths, DType type) : lengths(all_lengths), dtype(type) {
    const auto total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    bytes.resize(static_cast<std::size_t>(total) * element_size(dtype), std::byte{0x5a});
  }

  std::vector<TensorView> views() {
    std::vector<TensorView> all;
    std::byte* data = bytes.data();
    for (const std::int64_t length : lengths) {
      all.push_back({data, length, dtype});
      data += all.back().num_bytes();
    }
    return all;
  }
  std::vector<ConstTensorView> const_views() {
    const std::vector<TensorView> all = views();
    return {all.begin(), all.end()};
  }
  Bytes part(int rank) {
    const TensorView view = views()[static_cast<std::size_t>(rank)];
    return {view.data, view.data + view.num_bytes()};
  }

  Lengths lengths;
  DType dtype;
  Bytes bytes;
};

// Fills a tensor with finite values of both signs and several magnitudes.
void fill(Tensor& tensor, std::mt19937& generator) {
  const std::size_t size = element_size(tensor.dtype);
  for (std::size_t at = 0; at < tensor.bytes.size(); at += size) {
    std::uint32_t bits = static_cast<std::uint32_t>(generator());
    if (tensor.dtype == DType::float32) bits = (bits & 0x87ffffffu) | 0x38000000u;
    if (tensor.dtype != DType::float32) bits = (bits & 0x87ffu) | 0x3800u;
    std::memcpy(tensor.bytes.data() + at, &bits, size);
  }
}

// Returns what a receiver of these values has: encoded and decoded as a whole.
Bytes received(ConstTensorView values, BlockFormat format) {
  Bytes decoded(values.num_bytes());
  if (values.num_elements == 0) return decoded;
  auto communicators = make_communicators({0});
  communicators[0]->round_trip(values, format, {decoded.data(), values.num_elements, values.dtype});
  return decoded;
}

// Lengths that each rank sends to each: [from][to].
using Splits = std::vector<Lengths>;

Lengths received_by(const Splits& splits, std::size_t rank) {
  Lengths lengths;
  for (const Lengths& sent : splits) lengths.push_back(sent[rank]);
  return lengths;
}

struct Run {
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::vector<CallStats> stats;
  std::vector<LinkBytes> planned;
};

using Plan = std::function<ExchangePlan(const World&, const Lengths& sent, const Lengths& received)>;

Run run_exchange(const std::vector<int>& ids, const Splits& splits, DType dtype, std::size_t chunk_bytes,
                 const Plan& plan) {
  Run run{{}, {}, std::vector<CallStats>(ids.size()), std::vector<LinkBytes>(ids.size())};
  std::mt19937 generator(7);
  for (std::size_t rank = 0; rank < ids.size(); ++rank) {
    run.inputs.emplace_back(splits[rank], dtype);
    fill(run.inputs.back(), generator);
    run.outputs.emplace_back(received_by(splits, rank), dtype);
  }
  auto communicators = make_communicators(ids, chunk_bytes);
  run_ranks(static_cast<int>(ids.size()), [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    ExchangePlan own = plan(communicators[r]->world(), splits[r], received_by(splits, r));
    run.planned[r] = own.bytes();
    const auto inputs = run.inputs[r].const_views();
    const auto outputs = run.outputs[r].views();
    run.stats[r] = communicators[r]->run(*make_exchange(std::move(own)), {inputs, outputs}, 20s);
  });
  return run;
}

void check_received(Run& run, const std::vector<int>& ids, HopFormats formats, std::size_t min_bytes = 0) {
  const Topology topology(ids);
  for (int to = 0; to < topology.size(); ++to) {
    const auto rank = static_cast<std::size_t>(to);
    for (int from = 0; from < topology.size(); ++from) {
      const ConstTensorView sent = run.inputs[static_cast<std::size_t>(from)].const_views()[rank];
      const bool is_exact = from == to || sent.num_bytes() < min_bytes;
      const BlockFormat format = is_exact ? BlockFormat{} : formats.on(topology.link(from, to));
      REQUIRE(run.outputs[rank].part(from) == received(sent, format));
    }
    CHECK(run.stats[rank].intra_node_bytes == run.planned[rank].intra_node);
    CHECK(run.stats[rank].inter_node_bytes == run.planned[rank].inter_node);
  }
}

std::vector<Splits> splits_of(std::size_t size) {
  std::mt19937 generator(11);
  const Lengths some{0, 0, 1, 31, 64, 127, 128, 1000, 4097};
  Splits even(size, Lengths(size, 1000));
  Splits uneven(size);
  for (Lengths& lengths : uneven) {
    for (std::size_t to = 0; to < size; ++to) lengths.push_back(some[generator() % some.size()]);
  }
  Splits to_one(size, Lengths(size, 0));
  for (Lengths& lengths : to_one) lengths.back() = 777;
  return {even, uneven, to_one, Splits(size, Lengths(size, 0))};
}

}  // namespace

TEST_CASE("all_to_all: the bits of encoding each part whole, for every shape, split, dtype and chunk size") {
  for (const char* text : {"int8:128/int4:128", "exact/int8:64", "eden2:32/fp8:96", "exact"}) {
    const HopFormats formats = HopFormats::parse(text);
    for (const Shape& shape : kShapes) {
      const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
      for (const Splits& splits : splits_of(ids.size())) {
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
          for (const std::size_t chunk_bytes : {std::size_t{700}, kDefaultChunkBytes}) {
            if (test::kSanitizers && dtype == DType::float16) continue;
            Run run = run_exchange(ids, splits, dtype, chunk_bytes,
                                   [&](const World& world, const Lengths& sent, const Lengths& received) {
                                     return ExchangePlan::all_to_all(world, sent, received, dtype, formats);
                                   });
            check_received(run, ids, formats);
          }
        }
      }
    }
  }
}

TEST_CASE("all_to_all: fewer bytes than min_bytes between two ranks stay exact") {
  const std::vector<int> ids{0, 0, 1, 1};
  const HopFormats formats = HopFormats::parse("int8:128/int4:128");
  for (const Splits& splits : splits_of(4)) {
    Run run = run_exchange(ids, splits, DType::float32, 1024,
                           [&](const World& world, const Lengths& sent, const Lengths& received) {
                             return ExchangePlan::all_to_all(world, sent, received, DType::float32, formats, 512);
                           });
    check_received(run, ids, formats, 512);
  }
}

TEST_CASE("all_to_all: stochastic rounding does not depend on the chunk size, but on sender and receiver") {
  const std::vector<int> ids{0, 1, 2};
  const Splits splits(3, Lengths(3, 1000));
  const auto run = [&](std::size_t chunk_bytes) {
    return run_exchange(ids, splits, DType::float32, chunk_bytes,
                        [&](const World& world, const Lengths& sent, const Lengths& received) {
                          return ExchangePlan::all_to_all(world, sent, received, DType::float32,
                                                          HopFormats::parse("int4:128:stochastic"));
                        });
  };
  Run small = run(1024);
  Run large = run(kDefaultChunkBytes);
  for (std::size_t rank = 0; rank < ids.size(); ++rank) CHECK(small.outputs[rank].bytes == large.outputs[rank].bytes);
}

TEST_CASE("gather and scatter: the root exchanges equal parts with all ranks") {
  const HopFormats formats = HopFormats::parse("int8:64/int4:64");
  for (const Shape& shape : kShapes) {
    const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
    for (const std::int64_t n : {0, 1, 65, 1000}) {
      const int root = static_cast<int>(ids.size()) - 1;
      Splits to_root(ids.size(), Lengths(ids.size(), 0));
      for (Lengths& lengths : to_root) lengths.back() = n;
      Run gathered = run_exchange(ids, to_root, DType::bfloat16, 300,
                                  [&](const World& world, const Lengths& sent, const Lengths& received) {
                                    ExchangePlan plan = ExchangePlan::gather(world, root, n, DType::bfloat16, formats);
                                    CHECK((plan.sent() == sent && plan.received() == received));
                                    return plan;
                                  });
      check_received(gathered, ids, formats);
      Splits from_root(ids.size(), Lengths(ids.size(), 0));
      from_root.back().assign(ids.size(), n);
      Run scattered = run_exchange(ids, from_root, DType::float32, 300,
                                   [&](const World& world, const Lengths& sent, const Lengths& received) {
                                     ExchangePlan plan = ExchangePlan::scatter(world, root, n, DType::float32, formats);
                                     CHECK((plan.sent() == sent && plan.received() == received));
                                     return plan;
                                   });
      check_received(scattered, ids, formats);
    }
  }
}

TEST_CASE("gather and scatter: ranks that name different roots learn so") {
  for (const bool gathers : {true, false}) {
    auto communicators = make_communicators({0, 0, 1});
    std::vector<std::string> errors(3);
    run_ranks(3, [&](int rank) {
      auto& communicator = *communicators[static_cast<std::size_t>(rank)];
      const int root = rank == 2 ? 1 : 0;
      const auto plan_of = gathers ? &ExchangePlan::gather : &ExchangePlan::scatter;
      const ExchangePlan plan = plan_of(communicator.world(), root, 65, DType::float32, HopFormats::parse("int8:64"));
      Tensor input(plan.sent(), DType::float32);
      Tensor output(plan.received(), DType::float32);
      try {
        communicator.run(*make_exchange(plan), {input.const_views(), output.views()}, 20s);
      } catch (const TransportError& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
    for (const std::string& error : errors) {
      CHECK(error.find(gathers ? "gather to 0 " : "scatter from 0 ") != std::string::npos);
      CHECK(error.find(gathers ? "gather to 1 " : "scatter from 1 ") != std::string::npos);
    }
  }
}

TEST_CASE("messages: two ranks exchange values while others call nothing") {
  const std::vector<int> ids{0, 0, 1};
  auto communicators = make_communicators(ids, 256);
  Tensor sent({500}, DType::float32);
  std::mt19937 generator(3);
  fill(sent, generator);
  Tensor got({500}, DType::float32);
  const HopFormats formats = HopFormats::parse("int8:32");
  run_ranks(3, [&](int rank) {
    if (rank == 1) return;
    auto& communicator = *communicators[static_cast<std::size_t>(rank)];
    const auto plan = ExchangePlan::message(communicator.world(), 0, 2, 500, DType::float32, formats);
    std::vector<ConstTensorView> inputs(3);
    std::vector<TensorView> outputs(3);
    if (rank == 0) inputs[2] = sent.const_views()[0];
    if (rank == 2) outputs[0] = got.views()[0];
    communicator.run(*make_exchange(plan), {inputs, outputs}, 20s);
  });
  CHECK(got.bytes == received(sent.const_views()[0], formats.inter_node));
}

TEST_CASE("exchanges: what cannot be planned or run is refused before a byte moves") {
  auto communicators = make_communicators({0, 0});
  const World& world = communicators[0]->world();
  const HopFormats formats = HopFormats::parse("int8:128");
  const auto message_of = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const ArgumentError& error) {
      return error.what();
    }
    return "";
  };
  CHECK(message_of([&] { ExchangePlan::all_to_all(world, {1}, {1, 1}, DType::float32, formats); }) ==
        "sent: expected one length for each of 2 ranks, got 1");
  CHECK(message_of([&] { ExchangePlan::all_to_all(world, {1, 1}, {1, -1}, DType::float32, formats); }) ==
        "received: expected 0 or more elements for each rank, got -1");
  CHECK(message_of([&] { ExchangePlan::all_to_all(world, {1, 1}, {2, 1}, DType::float32, formats); }) ==
        "received: expected the 1 elements that rank 0 sends to itself, got 2");
  CHECK(message_of([&] { ExchangePlan::gather(world, 2, 1, DType::float32, formats); }) ==
        "root: expected 0 to 1, got 2");
  CHECK(message_of([&] { ExchangePlan::message(world, 0, 0, 1, DType::float32, formats); }) ==
        "to: expected a message between rank 0 and another one, got one from 0 to 0");

  const auto operation = make_exchange(ExchangePlan::all_to_all(world, {4, 4}, {4, 4}, DType::float32, formats));
  Tensor input({4, 4}, DType::float32);
  Tensor output({4, 4}, DType::float32);
  const auto run = [&](std::vector<ConstTensorView> inputs, std::vector<TensorView> outputs) {
    return message_of([&] { communicators[0]->run(*operation, {inputs, outputs}, 1s); });
  };
  CHECK(run({input.const_views()[0]}, output.views()) == "inputs: expected one for each of 2 ranks, got 1");
  auto shorter = output.views();
  shorter[1].num_elements = 3;
  CHECK(run(input.const_views(), shorter) == "outputs: expected float32[1 x 4] for rank 1, got float32[1 x 3]");
  auto overlapping = output.views();
  overlapping[1].data = input.views()[0].data;
  CHECK(run(input.const_views(), overlapping) == "outputs: expected memory apart from the inputs, got some of theirs");
}

TEST_CASE("all_to_all: ranks that call different things learn so") {
  auto communicators = make_communicators({0, 0});
  std::vector<std::string> errors(2);
  run_ranks(2, [&](int rank) {
    auto& communicator = *communicators[static_cast<std::size_t>(rank)];
    Tensor input({4, 4}, DType::float32);
    Tensor output({4, 4}, DType::float32);
    const auto plan = ExchangePlan::all_to_all(communicator.world(), {4, 4}, {4, 4}, DType::float32,
                                               HopFormats::parse(rank == 0 ? "int8:128" : "int4:128"));
    try {
      communicator.run(*make_exchange(plan), {input.const_views(), output.views()}, 20s);
    } catch (const TransportError& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  for (const std::string& error : errors) {
    CHECK(error.find("all_to_all float32 int8:128") != std::string::npos);
    CHECK(error.find("all_to_all float32 int4:128") != std::string::npos);
  }
}

TEST_CASE("all_to_all: lengths that sender and receiver see differently are an error on both") {
  auto communicators = make_communicators({0, 0});
  std::vector<int> failed(2);
  run_ranks(2, [&](int rank) {
    auto& communicator = *communicators[static_cast<std::size_t>(rank)];
    const Lengths received = rank == 0 ? Lengths{0, 700} : Lengths{40, 0};
    const Lengths sent = rank == 0 ? Lengths{0, 40} : Lengths{600, 0};
    Tensor input(sent, DType::float32);
    Tensor output(received, DType::float32);
    const auto plan =
        ExchangePlan::all_to_all(communicator.world(), sent, received, DType::float32, HopFormats::parse("int8:128"));
    try {
      communicator.run(*make_exchange(plan), {input.const_views(), output.views()}, 20s);
    } catch (const TransportError&) {
      failed[static_cast<std::size_t>(rank)] = 1;
    }
  });
  CHECK(failed == std::vector<int>{1, 1});
}

}  // namespace zcomm
