"""What other tuners' files hold of one trial, whatever the format: its variant, its figures, its outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...gen.variant import Illegal, Value, Variant
from ..evaluate.measure import median, spread, tflops
from ..evaluate.outcome import Measurement, Outcome, Status
from ..store.about import About
from ..store.studies import MAX_REASON
from .checked_values import CONTROL, Wrong, json_array, number_up_to, point_in_time, short_text, shown
from .portable import Ended

#: Times that a trial may have.
MAX_TIMES = 10_000
#: Outcomes that come with times.
MEASURED = (Status.OK, Status.SLOW)
#: A measurement's figures beside its times, by name: type, largest value, unit.
FIGURES: dict[str, tuple[type, float, str]] = {
    "registers": (int, 255, ""),
    "spill_bytes": (int, 2**31, "bytes"),
    "smem_bytes": (int, 2**31, "bytes"),
    "occupancy": (float, 1.0, ""),
    "error": (float, 1.0, ""),
}


@dataclass(frozen=True)
class Document:
    """A file to be: what is said of all trials, then the trials under ``name``, made as they are written:
    each with its key in an object, with None in a list."""

    head: Mapping[str, Any]
    name: str
    entries: Iterator[tuple[str | None, Mapping[str, Any]]]


def figures_of(outcome: Outcome) -> dict[str, Any]:
    """Returns what both formats hold of an outcome beside its parameters; times are in milliseconds."""
    figures: dict[str, Any] = {}
    measured = outcome.measurement
    if measured is not None:
        figures |= {"time": measured.median_us / 1000, "times": [us / 1000 for us in measured.times_us]}
        figures |= {"tflops": measured.tflops, **{name: getattr(measured, name) for name in FIGURES}}
        figures |= {"busy": measured.busy} if measured.busy else {}
    return figures | {"status": str(outcome.status), "reason": outcome.reason}


def same_value(one: Value, other: Value) -> bool:
    """Returns whether two values are of one type and equal: True is not 1."""
    return type(one) is type(other) and one == other


def ended_of(
    about: About,
    variant: Variant,
    figures: Mapping[str, Any],
    milliseconds: Mapping[str, Any],
    times_ms: Any,
    timestamp: Any,
) -> Ended:
    """Returns the trial that a file's values describe, each of them checked. Raises `Wrong`."""
    status = figures.get("status")
    if status not in [str(each) for each in Status]:
        raise Wrong(f"status {shown(status)} is none of {', '.join(Status)}")
    status = Status(status)
    reason = short_text(figures.get("reason", ""), "reason", most=4 * MAX_REASON)
    seconds = {
        phase: number_up_to(ms, f"the time to {phase}", 1e9) / 1000 for phase, ms in milliseconds.items()
    }
    measurement = None
    if status in MEASURED:
        measurement = _measurement(about, figures, times_ms)
    if status is not Status.ILLEGAL:
        try:
            variant.check(about.problem, about.limits)
        except Illegal as error:
            raise Wrong(f"{variant.name} is not legal: {error}") from error
    outcome = Outcome(
        variant=variant,
        status=status,
        reason=CONTROL.sub(" ", reason)[:MAX_REASON],
        measurement=measurement,
        seconds=seconds,
    )
    return Ended(outcome, point_in_time(timestamp))


def _measurement(about: About, figures: Mapping[str, Any], times_ms: Any) -> Measurement:
    """Checks the figures; what follows from others is worked out anew."""
    times = json_array(times_ms, "times")
    if not 1 <= len(times) <= MAX_TIMES:
        raise Wrong(f"it has {len(times)} times; 1 to {MAX_TIMES} are read")
    times_us = tuple(1000 * number_up_to(ms, "a time", 1e9, above=0.0) for ms in times)
    values: dict[str, Any] = {}
    for name, (kind, most, _) in FIGURES.items():
        value = number_up_to(figures.get(name), name, most)
        if kind is int and type(figures[name]) is not int:
            raise Wrong(f"{name} is {shown(figures[name])}, not a whole number")
        values[name] = int(value) if kind is int else value
    if values["error"] > about.problem.tolerance:
        raise Wrong(f"its error is {values['error']:.1e}, {about.problem.tolerance:.1e} allowed")
    return Measurement(
        times_us=times_us,
        median_us=median(times_us),
        spread=spread(times_us),
        tflops=tflops(about.problem, median(times_us)),
        predicted=about.predicted,
        busy=CONTROL.sub(" ", short_text(figures.get("busy", ""), "busy", most=500)),
        **values,
    )


def variant_of(about: About, values: Mapping[str, Any]) -> Variant:
    """Returns the variant with these values, each one of the family's own choices. Raises `Wrong`."""
    family = about.family
    parameters = {p.name: p for p in family.parameters()}
    if values.keys() != parameters.keys():
        odd = sorted(map(str, values.keys() ^ parameters.keys()))
        raise Wrong(f"family {family.family} has the parameters {', '.join(parameters)}; see {shown(odd)}")
    chosen: dict[str, Value] = {}
    for name, parameter in parameters.items():
        match = [choice for choice in parameter.choices if same_value(choice, values[name])]
        if not match:
            choices = ", ".join(map(str, parameter.choices))
            raise Wrong(f"{name}={shown(values[name])} is not a choice; choose from {choices}")
        # Ours, not the file's.
        chosen[name] = match[0]
    return family(**chosen)
