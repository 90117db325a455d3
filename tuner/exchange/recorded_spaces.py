"""Recorded spaces: what became of every variant of a space, as compressed JSON lines that anyone can read.

The first line tells of the problem, the card and what made the kernels; each line after it is a variant. A
search is replayed on them without a card, as often as one likes.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ...gen.families import family_named
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..errors import FlashgenError
from ..evaluate.outcome import Outcome, Status
from ..evaluate.reasons import first_line
from ..files import open_regular, write_bytes
from ..predict.catalogue import Catalogue, build_catalogue
from .portable import Trials

VERSION = 1
#: What opens a compressed file, by how its name ends.
OPENERS = {".xz": lzma.open, ".gz": gzip.open}
MAX_REASON = 200
#: What a compressed file may unfold to: far more than the largest space.
MAX_BYTES = 2**28


@dataclass(frozen=True)
class Entry:
    """What became of one variant; figures are None where nothing was timed."""

    variant: Variant
    status: Status
    median_us: float | None = None
    spread: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordedSpace:
    """A space and what became of its variants. ``unknown`` counts those that this version's family does not
    have any more; they are left out."""

    problem: Problem
    limits: DeviceLimits
    family: type[Variant]
    driver: str
    toolkit: str
    flashgen: str
    predicted: bool
    entries: tuple[Entry, ...]
    unknown: int = 0

    @property
    def best_us(self) -> float:
        """The optimum. Raises FlashgenError where nothing was timed."""
        times = [e.median_us for e in self.entries if e.median_us is not None]
        if not times:
            raise FlashgenError(
                f"none of {len(self.entries)} recorded variants of {self.problem.name} was timed; record "
                "another study"
            )
        return min(times)

    def catalogue(self) -> Catalogue:
        """Returns a catalogue of just the recorded variants, none of them taken."""
        parameters = self.family.parameters()
        codes = np.array(
            [[p.choices.index(getattr(e.variant, p.name)) for e in self.entries] for p in parameters],
            dtype=np.uint8,
        )
        return Catalogue(self.family, self.problem, self.limits, len(self.entries), {}, codes)


def recorded(trials: Trials) -> RecordedSpace:
    """Returns a study's finished trials as a recorded space.

    Raises:
        FlashgenError: the study stopped slow variants early, whose times are none to replay, or it has not
            tried all that are legal with the values that it held: the best of some is no optimum.
    """
    slow = sum(e.outcome.status is Status.SLOW for e in trials.ended)
    if slow:
        raise FlashgenError(
            f"{slow} of {len(trials.ended)} variants of {trials.about.study} were not timed to the end, "
            "since they were clearly beaten; tune with --sampler exhaustive and another --storage, and "
            "record that"
        )
    _require_exhaustive(trials)
    about = trials.about
    return RecordedSpace(
        problem=about.problem,
        limits=about.limits,
        family=about.family,
        driver=about.driver,
        toolkit=about.toolkit,
        flashgen=about.flashgen,
        predicted=about.predicted,
        entries=tuple(_entry(e.outcome) for e in trials.ended),
    )


def _require_exhaustive(trials: Trials) -> None:
    """Raises FlashgenError where a legal variant was not tried. A parameter of one value alone was held."""
    about = trials.about
    tried = {each.outcome.variant for each in trials.ended}
    held = {
        name: next(iter(values))
        for name in (p.name for p in about.family.parameters())
        if len(values := {getattr(variant, name) for variant in tried}) == 1
    }
    # One variant holds all its values and would be the whole of them.
    catalogue = build_catalogue(about.family, about.problem, about.limits, held if len(tried) > 1 else {})
    count = sum(catalogue.row(variant) is not None for variant in tried)
    if count < len(catalogue):
        raise FlashgenError(
            f"{count} of {len(catalogue)} legal variants of {about.study} were tried, so that its optimum is "
            f"not known; tune with --sampler exhaustive --trials {len(catalogue)}, and record that"
        )


def _entry(outcome: Outcome) -> Entry:
    measured = outcome.measurement
    entry = Entry(outcome.variant, outcome.status, reason=first_line(outcome.reason)[:MAX_REASON])
    if measured is None:
        return entry
    return replace(
        entry,
        median_us=measured.median_us,
        spread=measured.spread,
        registers=measured.registers,
        spill_bytes=measured.spill_bytes,
    )


def check_target(path: Path) -> None:
    """Raises FlashgenError for a file name that none can be written to."""
    _opener(path)


def write(path: Path, space: RecordedSpace) -> None:
    """Writes the file whole or not at all. Raises FlashgenError."""
    opener = _opener(path)
    head = {
        "flashgen_space": VERSION,
        "problem": space.problem.to_dict(),
        "limits": space.limits.to_dict(),
        "family": space.family.family,
        "driver": space.driver,
        "toolkit": space.toolkit,
        "flashgen": space.flashgen,
        "predicted": space.predicted,
        "variants": len(space.entries),
    }
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in (head, *map(_to_line, space.entries)))
    packed = io.BytesIO()
    with opener(packed, "wb") as file:
        file.write(text.encode("utf-8"))
    try:
        write_bytes(path, packed.getvalue())
    except OSError as error:
        raise FlashgenError(
            f"{path} cannot be written: {error.strerror or error}; free some space or name another file"
        ) from error


def _to_line(entry: Entry) -> dict[str, Any]:
    line = {"variant": entry.variant.to_dict(), "outcome": str(entry.status)}
    if entry.median_us is not None:
        line |= {
            "median_ms": round(entry.median_us / 1e3, 7),
            "spread": round(entry.spread or 0.0, 5),
            "registers": entry.registers,
            "spill_bytes": entry.spill_bytes,
        }
    return line | ({"reason": entry.reason} if entry.reason else {})


def read(path: Path) -> RecordedSpace:
    """Reads the space in a file. Raises FlashgenError, naming the line that is not as it must be."""
    lines = _lines(path)
    try:
        head = next(lines, None)
        if not isinstance(head, dict) or head.get("flashgen_space") != VERSION:
            raise ValueError(f"line 1 does not say that it is a recorded space of version {VERSION}")
        family = family_named(head["family"])
        parsed = [_in_line(number, family, line) for number, line in enumerate(lines, 2)]
        entries = {entry.variant: entry for entry in parsed if entry is not None}
        space = RecordedSpace(
            problem=Problem.from_dict(head["problem"]),
            limits=DeviceLimits.from_dict(head["limits"]),
            family=family,
            driver=str(head["driver"]),
            toolkit=str(head["toolkit"]),
            flashgen=str(head["flashgen"]),
            predicted=bool(head["predicted"]),
            entries=tuple(entries.values()),
            unknown=parsed.count(None),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise FlashgenError(
            f"{path} is no recorded space: {why}; `flashgen record` writes one from a study"
        ) from error
    if not space.entries:
        raise FlashgenError(
            f"{path} holds {space.unknown} variants, 0 of which family {family.family} still has; record it "
            "again with this version"
        )
    return space


def _in_line(number: int, family: type[Variant], line: Any) -> Entry | None:
    try:
        return _from_line(family, line)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"line {number}: {why}") from error


def _from_line(family: type[Variant], line: Mapping[str, Any]) -> Entry | None:
    """None for a variant that the family does not have any more; parameters it has gained are at their
    defaults."""
    values, status = line["variant"], Status(line["outcome"])
    try:
        variant = family.from_dict(values)
    except ValueError:
        return None
    reason = str(line.get("reason", ""))
    if status is not Status.OK:
        return Entry(variant, status, reason=reason)
    median_us, spread = 1e3 * float(line["median_ms"]), float(line["spread"])
    if not (math.isfinite(median_us) and median_us > 0):
        raise ValueError(f"median_ms is {line['median_ms']}, not a time")
    if not (math.isfinite(spread) and spread >= 0):
        raise ValueError(f"spread is {line['spread']}, not a share of the median")
    return Entry(
        variant,
        status,
        median_us=median_us,
        spread=spread,
        registers=int(line["registers"]),
        spill_bytes=int(line["spill_bytes"]),
        reason=reason,
    )


def _lines(path: Path) -> Iterator[Any]:
    opener = _opener(path)
    total = 0
    try:
        with open_regular(path, MAX_BYTES) as packed, opener(packed, "rb") as file:
            number = 0
            while line := file.readline(MAX_BYTES - total + 1):
                number, total = number + 1, total + len(line)
                if total > MAX_BYTES:
                    raise FlashgenError(f"{path} unfolds to over {MAX_BYTES} bytes; replay a smaller space")
                try:
                    yield json.loads(line.decode("utf-8"), parse_constant=_refuse)
                except (ValueError, RecursionError) as error:
                    why = "it is nested too deeply" if isinstance(error, RecursionError) else error
                    raise FlashgenError(
                        f"{path} is no recorded space: line {number} is no JSON ({why}); `flashgen record` "
                        "writes one from a study"
                    ) from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise FlashgenError(
            f"{path} cannot be read: {why}; name a file that `flashgen record` wrote"
        ) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no figure")


def _opener(path: Path) -> Any:
    if path.suffix not in OPENERS:
        raise FlashgenError(
            f"{path} ends in {path.suffix or 'nothing'}, a recorded space in {' or '.join(OPENERS)}; name it "
            f"{path.stem}.jsonl.xz"
        )
    return OPENERS[path.suffix]
