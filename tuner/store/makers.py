"""Which trials are comparable: those of the same kernels by the same compiler, predicted by the same model.

A study says in its attributes what made its trials. Studies of version 0.1.0 do not say which kernels they
are of nor which cost model predicted: for them it is written down what that version had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna.storages import BaseStorage

from ...gen.identity import IDENTITIES_OF_0_1_0, identities
from ...gen.problem import Problem
from ...gen.variant import Variant
from .kept_identity import kept_identity

#: The version whose studies name no identity and no cost model, and the cost model that it had.
FIRST_VERSION, ITS_COST_MODEL = "0.1.0", 1


@dataclass(frozen=True)
class Makers:
    """What makes the trials of a family: its kernels, the compiler and, of predicted times, the cost model.

    ``identities`` are those of the kernels, today's first, then earlier ones that are the same machine code.
    ``cost_model`` is its version, None for measured times.
    """

    family: str
    identities: tuple[str, ...]
    toolkit: str
    cost_model: int | None

    @classmethod
    def of(cls, family: type[Variant], toolkit: str, cost_model: int | None) -> Makers:
        """Returns what makes trials of today's kernels of a family."""
        today = kept_identity(family.family)
        return cls(family.family, identities(family.family, today), toolkit, cost_model)

    @property
    def mark(self) -> str:
        """Eight hex digits that a new study's name ends with."""
        words = (self.identities[0], self.toolkit, "" if self.cost_model is None else str(self.cost_model))
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]

    def attributes(self) -> dict[str, Any]:
        """Returns what a study says of its makers."""
        return {"identity": self.identities[0], "toolkit": self.toolkit, "cost_model": self.cost_model}

    def made(self, attributes: Mapping[str, Any]) -> bool:
        """Tells whether a study with these attributes holds trials of the same makers."""
        return (
            attributes.get("family") == self.family
            and _identity_of(attributes) in self.identities
            and cost_model_of(attributes) == self.cost_model
            and attributes.get("toolkit") == self.toolkit
        )


def cost_model_of(attributes: Mapping[str, Any]) -> int | None:
    """Returns the version of the cost model behind a study's times, None where they were measured or where it
    is unknown."""
    if "cost_model" not in attributes and _is_of_first_version(attributes) and attributes.get("predicted"):
        return ITS_COST_MODEL
    return attributes.get("cost_model")


def _identity_of(attributes: Mapping[str, Any]) -> str | None:
    if _is_of_first_version(attributes):
        return IDENTITIES_OF_0_1_0.get(str(attributes.get("family")))
    return attributes.get("identity")


def _is_of_first_version(attributes: Mapping[str, Any]) -> bool:
    return "identity" not in attributes and attributes.get("flashgen") == FIRST_VERSION


def study_name(slug: str, problem: Problem, family: type[Variant], mark: str) -> str:
    """Returns the name of a study: card, problem, family and the mark of what makes its trials."""
    return f"{slug}/{problem.name}/{family.family}/{mark}"


def name_of_study(
    storage: BaseStorage, slug: str, problem: Problem, family: type[Variant], makers: Makers
) -> str:
    """Returns the name of the study that trials of these makers go to.

    It is the study of that mark or, where there is none, the fullest of those that the same makers made under
    another mark, else a new one.
    """
    own = study_name(slug, problem, family, makers.mark)
    kin: list[tuple[int, str]] = []
    for study in storage.get_all_studies():
        if study.study_name == own:
            return own
        start, _, _ = study.study_name.rpartition("/")
        if start == own.rpartition("/")[0] and makers.made(study.user_attrs):
            kin.append((storage.get_n_trials(study._study_id), study.study_name))
    return max(kin)[1] if kin else own
