"""The fastest trials, timed once more in turns, and the winner among them, which is validated in full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import wait

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.render import render
from ..build.protocol import Build
from ..errors import FlashgenError
from ..evaluate.outcome import Outcome, Status
from ..evaluate.reasons import first_line
from .events import Doing
from .workshop import Workshop

#: Candidates re-timed at the end, and the slowdown beyond which one is no candidate.
NUM_FINALISTS, FINALIST_SLACK = 6, 1.15
#: How often the wait for compilers looks whether the run was told to stop.
POLL_SECONDS = 0.2


def candidates_of(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Returns the fastest few trials, fastest first."""
    fine = sorted(_working(outcomes), key=_median_us)
    return [o for o in fine[:NUM_FINALISTS] if _median_us(o) <= FINALIST_SLACK * _median_us(fine[0])]


def time_again(
    candidates: Sequence[Outcome], problem: Problem, limits: DeviceLimits, shop: Workshop
) -> list[Outcome]:
    """Times the candidates in turns and validates the fastest in full; nothing where the run is stopped.

    Their builds come from the cache. While they are timed no compiler of the run does anything.
    """
    with shop.watch.finals():
        shop.report(Doing(f"building the {len(candidates)} fastest again"))
        kernels = [render(c.variant, problem, limits) for c in candidates]
        futures = [shop.pool.submit(kernel) for kernel in kernels]
        while not all(future.done() for future in futures):
            if shop.stop.is_set():
                return []
            wait(futures, timeout=POLL_SECONDS)
        builds, errors = [], []
        for future, candidate in zip(futures, candidates, strict=True):
            if isinstance(build := future.result(), Build) and candidate.measurement is not None:
                builds.append(build)
                errors.append(candidate.measurement.error)
        return shop.team.finals(builds, problem, errors, shop.pool.quiet())


def winner_of(finalists: Sequence[Outcome], candidates: Sequence[Outcome]) -> Outcome:
    """Returns the fastest finalist; the fastest candidate where the run ended before they were timed.

    Raises:
        FlashgenError: every finalist failed.
    """
    fine = _working(finalists)
    if finalists and not fine:
        reasons = "; ".join(f"{o.variant.name}: {o.status}, {first_line(o.reason)}" for o in finalists)
        raise FlashgenError(f"every finalist failed the last, full validation ({reasons})")
    return min(fine or candidates, key=_median_us)


def faster(best: Outcome | None, other: Outcome) -> Outcome | None:
    """Returns the faster of two outcomes, of which the second may not have worked."""
    if other.status is not Status.OK:
        return best
    return other if best is None or _median_us(other) < _median_us(best) else best


def _working(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.status is Status.OK and o.measurement is not None]


def _median_us(outcome: Outcome) -> float:
    return outcome.measurement.median_us if outcome.measurement else float("inf")
