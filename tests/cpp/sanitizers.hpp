#pragma once

// Sanitizers make tests 5 to 30 times longer. Under them, the longest cases take a sample of what they try otherwise.

namespace zcomm::test {

#ifdef __SANITIZE_THREAD__
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitizers = true;
#else
inline constexpr bool kSanitizers = false;
#endif

}  // namespace zcomm::test
