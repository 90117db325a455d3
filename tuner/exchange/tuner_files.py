"""Trials in the files of other tuners: Kernel Tuner's cache, which its simulation mode replays, and T4
results, the benchmark hub's format. What flashgen needs to read them back is in a block ``flashgen``.

A file is data from anywhere. Nothing in it is compiled, evaluated or used as a path: parameters are looked up
among the family's choices, figures must be numbers in their range, names must match a narrow pattern, and
what can be worked out (medians, the name of the study, the kernel's source) is worked out anew.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

from ...gen.families import FAMILIES
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Illegal, Value, Variant
from ..build.cache import write_atomically
from ..errors import FlashgenError
from ..evaluate.measure import median, spread, tflops
from ..evaluate.outcome import Measurement, Outcome, Status
from ..store.studies import MAX_REASON
from .portable import About, Ended, Trials

KERNEL_TUNER, T4 = FORMATS = ("kernel-tuner", "t4")
#: Version of the ``flashgen`` block, and of T4.
VERSION, T4_VERSION = 1, "1.0.0"
MAX_FILE_BYTES = 256 * 2**20
MAX_TIMES = 10_000
#: Names of cards, drivers and compilers. A kernel's comments may tell them, so they hold no line break,
#: quote, backslash or end of a comment.
PLAIN_TEXT = re.compile(r"[A-Za-z0-9 ._,:;()+/~-]{0,120}")
NOT_PLAIN = re.compile(r"[^A-Za-z0-9 ._,:;()+/~-]")
MARK = re.compile(r"[0-9a-f]{8}")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")
#: How each way to fail is called by Kernel Tuner and by T4.
FAILURES = {
    Status.ILLEGAL: ("InvalidConfig", "constraints"),
    Status.SPILLED: ("InvalidConfig", "constraints"),
    Status.COMPILE_FAILED: ("CompilationFailedConfig", "compile"),
    Status.LAUNCH_FAILED: ("RuntimeFailedConfig", "runtime"),
    Status.TIMED_OUT: ("RuntimeFailedConfig", "timeout"),
    # Kernel Tuner knows no name for it, and its T4 writer refuses others than these.
    Status.WRONG: ("RuntimeFailedConfig", "correctness"),
}
MEASURED = (Status.OK, Status.SLOW)
#: A phase of ours in the files: Kernel Tuner's name, T4's name.
PHASES = {
    "compile": ("compile_time", "compilation"),
    "validate": ("verification_time", "validation"),
    "measure": ("benchmark_time", "benchmark"),
}
#: A measurement's figures beside its times: what they are in, and the largest there can be.
FIGURES: dict[str, tuple[type, float, str]] = {
    "registers": (int, 255, ""),
    "spill_bytes": (int, 2**31, "bytes"),
    "smem_bytes": (int, 2**31, "bytes"),
    "occupancy": (float, 1.0, ""),
    "error": (float, 1.0, ""),
}


class BadFile(FlashgenError):
    """A file that cannot be imported."""


# -- out -----------------------------------------------------------------------------------------------------


def export(path: Path, trials: Trials, style: str) -> None:
    """Writes the trials to a file, whole or not at all. Raises FlashgenError."""
    document = to_kernel_tuner(trials) if style == KERNEL_TUNER else to_t4(trials)
    # Kernel Tuner takes a file that does not end in two braces, each on its own, for one cut short.
    text = json.dumps(document, indent=1, allow_nan=False)
    text = re.sub(r"\}\s*\}$", "}\n}", text) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise FlashgenError(
            f"{path} cannot be written: {error.strerror or error}; free some space or name another file"
        ) from error


def to_kernel_tuner(trials: Trials) -> dict[str, Any]:
    """A Kernel Tuner cache file. Of each parameter it lists the values that were tried: the product of all
    there are would be millions, which Kernel Tuner walks one by one."""
    about = trials.about
    names = [p.name for p in about.family.parameters()]
    tried = [e.outcome.variant.to_dict() for e in trials.ended]
    problem = about.problem
    return {
        "device_name": about.limits.name,
        "kernel_name": f"attention_{problem.stem}_kernel",
        "problem_size": [problem.seqlen_q, problem.num_q_heads, problem.batch],
        "tune_params_keys": names,
        "tune_params": {
            p.name: [c for c in p.choices if any(_same(t[p.name], c) for t in tried)]
            for p in about.family.parameters()
        },
        "objective": "time",
        "flashgen": _about_to_dict(about),
        # Last, because Kernel Tuner appends to the file.
        "cache": {
            ",".join(str(e.outcome.variant.to_dict()[name]) for name in names): _to_entry(e)
            for e in trials.ended
        },
    }


def _to_entry(ended: Ended) -> dict[str, Any]:
    outcome = ended.outcome
    entry: dict[str, Any] = dict(outcome.variant.to_dict())
    figures = _figures(outcome)
    if outcome.status in MEASURED:
        entry |= {"time": figures.pop("time"), "times": figures.pop("times")}
    else:
        failure = FAILURES[outcome.status][0]
        # Newer versions look for the one, older ones for the other.
        entry |= {"time": failure, "__error__": failure}
    for phase, (name, _) in PHASES.items():
        entry[name] = 1000 * outcome.seconds.get(phase, 0.0)
    entry |= {"strategy_time": 0.0, "framework_time": 0.0, "timestamp": ended.at.isoformat()}
    return entry | figures


def to_t4(trials: Trials) -> dict[str, Any]:
    """T4 results, in Kernel Tuner's names and milliseconds."""
    return {
        "schema_version": T4_VERSION,
        "metadata": {"timeunit": "milliseconds", "flashgen": _about_to_dict(trials.about)},
        "results": [_to_result(each) for each in trials.ended],
    }


