"""A benchmark run's figures: what its JSON holds, and the ratios, means and bounds that follow from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from math import exp, inf, isfinite, log
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...gen.problem import Problem
from ..errors import FlashgenError
from ..files import read_text, write_text
from ..suites import SUITES, Workload
from .ceilings import Bound, Ceilings, bound_of

if TYPE_CHECKING:
    from ..shelf.library import Entry

OURS, FLASH, CUDNN = "flashgen", "flash", "cudnn"
#: What ends the names of those that make the same bits every run, and flashgen's own kernel that does, where
#: the fastest does not.
SAME_BITS = "-det"
OURS_SAME_BITS = OURS + SAME_BITS
OUR_NAMES = (OURS, OURS_SAME_BITS)
#: flashgen's own kernel of sixteen bits beside one of eight: a contender as others are, for users may run it
#: instead.
OURS_16_BITS = OURS + "-bf16"
#: All of flashgen's own, of whose errors none is a rival's.
OUR_KERNELS = (*OUR_NAMES, OURS_16_BITS)
#: What the reasons begin with of contenders that were not ready in time.
TOOK_LONGER = "took longer than"
#: What `Row.ratio` takes beside the names of contenders.
BEST = "best"
FORMAT = 1


def require_time(name: str, value: float | None) -> None:
    """Raises ValueError for what is neither None nor a time or a clock: positive and finite."""
    if value is not None and not (isinstance(value, int | float) and 0 < value < inf):
        raise ValueError(f"{name} is {value!r}, not a positive number")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contender on one workload. ``ms`` is None where it was not timed, and ``reason`` says why."""

    ms: float | None = None
    """The median time in milliseconds."""
    spread: float | None = None
    """Interquartile range of the times over their median."""
    repeats: int = 0
    ours_ms: float | None = None
    """flashgen's median in the same turns: what ratios are taken with."""
    clock_mhz: float | None = None
    """The median clock of the multiprocessors while it was timed."""
    error: float | None = None
    """Largest per-head ‖o - ref‖ / ‖ref‖ against float64, of the heads sampled."""
    scaled_from: int | None = None
    """The length that was timed instead of the workload's; the time is scaled by the square."""
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("ms", "ours_ms", "clock_mhz"):
            require_time(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A workload, the kernel that served it and all contenders' figures, flashgen's under `OURS`."""

    name: str
    problem: Problem
    kernel: str = ""
    family: str = ""
    exact: bool = False
    """Whether the kernel was tuned for just this problem; ``how`` says what it was tuned for."""
    how: str = ""
    deterministic: bool = False
    """Whether the kernel is one of gradients that makes the same bits every run."""
    peak_tflops: float | None = None
    """What the card's arithmetic can do at most of the problem, by its data sheet."""
    peak_mhz: int | None = None
    """The clock at which it can."""
    cells: dict[str, Cell] = field(default_factory=dict)
    scaled: dict[str, float] = field(default_factory=dict)
    """Milliseconds of contenders that another run timed, times this run's cuDNN over that run's."""
    reference: str = ""
    """The file, card and library versions that `scaled` was scaled from."""
    began: str = ""
    """When its run began, where that is not the one it now stands in."""
    ceilings: Ceilings | None = None
    """Those of its run, where that is not the one it now stands in."""
    tuned_since: str = ""
    """When the kernel that serves it now was tuned, where the figures are of the one before."""
    disturbances: tuple[str, ...] = ()
    """What makes the figures doubtful: throttling, other processes."""

    def ms(self, name: str) -> float | None:
        cell = self.cells.get(name)
        return None if cell is None else cell.ms

    @property
    def ours(self) -> float | None:
        return self.ms(OURS)

    @property
    def tflops(self) -> float | None:
        return None if self.ours is None else self.problem.flops / self.ours * 1e-9

    @property
    def key_tbps(self) -> float | None:
        """Terabytes of keys and values per second, each read once."""
        return None if self.ours is None else key_bytes(self.problem) / self.ours * 1e-9

    @property
    def clock_mhz(self) -> float | None:
        """The clock of the multiprocessors while flashgen was timed."""
        return self.cells.get(OURS, Cell()).clock_mhz

    @property
    def peak_at_clock(self) -> float | None:
        """`peak_tflops` at the clock that flashgen was timed at."""
        if self.peak_tflops is None or not self.peak_mhz or self.clock_mhz is None:
            return None
        return self.peak_tflops * self.clock_mhz / self.peak_mhz

    @property
    def same_bits_ms(self) -> float | None:
        """flashgen's milliseconds by a kernel of gradients that makes the same bits every run."""
        return self.ours if self.deterministic else self.ms(OURS_SAME_BITS)

    @property
    def rivals(self) -> list[str]:
        """The contenders timed in this run beside flashgen."""
        return [name for name, c in self.cells.items() if name not in OUR_NAMES and c.ms is not None]

    @property
    def scaled_ms(self) -> dict[str, float]:
        """Of `scaled` the contenders that this run did not time itself."""
        return {name: ms for name, ms in self.scaled.items() if self.ms(name) is None}

    @property
    def best(self) -> str | None:
        """The fastest contender of this run beside flashgen."""
        return min(self.rivals, key=lambda name: self.ms(name) or inf, default=None)

    def ratio(self, name: str) -> float | None:
        """Returns how many times faster flashgen is than a contender, or than the `BEST` of them. Those that
        make the same bits every run are held against flashgen's kernel that does, and are not among these."""
        if name == BEST:
            ratios = [self.ratio(each) for each in self.rivals if not each.endswith(SAME_BITS)]
            return min((ratio for ratio in ratios if ratio is not None), default=None)
        if name in OUR_NAMES:
            return None
        cell = self.cells.get(name, Cell())
        if cell.ms is None:
            scaled = self.scaled.get(name)
            return None if scaled is None or self.ours is None else scaled / self.ours
        ours = self.ours if cell.ours_ms is None else cell.ours_ms
        if name.endswith(SAME_BITS) and not self.deterministic:
            ours = self.ms(OURS_SAME_BITS)
        return None if ours is None else cell.ms / ours

    @property
    def behind(self) -> dict[str, float]:
        """The ratios, below 1, of the contenders of this run that are faster than flashgen."""
        return _below_1({name: self.ratio(name) for name in self.rivals})

    @property
    def behind_scaled(self) -> dict[str, float]:
        """The same of those that another run timed."""
        return _below_1({name: self.ratio(name) for name in self.scaled_ms})

    @property
    def error_ratio(self) -> float | None:
        """flashgen's error over the least of PyTorch's on the same inputs."""
        ours = self.cells.get(OURS, Cell()).error
        theirs = [c.error for name, c in self.cells.items() if name not in OUR_KERNELS and c.error]
        return None if ours is None or not theirs else ours / min(theirs)

    def bound(self, ceilings: Ceilings) -> Bound | None:
        """Returns the least time under its own run's ceilings, under those given where it stands in that."""
        return bound_of(self.problem, self.ceilings or ceilings)

    def of_roofline(self, ceilings: Ceilings) -> float | None:
        """Returns the least time over flashgen's: 1 is as fast as the card allows."""
        bound = self.bound(ceilings)
        return None if bound is None or self.ours is None else bound.ms / self.ours

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(Cell())
        cells = {
            name: {key: value for key, value in cell.items() if value != plain[key]}
            for name, cell in asdict(self)["cells"].items()
        }
        whole = asdict(self)
        del whole["ceilings"]  # once for all rows of a run, in `BenchRun.to_dict`
        return {
            **whole,
            "problem": self.problem.to_dict(),
            "cells": cells,
            "disturbances": list(self.disturbances),
            "ratios": self._ratios(),
        }

    def _ratios(self) -> dict[str, float | None]:
        names = [name for name in (*self.cells, *self.scaled, BEST) if name not in OUR_NAMES]
        return {name: self.ratio(name) for name in names}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        given = {**data}
        given.pop("ratios", None)
        return cls(
            **given
            | {
                "problem": Problem.from_dict(data["problem"]),
                "cells": {name: Cell(**cell) for name, cell in data["cells"].items()},
                "disturbances": tuple(data["disturbances"]),
            }
        )


@dataclass(frozen=True, kw_only=True)
class KernelErrors:
    """A kernel's errors beside PyTorch's on the same inputs of one kind."""

    kernel: str
    problem: Problem
    inputs: str
    errors: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "problem": self.problem.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KernelErrors:
        return cls(**{**data, "problem": Problem.from_dict(data["problem"])})


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """One run on one card. Host times are the caller's microseconds per call on a tiny problem, by dtype."""

    device: str
    arch: int
    driver: str
    toolkit: str
    flashgen: str
    began: str
    seconds: float = 0.0
    libraries: dict[str, str] = field(default_factory=dict)
    """Versions by name: torch, cuda, cudnn, and whatever else was timed."""
    clocks: dict[str, str] = field(default_factory=dict)
    """The card's condition ``before`` and ``after``: temperature, clock, power."""
    ceilings: Ceilings = field(default_factory=lambda: Ceilings({}, {}))
    host_us: dict[str, dict[str, float]] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    errors: tuple[KernelErrors, ...] = ()
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **asdict(self),
            "ceilings": self.ceilings.to_dict(),
            "earlier": {row.began: row.ceilings.to_dict() for row in self.rows if row.ceilings is not None},
            "summary": {name: summary(rows, self.ceilings) for name, rows in by_suite(self.rows).items()},
            "rows": [row.to_dict() for row in self.rows],
            "errors": [each.to_dict() for each in self.errors],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BenchRun:
        """Returns the run that `to_dict` wrote. Raises KeyError, TypeError or ValueError for anything
        else."""
        given = {**data}
        if given.pop("format", None) != FORMAT:
            raise ValueError(f"its format is {data.get('format')!r}, not {FORMAT}")
        given.pop("summary")
        # Earlier runs told of one reference for all rows.
        reference = given.pop("reference", "")
        earlier = {began: Ceilings.from_dict(each) for began, each in given.pop("earlier", {}).items()}
        rows = (replace(row, ceilings=earlier.get(row.began)) for row in map(Row.from_dict, data["rows"]))
        if reference:
            rows = (replace(row, reference=row.reference or reference) if row.scaled else row for row in rows)
        return cls(
            **given
            | {
                "ceilings": Ceilings.from_dict(data["ceilings"]),
                "rows": tuple(rows),
                "errors": tuple(map(KernelErrors.from_dict, data["errors"])),
                "notes": tuple(data["notes"]),
            }
        )


def key_bytes(problem: Problem) -> int:
    """Returns the bytes of all keys and values."""
    arrays = [each for each in problem.operation.strided if each.rows == "seqlen_k"]
    return sum(each.num_bytes(problem) for each in arrays)


def geomean(values: Iterable[float]) -> float | None:
    """Returns the geometric mean of positive numbers; None where there are none."""
    known = list(values)
    return exp(fmean(map(log, known))) if known else None


def by_suite(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Returns rows by the suite that has their workload; those of none under ``shapes``."""
    of = {workload.name: suite.name for suite in SUITES.values() for workload in suite.workloads}
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(of.get(row.name, "shapes"), []).append(row)
    return found


def contenders_of(rows: Iterable[Row]) -> list[str]:
    """Returns the names of all that were timed on one of the rows at least, flashgen first."""
    timed = dict.fromkeys(name for row in rows for name, cell in row.cells.items() if cell.ms is not None)
    return [OURS, *(name for name in timed if name != OURS)]


def rivals_of(rows: Iterable[Row]) -> list[str]:
    """Returns the names of all but flashgen that were timed on one of the rows at least."""
    return [name for name in contenders_of(rows) if name not in OUR_NAMES]


def scaled_of(rows: Iterable[Row]) -> list[str]:
    """Returns the names of those that another run timed and, on one of the rows at least, not this one."""
    return list(dict.fromkeys(name for row in rows for name in row.scaled_ms))


def _below_1(ratios: Mapping[str, float | None]) -> dict[str, float]:
    return {name: ratio for name, ratio in ratios.items() if ratio is not None and ratio < 1}


def summary(rows: Sequence[Row], ceilings: Ceilings) -> dict[str, dict[str, float | int | None]]:
    """Returns, by the name of each ratio and of the ``roofline`` share, its geometric mean, its least and the
    number of workloads that have it; of ratios also how many are below 1."""
    names = [*rivals_of(rows), *scaled_of(rows), BEST]
    ratios = {name: [row.ratio(name) for row in rows] for name in names}
    ratios["roofline"] = [row.of_roofline(ceilings) for row in rows]
    found: dict[str, dict[str, float | int | None]] = {}
    for name, values in ratios.items():
        known = [value for value in values if value is not None]
        if known:
            found[name] = {
                "geomean": geomean(known),
                "least": min(known),
                "workloads": len(known),
            }
            if name != "roofline":
                found[name]["behind"] = sum(value < 1 for value in known)
    return found


# -- files ---------------------------------------------------------------------------------------------------


def write(path: Path, run: BenchRun) -> None:
    """Writes the run's JSON, whole or not at all. Raises OSError."""
    write_text(path, as_json(run))


def as_json(run: BenchRun) -> str:
    return json.dumps(_plain(run.to_dict()), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN: an error that is one becomes the word."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _restored(value: Any) -> Any:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: _restored(each) for key, each in value.items()}
    return [_restored(each) for each in value] if isinstance(value, list) else value


def read(path: Path) -> BenchRun:
    """Reads the run of a JSON file.

    Raises:
        FlashgenError: it cannot be read, or is none.
    """
    try:
        return BenchRun.from_dict(_restored(json.loads(read_text(path))))
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FlashgenError(f"{path} is not what `flashgen bench` wrote ({error}); run it again") from error


def merged(runs: Sequence[BenchRun]) -> BenchRun:
    """Merges several runs on one card: each workload's row is from the last run that timed it and keeps when
    that began and its ceilings, libraries are those of all, and all else is what the last run says.

    Raises:
        FlashgenError: the runs are of different cards.
    """
    cards = list(dict.fromkeys(run.device for run in runs))
    if len(cards) > 1:
        raise FlashgenError(f"the runs are of different cards, {' and '.join(cards)}; name those of one")
    last = runs[-1]
    rows: dict[str, Row] = {}
    for run in runs:
        for row in run.rows:
            # What a run had no time for leaves what an earlier one found.
            if row.name not in rows or any(cell.ms for cell in row.cells.values()):
                rows[row.name] = row if run is last else _of_run(row, run, last)
    errors = {(e.kernel, e.inputs, e.problem): e for run in runs for e in run.errors}
    order = {name: i for i, name in enumerate(w.name for s in SUITES.values() for w in s.workloads)}
    return replace(
        last,
        libraries={name: version for run in runs for name, version in run.libraries.items()},
        rows=tuple(sorted(rows.values(), key=lambda row: order.get(row.name, len(order)))),
        errors=tuple(errors.values()),
        host_us={dtype: times for run in runs for dtype, times in run.host_us.items()},
    )


def with_later_kernels(run: BenchRun, entries: Iterable[Entry]) -> BenchRun:
    """Returns a run whose rows say of which kernels the library has a later one, tuned since they were
    timed."""
    tuned: dict[str, str] = {}
    for each in entries:
        if each.json_path is not None and each.kernel.device == run.device:
            tuned.setdefault(each.json_path.stem, each.kernel.tuned_at)

    def since(row: Row) -> str:
        at, began = tuned.get(row.kernel, ""), row.began or run.began
        is_later = row.ours and at and datetime.fromisoformat(at) > datetime.fromisoformat(began)
        return at if is_later else ""

    return replace(run, rows=tuple(replace(row, tuned_since=since(row)) for row in run.rows))


def _of_run(row: Row, run: BenchRun, last: BenchRun) -> Row:
    """A row with what it has of its own run, as it stands in the last."""
    began = row.began or run.began
    if began == last.began:
        return replace(row, began="", ceilings=None)
    return replace(row, began=began, ceilings=row.ceilings or run.ceilings)


def row_of(workload: Workload) -> Row:
    """Returns a workload's row, still without figures."""
    return Row(name=workload.name, problem=workload.problem)
