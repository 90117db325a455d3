"""What a tuning run tells while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..evaluate.outcome import Outcome


@dataclass(frozen=True)
class SpaceReady:
    """A family's space was enumerated; ``earlier`` of its variants were tried by earlier runs.

    ``taught_by`` names the neighbouring problems whose trials in the storage the search starts from.
    """

    family: str
    legal: int
    total: int
    removed: Mapping[str, int]
    earlier: int
    budget: int | None
    sweeps: bool
    seconds: float
    taught_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class SearchGoesOn:
    """A family is among the fastest after the first round and gets more of the budget.

    ``done`` counts the trials of its study so far.
    """

    family: str
    done: int
    budget: int | None


@dataclass(frozen=True)
class TrialDone:
    """One trial ended. ``number`` counts the family's trials, ``best`` is the fastest of all so far."""

    number: int
    budget: int | None
    origin: str
    outcome: Outcome
    best: Outcome | None


@dataclass(frozen=True)
class FinalsStarted:
    """The fastest are timed once more, in turns."""

    finalists: tuple[Outcome, ...]


@dataclass(frozen=True)
class Doing:
    """What is done or waited for from now on, until the next event."""

    text: str


@dataclass(frozen=True)
class InFlight:
    """Trials under way: in how many compilers, and how many on a card or before one."""

    compiling: int
    on_cards: int


@dataclass(frozen=True)
class Notice:
    """Something the user should know while the run goes on."""

    text: str


Event = SpaceReady | SearchGoesOn | TrialDone | FinalsStarted | Doing | InFlight | Notice
Report = Callable[[Event], None]
