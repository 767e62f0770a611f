#define ZCOMM_DIFFERENCE_KERNELS kAvx2Kernels
#include "codec/difference/kernels.inl"
