"""How large an error may be that rounding explains.

Inputs are taken as rounded to the problem's type. Per head, ‖o - ref‖ / ‖ref‖ stays within the class's
bound, `Problem.tolerance`, as long as no score exceeds `plain_score`. A larger score is itself rounded in
proportion to its size, and exp turns that absolute error into a relative error of the weight. So the bound
grows for each unit of the largest score beyond `plain_score`, by

- float32, 3xTF32 and 3xf16: 2⁻²⁴ · (3/2 + √d / 9), more, the longer the dot product. That is about twice the
  worst met in models of the kernels' arithmetic (sequential FMA; tensor cores that sum four exact products
  and cut off what does not fit), exp2 good to 2 ulp, over d = 1 .. 256, all distributions and several scales,
  plus one unit for scale · log2 e, which is rounded twice before it meets every score alike.
- f16 and bf16: twice that, since tensor cores cut off rather than round; the products are exact. P and o are
  rounded once each, by up to 2⁻¹¹ or 2⁻⁸, whatever the scores: that is the class's bound.
- TF32: 2⁻¹¹ / √d, at least 2⁻¹¹ / 8. Each factor of each product is rounded, by up to 2⁻¹¹ of itself. Such
  errors add up as random ones do, with √d, where the products that make a large score add up with d. The
  worst met in a model is about half of it.
- e4m3: 2⁻¹⁴ · (3/2 + √d / 9). Tensor cores keep thirteen bits behind the largest product's first, and add
  the next products to a sum cut off like that. The worst met on an emulated card is a third of it.

Elementwise, |o - ref| <= factor · bound · max|v| + bound · |ref|: an output is an average of v. The factor is
6 for float32, 3 for TF32 and 1 for 16-bit numbers, whose bounds hold for P's rounding element by element.

Of scores that are changed, what is measured against `plain_score` is how much of such an error arrives
behind the change, and twice the rounding of its own operations is added: an error of a score moves its weight
and the others' the other way. 16-bit classes compute hyperbolic tangents to 2⁻¹¹ of themselves.

What rounding does to all scores of a row alike moves no weight between keys, and all that is said above
counts on it: tensor cores cut off, so that scores come out too small, each by about the same. Against a sink
nothing cancels. Where it has most of the weight, the whole error of a score is that of the outputs: some
units of the score's size, as many as the class promises (3 + √d / 2, see allowed_errors.py; of TF32 as
above). The worst met, 3xTF32 with a sink of 12, is six.

The log-sum-exp of f16 and bf16 sums weights before they are rounded. Only their exponential may be rough, to
1e-4, less than the rounding then loses. So it is held to 2e-4 (e4m3: 5e-3; where weights are of eight bits,
and may be summed as they are then, 9e-2) plus the growth above, that of the others to factor · bound; in
proportion to its size where that exceeds 1. It is the mean of what moves each score, by weight: see
`moved_scores`.
"""

from __future__ import annotations

import math

import numpy as np

from ...gen.problem import EIGHT, Problem

#: Scores up to this leave the bound as it is; those of TF32 up to a quarter of it.
PLAIN_SCORE = 16.0
UNIT_ROUNDOFF = 2.0**-24
#: Largest relative rounding error of eleven bits: TF32's factors.
TF32_ROUNDOFF = 2.0**-11
#: How much larger than the bound, times max|v|, the error of one element may be: by dtype, or TF32.
ELEMENT_FACTORS = {"f32": 6.0, "tf32": 3.0, "f16": 1.0, "bf16": 1.0, "e4m3": 1.0}
#: Of a sum of products of e4m3, tensor cores keep thirteen bits behind the largest term's first.
E4M3_ROUNDOFF = 2.0**-14
#: Largest error of a 16-bit kernel's log-sum-exp, of one of eight bits, and of one whose sums may be of
#: weights of eight bits: by straight lines these are off by a twelfth.
HALF_LSE_TOLERANCE, E4M3_LSE_TOLERANCE, EIGHT_LSE_TOLERANCE = 2e-4, 5e-3, 9e-2
#: What `tanh.approx` of float32 may be off by, of its size.
HALF_TANH_ERROR = 2.0**-10.9


