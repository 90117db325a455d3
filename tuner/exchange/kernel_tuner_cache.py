"""A study's trials as the cache file of Kernel Tuner, which its simulation mode replays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..evaluate.outcome import Status
from ..store.about import About
from .checked_values import json_object, located
from .portable import Ended, Trials
from .study_block import about_of, block_of
from .trial_figures import MEASURED, Document, ended_of, figures_of, variant_of

#: How Kernel Tuner calls each way to fail.
FAILURES = {
    Status.ILLEGAL: "InvalidConfig",
    Status.SPILLED: "InvalidConfig",
    Status.COMPILE_FAILED: "CompilationFailedConfig",
    Status.LAUNCH_FAILED: "RuntimeFailedConfig",
    Status.TIMED_OUT: "RuntimeFailedConfig",
    # It knows no name for a wrong result.
    Status.WRONG: "RuntimeFailedConfig",
}
#: How Kernel Tuner calls the time that each phase of a trial took.
PHASES = {"compile": "compile_time", "validate": "verification_time", "measure": "benchmark_time"}


def to_cache(trials: Trials) -> Document:
    """Returns the trials as a Kernel Tuner cache file, of a variant the last one alone.

    Of each parameter it lists the values that were tried: the product of all there are would be millions,
    which Kernel Tuner walks one by one.
    """
    about = trials.about
    names = [p.name for p in about.family.parameters()]
    # By type too: True is not 1.
    tried = {
        name: {(type(value), value) for value in (getattr(e.outcome.variant, name) for e in trials.ended)}
        for name in names
    }
    problem = about.problem
    head = {
        "device_name": about.limits.name,
        "kernel_name": f"attention_{problem.stem}_kernel",
        "problem_size": [problem.seqlen_q, problem.num_q_heads, problem.batch],
        "tune_params_keys": names,
        "tune_params": {
            p.name: [c for c in p.choices if (type(c), c) in tried[p.name]] for p in about.family.parameters()
        },
        "objective": "time",
        "flashgen": block_of(about),
    }
    by_key = {",".join(str(getattr(e.outcome.variant, name)) for name in names): e for e in trials.ended}
    # Last, because Kernel Tuner appends to the file.
    return Document(head, "cache", ((key, _to_entry(each)) for key, each in by_key.items()))


def _to_entry(ended: Ended) -> dict[str, Any]:
    outcome = ended.outcome
    entry: dict[str, Any] = dict(outcome.variant.to_dict())
    figures = figures_of(outcome)
    if outcome.status in MEASURED:
        entry |= {"time": figures.pop("time"), "times": figures.pop("times")}
    else:
        failure = FAILURES[outcome.status]
        # Newer versions look for the one, older ones for the other.
        entry |= {"time": failure, "__error__": failure}
    for phase, name in PHASES.items():
        entry[name] = 1000 * outcome.seconds.get(phase, 0.0)
    entry |= {"strategy_time": 0.0, "framework_time": 0.0, "timestamp": ended.at.isoformat()}
    return entry | figures


def from_cache(top: Mapping[str, Any]) -> tuple[About, list[Ended]]:
    """Reads the trials of a parsed cache file in the file's order. Raises ValueError."""
    about = about_of(top.get("flashgen"))
    entries = json_object(top["cache"], "cache")
    return about, [
        located(f"entry {number} of cache", _from_entry, about, entry)
        for number, entry in enumerate(entries.values(), 1)
    ]


def _from_entry(about: About, data: Any) -> Ended:
    entry = json_object(data, "it")
    variant = variant_of(about, {p.name: entry.get(p.name) for p in about.family.parameters()})
    seconds = {phase: entry.get(name, 0.0) for phase, name in PHASES.items()}
    return ended_of(about, variant, entry, seconds, entry.get("times"), entry.get("timestamp"))
