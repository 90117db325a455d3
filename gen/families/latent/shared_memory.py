"""What a kernel of latent attention keeps in shared memory."""

from __future__ import annotations

from math import gcd

from ...problem import Problem
from ..wgmma.shared_memory import ALIGNMENT, BARRIER_BYTES, CHUNK, CHUNK_BYTES, chunks
from .parameters import CONSUMERS, Parameters

#: Numbers of 32 bits that each row has beside: a maximum and two sums.
ROW_NUMBERS = 3


def rest_chunks(problem: Problem) -> int:
    """Returns how many chunks of keys have columns that are no values, and none that are."""
    return chunks(problem.head_dim) - problem.head_dim_v // CHUNK


def piece(variant: Parameters, problem: Problem) -> int:
    """Returns how many keys are copied together: a tile, or what of it is of one page."""
    return gcd(variant.bc, problem.page_size)


def bytes_of_storage(variant: Parameters, problem: Problem) -> int:
    """Returns the bytes of a block's ``SharedStorage``: Q, two tiles of keys, weights, what rows have beside,
    and barriers."""
    d = chunks(problem.head_dim)
    tiles = CHUNK_BYTES * (variant.br * d + 2 * variant.bc * d + variant.br * chunks(variant.bc))
    arrivals = -(-d // variant.boxes)
    barriers = 2 * (arrivals + CONSUMERS + (1 if rest_chunks(problem) else 0)) + 1  # which is Q's
    # Rows that a block or its cluster writes have sums beside their maxima.
    numbers = variant.br * (ROW_NUMBERS if variant.workspace_splits == 1 else 1)
    whole = tiles + 4 * numbers + BARRIER_BYTES * barriers
    return -(-whole // ALIGNMENT) * ALIGNMENT
