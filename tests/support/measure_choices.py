"""Times, on a card, what searches of whole suites would try first: in minutes, what tuning takes hours for.

    python tests/support/measure_choices.py varlen mla --plan --candidates plan.json
    python tests/support/measure_choices.py varlen mla --candidates plan.json --table times.json --out out

The first line needs no card: choosing takes seconds for each problem. For every problem and every family
that serves it, candidates are the first variants that `flashgen tune` would try (``--first``): winners of the
library, then what the cost model expects most of. With ``--around`` they are so many of the library's kernel
of the problem, first itself, then what differs from it in one parameter, then in two: what has come since it
was tuned shows there. Without ``--plan`` they are built and validated in processes side by side; then one
process times them, the card to itself, and those near the fastest in turns, as the card gets slower while it
gets warm; the fastest is validated in full and keeps its class's promise, or the next one does. ``--table``
gets the times, as `flashgen.tuner.exchange.measured_tables` reads them, ``--out`` the winners, as `flashgen
tune` keeps them. ``--minutes`` bounds it all; what is not reached then is named.

The first form of this script made tests/data/measured_h200_later.json, of suites backward, varlen, few and
mla: up to fourteen variants of a family, and beside them those that had won by then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

import optuna
from flashgen.gen.families import family_named
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import DeviceLimits, preset_of
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.variant import Illegal, Variant
from flashgen.tuner.build.compile import usable_cores
from flashgen.tuner.build.protocol import Build, Toolchain
from flashgen.tuner.cards.device import Device, Runner, Timing
from flashgen.tuner.cards.lock import CardLock
from flashgen.tuner.cards.names import limits_named, resolve
from flashgen.tuner.cards.slug import device_slug
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError, NotServed
from flashgen.tuner.evaluate.adversarial import prove_promise
from flashgen.tuner.evaluate.measure import median, summarize
from flashgen.tuner.evaluate.outcome import Measurement
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.evaluate.worker_life import ONE_BLAS_THREAD
from flashgen.tuner.evaluate.worker_process import EMULATED_SAMPLE_FLOPS
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.predict.prior import prior_of
from flashgen.tuner.search.ask_tell import Search
from flashgen.tuner.serving import serving_families
from flashgen.tuner.shelf import choice, library
from flashgen.tuner.suites import SUITES, workloads
from flashgen.tuner.tune.winner import faster_in_library, tuned_kernel, write_files

# Of a script, Python looks for modules in its own folder.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.ended_pool import pool_of

#: The milliseconds that each candidate is timed for first. Who is timed later meets a warmer card: so many of
#: the fastest, within so many times the very fastest, are timed once more, in so many turns.
BUDGET_MS, FINALISTS, NEAR, ROUNDS = 18.0, 24, 1.15, 14
#: Kernels that take so many times as long as the fastest are no part of a table: their few launches tell
#: more of pauses of the card than of them.
FAR = 5.0
#: Parts of the time given by which all is built and validated, and timed.
BUILT_BY, TIMED_BY = 0.6, 0.8
#: What the sample of the real problem may cost the host, which computes it in float64.
SAMPLE_FLOPS = 2e10
SEED = 1


@dataclass(frozen=True)
class Case:
    """A problem of a suite, and the variants to time on it, of each family the likeliest first."""

    suite: str
    name: str
    problem: Problem
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Timed:
    """A build and its figures; the error is that of the quick validation until it is proved in full."""

    build: Build
    figures: Measurement

    @property
    def us(self) -> float:
        return self.figures.median_us


@dataclass(frozen=True)
class Failed:
    """Why something has no result: a line."""

    reason: str


# -- what is timed ---------------------------------------------------------------------------------------


def first_choices(
    problem: Problem,
    family: type[Variant],
    limits: DeviceLimits,
    entries: Sequence[library.Entry],
    count: int,
) -> list[Variant]:
    """Returns the first ``count`` variants that a search would try, all different; none where none is
    legal."""
    catalogue = build_catalogue(family, problem, limits)
    if not len(catalogue):
        return []
    known = choice.nearest_variants(entries, problem, limits, family)
    prior = prior_of(problem, limits)
    search = Search(catalogue, optuna.create_study(), budget=count, known=known, prior=prior)
    return [proposal.variant for proposal in search.ask_many(count)]


def around(problem: Problem, limits: DeviceLimits, kernels: Sequence[Variant], count: int) -> list[Variant]:
    """Returns up to ``count`` variants: the kernels, and what differs from one of them in one parameter, or
    in two; the order of either is random, but the same every time."""
    changes = [
        (kernel, {parameter.name: value})
        for kernel in kernels
        for parameter in type(kernel).parameters()
        for value in parameter.choices
        if value != kernel.to_dict()[parameter.name]
    ]
    chance = random.Random(SEED)
    chance.shuffle(changes)
    pairs = [
        (kernel, one | other)
        for (kernel, one), (same, other) in combinations(changes, 2)
        if kernel is same and one.keys().isdisjoint(other)
    ]
    chance.shuffle(pairs)
    found = list(kernels)
    for kernel, change in (*changes, *pairs):
        if len(found) >= count:
            break
        variant = type(kernel).from_dict(kernel.to_dict() | change)
        with contextlib.suppress(Illegal):
            variant.check(problem, limits)
            if variant not in found and variant.advice(problem, limits) is None:
                found.append(variant)
    return found[:count]


def planned(
    suites: Sequence[str],
    families: Sequence[str],
    limits: DeviceLimits,
    out: Path,
    count: int,
    *,
    is_around: bool,
) -> Iterator[Case]:
    """Yields the problems of the suites that a family serves, or one of those named: with first choices, or
    with what is around the library's kernels of just these problems."""
    entries = library.entries(library.folders(out))
    for suite in suites:
        for each in workloads([suite]):
            try:
                serving = serving_families(each.problem, limits)
            except NotServed as refused:
                print(f"{each.name}: {refused}", flush=True)
                continue
            named = [family for family in serving if not families or family.family in families]
            if is_around:
                kept = [e.kernel for e in entries if e.kernel.problem == each.problem and not e.predicted]
                kernels = [k.variant for k in kept if k.arch == limits.arch and type(k.variant) in named]
                found = around(each.problem, limits, tuple(dict.fromkeys(kernels)), count)
            else:
                found = [v for f in named for v in first_choices(each.problem, f, limits, entries, count)]
            if found:
                yield Case(suite, each.name, each.problem, tuple(found))


