#include "front/settings.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <span>
#include <sstream>
#include <utility>

#include "front/functions.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/plan.hpp"

namespace zcomm::front {
namespace {

void tell(const std::string& why_not) {
  if (!why_not.empty()) std::fprintf(stderr, "zcomm's front of NCCL leaves every call exact: %s\n", why_not.c_str());
}

// Adds to an error what is wrong.
template <class Parse>
auto parsed(const std::string& what, Parse&& parse) {
  try {
    return parse();
  } catch (const ArgumentError& error) {
    throw ArgumentError(what + ": " + error.what());
  }
}

}  // namespace

HopFormats parse_formats(const std::string& what, Collective collective, const std::string& text) {
  return parsed(what, [&] {
    if (collective == Collective::all_gather) {
      const BlockFormat format = BlockFormat::parse(text);
      return HopFormats{format, format};
    }
    HopFormats formats = HopFormats::parse(text);
    if (collective == Collective::broadcast) formats.intra_node = formats.inter_node;
    return formats;
  });
}

namespace {

std::string text_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? "" : text;
}

template <class Number>
Number number_of(const std::string& what, const std::string& text, Number least) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  check_argument(error == std::errc() && end == text.data() + text.size() && number >= least, what,
                 ": expected a whole number of at least ", least, ", got '", text, "'");
  return number;
}

template <class Number>
void read_number(const char* variable, Number least, Number& target) {
  if (const std::string text = text_of(variable); !text.empty()) target = number_of(variable, text, least);
}

void read_condition(const std::string& where, const std::string& word, Rule& rule) {
  const std::size_t split = std::min(word.find('='), word.size() - 1);
  const std::string key = word.substr(0, split), value = word.substr(split + 1);
  const std::size_t dash = value.find('-');
  if (key == "name" && !value.empty()) {
    rule.name = value;
  } else if (key == "ranks") {
    rule.ranks = number_of(where + ": ranks", value, 1);
  } else if (key == "dtype") {
    rule.dtype = parsed(where, [&] { return parse_dtype(value); });
  } else if (key == "caller" && !value.empty()) {
    rule.caller = value;
  } else if (key == "in_place" && (value == "yes" || value == "no")) {
    check_argument(rule.collective <= Collective::all_reduce, where,
                   ": in_place: expected a rule of all_gather, reduce_scatter or all_reduce, whose ranks all have both "
                   "buffers, got one of ",
                   kCollectiveNames[static_cast<std::size_t>(rule.collective)]);
    rule.in_place = value == "yes";
  } else if (key == "bytes" && dash != std::string::npos) {
    rule.min_bytes = number_of(where + ": bytes", value.substr(0, dash), std::size_t{0});
    if (dash + 1 < value.size()) rule.max_bytes = number_of(where + ": bytes", value.substr(dash + 1), rule.min_bytes);
  } else {
    throw ArgumentError(where +
                        ": expected name=PATTERN, ranks=N, dtype=NAME, bytes=MIN-MAX, in_place=yes, in_place=no " +
                        "or caller=PATTERN, got '" + word + "'");
  }
}

std::vector<Rule> read_rules(const std::string& path) {
  std::vector<Rule> rules;
  std::ifstream file(path);
  check_argument(file.good(), "ZCOMM_RULES: expected a file that can be read, got '", path, "'");
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    const std::string where = concat("ZCOMM_RULES, line ", ++number);
    std::istringstream stream(line.substr(0, line.find('#')));
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (words.empty()) continue;
    const auto last = kCollectiveNames.end() - 1;  // "other"
    const auto* const name = std::find(kCollectiveNames.begin(), last, words[0]);
    check_argument(name != last && words.size() > 1, where, ": expected a collective (all_gather, reduce_scatter, ",
                   "all_reduce, all_to_all, broadcast, gather, scatter or message), conditions and formats, got '",
                   line, "'");
    Rule rule{.text = line, .collective = static_cast<Collective>(name - kCollectiveNames.begin()), .formats = {}};
    for (const std::string& word : std::span(words).subspan(1, words.size() - 2)) read_condition(where, word, rule);
    rule.formats = parse_formats(where, rule.collective, words.back());
    rules.push_back(std::move(rule));
  }
  return rules;
}

bool fits(const std::string& pattern, const std::string& text) {
  return fnmatch(pattern.c_str(), text.c_str(), 0) == 0;
}

}  // namespace

