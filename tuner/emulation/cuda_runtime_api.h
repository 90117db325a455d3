// Found in place of CUDA's <cuda_runtime_api.h>.
#pragma once

#include "cuda_emulation.h"
