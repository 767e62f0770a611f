// Telemetry: compression errors per call site, measured on samples of the values that this rank sends.
//
// A sample is up to 16384 consecutive elements, in whole blocks; the next sample of a site takes the following ones.
// They pass through the communicator's codec and back, and are compared in double by operations of torch on the device
// and stream of the call. The host does not wait, and no result of a collective changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "c10d/policy/policy.hpp"
#include "observer.hpp"

namespace zcomm::c10d_binding {

// Sums over the samples of one site in one format. A block without scales counts as 256 elements. Blocks with a NaN or
// infinity are counted, but not added to the measures.
struct QuantizationError {
  std::uint64_t calls = 0;  // of the site in all formats
  std::uint64_t samples = 0;
  double elements = 0;
  double blocks = 0;
  // Sums over the blocks in which all values and decoded ones are finite, of 1, nonzero elements, nonzero elements that
  // are decoded as 0, x^2, squared errors and block errors, and the largest block error. A block's error is
  // max |decoded - x| / max |x|, or 0 if x is 0.
  std::array<double, 7> measures{};
};
// Collective, site, hop ("intra_node" or "inter_node"; "all" of an all-gather, which has one format), and format.
using ErrorKey = std::tuple<Collective, std::string, std::string, std::string>;

class Telemetry final : public Observer {
 public:
  // Samples every `every`-th call of a site, beginning with the first; 0: none.
  explicit Telemetry(std::int64_t every) : every_(every) {}

  // Counts each lossy segment that this rank encodes, and samples it if it is its turn. Between nodes of several ranks
  // sums are sent, which do not exist before the call: this rank's terms stand for them. Calls captured in a graph are
  // not sampled. Called on the job's thread, in which the job's stream is torch's current one. Thread-safe.
  void starts(const Job& job, Communicator& communicator, StreamView stream) override;

  // Returns all samples so far, by site. Blocks the host until the devices are done with them. Thread-safe.
  std::map<ErrorKey, QuantizationError> read();

 private:
  // Counts a segment. `site` is the caller's name; empty: "<collective> of <elements> <dtype>" of the whole tensor, or
  // "<collective> of other sizes" from the 1000th site on. `slots` is an all-gather's shard, the values that a
  // reduce-scatter sends to each rank, or the tensor of an all-reduce.
  void count(const Job& job, const std::string& site, std::span<const ConstTensorView> slots, HopFormats formats,
             Communicator& communicator, StreamView stream);
  void sample(const ErrorKey& key, ConstTensorView values, BlockFormat format, DType decoded_dtype, at::Device device,
              Communicator& communicator, StreamView stream);

  const std::int64_t every_;
  std::mutex mutex_;
  std::map<std::pair<Collective, std::string>, std::uint64_t> calls_;  // by site
  std::map<ErrorKey, QuantizationError> errors_;                       // but for their calls and measures
  // Measures by stream, on its device: two streams never write the same tensor. Calls on CPU tensors have a null one.
  std::map<std::tuple<ErrorKey, at::DeviceType, void*>, at::Tensor> measures_;
};

}  // namespace zcomm::c10d_binding
