"""Whether a kernel of the backward pass is right on a case: against float64, from outputs that the forward
pass has left rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ...gen.promise import promise_of
from ..build.protocol import Build
from ..cards.device import Runner
from ..cards.dtypes import numpy_dtype
from ..cards.score_values import of_four_axes
from . import reference
from .cases import Case
from .comparison import WrongResult
from .error_bounds import element_factor, error_bound, has_ordinary_scores, tanh_error
from .gradients import Gradient, gradients
from .reference import Reference

#: How many times what rounds weights off may be off by: weights, what they are multiplied by, and the sum.
ROUNDINGS = 2.0
#: What elements may be off by where weights end that a card keeps: of a head's largest, and of one.
LOST, LEAST = 2.0**-100, 2.0**-110
#: How many of the least weights that a type has may be missing in an element.
WEIGHTS = 16.0


def check_gradients(
    runner: Runner,
    build: Build,
    case: Case,
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    scale: float,
    values: Mapping[str, Any],
    rng: np.random.Generator,
) -> float:
    """Returns the largest per-head error over spread of a kernel's gradients on a case's ``inputs`` q, k and
    v, 0 where scores are beyond `has_ordinary_scores`. Raises `WrongResult`."""
    problem = build.kernel.problem
    q, k, v = inputs
    expected = reference.attention(
        q, k, v, scale=scale, scores=problem.scores, values=values, tanh_error=tanh_error(problem)
    )
    given = rng.standard_normal(expected.o.shape, dtype=np.float32).astype(numpy_dtype(problem.output_dtype))
    arrays = {"q": q, "k": k, "v": v, "dout": given}
    # As the forward pass leaves them: rounded.
    arrays |= {"o": expected.o.astype(given.dtype), "lse": expected.lse.astype(np.float32)}
    if case.want_lse:
        arrays["dlse"] = rng.standard_normal(expected.lse.shape, dtype=np.float32)
    wanted = gradients(
        q,
        k,
        v,
        given,
        scale=scale,
        dlse=arrays.get("dlse"),
        scores=problem.scores,
        values=values,
        unit=weight_bound(problem, expected),
        tanh_error=tanh_error(problem),
    )
    found = runner.differentiate(build, arrays, scale=scale, values=values)
    errors = [
        compare_gradient(
            found[name], each.summed_to(found[name].shape), expected, problem, f"{name}, {case.name}"
        )
        for name, each in wanted.items()
    ]
    return max(errors)


def weight_bound(problem: Problem, expected: Reference) -> float:
    """Returns how far off a weight may be, of its size. It is made of a score and of a log-sum-exp that
    somebody else has found: of what rounding does to a row's scores nothing cancels, as beside a sink."""
    sink_score = max(expected.sink_score, expected.max_score)
    return error_bound(problem, expected.max_score, expected.change_error, sink_score)


def compare_gradient(
    found: np.ndarray, wanted: Gradient, expected: Reference, problem: Problem, name: str
) -> float:
    """Returns the largest ‖found - wanted‖ over its spread of a head, 0 where scores are beyond
    `has_ordinary_scores`; ``expected`` is what the forward pass makes of the inputs. Raises `WrongResult` for
    anything that rounding does not explain, NaN and infinity included."""
    found, wanted = of_four_axes(found), Gradient(of_four_axes(wanted.value), of_four_axes(wanted.spread))
    sizes = (expected.max_score, expected.change_error, expected.sink_score)
    bound = ROUNDINGS * weight_bound(problem, expected)
    largest = np.abs(wanted.value).max(axis=(2, 3), keepdims=True, initial=0.0)
    difference = np.abs(np.asarray(found, np.float64) - wanted.value)
    floor = WEIGHTS * promise_of(problem).weight_floor
    difference = np.maximum(difference - (max(LOST, floor) * largest + max(LEAST, floor)), 0.0)
    norms = (np.sqrt(np.square(each).sum(axis=(2, 3))) for each in (difference, wanted.spread))
    errors = _over(*norms)
    if not (errors <= bound).all():
        b, h = np.unravel_index(int(np.nan_to_num(errors, nan=np.inf).argmax()), errors.shape)
        raise WrongResult(
            f"wrong gradient: {name}: head {h} of batch {b}: it is off by {errors[b, h]:.2e} of what its "
            f"terms are, at most {bound:.1e} allowed"
        )
    excess = _over(difference, element_factor(problem) * bound * wanted.spread)
    if not (excess <= 1.0).all():
        at = np.unravel_index(int(np.nan_to_num(excess, nan=np.inf).argmax()), excess.shape)
        b, h, row, x = (int(i) for i in at)
        raise WrongResult(
            f"wrong gradient: {name}: head {h} of batch {b}, row {row}, column {x}: it is "
            f"{float(found[b, h, row, x]):.7g}, float64 gives {wanted.value[b, h, row, x]:.7g}"
        )
    return float(errors.max()) / ROUNDINGS if has_ordinary_scores(problem, *sizes) else 0.0


def _over(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The quotient, of nothing over nothing 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(part == 0.0, 0.0, part / whole)
