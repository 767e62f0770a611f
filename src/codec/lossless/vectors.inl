// Vectors of kWidth bytes, and of kWidth values of 16 bits, for kernels.inl: AVX-512, AVX2, or loops.

#if defined(__AVX2__)
#include "codec/lossless/vectors_x86.inl"
#else
#include "codec/lossless/vectors_baseline.inl"
#endif
