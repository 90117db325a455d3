"""What a module with kernels for gradients under masks and changes of scores does when it is run."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .facts import Tuned
from .gradient_program import _Changed, _check_gradients, _time_gradients_us
from .gradients import Gradients
from .program import _check_and_time, _visible_share
from .scored_gradients import DifferentiableScoredAttention, ScoredGradients, _WantedGradients
from .scored_program import _check_scored, _checked_sizes, _Drawn, _time_scored_us
from .scored_values import Scored

#: By how much scores are moved to see how fast what becomes of them rises.
_STEP = 1e-5


def run_scored_gradients_module(gradients: ScoredGradients, doc: str | None) -> int:
    """Says what the module is, checks and times its kernels on device 0, with masks and changes that are
    drawn; the exit code."""

    def check(tuned: Tuned) -> float:
        return _check_scored_gradients(gradients, tuned)

    def time_us(tuned: Tuned) -> float:
        return _time_scored_gradients_us(gradients, tuned)

    return _check_and_time(gradients.kernels, gradients.use, check, time_us, _share_of_pairs, doc)


def run_differentiable_scored_module(attention: DifferentiableScoredAttention, doc: str | None) -> int:
    """Says what the module is, checks and times its kernels on device 0, forwards and backwards, with masks
    and changes that are drawn; the exit code."""
    gradients = attention._gradients

    def check(tuned: Tuned) -> float:
        if tuned in gradients.kernels:
            return _check_scored_gradients(gradients, tuned)
        return _check_scored(attention, tuned)

    def time_us(tuned: Tuned) -> float:
        if tuned in gradients.kernels:
            return _time_scored_gradients_us(gradients, tuned)
        return _time_scored_us(attention, tuned)

    kernels = (*attention.kernels, *gradients.kernels)
    return _check_and_time(kernels, attention.use, check, time_us, _share_of_pairs, doc)


def _share_of_pairs(tuned: Tuned) -> float:
    """Which share of the pairs of a row and a key there is."""
    if not isinstance(tuned, Scored):
        return _visible_share(tuned)
    return _Drawn(tuned, tuned.problem).visible_share(bool(tuned.problem["causal"]))


def _check_scored_gradients(gradients: ScoredGradients, tuned: Tuned) -> float:
    serving: Gradients = gradients._groups_of(tuned.name)[0]
    if not isinstance(tuned, Scored):
        return _check_gradients(serving, tuned)
    sizes = _checked_sizes(tuned)
    drawn = _Drawn(tuned, sizes)
    return _check_gradients(serving, tuned, _WantedGradients(tuned, drawn), _changing(drawn), sizes)


def _time_scored_gradients_us(gradients: ScoredGradients, tuned: Tuned) -> float:
    serving: Gradients = gradients._groups_of(tuned.name)[0]
    if not isinstance(tuned, Scored):
        return _time_gradients_us(serving, tuned)
    return _time_gradients_us(serving, tuned, _WantedGradients(tuned, _Drawn(tuned, tuned.problem)))


def _changing(drawn: _Drawn, first: int = 0) -> Callable[[NDArray[Any], bool], _Changed]:
    """What becomes of scores (batch, heads, seqlen_q, seqlen_k), whose first batch has that number, under
    what was drawn."""

    def changed(scores: NDArray[Any], causal: bool) -> _Changed:
        batches, *others = (np.arange(n) for n in scores.shape)
        indices = np.ix_(first + batches, *others)
        with np.errstate(all="ignore"):
            at, above, below = (
                np.asarray(drawn.tuned.change(drawn.at, moved, *indices, *scores.shape[2:]))
                for moved in (scores, scores + _STEP, scores - _STEP)
            )
            slope = (above - below) / (2 * _STEP)
            seen = np.asarray(drawn.tuned.sees(drawn.at, causal, *indices, *scores.shape[2:]), bool)
        sinks: Any = -np.inf
        if "sinks" in drawn.tuned.named:
            sinks = np.asarray(drawn.at.sinks[indices[1]], np.float64)
        # Infinite biases hide pairs, too.
        return _Changed(np.where(seen, at, -np.inf), np.where(np.isfinite(slope), slope, 0.0), sinks)

    return changed