def settings(variant: Variant) -> dict[str, Any]:
    """The parameters that are not the defaults."""
    values = variant.to_dict()
    return {p.name: values[p.name] for p in type(variant).parameters() if values[p.name] != p.default}


def write_plan(path: Path, cases: Iterable[Case]) -> None:
    told = [
        {
            "suite": case.suite,
            "name": case.name,
            "problem": case.problem.to_dict(),
            "variants": [[v.family, settings(v)] for v in case.variants],
        }
        for case in cases
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, told)) + "\n]\n", encoding="utf-8")


def read_plan(path: Path, suites: Sequence[str], families: Sequence[str]) -> list[Case]:
    """Returns those of a file's cases that are of the suites, with variants of the families, all if none is
    named."""
    cases = []
    for told in json.loads(path.read_text(encoding="utf-8")):
        variants = tuple(
            family_named(name).from_dict(family_named(name)().to_dict() | values)
            for name, values in told["variants"]
            if not families or name in families
        )
        if told["suite"] in suites and variants:
            cases.append(Case(told["suite"], told["name"], Problem.from_dict(told["problem"]), variants))
    return cases


# -- in processes of their own ---------------------------------------------------------------------------


class Bench:
    """What a process of a pool has: the device, opened when it is first needed."""

    device: Device
    #: Set once a kernel may have taken the card from this process.
    is_lost = False

    @classmethod
    @cache
    def runner(cls) -> Runner:
        return cls.device.open()

    @classmethod
    @cache
    def toolchain(cls) -> Toolchain:
        return cls.device.toolchain()


def begin(device: Device) -> None:
    """The first thing that a process does."""
    Bench.device = device