std::string Settings::agreement(const std::string& name) const {
  std::string text = concat("zcomm's front of NCCL, calls of at least ", min_bytes, " bytes, ");
  for (const HopFormats& each : formats) text += concat(each, ", ");
  for (const Rule& rule : rules) text += rule.text + (fits(rule.name, name) ? ", " : " (for another name), ");
  return concat(text, node_size, " ranks per node, ");
}

namespace {

bool is_in_place(const Request& request, int rank) {
  const auto slot = static_cast<std::size_t>(rank) * request.count * bytes_of_type(request.type);
  const auto* const from = static_cast<const std::byte*>(request.from);
  const auto* const to = static_cast<const std::byte*>(request.to);
  if (request.collective == Collective::all_gather) return from == to + slot;
  return request.collective == Collective::reduce_scatter ? from + slot == to : from == to;
}

}  // namespace

const HopFormats& Settings::formats_of(const Request& request, const std::string& name, int rank, int size,
                                       std::size_t bytes) const {
  for (const Rule& rule : rules) {
    const bool is_alike = rule.collective == request.collective && bytes >= rule.min_bytes && bytes <= rule.max_bytes &&
                          (!rule.ranks || *rule.ranks == size) && (!rule.dtype || rule.dtype == dtype_of(request.type));
    if (is_alike && fits(rule.name, name) && (!rule.in_place || *rule.in_place == is_in_place(request, rank)) &&
        (rule.caller == "*" || fits(rule.caller, name_of_library(request.caller)))) {
      *rule.has_matched = true;
      return rule.formats;
    }
  }
  return formats[static_cast<std::size_t>(request.collective)];
}

Settings read_settings() {
  Settings read;
  const auto read_formats = [&](Collective collective, const char* variable) {
    HopFormats& formats = read.formats[static_cast<std::size_t>(collective)];
    if (const std::string text = text_of(variable); !text.empty()) formats = parse_formats(variable, collective, text);
    read.is_asked = read.is_asked || !formats.is_exact();
    read.asks_exchanges = read.asks_exchanges || (is_exchange(collective) && !formats.is_exact());
  };
  read_formats(Collective::all_gather, "ZCOMM_ALL_GATHER");
  read_formats(Collective::reduce_scatter, "ZCOMM_REDUCE_SCATTER");
  read_formats(Collective::all_reduce, "ZCOMM_ALL_REDUCE");
  for (const auto exchange :
       {Collective::all_to_all, Collective::broadcast, Collective::gather, Collective::scatter, Collective::message}) {
    read_formats(exchange, "ZCOMM_EXCHANGES");
  }
  read.asks_messages = read.asks_exchanges;
  if (const std::string path = text_of("ZCOMM_RULES"); !path.empty()) read.rules = read_rules(path);
  read.is_asked = read.is_asked || !read.rules.empty();
  for (const Rule& rule : read.rules) {
    read.asks_exchanges = read.asks_exchanges || is_exchange(rule.collective);
    read.asks_messages = read.asks_messages || rule.collective == Collective::message;
  }
  read_number("ZCOMM_MIN_BYTES", std::size_t{0}, read.min_bytes);
  read.chunk_bytes = kDefaultGpuChunkBytes;
  read_number("ZCOMM_CHUNK_BYTES", std::size_t{1}, read.chunk_bytes);
  read_number("ZCOMM_NODE_SIZE", 1, read.node_size);
  read.logs = !text_of("ZCOMM_LOG").empty();
  read.stats_file = text_of("ZCOMM_STATS");
  return read;
}

const Settings& settings() {
  static const Settings& ours = *new Settings([] {
    Settings read;
    bool is_wrong = true;
    try {
      read = read_settings();
      is_wrong = false;
      if (cuda_toolkit().empty()) throw Error("this build of zcomm has no CUDA");
      nccl::library(wheel_beside_front());
      read.is_possible = true;
    } catch (const Error& error) {
      read.why_not = error.what();
    }
    if (is_wrong || read.is_asked) tell(std::exchange(read.why_not, {}));
    return read;
  }());
  return ours;
}

void tell_impossible() {
  static std::once_flag once;
  std::call_once(once, [] { tell(settings().why_not); });
}

const char* formats_of_call(const nccl::CollConfig* config) {
  if (config == nullptr || config->size < offsetof(nccl::CollConfig, limits)) return nullptr;
  for (const nccl::ConfigExt* option = config->ext; option != nullptr; option = option->next) {
    if (option->vendor_id == kVendorId && option->option_id == kFormatsOption) return option->value.text;
  }
  return nullptr;
}

bool wants_event(const nccl::CollConfig* config) {
  return config != nullptr && config->size >= sizeof(nccl::CollConfig) && config->launch_completion_event != nullptr;
}

}  // namespace zcomm::front
