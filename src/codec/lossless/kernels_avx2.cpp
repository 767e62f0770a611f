#define ZCOMM_LOSSLESS_KERNELS kAvx2Kernels
#include "codec/lossless/kernels.inl"
