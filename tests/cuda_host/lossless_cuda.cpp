#include "codec/cuda/lossless_cuda.cu"
