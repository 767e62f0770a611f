#define ZCOMM_ISA "avx512"
#define ZCOMM_KERNELS kAvx512Kernels
#include "codec/cpu/kernels.inl"
