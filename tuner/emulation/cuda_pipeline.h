// Found in place of CUDA's <cuda_pipeline.h>.
#pragma once

#include "cuda_emulation.h"