def tried(work: Callable[[Any], Any], item: Any) -> Any:
    """The work's result or, as `Failed`, what went wrong."""
    if Bench.is_lost:
        # The pool is then broken, and another one goes on.
        os._exit(1)
    try:
        return work(item)
    except Exception as error:
        if isinstance(error, LaunchError):
            Bench.is_lost = not getattr(Bench.runner(), "alive", True)
        elif isinstance(error, CorruptedMemory):
            Bench.is_lost = True
        return Failed(f"{type(error).__name__}: {error}".splitlines()[0])


def rendered(asked: tuple[Variant, Problem]) -> Kernel:
    return render(*asked, Bench.device.limits)


def validated(kernel: Kernel) -> tuple[Build, float]:
    """The build and its largest error in the quick validation."""
    build = Bench.toolchain().build(kernel)
    if build.spill_bytes:
        raise FlashgenError(f"{build.spill_bytes} bytes of registers spilled")
    return build, validate(Bench.runner(), build, seed=SEED, depth="quick")


def timed(asked: tuple[Problem, Sequence[tuple[Build, float]]]) -> list[Timed]:
    """Figures of builds on a problem: those timed in turns first, the fastest first, then the others."""
    problem, builds = asked
    runner, device = Bench.runner(), Bench.device

    def figures(build: Build, timing: Timing, error: float) -> Timed:
        occupancy = runner.occupancy(build)
        told = {"occupancy": occupancy, "error": error, "predicted": device.predicted}
        return Timed(build, summarize(timing, build, problem, **told))

    found: list[Timed] = []
    best: float | None = None
    with CardLock(device.lock_key).held() if device.lock_key else contextlib.nullcontext():
        for build, error in builds:
            try:
                timing = runner.measure(build, problem, best_us=best, budget_ms=BUDGET_MS)
            except LaunchError:
                if not getattr(runner, "alive", True):
                    raise
                continue
            found.append(figures(build, timing, error))
            best = min(best or math.inf, median(timing.times_us))
        found.sort(key=lambda each: each.us)
        top = [each for each in found[:FINALISTS] if each.us <= NEAR * found[0].us]
        timings = runner.measure_interleaved([each.build for each in top], problem, rounds=ROUNDS)
    again = [
        figures(each.build, timing, each.figures.error) for each, timing in zip(top, timings, strict=True)
    ]
    return sorted(again, key=lambda each: each.us) + found[len(top) :]


def proved(asked: tuple[Build, Problem]) -> float:
    """The largest error in the full validation of a build that keeps its class's promise."""
    build, problem = asked
    flops = EMULATED_SAMPLE_FLOPS["full"] if Bench.device.predicted else SAMPLE_FLOPS
    error = validate(Bench.runner(), build, seed=SEED, depth="full", problem=problem, max_sample_flops=flops)
    prove_promise(Bench.runner(), build, "few")
    return error


def side_by_side(
    work: Callable[[Any], Any], items: Sequence[Any], device: Device, processes: int, until: float
) -> list[Any]:
    """Returns what becomes of each item, in their order; `Failed` for those that had no time until then, by
    the monotonic clock.

    A process that dies, or loses the card, takes its pool with it; another one goes on with what has no
    result. Where that brings nothing, items are tried one by one, and who is first is to blame.
    """
    found: dict[int, Any] = {}
    width = processes
    while left := [i for i in range(len(items)) if i not in found]:
        running: dict[Future[Any], int] = {}
        # All have ended afterwards: what runs on the card beside a timing spoils it.
        with pool_of(min(width, len(left)), begin, device) as pool:
            try:
                running |= {pool.submit(tried, work, items[i]): i for i in left}
                seconds = None if until == math.inf else max(0.0, until - time.monotonic())
                for future in as_completed(running, timeout=seconds):
                    found[running[future]] = future.result()
            except BrokenProcessPool:
                done = [f for f in running if f.done() and not f.cancelled() and f.exception() is None]
                found |= {running[future]: future.result() for future in done}
                if found.keys().isdisjoint(left):
                    if width == 1:
                        found[left[0]] = Failed("its process died")
                    width = processes if width == 1 else 1
            except TimeoutError:
                found = {i: Failed("out of time") for i in left} | found
    return [found[i] for i in range(len(items))]


