// Included before everything else in a build for older systems: with it <condition_variable> and <mutex> do without
// pthread_cond_clockwait and pthread_mutex_clocklock, which glibc has since 2.30, as where these are missing.
#pragma once

#ifdef __cplusplus
#include <cstddef>  // which brings the library's configuration
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#endif
