"""All tuned kernels there are, one of them by name or file, and how two of them differ."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.scoring.words import scoring_words
from ...gen.variant import Value, Variant
from ..cards.slug import same_card
from ..errors import UsageError
from ..request import Shapes
from . import library, records

#: Files of a kernel's three that name it.
SUFFIXES = (".json", ".cu", ".py")
#: A figure of a kernel: its name, and whether less of it is better (None: neither).
FIGURES: dict[str, bool | None] = {
    "median_us": True,
    "tflops": False,
    "spread": True,
    "registers": None,
    "spill_bytes": True,
    "smem_bytes": None,
    "occupancy": None,
    "error": True,
}


def name_of(entry: library.Entry) -> str:
    """Returns the name that a kernel goes by: its card's folder and its problem, ``nvidia_h200/f32_d64``."""
    return f"{entry.slug}/{entry.kernel.problem.name}"


def fitting(
    known: Sequence[library.Entry],
    shapes: Shapes,
    limits: DeviceLimits | None = None,
    family: type[Variant] | None = None,
) -> list[library.Entry]:
    """Returns the kernels that the options leave, each once, by card and then by problem. What was not given
    fits any."""
    # Those of the out folder come first; its kernels may have come from the shipped ones.
    each = {(entry.slug, entry.kernel.problem, entry.kernel.variant): entry for entry in reversed(known)}
    left = [
        entry
        for entry in each.values()
        if shapes.fits(entry.kernel.problem)
        and (limits is None or same_card(entry.slug, limits.slug))
        and (family is None or type(entry.kernel.variant) is family)
    ]
    return sorted(left, key=_order)


def _order(entry: library.Entry) -> tuple[Any, ...]:
    p = entry.kernel.problem
    heads = p.batch * p.num_q_heads
    return (
        entry.slug,
        p.dtype,
        p.kv_dtype,
        p.precision,
        p.head_dim,
        p.head_dim_v,
        p.causal,
        p.scoring.values,
        p.seqlen_q,
        p.seqlen_k,
        heads,
    )


def to_dict(entry: library.Entry) -> dict[str, Any]:
    """Returns one kernel as `flashgen list --json` tells it: its record without the single times, and its
    file."""
    record = records.to_record(entry.kernel)
    record["measurement"] = {k: v for k, v in record["measurement"].items() if k != "times_us"}
    return {
        "name": name_of(entry),
        "file": str(entry.json_path) if entry.json_path is not None else None,
        **record,
    }


def find(known: Sequence[library.Entry], text: str) -> library.Entry:
    """Finds the kernel that ``text`` names: a file, ``nvidia_h200/f32_d64``, or ``f32_d64`` where one card
    has it.

    Raises:
        UsageError: there is none, or several; the message lists what was near.
    """
    path = Path(text)
    if path.suffix in SUFFIXES:
        record = path.with_suffix(".json")
        if not record.exists():
            raise UsageError(
                f"{text} is no tuned kernel of a library folder: {record} does not exist; name one that "
                "`flashgen list` shows, or its file"
            )
        return library.read(record)
    found = [entry for entry in known if text in (name_of(entry), entry.kernel.problem.name)]
    if not found:
        names = [name_of(entry) for entry in known]
        if not names:
            raise UsageError(f"there is no kernel {text!r}, for nothing was tuned yet")
        names += [name.rpartition("/")[2] for name in names]
        # What is named but for its sizes is nearer than another type of the same sizes.
        longer = [name for name in names if name.startswith(text)]
        near = longer or difflib.get_close_matches(text, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`flashgen list` shows those there are"
        raise UsageError(f"there is no kernel {text!r}; {hint}")
    cards = dict.fromkeys(name_of(entry) for entry in found)
    if len(cards) > 1:
        raise UsageError(f"{text!r} was tuned for several cards; name one of {', '.join(cards)}")
    # The out folder comes before the shipped one, and both before what a study alone holds.
    return found[0]


@dataclass(frozen=True)
class Difference:
    """Two kernels side by side."""

    a: library.Entry
    b: library.Entry

    @cached_property
    def problem(self) -> dict[str, tuple[Value, Value]]:
        """What of the problems differs."""
        return _differing(*map(_facts, (self.a.kernel.problem, self.b.kernel.problem)))

    @cached_property
    def made(self) -> dict[str, tuple[Value, Value]]:
        """What of the card and the tools differs."""
        names = ("device", "driver", "toolkit", "flashgen", "seed")
        a, b = ({n: getattr(e.kernel, n) for n in names} for e in (self.a, self.b))
        return _differing(a, b)

    @cached_property
    def parameters(self) -> dict[str, tuple[Value | None, Value | None]]:
        """The parameters that differ, the family among them; None where a family has no such parameter."""
        a, b = ({"family": v.family, **v.to_dict()} for v in (self.a.kernel.variant, self.b.kernel.variant))
        return _differing(a, b)

    @cached_property
    def figures(self) -> dict[str, tuple[float, float]]:
        a, b = self.a.kernel.measurement, self.b.kernel.measurement
        return {name: (getattr(a, name), getattr(b, name)) for name in FIGURES}

    @cached_property
    def source(self) -> str:
        """The change from a's source to b's as a unified diff, empty where they are the same."""
        a, b = self.a.kernel.source, self.b.kernel.source
        lines = difflib.unified_diff(
            a.splitlines(), b.splitlines(), f"{name_of(self.a)}.cu", f"{name_of(self.b)}.cu", lineterm=""
        )
        return "".join(f"{line}\n" for line in lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": to_dict(self.a),
            "b": to_dict(self.b),
            "problem": self.problem,
            "made": self.made,
            "parameters": self.parameters,
            "figures": self.figures,
            "source": self.source,
        }


def compare(known: Sequence[library.Entry], a: str, b: str) -> Difference:
    """Returns the difference between two kernels as `find` names them. Raises UsageError or FlashgenError."""
    return Difference(find(known, a), find(known, b))


def _facts(problem: Problem) -> dict[str, Any]:
    """A problem's fields, masks and changes of scores in words."""
    return {**problem.to_dict(), "scoring": scoring_words(problem.scoring) or "none"}


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*a, *(name for name in b if name not in a)]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}
