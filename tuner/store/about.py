"""What all trials of one study share, as the study's attributes have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...gen.families import family_named
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..cards.slug import SIM_PREFIX
from .makers import study_name


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
        return cls(
            problem=Problem.from_dict(attributes["problem"]),
            limits=DeviceLimits(**attributes["limits"]),
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
