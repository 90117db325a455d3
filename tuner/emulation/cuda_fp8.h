// Found in place of CUDA's <cuda_fp8.h>: its type of four bits of exponent and three of fraction, and its
// conversion.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "e4m3.h"

struct __nv_fp8_e4m3 {
  unsigned char __x;
};
