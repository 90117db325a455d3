"""Workloads of serving many users at once, as rivals were timed on them.

`varlen` are packed sequences of their own lengths, `few` some query rows a sequence against a long cache,
`paged` the same with keys in pages of 16 and of 128, `mla` values narrower than keys, or columns of them.
"""

from __future__ import annotations

from dataclasses import replace

from ..gen.lengths import listed_lengths
from .workload import Suite, Workload, workload

#: Lengths that the rivals' were: uniform between an eighth of the longest and the longest, drawn once.
_OF_4096 = (
    *(2630, 2024, 2713, 2771, 3010, 2546, 3734, 4032),
    *(3112, 3833, 3257, 768, 3751, 1467, 1727, 1750),
)
_OF_16384 = (6617, 7379, 8810, 8944)
_OF_512 = (
    *(238, 363, 360, 158, 349, 79, 413, 98, 406, 75, 331, 80, 176, 398, 263, 366),
    *(320, 241, 116, 289, 475, 154, 66, 337, 288, 223, 268, 177, 184, 147, 493, 229),
    *(99, 244, 90, 145, 472, 444, 384, 352, 232, 359, 227, 296, 245, 370, 426, 280),
    *(502, 236, 359, 75, 446, 493, 266, 264, 159, 208, 365, 166, 145, 302, 398, 481),
    *(305, 239, 229, 237, 345, 320, 245, 352, 134, 267, 493, 220, 134, 203, 456, 322),
    *(376, 310, 511, 318, 137, 434, 303, 506, 218, 468, 64, 324, 185, 196, 394, 463),
    *(368, 103, 108, 437, 215, 374, 484, 255, 182, 276, 115, 274, 80, 296, 416, 332),
    *(265, 208, 146, 461, 270, 280, 73, 310, 424, 94, 189, 311, 98, 483, 115, 431),
)
#: (sequences, queries, keys) of each, 32 heads of queries on 8 of keys.
_FEW = (
    *((32, q, 8192) for q in (1, 2, 4, 8, 16)),
    *((1, 1, 4096), (64, 1, 1024), (1, 1, 131072), (1, 4, 131072), (8, 64, 16384), (2, 512, 8192)),
)
#: Keys of a page: as many as engines use, and as kernels like.
_PAGE_SIZES = (16, 128)


def _varlen() -> tuple[Workload, ...]:
    def packed(
        name: str,
        lengths: tuple[int, ...],
        heads: int | tuple[int, int],
        longest: int,
        head_dim: int,
        causal: bool,
    ) -> Workload:
        varlen = listed_lengths(lengths, lengths)
        return workload(name, "bf16", len(lengths), heads, longest, head_dim, causal, varlen=varlen)

    return (
        packed("16x..4096-d128-h32-8c", _OF_4096, (32, 8), 4096, 128, True),
        packed("128x..512-d64-h16-16", _OF_512, 16, 512, 64, False),
        packed("4x..16384-d128-h16-16c", _OF_16384, 16, 16384, 128, True),
    )


def _few() -> tuple[Workload, ...]:
    """One row sees all keys, of several each its own and all before."""
    return tuple(
        workload(f"b{batch}-q{q}-k{k}-h32/8-d128", "bf16", batch, (32, 8), (q, k), 128, q > 1)
        for batch, q, k in _FEW
    )


def _paged() -> tuple[Workload, ...]:
    return tuple(
        Workload(f"{each.name}-page{size}", replace(each.problem, page_size=size))
        for each in _few()
        for size in _PAGE_SIZES
    )


def _mla() -> tuple[Workload, ...]:
    """Prefill, where values are narrower than keys, and decoding, where they are the keys' first columns."""
    prefill = tuple(
        workload(
            f"192/128-{seqlen}{'c' if causal else ''}",
            "bf16",
            16384 // seqlen,
            16,
            seqlen,
            (192, 128),
            causal,
        )
        for seqlen, causal in ((4096, False), (4096, True), (16384, True))
    )
    decoding = tuple(
        workload(
            f"latent-h{heads}-q{q}-k8192{f'-page{page_size}' if page_size else ''}",
            "bf16",
            32,
            (heads, 1),
            (q, 8192),
            (576, 512),
            q > 1,
            page_size=page_size,
            latent=True,
        )
        for heads in (16, 64, 128)
        for q in (1, 2)
        for page_size in (0, 64)
    )
    return (*prefill, *decoding)


SERVING_SUITES = (
    Suite("varlen", "packed sequences of their own lengths", _varlen()),
    Suite("few", "few queries on many keys", _few(), counts_keys=True),
    Suite("paged", "few queries, keys in pages", _paged(), counts_keys=True),
    Suite("mla", "values narrower than keys, latent attention", _mla()),
)
