"""What serves calls of one kind: the runtime of emitted modules over tables that fill themselves."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...gen.problem import Problem
from ...gen.scoring.asked import PLAIN, Scoring
from ...templates.runtime.attention import Attention
from ...templates.runtime.gradient_tensors import _GradientTensors
from ...templates.runtime.gradients import Gradients
from ...templates.runtime.scored_attention import _ScoredTensors
from ...templates.runtime.scored_gradients import _ScoredGradientTensors
from ...templates.runtime.scored_values import Scored
from ...templates.runtime.tensors import _Tensors
from ..cards.emulated import PREFIX
from .card import Card, SimCard, sim_card
from .emulated import EmulatedAttention, EmulatedGradients
from .known import KnownCalls
from .packed import MadePackedAttention, MadePackedTable
from .packed_gradients import MadePackedGradients
from .paged import MadePagedAttention, MadePagedTable
from .table import _PLAIN_DTYPES, LISTENERS, MadeTable
from .workshop import Workshop

#: Plans that are kept of calls of a kind.
REMEMBERED = 1024
#: The types of calls with scales.
_SCALED_DTYPES = ("e4m3",)


def _gradient_tensors(table: MadeTable, repeating: MadeTable, operator: str) -> _GradientTensors:
    """Returns what takes gradients of tensors, and of what masks and changes of scores read, by kernels that
    are made as calls need them."""
    kind = _ScoredGradientTensors if isinstance(table.kernels[0], Scored) else _GradientTensors
    made = kind.__new__(kind)
    made.operator, made.default_mask = operator, False
    made.table, made.repeating = table, repeating
    made.plan = functools.lru_cache(maxsize=REMEMBERED)(made.make_plan)
    return made


@dataclass
class Bound:
    """All that serves calls on cards of one kind: those of this machine, or one emulated card."""

    card: Card | None = None
    """None: the card on which the arrays of a call are."""
    wait: bool = True
    """Whether calls wait for the best kernel to be built; else what is ready may serve meanwhile."""
    served: dict[Any, Any] = field(default_factory=dict)
    """What serves calls that ask the same, as whoever makes calls keeps it."""
    again: KnownCalls = field(default_factory=KnownCalls)
    """Calls of tensors as they are made again, likewise. Another takes its place where kernels may be chosen
    anew: what calls that are under way keep in this one nobody finds."""
    most_again: int = REMEMBERED
    """So many are kept."""
    _attending: dict[tuple[Scoring, tuple[str, ...], str], Attention] = field(default_factory=dict)
    _packed: dict[tuple[Scoring, tuple[str, ...]], MadePackedAttention] = field(default_factory=dict)
    _packed_gradients: dict[Scoring, MadePackedGradients] = field(default_factory=dict)
    _paged: dict[Any, MadePagedAttention] = field(default_factory=dict)
    _gradients: dict[Scoring, Gradients] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def attending(
        self, scoring: Scoring = PLAIN, *, scaled: bool = False, precision: str = "auto"
    ) -> Attention:
        """Returns what attends with such masks and changes of scores; ``scaled``: of eight bits, of which
        weights may be, too, with a ``precision``."""
        dtypes = _SCALED_DTYPES if scaled else _PLAIN_DTYPES
        key = (scoring, dtypes, precision)
        with self._lock:
            if key not in self._attending:
                self._attending[key] = self._made(*key)
            return self._attending[key]

    def packed(self, scoring: Scoring = PLAIN, *, scaled: bool = False) -> MadePackedAttention:
        """Returns what attends to packed sequences likewise."""
        dtypes = _SCALED_DTYPES if scaled else _PLAIN_DTYPES
        with self._lock:
            if (scoring, dtypes) not in self._packed:
                told: dict[str, Any] = {"dtypes": dtypes, "card": self.card, "wait": self.wait}
                table = MadePackedTable(workshop_of, scoring, **told)
                operator = self._operator(scoring, dtypes).replace("attention", "attention_varlen", 1)
                made = MadePackedAttention(table, operator)
                if dtypes == _PLAIN_DTYPES:
                    with contextlib.suppress(ValueError):  # then it is forward only
                        made._group._tensors.gradients = self.packed_gradients(scoring)._group._tensors
                self._packed[scoring, dtypes] = made
            return self._packed[scoring, dtypes]

    def paged(
        self, scoring: Scoring = PLAIN, *, page_size: int, packed: bool, scaled: bool = False
    ) -> MadePagedAttention:
        """Returns what attends beside caches of pages of that size; ``packed``: of packed queries."""
        dtypes = _SCALED_DTYPES if scaled else _PLAIN_DTYPES
        key = (scoring, dtypes, page_size, packed)
        with self._lock:
            if key not in self._paged:
                told: dict[str, Any] = {"dtypes": dtypes, "card": self.card, "wait": self.wait}
                table = MadePagedTable(workshop_of, scoring, page_size=page_size, packed=packed, **told)
                kind = f"attention_paged{page_size}{'_varlen' if packed else ''}"
                operator = self._operator(scoring, dtypes).replace("attention", kind, 1)
                self._paged[key] = MadePagedAttention(table, operator)
            return self._paged[key]

    def gradients(self, scoring: Scoring = PLAIN) -> Gradients:
        """Returns what takes gradients under such masks and changes of scores. Raises ValueError where what
        these read has the name of a gradient."""
        with self._lock:
            if scoring not in self._gradients:
                kind = EmulatedGradients if isinstance(self.card, SimCard) else Gradients
                made = kind.__new__(kind)
                made.kernels = ()
                told: dict[str, Any] = {"backward": True, "card": self.card, "wait": self.wait}
                made._tensors = _gradient_tensors(
                    MadeTable(workshop_of, scoring, **told),
                    MadeTable(workshop_of, scoring, **told, deterministic=True),
                    f"{self._operator(scoring, _PLAIN_DTYPES)}_gradients",
                )
                if isinstance(made, EmulatedGradients) and isinstance(self.card, SimCard):
                    made.card = self.card
                self._gradients[scoring] = made
            return self._gradients[scoring]

    def packed_gradients(self, scoring: Scoring = PLAIN) -> MadePackedGradients:
        """Returns what takes gradients of packed sequences likewise."""
        with self._lock:
            if scoring not in self._packed_gradients:
                told: dict[str, Any] = {"backward": True, "card": self.card, "wait": self.wait}
                operator = self._operator(scoring, _PLAIN_DTYPES).replace("attention", "attention_varlen", 1)
                self._packed_gradients[scoring] = MadePackedGradients(
                    MadePackedTable(workshop_of, scoring, **told),
                    MadePackedTable(workshop_of, scoring, **told, deterministic=True),
                    f"{operator}_gradients",
                )
            return self._packed_gradients[scoring]

    def forget(self) -> None:
        """Has kernels be chosen anew: for when more is known of them."""
        with self._lock:
            for each in self._tensors():
                each.forget()
            self.again = KnownCalls()

    def remember(self, most: int) -> None:
        """Has so many plans be kept of calls of each kind from now on."""
        with self._lock:
            for each in self._tensors():
                each.plan = functools.lru_cache(maxsize=most)(each.plan.__wrapped__)
            self.again, self.most_again = KnownCalls(), most

    def _tensors(self) -> list[Any]:
        """What keeps plans."""
        found: list[Any] = [each._tensors for each in (*self._attending.values(), *self._gradients.values())]
        of_lengths = (*self._packed.values(), *self._packed_gradients.values(), *self._paged.values())
        return [*found, *(each._group._tensors for each in of_lengths)]

    def _made(self, scoring: Scoring, dtypes: tuple[str, ...], precision: str) -> Attention:
        told: dict[str, Any] = {"dtypes": dtypes, "precision": precision}
        table = MadeTable(workshop_of, scoring, **told, card=self.card, wait=self.wait)
        kind = EmulatedAttention if isinstance(self.card, SimCard) else Attention
        made = kind.__new__(kind)
        of_tensors = _ScoredTensors if isinstance(table.kernels[0], Scored) else _Tensors
        made._serve_by(of_tensors(table, self._operator(scoring, dtypes, precision), False))
        if isinstance(made, EmulatedAttention) and isinstance(self.card, SimCard):
            made.card = self.card
        if dtypes == _PLAIN_DTYPES:
            with contextlib.suppress(ValueError):  # then it is forward only
                made._tensors.gradients = self.gradients(scoring)._tensors
        return made

    def _operator(self, scoring: Scoring, dtypes: tuple[str, ...], precision: str = "auto") -> str:
        """A name among torch's operators, the same in every process."""
        where = "" if self.card is None else f"_{self.card.limits.slug}"
        where += "" if self.wait else "_meanwhile"
        told = "" if scoring == PLAIN else f"_{hashlib.sha256(str(scoring).encode()).hexdigest()[:8]}"
        scaled = "_scaled" if dtypes == _SCALED_DTYPES else ""
        scaled += "" if precision == "auto" else f"_{precision}"
        return f"attention{scoring.stem if len(scoring.stem) < 40 else ''}{told}{scaled}{where}"