def _to_result(ended: Ended) -> dict[str, Any]:
    outcome = ended.outcome
    figures = _figures(outcome)
    times = {name: 1000 * outcome.seconds.get(phase, 0.0) for phase, (_, name) in PHASES.items()}
    units = {"time": "ms", "tflops": "TFLOP/s", **{name: unit for name, (_, _, unit) in FIGURES.items()}}
    runtimes = figures.pop("times", [])
    return {
        "timestamp": ended.at.isoformat(),
        "configuration": outcome.variant.to_dict(),
        "times": times | {"framework": 0.0, "search_algorithm": 0.0, "runtimes": runtimes},
        "invalidity": "correct" if outcome.status in MEASURED else FAILURES[outcome.status][1],
        "correctness": 1 if outcome.status in MEASURED else 0,
        "measurements": [
            {"name": name, "value": value, "unit": units.get(name, "")} for name, value in figures.items()
        ],
        "objectives": ["time"],
    }


def _figures(outcome: Outcome) -> dict[str, Any]:
    """What both formats hold of an outcome beside its parameters: milliseconds, and figures as they are."""
    figures: dict[str, Any] = {}
    measured = outcome.measurement
    if measured is not None:
        figures |= {"time": measured.median_us / 1000, "times": [us / 1000 for us in measured.times_us]}
        figures |= {"tflops": measured.tflops, **{name: getattr(measured, name) for name in FIGURES}}
        figures |= {"busy": measured.busy} if measured.busy else {}
    return figures | {"status": str(outcome.status), "reason": outcome.reason}


def _about_to_dict(about: About) -> dict[str, Any]:
    limits = about.limits.to_dict()
    return {
        "version": VERSION,
        "problem": about.problem.to_dict(),
        "limits": limits | {"name": NOT_PLAIN.sub("_", about.limits.name)},
        "family": about.family.family,
        "predicted": about.predicted,
        **{
            name: NOT_PLAIN.sub("_", getattr(about, name))[:120] for name in ("driver", "toolkit", "flashgen")
        },
        "seed": about.seed,
        "mark": about.mark,
    }


def _same(one: Value, other: Value) -> bool:
    """True is no 1 here."""
    return type(one) is type(other) and one == other


# -- in ------------------------------------------------------------------------------------------------------


