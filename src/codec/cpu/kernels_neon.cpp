#define ZCOMM_ISA "neon"
#define ZCOMM_KERNELS kNeonKernels
#define ZCOMM_NEON
#include "codec/cpu/kernels.inl"
