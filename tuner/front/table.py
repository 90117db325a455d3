"""Tables of a runtime whose kernels are made as calls need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...gen.problem import MAX_HEAD_DIM, Problem
from ...gen.scoring.asked import PLAIN, Scoring
from ...templates.runtime import table
from ...templates.runtime.arrays import _View
from ...templates.runtime.facts import _DTYPE_NAMES, Tuned
from ...templates.runtime.table import Choice, _Table
from ..errors import FlashgenError, NotServed
from .card import EMULATE, Card, cuda_card
from .entry import outline_of
from .workshop import Chosen, Workshop

#: Problems' types by what array libraries call them.
PROBLEM_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
#: The types of calls without scales.
_PLAIN_DTYPES = ("f32", "f16", "bf16")
#: The card of what has no data.
_NOWHERE = 0

#: Who hears of each call for which a kernel is chosen.
LISTENERS: list[Callable[[Problem, Card], None]] = []


class NotMade(RuntimeError):
    """No kernel for a call could be built, or none that was is right."""


Workshops = Callable[[Card], Workshop]


class MadeTable(_Table):
    """A table of a kernel for whatever is asked, made when it is first asked for: of one kind of masks and
    changes of scores, forwards or backwards."""

    def __init__(
        self,
        workshops: Workshops,
        scoring: Scoring = PLAIN,
        *,
        dtypes: tuple[str, ...] = _PLAIN_DTYPES,
        precision: str = "auto",
        backward: bool = False,
        deterministic: bool = False,
        card: Card | None = None,
        wait: bool = True,
    ) -> None:
        """``workshops`` has each card's; ``card`` is the one of all calls, None: that of their arrays.
        ``deterministic``: only kernels serve that make the same bits every time. ``wait``: for the best to be
        built; else what is ready may serve meanwhile."""
        self.workshops, self.scoring, self.card = workshops, scoring, card
        self.precision = precision
        self.backward, self.deterministic, self.wait = backward, deterministic, wait
        super().__init__(self.outlines(dtypes))
        self.made: dict[Tuned, Chosen] = {}
        """What entries were made of."""

    def outlines(self, dtypes: tuple[str, ...]) -> tuple[Tuned, ...]:
        """Returns what kernels of each type have in common."""
        common: dict[str, Any] = {
            "precision": self.precision,
            "scoring": self.scoring,
            "backward": self.backward,
        }
        return tuple(outline_of(Problem(dtype=each, **common)) for each in dtypes)

    # ---- what is served

    def inspect(self, name: str, described: tuple[Any, ...], layout: Any, torch: Any) -> _View:
        of_host = torch is not None and self.card is None and described[3].type == "cpu"
        if of_host and "cpu" not in table._TORCH_DEVICES:
            raise ValueError(f"{name} is on the device 'cpu'; move it with {name}.cuda(), {EMULATE}")
        return super().inspect(name, described, layout, torch)

    def check_type(self, name: str, dtype: str, is_tensor: bool) -> None:
        wanted = self.dtypes_of(name)
        if dtype in wanted:
            return
        prefix = "torch." if is_tensor else ""
        raise TypeError(
            f"{name} is {dtype.removeprefix('torch.')}; served are {', '.join(wanted)}: pass "
            f"{name}.{'to' if is_tensor else 'astype'}({prefix}{wanted[0]})"
        )

    def check_head_dim(self, name: str, dtype: str, head_dim: int) -> None:
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has the head dim {head_dim}; served are 1..{MAX_HEAD_DIM}")

    def computing(self, dtype: str, head_dim: int, head_dim_v: int) -> list[Tuned]:
        served = all(1 <= each <= MAX_HEAD_DIM for each in (head_dim, head_dim_v))
        return [each for each in self.kernels if each.dtype == dtype] if served else []

    # ---- which kernel

    def choose(
        self, query: _View, key: _View, value: _View, strides: tuple[int, ...], causal: bool
    ) -> Choice:
        """Returns the kernel that is fastest by prediction, built and proved. Raises ValueError where nothing
        serves, `NotMade`."""
        problem, card = self.problem(query, key, value, causal), self.card_of(query)
        for note in LISTENERS:
            note(problem, card)
        workshop = self.workshops(card)
        try:
            chosen = workshop.serve(
                problem,
                lambda each: each.entry.can_step(strides),
                repeating=self.deterministic,
                wait=self.wait,
            )
        except NotServed as error:
            raise ValueError(f"{error.told}; pass arrays of another type, or take another card") from error
        except FlashgenError as error:
            raise NotMade(str(error)) from error
        self.made[chosen.entry] = chosen
        return Choice(chosen.entry, chosen.candidate.exact, chosen.entry.told)

    def problem(self, query: _View, key: _View, value: _View, causal: bool) -> Problem:
        """Returns the problem of arrays; what has no rows or keys counts as one of each."""
        batch, heads, rows = (max(1, n) for n in query.shape)
        kv_heads, keys = (max(1, n) for n in key.shape[1:])
        return Problem(
            dtype=PROBLEM_DTYPES[query.dtype],
            batch=batch,
            num_q_heads=heads,
            num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
            seqlen_q=rows,
            seqlen_k=keys,
            head_dim=query.head_dim,
            head_dim_v=value.head_dim,
            causal=causal,
            precision=self.precision,
            scoring=self.scoring,
            backward=self.backward,
        )

    def card_of(self, query: _View) -> Card:
        """Returns the card that a call runs on."""
        if self.card is not None:
            return self.card
        return cuda_card(_NOWHERE if query.device is None else query.device)
