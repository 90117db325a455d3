"""Whether a kernel of the backward pass is right on a case: against float64, from outputs that the forward
pass has left rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...gen.handover.reach import LOST_WEIGHT
from ...gen.kernel import Kernel
from ...gen.problem import Problem
from ...gen.promise import promise_of
from ..build.protocol import Build
from ..cards.device import Runner
from ..cards.dtypes import numpy_dtype
from ..cards.score_values import of_four_axes
from ..cards.sequences import sequence_slices
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
#: Arrays of queries, keys and values.
_Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]


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
    parts = _parts(problem, values, inputs)
    expected = [
        reference.attention(
            *each.of(inputs),
            scale=scale,
            scores=problem.scores,
            values=values,
            first=(each.number, 0),
            tanh_error=tanh_error(problem),
        )
        for each in parts
    ]
    dtype = numpy_dtype(problem.output_dtype)
    o = np.full((*q.shape[:3], v.shape[3]), np.nan, dtype)
    lse, given = np.full(q.shape[:3], np.nan, np.float32), o.copy()
    for each, exact in zip(parts, expected, strict=True):
        # As the forward pass leaves them: rounded.
        o[:, :, each.rows], lse[:, :, each.rows] = exact.o, exact.lse
        given[:, :, each.rows] = rng.standard_normal(exact.o.shape, dtype=np.float32)
    arrays = {"q": q, "k": k, "v": v, "dout": given, "o": o, "lse": lse}
    if case.want_lse:
        arrays["dlse"] = rng.standard_normal(lse.shape, dtype=np.float32)
    found = runner.differentiate(build, arrays, scale=scale, values=values)
    least, worst, of_buffers = least_weight(build.kernel), 0.0, dict[str, Gradient]()
    for each, exact in zip(parts, expected, strict=True):
        wanted = gradients(
            *each.of(inputs),
            given[:, :, each.rows],
            scale=scale,
            dlse=arrays["dlse"][:, :, each.rows] if case.want_lse else None,
            scores=problem.scores,
            values=values,
            first=(each.number, 0),
            unit=weight_bound(problem, exact),
            tanh_error=tanh_error(problem),
        )
        for name, gradient in wanted.items():
            if name not in ("dq", "dk", "dv"):
                of_buffers[name] = gradient.plus(of_buffers.get(name))
                continue
            own = found[name][:, :, each.rows if name == "dq" else each.keys]
            times = _times(name, each.of(inputs), scale)
            told = f"{name}, {case.name}"
            worst = max(worst, compare_gradient(own, gradient, exact, problem, told, least, times))
    largest = max(expected, key=lambda exact: weight_bound(problem, exact))
    for name, gradient in of_buffers.items():
        whole = gradient.summed_to(found[name].shape)
        told = f"{name}, {case.name}"
        worst = max(worst, compare_gradient(found[name], whole, largest, problem, told, least))
    return worst


@dataclass(frozen=True)
class _Part:
    """A sequence of packed ones, by its number, or a whole batch: where its rows and keys are."""

    number: int
    rows: slice
    keys: slice

    def of(self, inputs: _Inputs) -> _Inputs:
        q, k, v = inputs
        return q[:, :, self.rows], k[:, :, self.keys], v[:, :, self.keys]


def _parts(problem: Problem, values: Mapping[str, Any], inputs: _Inputs) -> list[_Part]:
    """What attends to itself alone."""
    if not problem.layout.is_packed:
        return [_Part(0, slice(0, inputs[0].shape[2]), slice(0, inputs[1].shape[2]))]
    places = zip(sequence_slices(values, "q"), sequence_slices(values, "k"), strict=True)
    return [_Part(number, rows, keys) for number, (rows, keys) in enumerate(places)]


def weight_bound(problem: Problem, expected: Reference) -> float:
    """Returns how far off a weight may be, of its size. It is made of a score and of a log-sum-exp that
    somebody else has found: of what rounding does to a row's scores nothing cancels, as beside a sink."""
    sink_score = max(expected.sink_score, expected.max_score)
    return error_bound(problem, expected.max_score, expected.change_error, sink_score)


def _times(name: str, inputs: _Inputs, scale: float) -> float:
    """Returns the largest number that gradients of scores are multiplied by, 1 at least: what the least of
    them lose is lost as often. Weights are, by gradients of outputs, which are of ordinary size."""
    q, k, _ = inputs
    factor = {"dq": k, "dk": q}.get(name)
    if factor is None or not factor.size:
        return 1.0
    return max(1.0, abs(scale) * float(np.abs(factor.astype(np.float64)).max()))


def least_weight(kernel: Kernel) -> float:
    """Returns the weight, of what a row's keys weigh together, below which a kernel may take one for none."""
    left_out = LOST_WEIGHT if kernel.variant.leaves_far_keys_out else 0.0
    return max(promise_of(kernel.problem).weight_floor, left_out)


def compare_gradient(
    found: np.ndarray,
    wanted: Gradient,
    expected: Reference,
    problem: Problem,
    name: str,
    least: float,
    times: float = 1.0,
) -> float:
    """Returns the largest ‖found - wanted‖ over its spread of a head, 0 where scores are beyond
    `has_ordinary_scores`; ``expected`` is what the forward pass makes of the inputs, ``least`` the weight
    below which a kernel may take one for none, ``times`` the largest number that what is summed was
    multiplied by. Raises `WrongResult` for anything that rounding does not explain, NaN and infinity
    included."""
    found, wanted = of_four_axes(found), Gradient(of_four_axes(wanted.value), of_four_axes(wanted.spread))
    sizes = (expected.max_score, expected.change_error, expected.sink_score)
    bound = ROUNDINGS * weight_bound(problem, expected)
    largest = np.abs(wanted.value).max(axis=(2, 3), keepdims=True, initial=0.0)
    difference = np.abs(np.asarray(found, np.float64) - wanted.value)
    floor = WEIGHTS * least
    difference = np.maximum(difference - (max(LOST, floor) * largest + max(LEAST, floor * times)), 0.0)
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