# -- the run ---------------------------------------------------------------------------------------------


class Measuring:
    """A run over cases on a device, in ``processes`` side by side, within ``minutes``."""

    def __init__(self, cases: Sequence[Case], device: Device, processes: int, minutes: float) -> None:
        self.cases, self.device, self.processes = cases, device, processes
        self._began, self._seconds = time.monotonic(), 60 * minutes

    def time_all(self) -> list[list[Timed]]:
        """Builds, validates and times the candidates: of each case those that are right, as `timed` has
        them."""
        # All problems' first candidates before the second ones: time may not do for all.
        turns = zip_longest(*([(i, v) for v in case.variants] for i, case in enumerate(self.cases)))
        asked = [each for turn in turns for each in turn if each is not None]
        kernels = self._side_by_side(rendered, [(v, self.cases[i].problem) for i, v in asked], BUILT_BY)
        # A kernel's text hardly ever depends on lengths, so that problems share it.
        distinct = {kernel.digest: kernel for kernel in kernels if isinstance(kernel, Kernel)}
        self._say(f"{len(asked)} candidates, {len(distinct)} kernels")
        results = self._side_by_side(validated, list(distinct.values()), BUILT_BY)
        by_digest = dict(zip(distinct, results, strict=True))
        builds: list[list[tuple[Build, float]]] = [[] for _ in self.cases]
        for (i, variant), kernel in zip(asked, kernels, strict=True):
            result = kernel if isinstance(kernel, Failed) else by_digest[kernel.digest]
            if isinstance(result, Failed):
                self._say(f"{self.cases[i].name}: {variant.family} {settings(variant)}: {result.reason}")
                continue
            build, error = result
            builds[i].append((replace(build, kernel=kernel), error))
        self._say(f"{sum(map(len, builds))} candidates are right")
        runnable = [i for i, each in enumerate(builds) if each]
        told = [(self.cases[i].problem, builds[i]) for i in runnable]
        found: list[list[Timed]] = [[] for _ in self.cases]
        for i, result in zip(runnable, self._side_by_side(timed, told, TIMED_BY, processes=1), strict=True):
            if isinstance(result, Failed):
                self._say(f"{self.cases[i].name} is not timed: {result.reason}")
            else:
                found[i] = result
        self._say(f"{sum(map(bool, found))} of {len(self.cases)} problems timed")
        disturbed = sum(bool(each.figures.busy) for case in found for each in case)
        if disturbed:
            self._say(f"{disturbed} timings were disturbed, by another process on the card or by its clocks")
        return found

    def winners(self, found: Sequence[Sequence[Timed]]) -> dict[int, Timed]:
        """Returns of each case, by its place, the fastest finalist that is right in full."""
        won: dict[int, Timed] = {}
        places = {i: 0 for i, each in enumerate(found) if each}
        while places:
            turn = [(i, found[i][place]) for i, place in places.items()]
            asked = [(each.build, self.cases[i].problem) for i, each in turn]
            for (i, each), error in zip(turn, self._side_by_side(proved, asked, 1.0), strict=True):
                if not isinstance(error, Failed):
                    won[i] = replace(each, figures=replace(each.figures, error=error))
                    del places[i]
                    continue
                variant = each.build.kernel.variant
                self._say(f"{self.cases[i].name}: not proved: {settings(variant)}: {error.reason}")
                places[i] += 1
                if places[i] == min(FINALISTS, len(found[i])):
                    del places[i]
        return won

    def keep(self, won: dict[int, Timed], out: Path) -> None:
        """Writes winners into the library, but for those of which it has a faster kernel."""
        slug, toolkit = device_slug(self.device), self.device.toolchain().version
        for i, each in won.items():
            rendered = each.build.kernel
            kernel = tuned_kernel(self.device, rendered, each.figures, toolkit=toolkit)
            path = library.Paths.of(out, slug, kernel.problem.name).json
            if faster_in_library(path, kernel, (), narrowed=True):
                self._say(f"{self.cases[i].name}: {path} has a faster one")
                continue
            write_files(out, slug, kernel, rendered)

    def _side_by_side(
        self, work: Callable[[Any], Any], items: Sequence[Any], by: float, processes: int = 0
    ) -> list[Any]:
        until = self._began + by * self._seconds
        return side_by_side(work, items, self.device, processes or self.processes, until)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:4.0f} s: {text}", flush=True)


