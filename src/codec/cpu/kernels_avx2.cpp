#define ZCOMM_KERNELS kAvx2Kernels
#include "codec/cpu/kernels.inl"
