// Messages, values, hashes and errors of jobs, each compared with what HostLosslessCodec makes of bodies.
// Tests in tests/python compare its bytes with bench/zcomm_bench/lossless_reference.py.
#pragma once

#include "codec_cuda_cases.hpp"
#include "lossless_cases.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm::test {

inline constexpr DType kHalves[] = {DType::bfloat16, DType::float16, DType::byte_pairs};

template <class T>
Bytes bytes_of(const T& number) {
  const auto bytes = std::as_bytes(std::span(&number, 1));
  return {bytes.begin(), bytes.end()};
}
inline Bytes bytes_of(const Patterns& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}
template <class T>
T number_in(const DeviceBuffer& memory) {
  T number;
  const Bytes bytes = memory.bytes();
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

// Values, and the base that they follow.
struct Update {
  Patterns base, values;
  DType dtype;
  std::uint64_t generation = 7;  // of the base; 0: whole values

  std::int64_t size() const { return static_cast<std::int64_t>(values.size()); }
  std::uint64_t base_hash() const { return generation == 0 ? 0 : hash_of(base); }
  std::uint64_t hash_of(Patterns some) const { return HostLosslessCodec().hash(view(some, dtype)); }
};

// Makes the message as the host does.
inline Bytes message_of(const Update& update) {
  LosslessHeader header{false, 2 * update.values.size(), 0, 0, update.hash_of(update.values)};
  HostBuffer body(max_lossless_bytes(update.size()));
  if (update.generation == 0) {
    body = HostBuffer(bytes_of(update.values));
  } else {
    Patterns values = update.values, base = update.base;
    const auto [num_bytes, hash] =
        HostLosslessCodec().encode(view(values, update.dtype), view(base, update.dtype), body.data());
    header = {true, num_bytes, update.generation, update.base_hash(), hash};
  }
  Bytes message(kLosslessHeaderBytes + header.body_bytes);
  write_header(header, message.data());
  std::copy_n(body.data(), header.body_bytes, message.begin() + kLosslessHeaderBytes);
  return message;
}

// Encoding job and its memory. The values begin `offset` bytes past a multiple of 16.
struct Sender {
  explicit Sender(const Update& update, std::size_t offset = 0)
      : values(bytes_of(update.values), offset),
        base(2 * update.values.size(), offset),
        message(kLosslessHeaderBytes + max_lossless_bytes(update.size())),
        hash(bytes_of(update.base_hash())),
        num_bytes(8) {
    base.set(bytes_of(update.base));
    job = {{values.data(), update.size(), update.dtype},
           {base.data(), update.size(), update.dtype},
           update.generation,
           message.data(),
           reinterpret_cast<std::uint64_t*>(hash.data()),
           reinterpret_cast<std::uint64_t*>(num_bytes.data())};
  }
  // After the job.
  void check(const Update& update) const {
    Bytes sent = message.bytes();
    const Bytes expected = message_of(update);
    REQUIRE(number_in<std::uint64_t>(num_bytes) == expected.size());
    CHECK(std::all_of(sent.begin() + static_cast<std::ptrdiff_t>(expected.size()), sent.end(),
                      [](std::byte byte) { return byte == kUntouched; }));
    sent.resize(expected.size());
    CHECK(sent == expected);
    CHECK(base.bytes() == bytes_of(update.values));
    CHECK(number_in<std::uint64_t>(hash) == update.hash_of(update.values));
  }

  DeviceBuffer values, base, message, hash, num_bytes;
  EncodeLossless job;
};

// Decoding job and its memory. Sanitizers see reads past the end of the message.
struct Receiver {
  Receiver(const Update& update, const Bytes& sent, std::size_t offset = 0)
      : message(sent),
        base(2 * update.values.size(), offset),
        hash(bytes_of(update.base_hash())),
        status(bytes_of(std::uint32_t{0})),
        base_hash(update.base_hash()) {
    base.set(bytes_of(update.base));
    job = {message.data(),
           sent.size(),
           {base.data(), update.size(), update.dtype},
           update.generation,
           reinterpret_cast<std::uint64_t*>(hash.data()),
           reinterpret_cast<std::uint32_t*>(status.data())};
  }
  // After the job: values and their hash, or NaNs, and the hash of before.
  void check(const Update& update, std::uint32_t errors = 0) const {
    CHECK(number_in<std::uint32_t>(status) == errors);
    const Patterns nans(update.values.size(), nan_of(update.dtype));
    CHECK(base.bytes() == bytes_of(errors == 0 ? update.values : nans));
    CHECK(number_in<std::uint64_t>(hash) == (errors == 0 ? update.hash_of(update.values) : base_hash));
  }

  DeviceBuffer message, base, hash, status;
  std::uint64_t base_hash;
  DecodeLossless job;
};

// Both kinds of memory are the host's here.
struct OnHost : Codecs {};
struct OnDevice : Codecs {};
inline const LosslessCodec& differences(const OnHost& codecs) { return *codecs.host->lossless(); }
inline const LosslessCodec& differences(const OnDevice& codecs) { return *codecs.device->lossless(); }

template <class Jobs>
auto jobs_of(const Jobs& all) {
  std::vector<decltype(all[0].job)> jobs;
  for (const auto& one : all) jobs.push_back(one.job);
  return jobs;
}

// Encodes and decodes, one call each; `step` is between the offsets of values.
template <class Place>
void check_updates(const Place& codecs, const std::vector<Update>& updates, std::size_t step = 0) {
  std::vector<Sender> senders;
  std::vector<Receiver> receivers;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    senders.emplace_back(updates[i], i * step % 16);
    receivers.emplace_back(updates[i], message_of(updates[i]), (i * step + 6 * step) % 16);
  }
  differences(codecs).encode(jobs_of(senders), {});
  differences(codecs).decode(jobs_of(receivers), {});
  for (std::size_t i = 0; i < updates.size(); ++i) {
    CAPTURE(i);
    CAPTURE(updates[i].size());
    senders[i].check(updates[i]);
    receivers[i].check(updates[i]);
  }
}