def error_bound(
    problem: Problem, max_score: float, change_error: float = 0.0, sink_score: float = 0.0
) -> float:
    """Returns the largest per-head ‖o - ref‖ / ‖ref‖ that rounding explains; see the module's docstring."""
    grown = _growth(problem, max_score) + _beside_sinks(problem, sink_score)
    return problem.tolerance + grown + 2 * change_error


def lse_bound(problem: Problem, max_score: float, change_error: float = 0.0) -> float:
    """Returns the largest error of the log-sum-exp that rounding explains, over max(1, its size)."""
    if problem.dtype != "f32":
        tolerance = E4M3_LSE_TOLERANCE if problem.dtype == "e4m3" else HALF_LSE_TOLERANCE
        if problem.precision == EIGHT:
            tolerance = EIGHT_LSE_TOLERANCE
        return tolerance + _growth(problem, max_score) + change_error
    return element_factor(problem) * error_bound(problem, max_score, change_error)


def moved_scores(apart: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Returns by how much each row's scores, and so its log-sum-exp, move at most, where elements of q move
    by up to ``apart``; arrays are (batch, heads, rows or keys, columns), the result (batch, heads, rows).

    A score moves by δ[j] = scale · Σ_d Δ[d] k[j,d], at most |scale| Σ_d |Δ[d] k[j,d]|; the logarithm of
    Σ_j e^(s[j] + δ[j]) lies between the log-sum-exp plus the least δ and plus the greatest. What changes
    scores is taken to be no steeper than 1, as soft caps are.
    """
    sizes = np.abs(np.nan_to_num(k.astype(np.float64)))
    group = apart.shape[1] // k.shape[1]
    moved = apart.reshape(*k.shape[:2], -1, apart.shape[-1]) @ sizes.swapaxes(-1, -2)
    largest = abs(scale) * moved.max(axis=-1, initial=0.0)
    return largest.reshape(len(k), k.shape[1] * group, -1)


def has_ordinary_scores(
    problem: Problem, max_score: float, change_error: float = 0.0, sink_score: float = 0.0
) -> bool:
    """Says whether scores are of the size that the class's bound is meant for: where they are changed, what
    the change rounds by stays below half of it, or below what its hyperbolic tangents make of such scores."""
    return (
        max_score <= plain_score(problem)
        and change_error <= max(problem.tolerance / 2, plain_score(problem) * tanh_error(problem))
        and _beside_sinks(problem, sink_score) <= problem.tolerance / 2
    )


def plain_score(problem: Problem) -> float:
    """Returns the largest score that leaves the class's bound as it is."""
    return PLAIN_SCORE / 4 if problem.precision == "tf32" else PLAIN_SCORE


def _growth(problem: Problem, max_score: float) -> float:
    """What the rounding of large scores adds to a bound."""
    beyond, root = max(0.0, max_score - plain_score(problem)), math.sqrt(problem.head_dim)
    if problem.precision == "tf32":
        return beyond * TF32_ROUNDOFF * max(1 / root, 1 / 8)
    return beyond * _unit(problem) * (1.5 + root / 9)


def _beside_sinks(problem: Problem, sink_score: float) -> float:
    """What the rounding of scores adds where a sink has weight."""
    root = math.sqrt(problem.head_dim)
    if problem.precision == "tf32":
        return sink_score * TF32_ROUNDOFF * max(1 / root, 1 / 8)
    return sink_score * _unit(problem) * (3 + root / 2)


def _unit(problem: Problem) -> float:
    """What one sum of a score rounds by, of its size."""
    return {"f32": UNIT_ROUNDOFF, "e4m3": E4M3_ROUNDOFF}.get(problem.dtype, 2 * UNIT_ROUNDOFF)


def tanh_error(problem: Problem) -> float:
    """Returns how far off the class's hyperbolic tangents may be, of their size."""
    return 0.0 if problem.dtype == "f32" else HALF_TANH_ERROR


def element_factor(problem: Problem) -> float:
    return ELEMENT_FACTORS.get(problem.precision, ELEMENT_FACTORS[problem.dtype])
