#define ZCOMM_ISA "baseline"
#define ZCOMM_KERNELS kBaselineKernels
#include "codec/cpu/kernels.inl"
