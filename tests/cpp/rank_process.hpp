// Ranks that are processes: this program starts itself to run one of its skipped test cases.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "zcomm/nccl.hpp"

namespace zcomm::test {

inline std::string to_hex(const NcclUniqueId& id) {
  std::string text;
  for (const std::byte byte : id) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += {kDigits[static_cast<int>(byte) >> 4], kDigits[static_cast<int>(byte) & 15]};
  }
  return text;
}

inline NcclUniqueId id_from_hex(std::string_view text) {
  NcclUniqueId id{};
  for (std::size_t i = 0; i < id.size(); ++i) {
    int byte = 0;
    std::from_chars(&text[2 * i], &text[2 * i] + 2, byte, 16);
    id[i] = static_cast<std::byte>(byte);
  }
  return id;
}

// Starts this program with more environment variables ("NAME=value"), to run the skipped test case of that name. Its
// stderr goes to the file `errors`, if that is not null.
inline pid_t spawn_case(const char* test_case, std::vector<std::string> variables, const char* errors = nullptr) {
  std::vector<char*> environment;
  for (std::string& variable : variables) environment.push_back(variable.data());
  for (char** variable = environ; *variable != nullptr; ++variable) environment.push_back(*variable);
  environment.push_back(nullptr);
  std::vector<std::string> words{"rank", std::string("--test-case=") + test_case, "--no-skip", "--minimal"};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (errors != nullptr) posix_spawn_file_actions_addopen(&actions, 2, errors, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  pid_t pid = 0;
  REQUIRE(posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, arguments.data(), environment.data()) == 0);
  posix_spawn_file_actions_destroy(&actions);
  return pid;
}

// "ends well", "fails", or "hangs": then it was killed.
inline std::string outcome_of(pid_t pid, std::chrono::seconds limit = std::chrono::seconds(120)) {
  const auto latest = std::chrono::steady_clock::now() + limit;
  int status = 0;
  for (pid_t ended = 0; (ended = waitpid(pid, &status, WNOHANG)) != pid;) {
    if (ended < 0) return "is no process";
    if (std::chrono::steady_clock::now() >= latest) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      return "hangs";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "ends well" : "fails";
}

}  // namespace zcomm::test