def read(path: Path) -> Trials:
    """The trials of a file that `export` wrote, in either format, with everything in it checked.

    Raises:
        BadFile: it cannot be read, or something in it is not as it must be; the message says where.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise BadFile(
                f"{path} has {size} bytes, at most {MAX_FILE_BYTES} are read; import a smaller study"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise BadFile(f"{path} cannot be read: {why}; name a file that `flashgen export` wrote") from error
    try:
        document = json.loads(text, parse_constant=_no_number)
        return from_document(document)
    except (_Wrong, ValueError, RecursionError) as error:
        why = CONTROL.sub(" ", str(error))[:400] if isinstance(error, _Wrong | ValueError) else "too deep"
        raise BadFile(f"{path} cannot be imported: {why}; export it again with `flashgen export`") from error


def from_document(document: Any) -> Trials:
    """The trials of a parsed file. Raises ValueError."""
    top = _mapping(document, "the file")
    if "cache" in top:
        about = _about_from_dict(top.get("flashgen"))
        entries = _mapping(top["cache"], "cache")
        ended = [
            _in(f"entry {number} of cache", _from_entry, about, entry)
            for number, entry in enumerate(entries.values(), 1)
        ]
    elif "results" in top:
        about = _about_from_dict(_mapping(top.get("metadata"), "metadata").get("flashgen"))
        ended = [
            _in(f"result {number}", _from_result, about, result)
            for number, result in enumerate(_list(top["results"], "results"), 1)
        ]
    else:
        raise _Wrong("it holds neither a Kernel Tuner cache nor T4 results")
    unique = {each.outcome.variant: each for each in sorted(ended, key=lambda each: each.at, reverse=True)}
    return Trials(about, tuple(sorted(unique.values(), key=lambda each: each.at)))


def _from_entry(about: About, data: Any) -> Ended:
    entry = _mapping(data, "it")
    variant = _variant(about, {p.name: entry.get(p.name) for p in about.family.parameters()})
    seconds = {phase: entry.get(name, 0.0) for phase, (name, _) in PHASES.items()}
    return _ended(about, variant, entry, seconds, entry.get("times"), entry.get("timestamp"))


def _from_result(about: About, data: Any) -> Ended:
    result = _mapping(data, "it")
    variant = _variant(about, _mapping(result.get("configuration"), "configuration"))
    times = _mapping(result.get("times"), "times")
    seconds = {phase: times.get(name, 0.0) for phase, (_, name) in PHASES.items()}
    figures: dict[str, Any] = {}
    for each in _list(result.get("measurements"), "measurements"):
        figure = _mapping(each, "a measurement")
        figures[_text(figure.get("name"), "a measurement's name")] = figure.get("value")
    return _ended(about, variant, figures, seconds, times.get("runtimes"), result.get("timestamp"))


def _ended(
    about: About,
    variant: Variant,
    figures: Mapping[str, Any],
    milliseconds: Mapping[str, Any],
    times_ms: Any,
    timestamp: Any,
) -> Ended:
    status = figures.get("status")
    if status not in [str(each) for each in Status]:
        raise _Wrong(f"status {_shown(status)} is none of {', '.join(Status)}")
    status = Status(status)
    reason = _text(figures.get("reason", ""), "reason", most=4 * MAX_REASON)
    seconds = {phase: _number(ms, f"the time to {phase}", 1e9) / 1000 for phase, ms in milliseconds.items()}
    measurement = None
    if status in MEASURED:
        measurement = _measurement(about, figures, times_ms)
    if status is not Status.ILLEGAL:
        try:
            variant.check(about.problem, about.limits)
        except Illegal as error:
            raise _Wrong(f"{variant.name} is not legal: {error}") from error
    outcome = Outcome(
        variant=variant,
        status=status,
        reason=CONTROL.sub(" ", reason)[:MAX_REASON],
        measurement=measurement,
        seconds=seconds,
    )
    return Ended(outcome, _time(timestamp))


def _measurement(about: About, figures: Mapping[str, Any], times_ms: Any) -> Measurement:
    """The figures, with all that follows from others worked out anew."""
    times = _list(times_ms, "times")
    if not 1 <= len(times) <= MAX_TIMES:
        raise _Wrong(f"it has {len(times)} times; 1 to {MAX_TIMES} are read")
    times_us = tuple(1000 * _number(ms, "a time", 1e9, above=0.0) for ms in times)
    values: dict[str, Any] = {}
    for name, (kind, most, _) in FIGURES.items():
        value = _number(figures.get(name), name, most)
        if kind is int and type(figures[name]) is not int:
            raise _Wrong(f"{name} is {_shown(figures[name])}, not a whole number")
        values[name] = int(value) if kind is int else value
    if values["error"] > about.problem.tolerance:
        raise _Wrong(f"its error is {values['error']:.1e}, {about.problem.tolerance:.1e} allowed")
    return Measurement(
        times_us=times_us,
        median_us=median(times_us),
        spread=spread(times_us),
        tflops=tflops(about.problem, median(times_us)),
        predicted=about.predicted,
        busy=CONTROL.sub(" ", _text(figures.get("busy", ""), "busy", most=500)),
        **values,
    )


def _variant(about: About, values: Mapping[str, Any]) -> Variant:
    """The variant with these values, each one of the family's own."""
    family = about.family
    parameters = {p.name: p for p in family.parameters()}
    if values.keys() != parameters.keys():
        odd = sorted(map(str, values.keys() ^ parameters.keys()))
        raise _Wrong(f"family {family.family} has the parameters {', '.join(parameters)}; see {_shown(odd)}")
    chosen: dict[str, Value] = {}
    for name, parameter in parameters.items():
        match = [choice for choice in parameter.choices if _same(choice, values[name])]
        if not match:
            choices = ", ".join(map(str, parameter.choices))
            raise _Wrong(f"{name}={_shown(values[name])} is not a choice; choose from {choices}")
        # Ours, not the file's.
        chosen[name] = match[0]
    return family(**chosen)


