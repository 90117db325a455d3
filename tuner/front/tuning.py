"""`flashgen.tune` and `flashgen.autotune`: what the command does, as calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...gen.problem import Problem
from ...gen.scoring.asked import Scoring
from ..build.compile import usable_cores
from ..cards.names import resolve
from ..errors import UsageError, checked
from ..serving import serving_families
from ..store.places import default_storage
from ..tune.coordinator import TuneOptions
from ..tune.coordinator import tune as search
from ..tune.options import DEFAULT_SIM_TRIALS, DEFAULT_TRIALS
from ..tune.result import TuneResult
from .bound import forget_choices
from .card import Card, CudaCard, SimCard
from .notes import Notes
from .notice import say_once
from .records import RECORDS, home_folder

#: Of what was called under `autotune`, how much is tuned: the costliest, each for as long as this at least.
MOST_TUNED, LEAST_MINUTES = 8, 0.25
_SCORING = ("window", "always", "chunk", "prefix", "lengths", "documents", "dilation", "tree", "softcap")
_SCORING += ("alibi", "bias", "sinks", "mask", "score", "buffers", "scalars")


def tune(
    *,
    dtype: str = "f32",
    precision: str = "auto",
    d: int = 64,
    dv: int = 0,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    seqlen: int | None = None,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    causal: bool = False,
    backward: bool = False,
    varlen: str = "",
    device: int | str = 0,
    trials: int | None = None,
    minutes: float | None = None,
    seed: int = 0,
    jobs: int | None = None,
    out: Path | str | None = None,
    storage: str | None = None,
    **scoring: Any,
) -> TuneResult:
    """Searches for the fastest kernel of a problem, which `flashgen.attention` takes from then on.

    The problem is told as the options of `flashgen tune` tell it: ``dtype`` is "f32", "f16", "bf16" or
    "e4m3", ``precision`` how exact of those that it has, ``d`` and ``dv`` the head dims of keys and values,
    and masks and changes of scores are those of a `Scoring`: ``window=(1023, 0)``, ``softcap=30.0``,
    ``sinks=True``, ``score="..."``. ``device`` is a card's number or "sim:a100". The search makes ``trials``
    (200, on an emulated card 24), or takes so many ``minutes``; another call goes on where this ended.
    Kernels go to ``out``, by default ``$FLASHGEN_HOME`` or the user's data folder, trials to ``storage``.

    Returns what was found: its ``kernel`` has the variant and its measurement, ``paths`` the files. Raises
    UsageError for a problem that is none, FlashgenError where nothing serves it or the card is missing.
    """
    if unknown := [name for name in scoring if name not in _SCORING]:
        raise UsageError(f"{unknown[0]}= is no argument of tune; masks and scores are {', '.join(_SCORING)}")
    sizes = {"batch": batch, "num_q_heads": heads, "num_kv_heads": kv_heads or heads}
    sizes |= {"seqlen_q": seqlen_q or seqlen, "seqlen_k": seqlen_k or seqlen}
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    problem = checked(
        lambda: Problem(
            dtype=dtype,
            precision=precision,
            head_dim=d,
            head_dim_v=dv,
            causal=causal,
            backward=backward,
            varlen=varlen,
            scoring=Scoring(**scoring),
            **given,
        )
    )
    folder = home_folder() if out is None else Path(out)
    return tune_problem(
        problem,
        str(device),
        trials,
        minutes,
        folder,
        seed=seed,
        jobs=jobs or usable_cores(),
        storage=storage or default_storage(folder),
    )


def tune_problem(
    problem: Problem,
    device: str,
    trials: int | None,
    minutes: float | None,
    out: Path,
    *,
    seed: int = 0,
    jobs: int = 1,
    storage: str,
) -> TuneResult:
    """Searches for the fastest kernel of a problem on a device and has calls take it."""
    card = resolve(device)
    if trials is None and minutes is None:
        trials = DEFAULT_SIM_TRIALS if card.predicted else DEFAULT_TRIALS
    options = TuneOptions(
        device=card,
        problem=problem,
        families=serving_families(problem, card.limits),
        trials=trials,
        minutes=minutes,
        seed=seed,
        storage=storage,
        out=out,
        jobs=jobs,
    )
    found = search(options, report=lambda event: None, stop=threading.Event())
    RECORDS.forget()
    forget_choices()
    return found


@contextlib.contextmanager
def autotune(minutes: float = 2.0, *, out: Path | str | None = None) -> Iterator[Notes]:
    """Notes what `flashgen.attention` is asked for inside, and tunes the costliest of it afterwards.

    ``minutes`` are for all of it, shared out by the time that calls are predicted to take together. Later
    calls, of this process and others, take what was found. Kernels go where `flashgen.tune` puts them. The
    notes say what was called how often, and once it is over what was ``tuned``.

    Raises FlashgenError where tuning fails; what is inside has run then.
    """
    notes = Notes()
    with notes.taken():
        yield notes
    folder = home_folder() if out is None else Path(out)
    costly = notes.costliest(MOST_TUNED)
    whole = sum(each.cost_us for each in costly)
    for each in costly:
        share = max(LEAST_MINUTES, minutes * each.cost_us / whole)
        say_once(f"tuning {each.problem.name} on {each.card.limits.name}, {share:.1f} minutes")
        result = tune_problem(
            each.problem,
            _spec(each.card),
            None,
            share,
            folder,
            jobs=usable_cores(),
            storage=default_storage(folder),
        )
        notes.tuned.append(result)


def _spec(card: Card) -> str:
    """A card as `flashgen tune --device` names it."""
    if isinstance(card, SimCard):
        return card.device.spec
    assert isinstance(card, CudaCard)
    return str(card.ordinal)
