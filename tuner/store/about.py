"""What all trials of one study share, as the study's attributes have it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...gen.families import family_named
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..cards.slug import SIM_PREFIX
from ..printable import is_plain
from .makers import study_name

#: What `DeviceLimits.slug` makes of a card's name.
SLUG = re.compile(r"[a-z0-9_]+")


def card_of(attributes: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the folder and the name of the card that a study's attributes tell. Raises KeyError or
    ValueError for a folder that is none, or a name that is more than a line."""
    slug, device = attributes["slug"], attributes["device"]
    if not isinstance(slug, str) or not SLUG.fullmatch(slug):
        raise ValueError(f"slug is {slug!r}, not the folder of a card")
    if not isinstance(device, str) or not is_plain(device):
        raise ValueError(f"device is {device!r}, not one line of printable characters")
    return slug, device


@dataclass(frozen=True)
class About:
    """What all trials of one study share.

    ``identity``, ``toolkit`` and ``cost_model`` say what made them, as in `Makers`; version 0.1.0 did not say
    the first and the last. ``mark`` ends the study's name.
    """

    problem: Problem
    limits: DeviceLimits
    family: type[Variant]
    predicted: bool
    driver: str
    toolkit: str
    flashgen: str
    seed: int
    mark: str
    identity: str | None = None
    cost_model: int | None = None

    @classmethod
    def of_study(cls, name: str, attributes: Mapping[str, Any]) -> About:
        """Reads what `attributes` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        for key in ("driver", "toolkit", "flashgen"):
            if not isinstance(attributes[key], str):
                raise TypeError(f"{key} is {attributes[key]!r}, not a text")
        if type(attributes["predicted"]) is not bool or type(attributes["seed"]) is not int:
            raise TypeError("predicted is no truth value, or seed no whole number")
        return cls(
            problem=Problem.from_dict(attributes["problem"]),
            limits=DeviceLimits.from_dict(attributes["limits"]),
            family=family_named(attributes["family"]),
            predicted=attributes["predicted"],
            driver=attributes["driver"],
            toolkit=attributes["toolkit"],
            flashgen=attributes["flashgen"],
            seed=attributes["seed"],
            mark=name.rpartition("/")[2],
            identity=attributes.get("identity"),
            cost_model=attributes.get("cost_model"),
        )

    @property
    def slug(self) -> str:
        """The folder of the card's kernels: ``nvidia_h200``; emulated ``sim_h200``."""
        return (SIM_PREFIX if self.predicted else "") + self.limits.slug

    @property
    def study(self) -> str:
        """The study's name, which is never taken from a file."""
        return study_name(self.slug, self.problem, self.family, self.mark)

    def attributes(self) -> dict[str, Any]:
        """Returns the study's attributes as JSON values."""
        made_by = {} if self.identity is None else {"identity": self.identity, "cost_model": self.cost_model}
        return {
            **made_by,
            "slug": self.slug,
            "device": self.limits.name,
            "driver": self.driver,
            "limits": self.limits.to_dict(),
            "predicted": self.predicted,
            "toolkit": self.toolkit,
            "problem": self.problem.to_dict(),
            "family": self.family.family,
            "flashgen": self.flashgen,
            "seed": self.seed,
        }
