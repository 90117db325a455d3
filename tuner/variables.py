"""The environment's variables that flashgen reads."""

from __future__ import annotations

import os

#: What each is for; docs/tuning.md has the same table.
VARIABLES = {
    "FLASHGEN_CACHE": "the folder of built kernels, instead of the user's cache folder",
    "FLASHGEN_CACHE_LIMIT": "the most that folder may take (500M, 4G); 2G without it",
    "FLASHGEN_HOME": "the folder of kernels tuned on this machine, instead of the user's data folder",
    "CUDA_HOME": "the CUDA toolkit whose nvcc or NVRTC compiles, before others that are found",
    "CUDA_PATH": "the same, after CUDA_HOME",
    "CXX": "the C++ compiler that emulated cards are built with, and that nvcc preprocesses with",
}


def set_variables() -> dict[str, str]:
    """Returns those that are set, with their values."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
