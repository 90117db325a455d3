"""Kernels for calls on one card: chosen, built, proved, and kept for the next."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...gen.emit.words import class_words
from ...gen.families import family_named
from ...gen.kernel import Kernel
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Illegal
from ...templates.runtime.facts import Tuned
from ..build.cache import cache_folder, cached
from ..build.protocol import Build
from ..cards.slug import same_card
from ..errors import BuildError, FlashgenError, LaunchError
from ..predict.cost_model import COST_MODEL
from .candidates import Candidate, candidates
from .card import Card
from .entry import entry_of
from .notice import say_once, waiting
from .proof import WrongKernel, prove
from .records import RECORDS, Records

#: Raised with each change of how kernels are chosen: what was remembered before is chosen anew.
CHOICE = 3
#: Of a choice, how many are kept: those that spill or cannot step by some strides make room for the next.
KEPT = 16
#: Sizes up to this count as they are, others to the eighth of a doubling.
EXACT_SIZES, STEPS_PER_DOUBLING = 64, 8
_SIZES = ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k")


class Chosen(NamedTuple):
    """A candidate and its kernel as an entry of a runtime's table."""

    candidate: Candidate
    entry: Tuned
    kernel: Kernel


#: Tells whether a candidate's kernel suits a call.
Fits = Callable[[Chosen], bool]
#: What became of a kernel that was built and proved.
READY, SPILLS = "ready", "it spills registers"


@dataclass
class Workshop:
    """What one card has kernels made by."""

    card: Card
    records: Records = RECORDS
    on_ready: Callable[[], None] = lambda: None
    """Called when a kernel was built that no call waited for."""
    _chosen: dict[tuple[int, Problem, bool], list[Candidate]] = field(default_factory=dict)
    _made: dict[tuple[str, str], Chosen] = field(default_factory=dict)
    """By a variant and the problem without its sizes."""
    _ready: dict[Tuned, str] = field(default_factory=dict)
    """Kernels that were built and proved: `READY` or `SPILLS`."""
    _unfit: set[Tuned] = field(default_factory=set)
    """Kernels that do not build, or are wrong."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _building: threading.RLock = field(default_factory=threading.RLock)
    """Apart from the other, so that who does not wait is not held up."""

    def ranked(self, problem: Problem, *, repeating: bool = False) -> list[Candidate]:
        """Returns what may serve a problem, the best first; ``repeating``: what makes the same bits every
        run. Raises NotServed where nothing does."""
        if problem.seqlen_q == 1:  # it sees all keys, whatever the mask
            problem = replace(problem, causal=False)
        key = (self.records.version, _in_steps(problem), repeating)
        with self._lock:
            if key not in self._chosen:
                self._chosen[key] = self._remembered(key[1], problem, repeating)
            return self._chosen[key]

    def fitting(
        self, problem: Problem, fits: Fits = lambda chosen: True, *, repeating: bool = False
    ) -> Iterator[Chosen]:
        """Yields the candidates for a problem that ``fits`` lets pass, the best first; where none fits, all.
        ``repeating``: those that make the same bits every run. What is known not to serve is left out."""
        others: list[Chosen] = []
        passed = False
        for candidate in self.ranked(problem, repeating=repeating):
            chosen = self._rendered(candidate, problem)
            if chosen is None or chosen.entry in self._unfit:
                continue
            if fits(chosen):
                passed = True
                yield chosen
            else:
                others.append(chosen)
        if not passed:
            yield from others

    def serve(
        self,
        problem: Problem,
        fits: Fits = lambda chosen: True,
        *,
        repeating: bool = False,
        wait: bool = True,
    ) -> Chosen:
        """Returns the best kernel for a problem, built and proved on the card; of kernels that all spill
        registers the first. ``repeating``: one that makes the same bits every run. Without ``wait`` another
        that is ready serves where there is one, while the best is built.

        Raises:
            NotServed: no family computes the problem there.
            FlashgenError: there is no compiler, or nothing that it builds is right.
        """
        if not wait and (ready := self._meanwhile(problem, fits, repeating)) is not None:
            return ready
        with self._building:
            spilling, why = None, "none makes the same bits every run" if repeating else "no variant is legal"
            for chosen in self.fitting(problem, fits, repeating=repeating):
                state = self._make_ready(chosen)
                if state == READY:
                    return chosen
                if state == SPILLS:
                    spilling = spilling or chosen
                else:
                    why = state
            if spilling is None:
                raise FlashgenError(f"no kernel for {problem.name} serves on {self.card.limits.name}: {why}")
            return spilling

    def is_ready(self, chosen: Chosen) -> bool:
        """Tells whether a kernel was built and proved by this process."""
        return chosen.entry in self._ready

    def _meanwhile(self, problem: Problem, fits: Fits, repeating: bool) -> Chosen | None:
        """The best kernel that is ready; where that is not the best there is, this is built in the
        background."""
        ranked = list(self.fitting(problem, fits, repeating=repeating))
        ready = next((each for each in ranked if self._ready.get(each.entry) == READY), None)
        if ready is not None and ready.entry is not ranked[0].entry:
            told = (problem, fits, repeating)
            threading.Thread(target=self._build_best, args=told, name="flashgen builds", daemon=True).start()
        return ready

    def _build_best(self, problem: Problem, fits: Fits, repeating: bool) -> None:
        with contextlib.suppress(FlashgenError):  # what is ready goes on serving
            self.serve(problem, fits, repeating=repeating)
            self.on_ready()

    # ---- which

    def _remembered(self, stepped: Problem, problem: Problem, repeating: bool) -> list[Candidate]:
        """The candidates of a problem, as they were ranked once for all problems of about that shape."""
        limits = self.card.limits
        parts = ["choice", f"{CHOICE}, {COST_MODEL}", self.records.fingerprint()]
        parts += [json.dumps(stepped.to_dict(), sort_keys=True), json.dumps(limits.to_dict(), sort_keys=True)]
        parts += ["repeating"] * repeating

        def produce(target: Path) -> Mapping[str, Any]:
            with waiting(f"choosing a kernel for {class_words(problem)} on {limits.name}"):
                ranked.extend(chosen())
            target.write_text(json.dumps([_to_dict(each) for each in ranked]), encoding="utf-8")
            return {}

        def chosen() -> list[Candidate]:
            return candidates(problem, limits, self.records.all(), repeating=repeating)[:KEPT]

        ranked: list[Candidate] = []
        entry = cached(parts, ".choice", produce)
        if ranked:
            return ranked
        told = json.loads(entry.path.read_text(encoding="utf-8"))
        try:
            return [_from_dict(each, self.records) for each in told]
        except (KeyError, TypeError, ValueError):  # of another version of the families
            return chosen()

    def _rendered(self, candidate: Candidate, problem: Problem) -> Chosen | None:
        """A candidate's kernel, rendered once for all lengths; None where it is not legal after all."""
        made_for = json.dumps({**problem.to_dict(), **dict.fromkeys(_SIZES)}, sort_keys=True)
        key = (candidate.variant.name, made_for)
        with self._lock:
            if key not in self._made:
                try:
                    kernel = render(candidate.variant, problem, self.card.limits)
                except Illegal:
                    return None
                record, limits = candidate.record, self.card.limits
                # What another card measured is no figure of this one, by whose name the entry goes.
                here = record is not None and same_card(record.slug, limits.slug)
                known = record.kernel.measurement.to_dict() if record is not None and here else {}
                entry = entry_of(kernel, limits.name, known)
                self._made[key] = Chosen(candidate, entry, kernel)
            return self._made[key]._replace(candidate=candidate)

    # ---- made ready

    def _make_ready(self, chosen: Chosen) -> str:
        """Builds and proves a kernel; returns `READY`, `SPILLS`, or why it does not serve."""
        entry, kernel = chosen.entry, chosen.kernel
        if entry in self._ready:
            return self._ready[entry]
        try:
            build = self._built(kernel)
            self.card.take(entry, build)
            with waiting(f"proving {class_words(kernel.problem)} on {self.card.limits.name}"):
                prove(build, self.card.runs(entry, build), self.card.where)
        except (BuildError, LaunchError, WrongKernel) as error:
            self._unfit.add(entry)
            if not isinstance(error, BuildError):
                say_once(str(error))
            return str(error)
        self._ready[entry] = SPILLS if build.spill_bytes else READY
        return self._ready[entry]

    def _built(self, kernel: Kernel) -> Build:
        what = f"{class_words(kernel.problem)} for {self.card.limits.name}"
        with waiting(f"building {what}, once: binaries are kept in {cache_folder()}"):
            return self.card.toolchain().build(kernel)


