// Differences between the releases of torch that zcomm is built with, which have other virtual functions: of 2.11
// to 2.15 tests/python/backend/test_backend_virtuals.py lists them all.
#pragma once

#include <torch/headeronly/version.h>

#define ZCOMM_TORCH_HAS(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// Backend::suspend, resume, getMemoryStats.
#define ZCOMM_HAS_SUSPEND ZCOMM_TORCH_HAS(2, 12)
// Backend::gather_single; Backend::Options::clone.
#define ZCOMM_HAS_GATHER_SINGLE ZCOMM_TORCH_HAS(2, 14)
#define ZCOMM_HAS_CLONED_OPTIONS ZCOMM_TORCH_HAS(2, 14)
