"""See torch."""

import contextlib

using = []


class SDPBackend:
    FLASH_ATTENTION = "FLASH_ATTENTION"
    CUDNN_ATTENTION = "CUDNN_ATTENTION"
    EFFICIENT_ATTENTION = "EFFICIENT_ATTENTION"
    MATH = "MATH"


@contextlib.contextmanager
def sdpa_kernel(backend):
    using.append(backend)
    try:
        yield
    finally:
        using.pop()
