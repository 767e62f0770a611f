#include "lossless_cuda_cases.hpp"
#include "sanitizers.hpp"

namespace zcomm {

using namespace test;

TEST_SUITE("jobs of lossless codecs") {
  TEST_CASE_TEMPLATE("messages and values are those of the host, for every size", Place, OnHost, OnDevice) {
    const Place codecs;
    std::mt19937 random(1);
    std::vector<std::int64_t> sizes;
    for (std::int64_t n = 0; n < 5000; n += 1 + n / (kSanitizers ? 4 : 8)) sizes.push_back(n);
    for (const std::int64_t n : {2047, 2048, 2049, 4095, 4096, 4097}) sizes.push_back(n);
    for (const std::int64_t n : sizes) check_updates(codecs, all_changes(n, random));
  }

  TEST_CASE_TEMPLATE("every pattern as a base, with every distance by strata", Place, OnHost, OnDevice) {
    const Place codecs;
    std::mt19937 random(2);
    for (int stratum = 0; stratum <= 16; stratum += kSanitizers ? 4 : 1) {
      std::vector<Update> updates;
      for (const bool is_mixed : {false, true}) {
        const auto [base, values] = all_patterns(stratum, is_mixed, random);
        for (const DType dtype : kHalves) updates.push_back({base, values, dtype});
      }
      CAPTURE(stratum);
      check_updates(codecs, updates);
    }
  }

  TEST_CASE_TEMPLATE("values at any address", Place, OnHost, OnDevice) {
    const Place codecs;
    std::mt19937 random(3);
    for (const std::int64_t n : {1, 33, 2048, 4099}) check_updates(codecs, all_changes(n, random), 2);
  }

  TEST_CASE_TEMPLATE("whole values, and none that are sent", Place, OnHost, OnDevice) {
    const Place codecs;
    std::mt19937 random(4);
    std::vector<Update> updates;
    for (const std::int64_t n : {0, 1, 17, 2048, 2049, 10001}) {
      for (const DType dtype : kHalves) updates.push_back({weights(n, random), weights(n, random), dtype, 0});
    }
    check_updates(codecs, updates);
    check_updates(codecs, updates, 6);
    for (Update& update : updates) {
      update.generation = 3;
      Sender sender(update);
      sender.job.message = nullptr, sender.job.num_bytes = nullptr;
      differences(codecs).encode({&sender.job, 1}, {});
      CHECK(sender.base.bytes() == bytes_of(update.values));
      CHECK(number_in<std::uint64_t>(sender.hash) == update.hash_of(update.values));
    }
  }

  TEST_CASE_TEMPLATE("batches of jobs of all sizes, more than fit a launch", Place, OnHost, OnDevice) {
    const Place codecs;
    std::mt19937 random(5);
    std::vector<Update> updates;
    for (std::int64_t i = 0; i < 130; ++i) {
      const std::int64_t n = i % 13 == 0 ? 0 : i % 17 == 0 ? 9000 + i : i * i % 2100;
      const Patterns base = weights(n, random);
      const Change& change = kChanges[static_cast<std::size_t>(i) % kChanges.size()].second;
      updates.push_back({base, changed(base, change, random), kHalves[i % 2], i % 5 == 0 ? 0u : 9u});
    }
    check_updates(codecs, updates);
    differences(codecs).encode({}, {});
    differences(codecs).decode({}, {});
    differences(codecs).check({}, {});
  }

  TEST_CASE("tables that a CTA scans in several rounds") {
    const OnDevice codecs;
    std::mt19937 random(6);
    // 4096 tiles in a round; few of them hold more than an update or two.
    const std::int64_t n = (kSanitizers ? 4097 : 9000) * 2048 + 5;
    const Patterns base = weights(n, random);
    check_updates(codecs, {{base, changed(base, kChanges[1].second, random), DType::bfloat16}});
  }

  TEST_CASE_TEMPLATE("damaged messages are found as by the host, and nothing beyond them is read", Place, OnHost,
                     OnDevice) {
    const Place codecs;
    std::mt19937 random(7);
    std::uint32_t seen = 0;
    for (const std::int64_t n : {1, 100, 2048, 2049, 6000}) {
      for (const auto& [name, change] : kChanges) {
        CAPTURE(n);
        CAPTURE(name);
        const Patterns base = weights(n, random);
        const Update update{base, changed(base, change, random), DType::bfloat16};
        const Bytes message = message_of(update);
        std::vector<Receiver> receivers;
        std::vector<std::uint32_t> errors;
        for (int attempt = 0; attempt < (kSanitizers ? 20 : 40); ++attempt) {
          const Bytes other = damaged(message, random);
          receivers.emplace_back(update, other);
          errors.push_back(errors_in(other, update));
          seen |= errors.back();
        }
        differences(codecs).decode(jobs_of(receivers), {});
        for (std::size_t i = 0; i < receivers.size(); ++i) {
          CAPTURE(i);
          receivers[i].check(update, errors[i]);
        }
      }
    }
    CHECK(seen == (kHeaderError | kGenerationError | kBaseError | kBodyError | kResultError));
  }

  TEST_CASE("differences beyond a byte, which no encoder writes, are modulo 256 as on the host") {
    const Codecs codecs;
    for (const auto& [dtype, pattern, c] :
         {std::tuple{DType::bfloat16, 0x3c00, 127}, {DType::byte_pairs, 0x1010, 15}}) {
      for (const int r : {2, 3, 4, 5}) {  // of the first value, whose low bits are 7 as all others'
        CAPTURE(r);
        // Head, Z, P, T1 to T5 and L: see docs/wire_format.md.
        Bytes tile(4 + 4 + 256);
        tile[0] = static_cast<std::byte>(c);
        tile[8] = std::byte{1};
        for (int j = 1; j <= r; ++j) tile.push_back(static_cast<std::byte>(r > j ? 1 : 0));
        tile.resize((tile.size() + 1792 + 3) / 4 * 4);
        Bytes body((4 + tile.size() + 15) / 16 * 16);
        const auto words = static_cast<std::uint16_t>(tile.size() / 4);
        std::memcpy(body.data(), &words, sizeof words);
        std::copy(tile.begin(), tile.end(), body.begin() + 4);

        Update update{Patterns(2048, static_cast<std::uint16_t>(pattern)), {}, dtype};
        update.values = update.base;
        HostBuffer aligned(body);
        HostLosslessCodec().decode({aligned.data(), body.size()}, view(update.values, dtype));
        Bytes message(kLosslessHeaderBytes);
        write_header({true, body.size(), update.generation, update.base_hash(), update.hash_of(update.values)},
                     message.data());
        message.insert(message.end(), body.begin(), body.end());
        const Receiver receiver(update, message);
        codecs.device->lossless()->decode({&receiver.job, 1}, {});
        receiver.check(update);
      }
    }
  }

  TEST_CASE_TEMPLATE("another generation or base, and whole values of another size", Place, OnHost, OnDevice) {
    const Place codecs;
    std::mt19937 random(8);
    const Patterns base = weights(5000, random);
    const Update update{base, changed(base, kChanges[3].second, random), DType::float16};
    const Update whole{base, update.values, DType::float16, 0};
    Update later = update, other = update, astray = update, longer = whole;
    later.generation = 8;
    other.base[4999] ^= 1;  // another base, whose hash is known
    longer.base.push_back(0), longer.values.push_back(0);
    const auto check = [&](const Update& here, const Bytes& message, std::uint32_t errors) {
      const Receiver receiver(here, message);
      differences(codecs).decode({&receiver.job, 1}, {});
      receiver.check(here, errors);
    };
    check(later, message_of(update), kGenerationError);
    check(other, message_of(update), kBaseError);
    check(whole, message_of(update), kGenerationError);
    check(update, message_of(whole), kGenerationError | kBaseError);
    check(longer, message_of(whole), kBodyError);
    astray.base[2047] ^= 0x8000;  // something has written to the base
    Receiver receiver(astray, message_of(update));
    receiver.hash.set(bytes_of(update.base_hash())), receiver.base_hash = update.base_hash();
    differences(codecs).decode({&receiver.job, 1}, {});
    receiver.check(astray, kResultError);
  }

  TEST_CASE_TEMPLATE("a status word keeps what it has, and jobs may share one", Place, OnHost, OnDevice) {
    const Place codecs;
    std::mt19937 random(9);
    std::vector<Receiver> receivers;
    std::vector<Update> updates;
    for (std::uint64_t i = 0; i < 3; ++i) {
      const Patterns base = weights(3000, random);
      updates.push_back({base, changed(base, kChanges[2].second, random), DType::bfloat16});
      const Bytes message = message_of(updates[i]);
      updates[i].generation += i == 1 ? 1 : 0;  // of the second one
      receivers.emplace_back(updates[i], i == 2 ? Bytes(message.begin(), message.end() - 16) : message);
    }
    receivers[0].status.set(bytes_of(std::uint32_t{kSecondaryError}));
    std::vector<DecodeLossless> jobs = jobs_of(receivers);
    jobs[1].status = jobs[2].status = jobs[0].status;
    differences(codecs).decode(jobs, {});
    CHECK(number_in<std::uint32_t>(receivers[0].status) == (kSecondaryError | kGenerationError | kHeaderError));
    CHECK(receivers[0].base.bytes() == bytes_of(updates[0].values));
    CHECK(receivers[1].base.bytes() == bytes_of(Patterns(3000, 0x7fc0)));
    CHECK(receivers[2].base.bytes() == bytes_of(Patterns(3000, 0x7fc0)));
  }

  TEST_CASE_TEMPLATE("values that something has written to since their hash was taken", Place, OnHost, OnDevice) {
    const Place codecs;
    std::mt19937 random(10);
    for (const DType dtype : kHalves) {
      for (const std::int64_t n : {0, 1, 2047, 40000}) {
        for (const std::size_t offset : {0, 2}) {
          Patterns values = weights(n, random);
          DeviceBuffer hash(bytes_of(std::uint64_t{0})), status(bytes_of(std::uint32_t{0}));
          DeviceBuffer memory(2 * values.size(), offset);
          memory.set(bytes_of(values));
          const TensorView there{memory.data(), n, dtype};
          CheckHash job{.values = there, .hash = reinterpret_cast<std::uint64_t*>(hash.data())};
          differences(codecs).check({&job, 1}, {});
          CHECK(number_in<std::uint64_t>(hash) == HostLosslessCodec().hash(view(values, dtype)));
          job.spoiled = there, job.status = reinterpret_cast<std::uint32_t*>(status.data());
          differences(codecs).check({&job, 1}, {});
          CHECK(number_in<std::uint32_t>(status) == 0);
          CHECK(memory.bytes() == bytes_of(values));
          if (n == 0) continue;
          values[random() % values.size()] ^= 0x10;
          memory.set(bytes_of(values));
          differences(codecs).check({&job, 1}, {});
          CHECK(number_in<std::uint32_t>(status) == kSecondaryError);
          CHECK(memory.bytes() == bytes_of(Patterns(values.size(), nan_of(dtype))));
        }
      }
    }
  }

  TEST_CASE("an encode and a decode are recorded in a graph") {
    const OnDevice codecs;
    std::mt19937 random(11);
    const Patterns first = weights(5000, random), second = changed(first, kChanges[3].second, random);
    const Update update{first, second, DType::bfloat16};
    Sender sender(update);
    Receiver receiver(update, message_of(update));
    cudaStream_t stream;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    // Allocates scratch first: a capture allocates none.
    differences(codecs).encode({&sender.job, 1}, {stream});
    differences(codecs).decode({&receiver.job, 1}, {stream});
    synchronize({stream});
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    differences(codecs).encode({&sender.job, 1}, {stream});
    differences(codecs).decode({&receiver.job, 1}, {stream});
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (int replay = 0; replay < 2; ++replay) {
      for (DeviceBuffer* base : {&sender.base, &receiver.base}) base->set(bytes_of(first));
      for (DeviceBuffer* hash : {&sender.hash, &receiver.hash}) hash->set(bytes_of(update.base_hash()));
      REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
      synchronize({stream});
      sender.check(update);
      receiver.check(update);
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }

  TEST_CASE_TEMPLATE("wrong arguments are refused before any job runs", Place, OnHost, OnDevice) {
    const Place codecs;
    std::mt19937 random(12);
    const Patterns base = weights(64, random);
    const Update update{base, changed(base, kChanges[3].second, random), DType::bfloat16};
    const Sender sender(update);
    const Receiver receiver(update, message_of(update));
    const auto refuses = [&](auto change, const char* message) {
      EncodeLossless jobs[] = {sender.job, sender.job};
      change(jobs[1]);
      CHECK_THROWS_WITH_AS(differences(codecs).encode(jobs, {}), message, ArgumentError);
    };
    refuses([](EncodeLossless& job) { job.base.num_elements = 63; },
            "base: expected 64 elements of bfloat16 as in values, got 63 of bfloat16");
    refuses([](EncodeLossless& job) { job.values.dtype = DType::float32; },
            "values: expected bfloat16, float16 or values of 8 bits, of which differences are made, got float32");
    refuses([](EncodeLossless& job) { job.message += 8; },
            "message: expected an address that is a multiple of 16, got 8 bytes past one");
    refuses([](EncodeLossless& job) { job.hash = nullptr; }, "hash: expected memory of 1 elements, got a null pointer");
    refuses([](EncodeLossless& job) { job.num_bytes = nullptr; },
            "num_bytes: expected memory of 8 bytes, got a null pointer");
    refuses([](EncodeLossless& job) { job.message = nullptr; },
            "num_bytes: expected a null pointer, as message is one, got another address");
    DecodeLossless decodes[] = {receiver.job, receiver.job};
    decodes[1].status = nullptr;
    CHECK_THROWS_WITH_AS(differences(codecs).decode(decodes, {}),
                         "status: expected memory of 1 elements, got a null pointer", ArgumentError);
    CHECK(sender.base.bytes() == bytes_of(base));
    CHECK(receiver.base.bytes() == bytes_of(base));
  }
}

}  // namespace zcomm
