"""Tables of times that a card was asked for: of each problem some variants, of one family or of several.

A table is JSON, plain or compressed. Either each row names its family,

    {"preset": "h200", "sets": [{"sample": ..., "problem": {...},
                                 "rows": [[us, registers, "wgmma", {parameter: value, ...}], ...]}]}

where parameters left out have their defaults, or the table is of one family (`predict.fit` writes such ones):
`family` and `columns` stand once, and rows are what the columns say. Recorded spaces are read as well.

A time belongs to the text that was timed. What a table says of texts that are no longer what is rendered,

    "superseded": [{"since": "2026-11-24", "why": ..., "family": "wgmma", "values": {"pack_heads": true}}]

are rows that tell nothing of today's kernels: all of that family with those values.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...gen.families import family_named
from ...gen.limits import DeviceLimits, preset
from ...gen.problem import Problem
from ...gen.variant import Illegal, Variant
from ..errors import FlashgenError
from ..shelf.choice import same_card
from ..shelf.library import Entry
from . import recorded_spaces

#: What stands in a row beside parameters.
TIME, REGISTERS = "median_us", "registers"


@dataclass(frozen=True)
class Measured:
    """Times of variants on one problem, in microseconds; ``sample`` says what they were timed for."""

    sample: str
    problem: Problem
    limits: DeviceLimits
    variants: tuple[Variant, ...]
    us: np.ndarray


def read(path: Path, *, superseded: bool = False) -> list[Measured]:
    """Reads a table or a recorded space; variants that this version does not have, or calls illegal, are left
    out, those whose text has changed since they were timed unless ``superseded`` are asked for, and so are
    problems of which fewer than two are then left.

    Raises:
        FlashgenError: the file is neither.
    """
    if ".jsonl" in path.name:
        return _of_space(path)
    try:
        raw = path.read_bytes()
        table = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        limits = preset(table["preset"])
        left_out = [] if superseded else [_of_text(each) for each in table.get("superseded", ())]
        found = [_measured(table, each, limits, left_out) for each in table["sets"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlashgenError(f"{path} is no table of measured times: {error}") from error
    return [each for each in found if len(each.variants) > 1]


def with_winner(measured: Measured, entries: Sequence[Entry]) -> Measured:
    """Returns the same with the fastest kernel that was tuned on that card for the problem, at the time it
    had then, where it is not among those that were timed here."""
    same = [
        e.kernel
        for e in entries
        if e.kernel.problem == measured.problem
        and same_card(e.slug, measured.limits.slug)
        and not e.predicted
    ]
    if not same:
        return measured
    winner = min(same, key=lambda kernel: kernel.measurement.median_us)
    if winner.variant in measured.variants:
        return measured
    us = np.append(measured.us, winner.measurement.median_us)
    return replace(measured, variants=(*measured.variants, winner.variant), us=us)


def _of_text(superseded: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family and the values that variants have whose text has changed since they were timed."""
    family, values = superseded["family"], dict(superseded["values"])
    if unknown := values.keys() - {each.name for each in family_named(family).parameters()}:
        raise ValueError(f"{family} has no parameter {min(unknown)}")
    return family, values


def _measured(
    table: Mapping[str, Any],
    entry: Mapping[str, Any],
    limits: DeviceLimits,
    left_out: Sequence[tuple[str, Mapping[str, Any]]],
) -> Measured:
    problem = Problem.from_dict(entry["problem"])
    kept: dict[Variant, float] = {}
    for us, family, values in _rows(table, entry["rows"]):
        kind = family_named(family)
        variant = kind.from_dict(kind().to_dict() | values)
        if any(family == its and variant.to_dict().items() >= of.items() for its, of in left_out):
            continue
        try:
            variant.check(problem, limits)
        except Illegal:
            continue
        kept.setdefault(variant, us)
    return Measured(entry.get("sample", ""), problem, limits, tuple(kept), np.array(list(kept.values())))


def _rows(table: Mapping[str, Any], rows: Sequence[Any]) -> Iterator[tuple[float, str, dict[str, Any]]]:
    columns = table.get("columns")
    for row in rows:
        if columns is None:
            us, _, family, values = row
            yield us, family, values
        else:
            values = dict(zip(columns, row, strict=True))
            us = values.pop(TIME)
            values.pop(REGISTERS, None)
            yield us, table["family"], values


def _of_space(path: Path) -> list[Measured]:
    space = recorded_spaces.read(path)
    timed = [(e.variant, e.median_us) for e in space.entries if e.median_us is not None]
    if len(timed) < 2:
        return []
    variants, us = zip(*timed, strict=True)
    return [Measured("whole space", space.problem, space.limits, variants, np.array(us))]
