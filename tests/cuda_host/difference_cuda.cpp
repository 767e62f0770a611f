#include "codec/cuda/difference_cuda.cu"