def _about_from_dict(data: Any) -> About:
    if data is None:
        raise _Wrong("it has no block 'flashgen', so it does not say which problem and card it is of")
    block = _mapping(data, "flashgen")
    version = block.get("version")
    if version != VERSION:
        raise _Wrong(f"it is of version {_shown(version)}, this flashgen reads {VERSION}")
    family = FAMILIES.get(_text(block.get("family"), "family"))
    if family is None:
        raise _Wrong(f"unknown family {_shown(block['family'])}; choose from {', '.join(FAMILIES)}")
    mark = _text(block.get("mark"), "mark")
    if not MARK.fullmatch(mark):
        raise _Wrong(f"mark {_shown(mark)} is not eight hex digits")
    if type(block.get("predicted")) is not bool:
        raise _Wrong("predicted is neither true nor false")
    return About(
        problem=_problem(block.get("problem")),
        limits=_limits(block.get("limits")),
        family=family,
        predicted=block["predicted"],
        driver=_plain(block.get("driver"), "driver"),
        toolkit=_plain(block.get("toolkit"), "toolkit"),
        flashgen=_plain(block.get("flashgen"), "flashgen"),
        seed=_whole(block.get("seed"), "seed", 2**32 - 1),
        mark=mark,
    )


def _problem(data: Any) -> Problem:
    values = _fields(data, Problem(), "problem")
    return _in("problem", lambda: Problem(**values))


def _limits(data: Any) -> DeviceLimits:
    example = DeviceLimits(
        name="", arch=0, num_sms=0, smem_per_block=0, smem_per_sm=0, max_threads_per_sm=0,
        max_blocks_per_sm=0, l2_bytes=0, clock_mhz=0, dram_gbps=0,
    )  # fmt: skip
    limits = DeviceLimits(**_fields(data, example, "limits"))
    if not limits.slug:
        raise _Wrong("the card has no name")
    return limits


def _fields(data: Any, example: Any, what: str) -> dict[str, Any]:
    """The fields of a dataclass, of the types that ``example`` has them."""
    given = _mapping(data, what)
    names = [field.name for field in fields(example)]
    if set(given) != set(names):
        odd = sorted(map(str, set(given) ^ set(names)))
        raise _Wrong(f"{what} has the fields {', '.join(names)}; see {_shown(odd)}")
    values: dict[str, Any] = {}
    for name, typical in asdict(example).items():
        value = given[name]
        if isinstance(typical, bool):
            if type(value) is not bool:
                raise _Wrong(f"{what}: {name} is neither true nor false")
            values[name] = value
        elif isinstance(typical, str):
            values[name] = _plain(value, name)
        else:
            values[name] = _whole(value, name, 2**40, least=1)
    return values


# -- values ----------------------------------------------------------------------------------------------


class _Wrong(ValueError):
    """Something in a file is not as it must be."""


def _in(place: str, check: Any, *arguments: Any) -> Any:
    """What ``check`` returns; its error says where."""
    try:
        return check(*arguments)
    except (ValueError, ArithmeticError) as error:
        raise _Wrong(f"{place}: {error}") from error


def _no_number(text: str) -> NoReturn:
    raise _Wrong(f"{text} is no figure")


def _shown(value: Any) -> str:
    """A value of the file as it may be told."""
    return CONTROL.sub(" ", repr(value))[:80]


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{what} is {_shown(value)}, not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"{what} is {_shown(value)}, not a list")
    return value


def _text(value: Any, what: str, most: int = 200) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise _Wrong(f"{what} is {_shown(value)}, not a text of at most {most} characters")
    return value


def _plain(value: Any, what: str) -> str:
    if not PLAIN_TEXT.fullmatch(_text(value, what)):
        raise _Wrong(f"{what} is {_shown(value)}; letters, digits, blanks and ._,:;()+/- are read")
    return str(value)


def _whole(value: Any, what: str, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _Wrong(f"{what} is {_shown(value)}, not a whole number from {least} to {most}")
    return value


def _number(value: Any, what: str, most: float, above: float | None = None) -> float:
    # Whole numbers know no bound; one beyond a float's cannot be asked whether it is finite.
    if type(value) not in (int, float) or not 0 <= value <= most or not math.isfinite(value):
        raise _Wrong(f"{what} is {_shown(value)}, not a number from 0 to {most:g}")
    if above is not None and value <= above:
        raise _Wrong(f"{what} is {_shown(value)}; it must be above {above:g}")
    return float(value)


def _time(value: Any) -> datetime.datetime:
    try:
        when = datetime.datetime.fromisoformat(_text(value, "timestamp"))
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.UTC)
        return when.astimezone(datetime.UTC)
    except (ValueError, OverflowError) as error:
        raise _Wrong(f"timestamp {_shown(value)} is no ISO 8601 time") from error
