"""Whether a kernel keeps its class's promise on adversarial inputs: case by case, row by row."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...gen.lengths import SAME
from ...gen.problem import Problem
from ...gen.promise import UNIT, Promise, promise_of
from ...gen.scoring.values import draw_values
from ...gen.variant import Variant
from ..build.protocol import Build
from ..cards.device import Runner
from ..cards.pages import draw_table, scatter, told_of_pages
from ..cards.score_values import values_as_read
from ..cards.sequences import lengths_as_values
from ..errors import CorruptedMemory, LaunchError
from .adversarial_inputs import AdversarialCase, Breadth, cases_for
from .allowed_errors import Allowed, attend_exactly, element_bounds, row_bounds
from .appending import take_new_rows
from .asked_numbers import numbers_for
from .asked_pairs import AskedPairs
from .comparison import WrongResult
from .paged import row_after_row

#: Rows and keys of a case: some tiles of either, few, and lengths that no tile divides.
MOST_ROWS, MOST_KEYS = 73, 261
#: Those where the keys of a tile of rows are shared out.
FEW_ROWS, SHARED_KEYS = 11, 1061
#: Keys of the last tile.
LAST_KEYS = 5
#: Of half a unit in the last place, what sums of a few hundred products may be off by at most.
ROUNDINGS = 4
#: Of the numbers that masks may have, those that hide most keys.
HIDING_TURN = 2


class BrokenPromise(WrongResult):
    """A result on adversarial inputs beyond what the kernel's class promises; names the case, the error, what
    is allowed and what is promised."""


@dataclass(frozen=True)
class Finding:
    """What one case showed: the worst error found beside its bound, and where that is.

    ``error`` is infinite for what is finite and should not be, or the other way round: then ``where`` tells
    it all. ``head_error`` is the largest ‖o - ref‖ / ‖ref‖ of a head, whatever is allowed, over the rows
    whose scores float32 can hold and that are finite.
    """

    case: str
    group: str
    kept: bool
    error: float
    bound: float
    head_error: float
    where: str

    def words(self) -> str:
        if math.isinf(self.error):
            return f"{self.case}: {self.where}"
        return f"{self.case}: {self.where} is {self.error:.1e}, {self.bound:.1e} allowed"

    def to_dict(self) -> dict[str, Any]:
        """Returns the finding as JSON values: JSON has no infinity, so that such an error is null."""
        figures = {name: getattr(self, name) for name in ("error", "bound", "head_error")}
        return asdict(self) | {name: x if math.isfinite(x) else None for name, x in figures.items()}


def prove_promise(runner: Runner, build: Build, breadth: Breadth, *, seed: int = 0) -> int:
    """Returns on how many adversarial cases a build keeps what its class promises: on all that it is tried
    on.

    Raises:
        BrokenPromise: it does not, on one.
        LaunchError, CorruptedMemory: it does not run.
    """
    problem = build.kernel.problem
    cases = cases_for(problem, breadth)
    for finding in adversarial_findings(runner, build, cases, seed=seed):
        if not finding.kept:
            raise BrokenPromise(
                f"wrong result on adversarial inputs: {finding.words()}; promised are "
                f"{promise_of(problem).words()}"
            )
    return len(cases)


def adversarial_findings(
    runner: Runner, build: Build, cases: Iterable[AdversarialCase], *, seed: int = 0
) -> Iterator[Finding]:
    """Yields what each case shows of a build. Raises LaunchError and CorruptedMemory, which name the case."""
    for case in cases:
        try:
            yield try_case(runner, build, case, seed=seed)
        except (LaunchError, CorruptedMemory) as error:
            raise type(error)(f"{case.name}: {error}") from error


def try_case(runner: Runner, build: Build, case: AdversarialCase, *, seed: int = 0) -> Finding:
    """Runs a build on a case's inputs and judges the result. Raises LaunchError and CorruptedMemory."""
    problem = build.kernel.problem
    promise = promise_of(problem)
    rows, keys = shape_for(build.kernel.variant)
    values, unseen = _values(build.kernel.variant, problem, case, rows, keys, seed)
    q, k, v, scale = case.draw(problem, rows=rows, keys=keys, seed=seed, unseen=unseen)
    # Of packed sequences the case is one.
    told = {**values, **lengths_as_values((rows,), (keys,))} if problem.layout.is_packed else dict(values)
    lengths, caches = (keys,) * len(k), (k, v)
    if problem.layout.is_paged:
        pages = draw_table(lengths, problem.page_size)
        caches = (scatter(row_after_row(k), lengths, pages), scatter(row_after_row(v), lengths, pages))
        told |= told_of_pages(lengths, pages)
    if problem.append is not None:
        caches = (caches[0].copy(), caches[1].copy())
        told |= take_new_rows(problem, *caches, told, (min(rows, keys),) * len(k), turned=False).values
    o, lse = runner.attend(build, q, *caches, scale=scale, want_lse=True, values=told)
    assert lse is not None
    allowed = attend_exactly(
        *(q, k, v),
        scale=scale,
        problem=problem,
        promise=promise,
        exact=case.exact,
        values=values,
    )
    return judge(np.asarray(o, np.float64), np.asarray(lse, np.float64), allowed, problem, promise, case)


