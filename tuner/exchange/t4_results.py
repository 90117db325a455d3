"""A study's trials as T4 results, the format of the autotuning benchmark hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..evaluate.outcome import Status
from ..store.about import About
from .checked_values import json_array, json_object, located, short_text
from .portable import Ended, Trials
from .study_block import about_of, block_of
from .trial_figures import FIGURES, MEASURED, Document, ended_of, figures_of, variant_of

#: The version of T4 that is written.
T4_VERSION = "1.0.0"
#: How T4 calls each way to fail; Kernel Tuner's writer of it refuses other names.
FAILURES = {
    Status.ILLEGAL: "constraints",
    Status.SPILLED: "constraints",
    Status.COMPILE_FAILED: "compile",
    Status.LAUNCH_FAILED: "runtime",
    Status.TIMED_OUT: "timeout",
    Status.WRONG: "correctness",
}
#: How T4 calls the time that each phase of a trial took.
PHASES = {"compile": "compilation", "validate": "validation", "measure": "benchmark"}


def to_results(trials: Trials) -> Document:
    """Returns the trials as T4 results, in Kernel Tuner's names and milliseconds."""
    head = {
        "schema_version": T4_VERSION,
        "metadata": {"timeunit": "milliseconds", "flashgen": block_of(trials.about)},
    }
    return Document(head, "results", ((None, _to_result(each)) for each in trials.ended))


def _to_result(ended: Ended) -> dict[str, Any]:
    outcome = ended.outcome
    figures = figures_of(outcome)
    times = {name: 1000 * outcome.seconds.get(phase, 0.0) for phase, name in PHASES.items()}
    units = {"time": "ms", "tflops": "TFLOP/s", **{name: unit for name, (_, _, unit) in FIGURES.items()}}
    runtimes = figures.pop("times", [])
    return {
        "timestamp": ended.at.isoformat(),
        "configuration": outcome.variant.to_dict(),
        "times": times | {"framework": 0.0, "search_algorithm": 0.0, "runtimes": runtimes},
        "invalidity": "correct" if outcome.status in MEASURED else FAILURES[outcome.status],
        "correctness": 1 if outcome.status in MEASURED else 0,
        "measurements": [
            {"name": name, "value": value, "unit": units.get(name, "")} for name, value in figures.items()
        ],
        "objectives": ["time"],
    }


def from_results(top: Mapping[str, Any]) -> tuple[About, list[Ended]]:
    """Reads the trials of parsed T4 results in the file's order. Raises ValueError."""
    about = about_of(json_object(top.get("metadata"), "metadata").get("flashgen"))
    return about, [
        located(f"result {number}", _from_result, about, result)
        for number, result in enumerate(json_array(top["results"], "results"), 1)
    ]


def _from_result(about: About, data: Any) -> Ended:
    result = json_object(data, "it")
    variant = variant_of(about, json_object(result.get("configuration"), "configuration"))
    times = json_object(result.get("times"), "times")
    seconds = {phase: times.get(name, 0.0) for phase, name in PHASES.items()}
    figures: dict[str, Any] = {}
    for each in json_array(result.get("measurements"), "measurements"):
        figure = json_object(each, "a measurement")
        figures[short_text(figure.get("name"), "a measurement's name")] = figure.get("value")
    return ended_of(about, variant, figures, seconds, times.get("runtimes"), result.get("timestamp"))
