#define ZCOMM_DIFFERENCE_KERNELS kBaselineKernels
#include "codec/difference/kernels.inl"
