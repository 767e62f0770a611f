// Scanner of the words of a PTX file.
#pragma once

#include <cctype>
#include <stdexcept>
#include <string>

#include "integers.hpp"

namespace ptx {

class Scanner {
 public:
  explicit Scanner(const std::string& text) : text_(text) { skip(); }

  bool is_at_end() const { return at_ == text_.size(); }
  u32 line() const { return line_; }
  bool is_next(char c) const { return peek() == c; }

  bool take(const std::string& word) {
    if (text_.compare(at_, word.size(), word) != 0) return false;
    at_ += word.size();
    skip();
    return true;
  }
  void expect(const std::string& word) {
    if (!take(word)) refuse("'" + word + "'");
  }

  // Reads a name of letters, digits and _ $ %; with dots if `with_dots`.
  std::string name(bool with_dots = false) {
    const std::size_t begin = at_;
    while (is_in_name(peek()) || (with_dots && peek() == '.')) ++at_;
    if (at_ == begin) refuse("a name");
    const std::string found = text_.substr(begin, at_ - begin);
    skip();
    return found;
  }
  bool is_number() const { return peek() == '-' || std::isdigit(static_cast<unsigned char>(peek())); }
  // An integer in C's notation, or the bits of a float32: 0f and eight hexadecimal digits.
  u64 number() {
    const bool is_negative = take("-");
    if (take("0f") || take("0F")) return digits(16);
    const u64 value = take("0x") ? digits(16) : digits(10);
    return is_negative ? 0 - value : value;
  }
  void skip_statement() {
    while (!is_at_end() && peek() != ';') ++at_;
    expect(";");
  }
  void skip_line() {
    while (!is_at_end() && peek() != '\n') ++at_;
    skip();
  }

  // Throws: what was expected here.
  [[noreturn]] void refuse(const std::string& expected) const { refuse(expected, text_.substr(at_, 40)); }
  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    throw std::runtime_error("PTX, line " + std::to_string(line_) + ": expected " + expected + ", got '" +
                             got.substr(0, got.find('\n')) + "'");
  }

 private:
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  static bool is_in_name(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
  }
  u64 digits(int base) {
    const std::size_t begin = at_;
    while (std::isxdigit(static_cast<unsigned char>(peek()))) ++at_;
    if (at_ == begin) refuse("a number");
    const u64 value = std::stoull(text_.substr(begin, at_ - begin), nullptr, base);
    skip();
    return value;
  }
  // White space and comments.
  void skip() {
    for (; at_ < text_.size(); ++at_) {
      if (text_.compare(at_, 2, "//") == 0) {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      }
      if (!std::isspace(static_cast<unsigned char>(peek()))) return;
      line_ += peek() == '\n' ? 1 : 0;
    }
  }

  const std::string& text_;
  std::size_t at_ = 0;
  u32 line_ = 1;
};

}  // namespace ptx