def outline(attention: Attention) -> Any:
    """Returns what all kernels of a kind have in common, as an entry."""
    return attention._table.kernels[0]


_WORKSHOPS: dict[Card, Workshop] = {}
_BOUND: dict[tuple[str | None, bool], Bound] = {}
_LOCK = threading.RLock()


def workshop_of(card: Card) -> Workshop:
    """Returns what makes a card's kernels."""
    with _LOCK:
        if card not in _WORKSHOPS:
            _WORKSHOPS[card] = Workshop(card, on_ready=forget_choices)
        return _WORKSHOPS[card]


def bound_of(device: Any, *, wait: bool = True) -> Bound:
    """Returns what serves calls on a device: None for the card of the arrays, ``sim:a100`` for an emulated
    one. Raises ValueError and UsageError for another."""
    key = (device, wait)
    if key in _BOUND:
        return _BOUND[key]
    if device is not None and not (isinstance(device, str) and device.startswith(PREFIX)):
        raise ValueError(
            f"device is {device!r}; leave it out, for the card on which the arrays are, or name an emulated "
            "one, as 'sim:a100', for arrays of the host"
        )
    with _LOCK:
        return _BOUND.setdefault(key, Bound(None if device is None else sim_card(device), wait))


@contextlib.contextmanager
def noting(note: Callable[[Problem, Card], None]) -> Iterator[None]:
    """Has ``note`` hear of each call while the context is open. Nothing follows from calls before meanwhile,
    so that each takes longer."""
    LISTENERS.append(note)
    try:
        for each in list(_BOUND.values()):
            each.remember(0)
        yield
    finally:
        LISTENERS.remove(note)
        for each in list(_BOUND.values()):
            each.remember(REMEMBERED)


def forget_choices() -> None:
    """Has calls choose their kernels anew: for when more is known, or more is ready."""
    for each in list(_BOUND.values()):
        each.forget()
