#define ZCOMM_LOSSLESS_KERNELS kAvx512Kernels
#include "codec/lossless/kernels.inl"
