// What the environment, and a call, ask the front to compress. All ranks must be asked alike.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "front/request.hpp"
#include "zcomm/block_format.hpp"

namespace zcomm::front {

// Line of the file that ZCOMM_RULES names: "COLLECTIVE [CONDITION=VALUE...] FORMATS".
struct Rule {
  std::string text;
  Collective collective;
  std::string name = "*";         // pattern of ncclConfig_t::commName
  std::optional<int> ranks = {};  // of the communicator
  std::optional<DType> dtype = {};
  std::size_t min_bytes = 0;
  std::size_t max_bytes = SIZE_MAX;
  std::optional<bool> in_place = {};
  std::string caller = "*";  // pattern of the name of the library that makes the call
  HopFormats formats;
  std::shared_ptr<std::atomic<bool>> has_matched = std::make_shared<std::atomic<bool>>(false);
};

// Variables of the same names as the torch backend's, but for ZCOMM_RULES and ZCOMM_STATS. All formats are exact where
// nothing is said, because NCCL's calls do not tell whose data they carry.
struct Settings {
  HopFormats formats[kCollectiveNames.size()];
  std::vector<Rule> rules;  // the first that matches wins over `formats`
  std::size_t min_bytes = std::size_t{64} << 10;
  std::size_t chunk_bytes = 0;
  int node_size = 0;  // ranks per node, in the order of each communicator; 0: ranks of one host are a node
  bool logs = false;
  std::string stats_file;
  bool is_asked = false;  // by the environment
  bool asks_exchanges = false;
  bool asks_messages = false;
  bool is_possible = false;  // the build and NCCL can compress
  std::string why_not;       // that is_possible is false, if nobody has been told

  // Returns all that ranks must have alike for a communicator with this name: of names, which rules they match.
  std::string agreement(const std::string& name) const;

  // Returns the formats of a call whose tensor has `bytes`, on a communicator with this name and size.
  const HopFormats& formats_of(const Request& request, const std::string& name, int rank, int size,
                               std::size_t bytes) const;
};

// Parses the formats of a collective. An all-gather and a broadcast encode each value once: the first takes one format,
// the second has the one between nodes. Throws ArgumentError that begins with `what`.
HopFormats parse_formats(const std::string& what, Collective collective, const std::string& text);

// Reads the variables. Throws ArgumentError that names the variable, or the line of the file.
Settings read_settings();

// Returns the settings of this process. Wrong ones, and a build or an NCCL that cannot compress, leave every call exact
// and say so once on stderr.
const Settings& settings();

// Returns the text of the formats that a call asks for by itself, by a vendor option in its configuration; else null.
const char* formats_of_call(const nccl::CollConfig* config);

// Writes once on stderr why the formats that a call asks for by itself have no effect, if nothing was written before.
void tell_impossible();

// Tells whether a call is to be decided on. False for all calls of a program that asks for nothing.
inline bool are_asked(const nccl::CollConfig* config) {
  const bool asks = formats_of_call(config) != nullptr;
  if (asks && !settings().is_possible) tell_impossible();
  return settings().is_possible && (settings().is_asked || asks);
}

// Returns whether a call needs what only NCCL has: an event that it records.
bool wants_event(const nccl::CollConfig* config);

}  // namespace zcomm::front