def _values(
    variant: Variant, problem: Problem, case: AdversarialCase, rows: int, keys: int, seed: int
) -> tuple[Mapping[str, Any], np.ndarray | None]:
    """What the problem's scores read in a case, and which keys no row sees then."""
    if problem.scores.is_plain:
        return {}, None
    drawn = zlib.crc32(case.name.encode())
    rng = np.random.default_rng([seed, drawn])
    turn = HIDING_TURN if case.group == "hidden" else drawn
    numbers = numbers_for(problem.scoring, keys, int(getattr(variant, "bc", 64)), turn, rng)
    varlen = SAME if problem.layout.is_packed else ""
    sizes = replace(
        problem, batch=1, num_q_heads=2, num_kv_heads=1, seqlen_q=rows, seqlen_k=keys, varlen=varlen
    )
    values = values_as_read(sizes, draw_values(numbers, problem.scores, sizes, rng))
    asked = AskedPairs(problem.scores, values, (0, 0), 2, rows, keys)
    hidden = asked.hidden(0, np.arange(rows), np.arange(keys))
    return values, np.asarray(hidden.all(axis=(0, 1)))


def shape_for(variant: Variant) -> tuple[int, int]:
    """Returns rows and keys of a case for a variant: two tiles of keys and some, a tile of rows and some.

    Where keys are shared out, the last tile has fewer keys than there are rows, so that under a causal mask
    some rows see nothing of what the last block has.
    """
    br, bc = int(getattr(variant, "br", 64)), int(getattr(variant, "bc", 64))
    if variant.key_shares() > 1:
        tiles = min(variant.key_shares() + 1, (SHARED_KEYS - LAST_KEYS) // bc)
        return min(br + 9, FEW_ROWS), tiles * bc + LAST_KEYS
    return min(br + 9, MOST_ROWS), min(2 * bc + LAST_KEYS, MOST_KEYS)


def judge(
    o: np.ndarray,
    lse: np.ndarray,
    allowed: Allowed,
    problem: Problem,
    promise: Promise,
    case: AdversarialCase,
) -> Finding:
    """Compares outputs in float64 with what is allowed."""
    with np.errstate(all="ignore"):
        head_error = _head_errors(o, allowed)
        worst: tuple[float, float, float, str] = (-1.0, 0.0, 0.0, "")
        for ratio, error, bound, where in (
            _not_finite(o, lse, allowed),
            _by_head(o, allowed, promise),
            _by_row(o, allowed, promise),
            _by_element(o, allowed, problem, promise),
            _by_lse(lse, allowed),
        ):
            if ratio > worst[0]:
                worst = (ratio, error, bound, where)
    ratio, error, bound, where = worst
    return Finding(case.name, case.group, ratio <= 1, error, bound, head_error, where)


def _difference(o: np.ndarray, allowed: Allowed) -> np.ndarray:
    """o - ref of what is to be compared: finite in both."""
    compared = np.isfinite(o) & np.isfinite(allowed.o)
    return np.where(compared, np.where(compared, o, 0) - np.where(compared, allowed.o, 0), 0.0)


def _head_errors(o: np.ndarray, allowed: Allowed) -> float:
    """The largest ‖o - ref‖ / ‖ref‖ of a head, over what is finite in both and within float32's range."""
    compared = np.isfinite(o) & np.isfinite(allowed.o) & ~allowed.open_rows[..., None]
    compared = compared.all(axis=-1, keepdims=True)
    norms = _norm(np.where(compared, allowed.o, 0.0), (2, 3))
    distances = _norm(np.where(compared, _difference(o, allowed), 0.0), (2, 3))
    return float(np.where(distances == 0, 0.0, distances / norms).max())


def _not_finite(o: np.ndarray, lse: np.ndarray, allowed: Allowed) -> tuple[float, float, float, str]:
    """Finds what is finite where it must not be, and the other way round."""
    rows_open = allowed.open_rows | allowed.no_weight
    wrong = np.where(
        np.isnan(allowed.o),
        ~np.isnan(o),
        np.where(
            np.isinf(allowed.o), np.isfinite(o), ~np.isfinite(o) & ~(rows_open[..., None] | allowed.open)
        ),
    )
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        rows = int(wrong.any(axis=-1).sum())
        return (
            np.inf,
            np.inf,
            0.0,
            (
                f"{rows} rows, the first row {at[2]} of head {at[1]}: o is {o[at]:.3g}, float64 gives "
                f"{allowed.o[at]:.3g}"
            ),
        )
    lse_nan = np.isnan(lse) | (np.isposinf(lse) & allowed.infinite_scores)
    wrong = np.where(
        np.isnan(allowed.lse),
        ~lse_nan,
        np.where(
            np.isneginf(allowed.lse),
            ~np.isneginf(lse) & ~(allowed.no_weight & np.isnan(lse)),
            ~np.isfinite(lse) & ~allowed.open_rows,
        ),
    )
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        return (
            np.inf,
            np.inf,
            0.0,
            (
                f"{int(wrong.sum())} rows, the first row {at[2]} of head {at[1]}: log-sum-exp is "
                f"{lse[at]:.3g}, float64 gives {allowed.lse[at]:.3g}"
            ),
        )
    return 0.0, 0.0, 0.0, ""


def _by_head(o: np.ndarray, allowed: Allowed, promise: Promise) -> tuple[float, float, float, str]:
    # Rows of which only some columns are finite are left to the others, so is a head of which most are such:
    # a few means near zero are no head.
    compared = (np.isfinite(o) & np.isfinite(allowed.o)).all(axis=-1, keepdims=True)
    compared &= compared.mean(axis=2, keepdims=True) >= 0.5
    norms = _norm(np.where(compared, allowed.o, 0.0), (2, 3))
    error = _norm(np.where(compared, _difference(o, allowed), 0.0), (2, 3))
    bound = promise.tolerance * norms + _norm(np.where(compared, allowed.slack, 0.0), (2, 3))
    # Sums round in proportion to Σ p|v|, which is more than the head where values cancel.
    bound += ROUNDINGS * UNIT * _norm(np.where(compared, allowed.measure, 0.0), (2, 3))
    norms = np.where(norms == 0, 1.0, norms)
    return _worst(error / norms, bound / norms, "‖o - ref‖ / ‖ref‖ of head {1}")


def _by_row(o: np.ndarray, allowed: Allowed, promise: Promise) -> tuple[float, float, float, str]:
    error, bound = _norm(_difference(o, allowed), -1), row_bounds(allowed, promise)
    measure = _norm(allowed.measure, -1)
    measure = np.where((measure == 0) | ~np.isfinite(measure), 1.0, measure)
    return _worst(error / measure, bound / measure, "‖o - ref‖ / Σ p|v| of row {2} of head {1}")


def _by_element(
    o: np.ndarray, allowed: Allowed, problem: Problem, promise: Promise
) -> tuple[float, float, float, str]:
    error, bound = np.abs(_difference(o, allowed)), element_bounds(allowed, problem, promise)
    measure = np.where((allowed.measure == 0) | ~np.isfinite(allowed.measure), 1.0, allowed.measure)
    return _worst(error / measure, bound / measure, "|o - ref| / Σ p|v| of column {3}, row {2} of head {1}")


def _by_lse(lse: np.ndarray, allowed: Allowed) -> tuple[float, float, float, str]:
    compared = np.isfinite(lse) & np.isfinite(allowed.lse)
    error = np.where(compared, np.abs(np.where(compared, lse - allowed.lse, 0.0)), 0.0)
    return _worst(error, allowed.lse_slack, "log-sum-exp of row {2} of head {1}")


def _worst(error: np.ndarray, bound: np.ndarray, where: str) -> tuple[float, float, float, str]:
    """The largest error over its bound: their ratio, both, and where it is."""
    ratios = np.where(error == 0, 0.0, error / bound)
    ratios = np.where(np.isnan(ratios), np.where(np.isnan(bound), 0.0, np.inf), ratios)
    at = tuple(int(i) for i in np.unravel_index(int(ratios.argmax()), ratios.shape))
    return float(ratios[at]), float(error[at]), float(bound[at]), where.format(*at)


def _norm(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    return np.sqrt(np.square(values).sum(axis=axis))
