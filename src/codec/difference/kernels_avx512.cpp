#define ZCOMM_DIFFERENCE_KERNELS kAvx512Kernels
#include "codec/difference/kernels.inl"
