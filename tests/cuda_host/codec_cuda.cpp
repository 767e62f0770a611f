#include "codec/cuda/codec_cuda.cu"
