"""Another run's times, such as FlashAttention-3's, beside a run's own: scaled by what both timed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...gen.layout import DENSE
from ...gen.problem import Problem
from ..errors import FlashgenError
from ..files import read_text
from .figures import CUDNN, FLASH, OURS, BenchRun, Row, by_suite, contenders_of
from .sixteen_bits import in_16_bits

#: What ends the name of a contender that was timed without the causal mask.
UNMASKED = "-nomask"
#: How far the floating-point operations of one problem may lie apart as two runs count them.
SAME_WORK = 0.01


def with_reference(run: BenchRun, path: Path) -> BenchRun:
    """Returns the run with what another timed and this one did not, such as FlashAttention-3, scaled by
    cuDNN: a workload's milliseconds there, beside eight bits those of bfloat16, times cuDNN's here over
    cuDNN's there; where either lacks it, by the fastest there that both timed. What is scaled by is what
    stood beside flashgen in its own turn. Of runs put together each is one by itself. Workloads that the
    other did not time stay as they are.

    ``path``: JSON with ``rows`` of ``ms`` by contender and of ``dtype``, ``shape`` (batch, query heads, key
    heads, query length, key length, head dim), ``causal`` and, if any, ``scoring``; or in the place of these
    of ``section``, a suite, and ``name``, a workload of it. What it counted other ``gflop`` of was another
    problem, say of other documents, and scales nothing.

    Raises:
        FlashgenError: it cannot be read, or is none.
    """
    try:
        data = json.loads(read_text(path))
        there = {_key_of(row): row for row in data["rows"]}
        times = _times(data["rows"])
        versions = ", ".join(str(data[key]) for key in ("device", "torch", "fa3", "date") if key in data)
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FlashgenError(f"{path} is not a table of reference times ({error!r})") from error
    reference = f"{path.name} ({versions})"

    suites = {row.name: suite for suite, members in by_suite(run.rows).items() for row in members}
    timed = {
        began: set(contenders_of(row for row in run.rows if row.began == began))
        for began in {row.began for row in run.rows}
    }

    def scaled(row: Row) -> dict[str, float]:
        suite = suites[row.name]
        # Names there are those of one section, here of all suites.
        keys = (_key(in_16_bits(row.problem)), (suite, row.name), (suite, row.name.removeprefix(f"{suite}-")))
        key = next((key for key in keys if key in times), None)
        if key is None or not _same_work(row.problem, there.get(key, {}).get("gflop")):
            return {}
        theirs = times[key]
        both = {name: ms for name, ms in theirs.items() if ms and name != OURS and row.ms(name)}
        by = CUDNN if CUDNN in both else min(both, key=both.__getitem__, default=None)
        here = None if by is None else row.ms(by)
        if by is None or here is None:
            return {}
        # Beside flashgen as the table has it, which other turns may have found at another clock.
        beside = row.ratio(by)
        ours = row.ms(OURS)
        speed = (beside * ours if beside and ours else here) / both[by]
        return {name: ms * speed for name, ms in theirs.items() if name not in timed[row.began] and ms}

    found = [(row, scaled(row)) for row in run.rows]
    rows = [replace(row, scaled=theirs, reference=reference) if theirs else row for row, theirs in found]
    return replace(run, rows=tuple(rows))


def _same_work(problem: Problem, gflop: float | None) -> bool:
    return not gflop or abs(problem.flops / 1e9 / gflop - 1) < SAME_WORK


def _key(problem: Problem) -> tuple[Any, ...]:
    p = problem
    shape = (p.batch, p.num_q_heads, p.num_kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim)
    if p.precision != "auto" or p.head_dim_v != p.head_dim or p.layout is not DENSE or p.backward:
        return ()
    return (p.dtype, shape, p.causal, json.dumps(p.scoring.to_dict(), sort_keys=True))


def _key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    if "shape" not in row:
        return (row["section"], row["name"])
    asked = json.dumps(row.get("scoring", {}), sort_keys=True)
    return (row["dtype"], tuple(row["shape"]), bool(row["causal"]), asked)


def _times(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, float]]:
    """Milliseconds by row and contender. Those on pages stand beside the others there, in rows of their own
    here; those that left the causal mask out of several queries computed something else."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = _key_of(row)
        for told, ms in row["ms"].items():
            name, _, page_size = told.partition("-page")
            if page_size:
                found.setdefault(("paged", f"{row['name']}-page{page_size}"), {})[_name_of(name)] = ms
            elif not name.endswith(UNMASKED) or "-q1-" in row["name"]:
                found.setdefault(key, {})[_name_of(name)] = ms
    return found


def _name_of(name: str) -> str:
    """Such files say sdpa-memeff for what is mem-eff here, and in which of its forms a library was called."""
    plain = name.removeprefix("sdpa-").removesuffix("-sdpa")
    if plain != "torch-varlen":
        for form in ("-varlen", "-document", "-s1", UNMASKED):
            plain = plain.removesuffix(form)
    return {"memeff": "mem-eff", "fa2": FLASH}.get(plain, plain)