def _in_steps(problem: Problem) -> Problem:
    """A problem whose sizes stand for all near them."""
    sizes = {name: near(getattr(problem, name)) for name in _SIZES}
    group = max(1, round(problem.num_q_heads / problem.num_kv_heads))
    sizes["num_q_heads"] = group * sizes["num_kv_heads"]
    return replace(problem, **sizes)


def near(size: int) -> int:
    """Returns the size that stands for all near one; itself for itself."""
    if size <= EXACT_SIZES:
        return size
    return round(2 ** (round(math.log2(size) * STEPS_PER_DOUBLING) / STEPS_PER_DOUBLING))


def _to_dict(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON has it."""
    record = candidate.record
    return {
        "family": candidate.variant.family,
        "variant": candidate.variant.to_dict(),
        "predicted_us": candidate.predicted_us,
        "model_us": candidate.model_us,
        "limiter": candidate.limiter,
        "exact": candidate.exact,
        "elsewhere": candidate.elsewhere,
        "record": None if record is None else [record.slug, record.kernel.problem.name],
    }


def _from_dict(data: dict[str, Any], records: Records) -> Candidate:
    """The candidate that `_to_dict` wrote. Raises KeyError, TypeError and ValueError."""
    variant = family_named(data["family"]).from_dict(data["variant"])
    record = (
        None
        if data["record"] is None
        else records.find(str(data["record"][0]), str(data["record"][1]), variant)
    )
    times = (float(data["predicted_us"]), float(data["model_us"]))
    places = (bool(data["exact"]), bool(data["elsewhere"]))
    return Candidate(variant, *times, str(data["limiter"]), record, *places)
