"""What a kernel of latent attention keeps in shared memory."""

from __future__ import annotations

from ...problem import Problem
from ..wgmma.shared_memory import ALIGNMENT, BARRIER_BYTES, CHUNK, CHUNK_BYTES, chunks
from .parameters import CONSUMERS, Parameters

#: Numbers of 32 bits that each row has beside: a maximum, two sums, a factor and a mark.
ROW_BYTES = 4 * 5


def rest_chunks(problem: Problem) -> int:
    """Returns how many chunks of keys have columns that are no values, and none that are."""
    return chunks(problem.head_dim) - problem.head_dim_v // CHUNK


def bytes_of_storage(variant: Parameters, problem: Problem) -> int:
    """Returns the bytes of a block's ``SharedStorage``: Q, two tiles of keys, weights, what rows have beside,
    and barriers."""
    d = chunks(problem.head_dim)
    tiles = CHUNK_BYTES * (variant.br * d + 2 * variant.bc * d + variant.br * chunks(variant.bc))
    arrivals = -(-d // variant.boxes)
    barriers = 2 * (arrivals + CONSUMERS + (1 if rest_chunks(problem) else 0))
    whole = tiles + variant.br * ROW_BYTES + BARRIER_BYTES * barriers
    return -(-whole // ALIGNMENT) * ALIGNMENT
