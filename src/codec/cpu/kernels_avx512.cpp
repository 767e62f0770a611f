#define ZCOMM_KERNELS kAvx512Kernels
#include "codec/cpu/kernels.inl"
