"""`flashgen.quantize`: arrays as numbers of eight bits that lose little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ...templates.runtime.arrays import _kind, _library, _torch_of
from ...templates.runtime.attention import _check_call

#: The largest number of e4m3.
LARGEST = 448.0
#: The exponent, of a power of two, that 1 of q · k counts for: from here on exponents of up to 2^8 fit f16,
#: in which the fastest kernels have them (`score_type`). Where it counts for less, they bring Q down first.
WANTED_SCALE = 2.0**-8
#: How often the largest numbers of q and of k are halved for it at most. Before, numbers down to 2^-15 of the
#: largest have all bits of e4m3; after so many halvings, those down to 2^-10 of it.
MOST_HALVINGS = 5


class Quantized(NamedTuple):
    """q, k and v in float8_e4m3fn, and what each is multiplied by to be what was meant."""

    q: Any
    k: Any
    v: Any
    scales: tuple[float, float, float]


def quantize(
    q: Any,
    k: Any,
    v: Any,
    *,
    smooth: bool = False,
    rotate: bool = False,
    scales: Sequence[float] | None = None,
    layout: str = "bhsd",
) -> Quantized:
    """Rounds arrays to float8_e4m3fn with a scale each, as `flashgen.attention` takes them.

    q, k and v are torch, numpy or JAX arrays of numbers, (batch, heads, seqlen, head_dim), with layout="bshd"
    (batch, seqlen, heads, head_dim); so are the results, in shape, order and place:

        eight = flashgen.quantize(q, k, v, rotate=True)
        o = flashgen.attention(*eight[:3], scales=eight.scales, causal=True)

    rotate: turns rows of q and of k alike, by random signs and a Hadamard matrix, which spreads an outlier
        over all columns and leaves scores as they are (Shah et al. 2024, "FlashAttention-3", section 3.3).
        Of a head dim that is no power of two, as many columns are turned together as a power of two divides.
    smooth: takes the mean of a head's keys away from each of them, which changes all scores of a row alike,
        and no weight (Zhang et al. 2024, "SageAttention"); log-sum-exps become scale * q · mean smaller. New
        keys beside a cache want the mean that was taken from those in it, so that it is no help there.
    scales: what was found to fit before, for q, k and v; numbers beyond are cut off. None: the largest number
        of each array decides, for which a call waits until it is known. That of v becomes the type's; those
        of q and k stay up to 2^5 below it, so that scores fit f16, in which the fastest kernels have them.

    Raises TypeError for arrays of other libraries, ValueError for infinite numbers, shapes that do not go
    together and scales that are no positive numbers.
    """
    _check_call(layout)
    given = {"q": q, "k": k, "v": v}
    for name, x in given.items():
        if len(x.shape) != 4:
            raise ValueError(f"{name} has {len(x.shape)} dimensions, {tuple(x.shape)}; 4 are needed")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dim {q.shape[-1]} and k {k.shape[-1]}: they must agree")
    numbers = {name: _as_float32(name, x) for name, x in given.items()}
    if smooth:
        numbers["k"] = numbers["k"] - _mean(numbers["k"], 2 if layout == "bhsd" else 1)
    if rotate:
        for name in ("q", "k"):
            numbers[name] = _rotated(numbers[name])
    if scales is None:
        of_q, of_k, of_v = (_scale_of(name, x) for name, x in numbers.items())
        scales = (*_raised(of_q, of_k, int(q.shape[-1])), of_v)
    of_q, of_k, of_v = map(float, scales)
    if not all(0 < each < math.inf for each in (of_q, of_k, of_v)):
        raise ValueError(f"scales are {tuple(scales)}: pass three positive numbers")
    made = [_rounded(x, each) for x, each in zip(numbers.values(), (of_q, of_k, of_v), strict=True)]
    return Quantized(made[0], made[1], made[2], (of_q, of_k, of_v))


@lru_cache(maxsize=32)
def rotation(columns: int) -> np.ndarray:
    """Returns the orthogonal matrix, float32, by which `quantize` turns rows of so many columns."""
    block = columns & -columns  # the largest power of two that divides them
    hadamard = np.ones((1, 1))
    while len(hadamard) < block:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.random.default_rng(columns).choice((-1.0, 1.0), columns)
    turned = np.kron(np.eye(columns // block), hadamard / math.sqrt(block))
    return (signs[:, None] * turned).astype(np.float32)


def _as_float32(name: str, x: Any) -> Any:
    if _torch_of(x) is not None:
        return x.float()
    if not isinstance(x, np.ndarray) and _library(x) not in ("jax", "jaxlib"):
        raise TypeError(
            f"{name} is a {_kind(x)}; torch, numpy and JAX have numbers of float8_e4m3fn: pass an array of "
            "theirs"
        )
    return x.astype(np.float32)


def _mean(x: Any, axis: int) -> Any:
    return x.mean(axis, keepdim=True) if _torch_of(x) is not None else x.mean(axis, keepdims=True)


def _rotated(x: Any) -> Any:
    turn, torch = rotation(int(x.shape[-1])), _torch_of(x)
    return x @ (turn if torch is None else torch.from_numpy(turn).to(x.device))


def _scale_of(name: str, x: Any) -> float:
    """By which the largest number is multiplied where that of the type is meant."""
    largest = float(abs(x).max()) if math.prod(x.shape) else 0.0
    if not math.isfinite(largest):
        raise ValueError(f"{name} has numbers that are not finite: no scale makes eight bits of them")
    return largest / LARGEST or 1.0


def _raised(of_q: float, of_k: float, head_dim: int) -> tuple[float, float]:
    """Scales of q and k by powers of two larger, as far as `WANTED_SCALE` asks for it."""
    scale = of_q * of_k * math.log2(math.e) / math.sqrt(head_dim)
    halvings = min(max(0, math.ceil(math.log2(WANTED_SCALE / scale))), 2 * MOST_HALVINGS)
    return of_q * 2.0 ** (halvings // 2), of_k * 2.0 ** ((halvings + 1) // 2)


def _rounded(x: Any, scale: float) -> Any:
    torch = _torch_of(x)
    if torch is not None:
        return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    # JAX has the types of ml_dtypes.
    return (x / scale).clip(-LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