def table(cases: Sequence[Case], found: Sequence[Sequence[Timed]], device: Device) -> str:
    """Returns the times as `measured_tables` reads them, of each problem the fastest first.

    Raises:
        FlashgenError: the card is of no preset, of which tables are.
    """
    limits = device.limits
    name = preset_of(limits.name)
    if name is None:
        raise FlashgenError(f"no preset is called like {limits.name}; add one to PRESETS in gen/limits.py")
    suites = ", ".join(dict.fromkeys(case.suite for case in cases))
    about = (
        f"{'Predicted' if device.predicted else 'Median'} times of kernels of suites {suites} on "
        f"{limits.name}, of each problem's fastest in turns, without those that spill or take "
        f"over {FAR:g} times as long as the fastest: [us, registers, family, parameters that are not the "
        "defaults]."
    )
    sets = []
    for case, timings in zip(cases, found, strict=True):
        if not timings:
            continue
        near = [each for each in timings if each.us <= FAR * min(every.us for every in timings)]
        rows = [
            json.dumps([round(each.us, 1), each.build.registers, variant.family, settings(variant)])
            for each in sorted(near, key=lambda each: each.us)
            for variant in [each.build.kernel.variant]
        ]
        told = json.dumps({"sample": case.suite, "problem": case.problem.to_dict()})
        sets.append(f'  {told[:-1]}, "rows": [\n    ' + ",\n    ".join(rows) + "]}")
    return (
        f'{{"about": {json.dumps(about)},\n "preset": {json.dumps(name)},\n "sets": [\n'
        + ",\n".join(sets)
        + "]}\n"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="+", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--first", type=int, default=14, help="candidates of each family (14)")
    parser.add_argument(
        "--around", type=int, default=0, metavar="N", help="so many around the library's kernel instead"
    )
    parser.add_argument("--family", action="append", default=[], help="of this family alone; may be repeated")
    parser.add_argument("--device", help="the card (0), or with --plan its preset (h200)")
    parser.add_argument(
        "--candidates", type=Path, metavar="FILE", help="read from there, or planned to there"
    )
    parser.add_argument("--plan", action="store_true", help="choose candidates and time nothing")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where the times go")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the library that gets the winners")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all of it")
    parser.add_argument("--processes", type=int, default=usable_cores(), help="side by side (one per core)")
    asked = parser.parse_args(words)
    if asked.plan != (asked.table is None and asked.out is None) or asked.plan > bool(asked.candidates):
        parser.error("name --table or --out for what is timed, or --plan with the --candidates to write")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    out = asked.out or library.shipped_folder()
    count, is_around = asked.around or asked.first, asked.around > 0
    if asked.plan:
        limits = limits_named(asked.device or "h200")
        cases = list(planned(asked.suites, asked.family, limits, out, count, is_around=is_around))
        write_plan(asked.candidates, cases)
        print(f"{sum(len(case.variants) for case in cases)} candidates of {len(cases)} problems")
        return
    # What ends a program politely is to end its processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Of the processes side by side, which get it before they import numpy.
    os.environ.update(ONE_BLAS_THREAD)
    device = resolve(asked.device or "0")
    if asked.candidates:
        cases = read_plan(asked.candidates, asked.suites, asked.family)
    else:
        cases = list(planned(asked.suites, asked.family, device.limits, out, count, is_around=is_around))
    run = Measuring(cases, device, asked.processes, asked.minutes)
    found = run.time_all()
    if asked.table:
        asked.table.write_text(table(cases, found, device), encoding="utf-8")
    won = run.winners(found)
    for i, each in won.items():
        variant = each.build.kernel.variant
        tflops = each.figures.tflops
        print(f"{cases[i].suite} {cases[i].name}: {each.us:.1f} us, {tflops:.1f} TFLOP/s", settings(variant))
    if asked.out:
        run.keep(won, asked.out)


if __name__ == "__main__":
    main()
