#define ZCOMM_LOSSLESS_KERNELS kBaselineKernels
#include "codec/lossless/kernels.inl"
