// Found in place of CUDA's <cuda_runtime.h>.
#pragma once

#include "cuda_emulation.h"
