"""A kernel's output beside the reference: the largest error per head, or what is wrong and where."""

from __future__ import annotations

import numpy as np

from ...gen.problem import Problem
from ...gen.promise import NORMAL_WEIGHT_FLOOR, promise_of
from ..cards.dtypes import smallest
from ..errors import FlashgenError
from .error_bounds import element_factor, error_bound, has_ordinary_scores, lse_bound
from .reference import Reference


class WrongResult(FlashgenError):
    """A result further from float64's than rounding explains; names the case, the head and both numbers."""


def compare(
    o: np.ndarray,
    lse: np.ndarray | None,
    expected: Reference,
    v: np.ndarray,
    problem: Problem,
    name: str,
    moved: np.ndarray | float = 0.0,
) -> float:
    """Returns the largest per-head error, 0 where scores are beyond `has_ordinary_scores`.

    ``o`` and ``lse`` have the reference's shapes; of ``problem`` type, precision and head dim set the bounds.
    ``moved`` is what each row's scores may be off by beside that, which the log-sum-exp follows.
    Raises `WrongResult` for anything beyond them, NaN and infinity included.
    """
    sizes = (expected.max_score, expected.change_error, expected.sink_score)
    bound = error_bound(problem, *sizes)
    difference, lost = np.asarray(o, np.float64) - expected.o, _lost(expected, problem)
    norms, distances = _norm(expected.o), np.maximum(_norm(difference) - _norm(lost), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        # Heads whose rows see no key have a norm of 0 and must be exactly 0.
        errors = np.where((norms == 0) & (distances == 0), 0.0, distances / norms)
    if not (errors <= bound).all():
        b, h = _worst(errors)
        raise WrongResult(
            f"wrong result: {name}: head {h} of batch {b}: ‖o - ref‖ / ‖ref‖ is {errors[b, h]:.2e}, "
            f"at most {bound:.1e} allowed"
        )
    atol = element_factor(problem) * bound * float(np.abs(v).max(initial=0))
    allowed = atol + bound * np.abs(expected.o) + lost
    with np.errstate(invalid="ignore", divide="ignore"):
        # Of a sequence without keys nothing is allowed.
        excess = np.where(difference == 0, 0.0, np.abs(difference) / allowed)
    if not (excess <= 1).all():
        b, h, row, x = _worst(excess)
        raise WrongResult(
            f"wrong result: {name}: head {h} of batch {b}, row {row}, column {x}: "
            f"o is {float(o[b, h, row, x]):.7g}, float64 gives {expected.o[b, h, row, x]:.7g}"
        )
    if lse is not None:
        allowed = lse_bound(problem, expected.max_score, expected.change_error)
        _compare_lse(lse, expected, allowed, moved, name)
    return float(errors.max()) if has_ordinary_scores(problem, *sizes) else 0.0


def _lost(expected: Reference, problem: Problem) -> np.ndarray:
    """What of each element may be lost where sinks leave its keys next to no weight."""
    if expected.reach is None:
        return np.zeros((1, 1, 1, 1))
    floor = max(promise_of(problem).weight_floor, NORMAL_WEIGHT_FLOOR)
    return floor * expected.reach + smallest(problem.output_dtype) / 2


def _norm(values: np.ndarray) -> np.ndarray:
    """The norm of each head."""
    return np.sqrt(np.square(values).sum(axis=(2, 3)))


def _compare_lse(
    lse: np.ndarray, expected: Reference, bound: float, moved: np.ndarray | float, name: str
) -> None:
    """The log-sum-exp: -inf exactly where no key is seen, else within the rounding of its size."""
    unseen = np.isneginf(expected.lse)
    finite = np.where(unseen, 0.0, expected.lse)
    with np.errstate(invalid="ignore"):
        distance = np.where(
            unseen,
            np.where(np.isneginf(lse), 0.0, np.inf),
            (np.abs(lse - finite) - moved) / np.maximum(1, np.abs(finite)),
        )
    if not (distance <= bound).all():
        b, h, row = _worst(distance)
        raise WrongResult(
            f"wrong log-sum-exp: {name}: head {h} of batch {b}, row {row}: it is {lse[b, h, row]:.7g}, "
            f"float64 gives {expected.lse[b, h, row]:.7g}"
        )


def _worst(values: np.ndarray) -> tuple[int, ...]:
    """The index of the largest value; NaN counts as the largest."""
    ranked = np.where(np.isnan(values), np.inf, values)
    return tuple(int(i) for i in np.unravel_index(int(ranked.argmax()), values.shape))
