#define ZCOMM_ISA "avx2"
#define ZCOMM_KERNELS kAvx2Kernels
#include "codec/cpu/kernels.inl"