inline std::vector<Update> all_changes(std::int64_t n, std::mt19937& random) {
  std::vector<Update> updates;
  for (const auto& [name, change] : kChanges) {
    const Patterns base = weights(n, random);
    for (const DType dtype : kHalves) updates.push_back({base, changed(base, change, random), dtype});
  }
  return updates;
}

// Damages a message, sometimes so that its header still fits it.
inline Bytes damaged(Bytes message, std::mt19937& random) {
  const bool is_cut = random() % 3 == 0, fits = random() % 2 == 0;
  if (is_cut) message.resize(random() % message.size());
  for (unsigned i = is_cut ? 1 : 0; i < 1 + random() % 4 && !message.empty(); ++i) {
    // Prefers places with sizes: the header, the table or a head.
    const std::size_t begin = fits ? std::min(kLosslessHeaderBytes, message.size() - 1) : 0;
    const std::size_t count = message.size() - begin;
    message[begin + random() % (random() % 2 == 0 ? std::min<std::size_t>(count, 24) : count)] =
        static_cast<std::byte>(random());
  }
  const std::uint64_t num_bytes = message.size();
  if (fits && message.size() >= kLosslessHeaderBytes) std::memcpy(message.data() + 8, &num_bytes, 8);
  return message;
}

// Returns the errors that the host finds in a message.
inline std::uint32_t errors_in(const Bytes& message, const Update& update) {
  if (message.size() < kLosslessHeaderBytes) return kHeaderError;
  LosslessHeader header;
  try {
    header = read_header(message.data());
  } catch (const Error&) {
    return kHeaderError;
  }
  if (header.body_bytes != message.size() - kLosslessHeaderBytes) return kHeaderError;
  std::uint32_t errors = 0;
  const bool is_whole = !header.is_difference;
  if (header.generation != update.generation || is_whole != (update.generation == 0)) errors |= kGenerationError;
  if (update.generation != 0 && header.base_hash != update.base_hash()) errors |= kBaseError;
  if (errors != 0) return errors;
  Patterns result = update.base;
  std::uint64_t hash = 0;
  HostBuffer body(Bytes(message.begin() + kLosslessHeaderBytes, message.end()));
  if (is_whole) {
    if (header.body_bytes != 2 * result.size()) return kBodyError;
    std::memcpy(result.data(), body.data(), header.body_bytes);
    hash = update.hash_of(result);
  } else {
    try {
      hash = HostLosslessCodec().decode({body.data(), body.size}, view(result, update.dtype));
    } catch (const Error&) {
      return kBodyError;
    }
  }
  if (hash != header.result_hash) return kResultError;
  CHECK(result == update.values);
  return 0;
}

}  // namespace zcomm::test
