"""A tuned kernel as JSON: all of it but its source."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from ...gen.families import family_named
from ...gen.problem import Problem
from ..evaluate.outcome import Measurement, TunedKernel
from ..printable import is_plain


def to_record(kernel: TunedKernel) -> dict[str, Any]:
    """Returns all of a tuned kernel but its source, as JSON values."""
    return {
        "problem": kernel.problem.to_dict(),
        "family": kernel.variant.family,
        "variant": kernel.variant.to_dict(),
        "predicted": kernel.measurement.predicted,
        "measurement": kernel.measurement.to_dict(),
        "device": kernel.device,
        "arch": kernel.arch,
        "driver": kernel.driver,
        "toolkit": kernel.toolkit,
        "flashgen": kernel.flashgen,
        "seed": kernel.seed,
        "tuned_at": kernel.tuned_at,
    }


def figures(kernel: TunedKernel) -> dict[str, Any]:
    """Returns what an emitted file tells of how its kernel was tuned: the measurement and what it was made
    with."""
    made_with = ("driver", "toolkit", "flashgen", "seed")
    return kernel.measurement.to_dict() | {name: getattr(kernel, name) for name in made_with}


def from_record(data: dict[str, Any], source: str) -> TunedKernel:
    """Returns the kernel that `to_record` wrote. Raises KeyError, TypeError, ValueError or RecursionError for
    anything else: texts of one printable line, figures that can have been measured."""
    texts = {name: _text(data, name) for name in ("device", "driver", "toolkit", "flashgen", "tuned_at")}
    datetime.datetime.fromisoformat(texts["tuned_at"])
    return TunedKernel(
        problem=Problem.from_dict(data["problem"]),
        variant=family_named(data["family"]).from_dict(data["variant"]),
        source=source,
        measurement=Measurement.from_dict(data["measurement"]),
        arch=_number(data, "arch"),
        seed=_number(data, "seed"),
        **texts,
    )


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data[name]
    if not isinstance(value, str) or not is_plain(value):
        raise ValueError(f"{name} is {value!r}, not one line of printable characters")
    return value


def _number(data: Mapping[str, Any], name: str) -> int:
    value = data[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, not a whole number from 0")
    return value
