"""The block ``flashgen`` of an exported file: what all trials of the study share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ...gen.families import FAMILIES
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.scoring.asked import Scoring
from ..store.about import About
from .checked_values import Wrong, json_object, located, plain_text, short_text, shown, whole_number

#: The version of the ``flashgen`` block.
VERSION = 1
#: Characters that `PLAIN_TEXT` does not allow.
NOT_PLAIN = re.compile(r"[^A-Za-z0-9 ._,:;()+/~-]")
#: What tells apart versions of what made the kernels.
MARK = re.compile(r"[0-9a-f]{8}")
#: What a family's kernels were.
IDENTITY = re.compile(r"[0-9a-f]{16}")


def block_of(about: About) -> dict[str, Any]:
    """Returns the block as JSON values; what is not plain text in a name becomes ``_``."""
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
        **({} if about.identity is None else {"identity": about.identity, "cost_model": about.cost_model}),
    }


def about_of(data: Any) -> About:
    """Returns what a file's block says of its study, each value checked. Raises `Wrong`."""
    if data is None:
        raise Wrong("it has no block 'flashgen', so it does not say which problem and card it is of")
    block = json_object(data, "flashgen")
    version = block.get("version")
    if version != VERSION:
        raise Wrong(f"it is of version {shown(version)}, this flashgen reads {VERSION}")
    family = FAMILIES.get(short_text(block.get("family"), "family"))
    if family is None:
        raise Wrong(f"unknown family {shown(block['family'])}; choose from {', '.join(FAMILIES)}")
    mark = short_text(block.get("mark"), "mark")
    if not MARK.fullmatch(mark):
        raise Wrong(f"mark {shown(mark)} is not eight hex digits")
    if type(block.get("predicted")) is not bool:
        raise Wrong("predicted is neither true nor false")
    identity, cost_model = block.get("identity"), block.get("cost_model")
    if identity is not None and not (isinstance(identity, str) and IDENTITY.fullmatch(identity)):
        raise Wrong(f"identity {shown(identity)} is not sixteen hex digits")
    return About(
        problem=_problem(block.get("problem")),
        limits=_limits(block.get("limits")),
        family=family,
        predicted=block["predicted"],
        driver=plain_text(block.get("driver"), "driver"),
        toolkit=plain_text(block.get("toolkit"), "toolkit"),
        flashgen=plain_text(block.get("flashgen"), "flashgen"),
        seed=whole_number(block.get("seed"), "seed", 2**32 - 1),
        mark=mark,
        identity=identity,
        cost_model=None if cost_model is None else whole_number(cost_model, "cost_model", 2**31 - 1),
    )


def _problem(data: Any) -> Problem:
    given = dict(json_object(data, "problem"))
    asked = json_object(given.pop("scoring", {}), "scoring")
    values = _fields(given, Problem().to_dict(), "problem")
    return located("problem", lambda: Problem(**values, scoring=_scoring(asked)))


def _scoring(data: Mapping[str, Any]) -> Scoring:
    try:
        return Scoring.from_dict(data)
    except TypeError as error:
        raise Wrong(str(error)) from error


def _limits(data: Any) -> DeviceLimits:
    example = DeviceLimits(
        name="", arch=0, num_sms=0, smem_per_block=0, smem_per_sm=0, max_threads_per_sm=0,
        max_blocks_per_sm=0, l2_bytes=0, clock_mhz=0, dram_gbps=0,
    )  # fmt: skip
    limits = DeviceLimits(**_fields(data, asdict(example), "limits"))
    if not limits.slug:
        raise Wrong("the card has no name")
    return limits


def _fields(data: Any, example: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The fields that ``example`` has, of the types that it has them."""
    given, names = json_object(data, what), list(example)
    if set(given) != set(names):
        odd = sorted(map(str, set(given) ^ set(names)))
        raise Wrong(f"{what} has the fields {', '.join(names)}; see {shown(odd)}")
    values: dict[str, Any] = {}
    for name, typical in example.items():
        value = given[name]
        if isinstance(typical, bool):
            if type(value) is not bool:
                raise Wrong(f"{what}: {name} is neither true nor false")
            values[name] = value
        elif isinstance(typical, str):
            values[name] = plain_text(value, name)
        else:
            values[name] = whole_number(value, name, 2**40, least=1)
    return values
