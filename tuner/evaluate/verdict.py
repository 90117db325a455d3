"""What became of a build, as an `Outcome`: from its figures, or from how running it failed."""

from __future__ import annotations

from collections.abc import Mapping

from ..build.protocol import Build
from ..errors import CorruptedMemory, FlashgenError, LaunchError
from .comparison import WrongResult
from .outcome import Measurement, Outcome, Status
from .worker_life import Died, TimedOut
from .worker_process import PHASES


def measured(
    build: Build, figures: Measurement, *, stopped_early: bool, seconds: Mapping[str, float]
) -> Outcome:
    """Returns the outcome of a build that was timed; ``seconds`` is the wall time by phase."""
    if stopped_early:
        reason = f"{figures.median_us:.0f} us, more than twice the best so far"
        return _outcome(build, Status.SLOW, seconds, reason, figures)
    return _outcome(build, Status.OK, seconds, measurement=figures)


def spilled(build: Build, max_spill_bytes: int) -> Outcome:
    """Returns the outcome of a build that is not run since it spills more than ``max_spill_bytes``."""
    reason = f"{build.spill_bytes} bytes of registers spilled to memory, {max_spill_bytes} allowed"
    return _outcome(build, Status.SPILLED, {}, reason)


def failed(build: Build, failure: FlashgenError, seconds: Mapping[str, float]) -> Outcome:
    """Returns the outcome of a failure that is the build's; raises the failure again where it is not."""
    match failure:
        case TimedOut():
            status = Status.TIMED_OUT
        case WrongResult() | CorruptedMemory():
            status = Status.WRONG
        case LaunchError() | Died():
            status = Status.LAUNCH_FAILED
        case _:
            raise failure
    return _outcome(build, status, seconds, str(failure))


def _outcome(
    build: Build,
    status: Status,
    seconds: Mapping[str, float],
    reason: str = "",
    measurement: Measurement | None = None,
) -> Outcome:
    by_phase = {phase: seconds[phase] for phase in PHASES if phase in seconds}
    return Outcome(
        variant=build.kernel.variant,
        status=status,
        reason=reason,
        measurement=measurement,
        seconds={"compile": build.seconds, **by_phase},
    )
