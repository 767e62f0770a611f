// What compression loses, per call site, measured on samples of what this rank is about to send.
//
// A sample is up to 16384 consecutive elements, whole blocks; the next sample of a site takes the next ones. They go
// through the communicator's own codec and back, and both sides are compared in double, by operations of torch on the
// device and the stream of the call: the host does not wait, and no result of a collective changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "policy.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

// A compressed call, before it runs.
struct SampledCall {
  Collective collective;
  const std::string& name;  // the caller's; empty: "<collective> of <elements> <dtype>" of the whole tensor
  at::Device device;
};

// What the samples of one site, in one format, add up to. A block without scales counts as 256 elements. A block that
// holds a NaN or an infinity is counted, and adds to nothing else.
struct Loss {
  Collective collective;
  std::string site;
  std::string hop;     // "intra_node" or "inter_node"; "all" of an all-gather, which has one format
  std::string format;  // as BlockFormat
  std::uint64_t calls = 0;
  std::uint64_t samples = 0;
  double elements = 0;
  double blocks = 0;
  double finite_blocks = 0;
  double nonzero = 0;              // elements
  double zeroed = 0;               // of them, those that are decoded as 0
  double signal = 0;               // sum of x^2
  double noise = 0;                // sum of (decode(encode(x)) - x)^2
  double block_errors = 0;         // sum over blocks of max |decode(encode(x)) - x| / max |x|; 0 for a block of zeros
  double largest_block_error = 0;  // of these
};

class Telemetry {
 public:
  // Every `every`-th call of a site is sampled, its first one included; 0: none.
  explicit Telemetry(std::int64_t every) : every_(every) {}

  bool is_on() const { return every_ != 0; }

  // Counts the call, and samples it if it is its turn. `slots`: an all-gather's shard, the values that a reduce-scatter
  // sends to each rank, the tensor of an all-reduce. In a group of nodes of several ranks what is sent between nodes
  // are sums, which nobody has before the call: this rank's terms stand for them. On a GPU the stream must be torch's
  // current one; calls that a graph captures are left out. Any thread.
  void before(const SampledCall& site, std::span<const ConstTensorView> slots, HopFormats formats,
              Communicator& communicator, StreamView stream) {
    if (is_on()) count(site, slots, formats, communicator, stream);
  }

  // All samples so far, by site. Blocks the host until the devices are done with them. Any thread.
  std::vector<Loss> read();

 private:
  // What the samples on one stream add up to, on its device: two streams never write the same tensor.
  struct Sums {
    at::Device device;
    at::Tensor totals;   // of Measured
    at::Tensor largest;  // of Measured
  };
  struct Row {
    std::uint64_t samples = 0;
    double elements = 0;
    double blocks = 0;
    std::map<std::pair<at::DeviceType, void*>, Sums> by_stream;  // calls on CPU tensors have a null stream, too
  };
  struct Calls {
    std::uint64_t calls = 0;
    std::map<std::pair<std::string, std::string>, Row> rows;  // by hop and format
  };

  void count(const SampledCall& site, std::span<const ConstTensorView> slots, HopFormats formats,
             Communicator& communicator, StreamView stream);
  void sample(Row& row, ConstTensorView values, BlockFormat format, DType decoded_dtype, at::Device device,
              Communicator& communicator, StreamView stream);

  const std::int64_t every_;
  std::mutex mutex_;
  std::map<std::pair<Collective, std::string>, Calls> sites_;
};

}  // namespace zcomm::c10d_binding
