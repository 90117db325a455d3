"""The coordinator: whole runs with a stand-in for the card, and on an emulated card from the command line."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.problem import Problem
from flashgen.gen.variant import Variant
from flashgen.tuner.errors import FlashgenError, UsageError
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.search.sampler_names import SamplerName
from flashgen.tuner.shelf import library
from flashgen.tuner.shelf.winners import kernels_in_storage
from flashgen.tuner.store.studies import open_storage
from flashgen.tuner.tune.coordinator import tune
from flashgen.tuner.tune.events import Doing, FinalsStarted, InFlight, SearchGoesOn, SpaceReady, TrialDone
from flashgen.tuner.tune.options import TuneOptions
from flashgen.tuner.view.progress import RunView
from flashgen.tuner.view.tuned import show_result
from optuna.study import get_all_study_names, load_study
from rich.console import Console
from sqlalchemy.exc import OperationalError

from tests.support import stand_ins
from tests.support.caches import without_kernels
from tests.support.depth import sampled
from tests.support.processes import descendants, gone
from tests.support.stand_ins import LADDER, PROBLEM, StandInDevice, StandInEvaluator, StandInToolchain, cost


@pytest.fixture
def options(tune_options) -> TuneOptions:
    # Quick: what is tested here is what becomes of its proposals.
    return replace(tune_options, trials=40, sampler=SamplerName.RANDOM)


def run(options: TuneOptions, evaluator: StandInEvaluator | None = None, **others):
    evaluator = evaluator or StandInEvaluator()
    return tune(options, make_evaluator=lambda device: evaluator, **others)


def test_a_run_finds_and_writes_the_best(options):
    events = []
    evaluator = StandInEvaluator(wrong=(128,))
    result = run(options, evaluator, report=events.append)
    assert (result.trials_run, result.trials_earlier) == (40, 0)
    assert len(set(evaluator.evaluated)) == 40
    assert evaluator.closed
    best = min((v for v in evaluator.evaluated if v.to_dict()["br"] != 128), key=cost)
    assert cost(result.kernel.variant) == cost(best)
    assert result.kernel.measurement.median_us == cost(best) + 1  # the finalists' time, not the trial's
    assert sum(result.counts.values()) == 40
    assert result.reasons == {"wrong: head 0: error 1.0, 2e-06 allowed": result.counts["wrong"]}
    assert 1 < len(evaluator.finalists) <= 6
    (found,) = library.entries([options.out])
    assert replace(found.kernel, source="") == replace(result.kernel, source="")
    assert "attention_f32_d40_kernel" in found.kernel.source
    compile(result.paths.py.read_text(), "f32_d40.py", "exec")
    kinds = [type(e) for e in events if not isinstance(e, Doing | InFlight)]
    assert kinds[0] is SpaceReady and kinds[-1] is FinalsStarted and kinds.count(TrialDone) == 40
    trials = [e for e in events if isinstance(e, TrialDone)]
    assert [e.number for e in trials] == list(range(1, 41))
    medians = [e.best.measurement.median_us for e in trials if e.best and e.best.measurement]
    assert medians == sorted(medians, reverse=True)
    json.dumps(result.to_dict())


def test_the_same_command_resumes(options):
    first, second = StandInEvaluator(), StandInEvaluator()
    run(replace(options, trials=15), first)
    result = run(options, second)
    assert (result.trials_run, result.trials_earlier) == (25, 15)
    assert not set(first.evaluated) & set(second.evaluated)
    # The budget is spent: nothing more to try, but the winner is written all the same.
    third = StandInEvaluator()
    result = run(options, third)
    assert (result.trials_run, third.evaluated) == (0, [])
    assert cost(result.kernel.variant) == min(map(cost, first.evaluated + second.evaluated))


def test_a_budget_of_minutes(options):
    evaluator = StandInEvaluator()
    evaluator.on_evaluate = lambda: time.sleep(0.05)
    started = time.monotonic()
    result = run(replace(options, trials=None, minutes=0.04), evaluator)
    assert 2.0 < time.monotonic() - started < 12.0
    assert 0 < result.trials_run == len(evaluator.evaluated)
    assert not result.interrupted


def test_a_compiler_that_fails_ends_no_run(options):
    device = StandInDevice(chain=StandInToolchain(refuses=(4, 8, 32, 64)))
    result = run(replace(options, device=device))
    assert result.kernel.variant.to_dict()["bc"] == 16
    assert result.counts["compile-failed"] > 0
    assert result.reasons["compile-failed: ptxas fatal: made to fail"] == result.counts["compile-failed"]


def test_when_nothing_works_the_reasons_are_told(options):
    device = StandInDevice(chain=StandInToolchain(refuses=(4, 8, 16, 32, 64)))
    with pytest.raises(
        FlashgenError, match=r"none of 40 variants tried works.*40 x compile-failed: ptxas fatal"
    ):
        run(replace(options, device=device))


def test_no_legal_variant(options):
    why = r"no variant of 'ladder' with vec=4 is legal.*vec=4 does not divide head dim 7"
    with pytest.raises(UsageError, match=why):
        run(replace(options, problem=Problem(head_dim=7), held={"vec": 4}))


def test_finalists_wrong_in_full_do_not_win(options):
    evaluator = StandInEvaluator(wrong_in_full=(16,))
    try:
        result = run(options, evaluator)
    except FlashgenError as error:
        assert "every finalist failed" in str(error)
    else:
        assert result.kernel.variant.to_dict()["bc"] != 16
    assert any(v.to_dict()["bc"] == 16 for v in evaluator.finalists)


def test_stopping_keeps_the_best_so_far(options):
    stop = threading.Event()
    evaluator = StandInEvaluator()
    evaluator.on_evaluate = lambda: stop.set() if len(evaluator.evaluated) == 9 else None
    result = run(options, evaluator, stop=stop)
    assert result.interrupted
    assert result.trials_run == 10
    assert cost(result.kernel.variant) == min(map(cost, evaluator.evaluated))
    assert result.paths.cu.exists() and not evaluator.finalists
    # What was in flight is free to be tried again.
    assert run(options).trials_run == 30


def test_stopping_before_the_first_trial_ends(options):
    stop = threading.Event()
    stop.set()
    with pytest.raises(FlashgenError, match="before the first trial"):
        run(options, stop=stop)


def test_a_full_disk_loses_no_finished_trial(options):
    device = StandInDevice(chain=StandInToolchain(disk_full_after=12))
    with pytest.raises(FlashgenError, match="No space left"):
        run(replace(options, device=device))
    assert run(options).trials_earlier > 0


def test_a_disk_that_fills_under_the_trials_loses_no_finished_one(options, monkeypatch):
    evaluator = StandInEvaluator()

    def fill() -> None:
        if len(evaluator.evaluated) == 8:
            monkeypatch.setattr(optuna.study.Study, "tell", full)

    def full(*_, **__):
        raise OperationalError("COMMIT", {}, sqlite3.OperationalError("database or disk is full"))

    evaluator.on_evaluate = fill
    with monkeypatch.context(), pytest.raises(FlashgenError, match=r"database or disk is full.*it resumes"):
        run(options, evaluator)
    monkeypatch.undo()
    monkeypatch.setattr("flashgen.tuner.tune.family_run.prior_of", lambda problem, limits: cost)
    # The last may have been on the card while the one before was told.
    assert run(options).trials_earlier in (7, 8)


def test_a_winner_that_cannot_be_written_is_kept_in_the_study(options, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(library, "write_text", full)
        with pytest.raises(FlashgenError, match=r"No space left on device.*flashgen emit"):
            run(options)
    assert library.entries([options.out]) == []
    (kept,) = kernels_in_storage(options.storage)
    assert kept.kernel.measurement.median_us == cost(kept.kernel.variant) + 1
    assert kept.rendered is not None and kept.kernel.source == kept.rendered.source


def test_an_unfinished_study_gives_its_best_trial(options, monkeypatch):
    evaluator = StandInEvaluator()

    def die() -> None:
        if len(evaluator.evaluated) == 12:
            raise RuntimeError("killed")

    evaluator.on_evaluate = die
    with pytest.raises(RuntimeError, match="killed"):
        run(options, evaluator)
    (kept,) = kernels_in_storage(options.storage)
    assert cost(kept.kernel.variant) == min(map(cost, evaluator.evaluated))
    assert kept.kernel.measurement.median_us == cost(kept.kernel.variant)
    assert run(options).trials_earlier == 12


def test_held_parameters_do_not_replace_a_faster_kernel(options):
    best = run(options)
    held = run(replace(options, held={"br": 256, "bc": 32}, trials=10))
    assert held.kept_faster == best.paths.json
    assert library.read(best.paths.json).kernel.variant == best.kernel.variant
    assert held.kernel.variant.to_dict()["br"] == 256


SIMT = FAMILIES["simt"]
#: Parameters that make some hundred variants of it.
SIMT_UNROLLS = next(p.choices for p in SIMT.parameters() if p.name == "unroll")
FEW = ("q_layout", "k_layout", "unroll", "min_blocks", "bc", "br")


def narrow_simt(monkeypatch, *free: str) -> None:
    """The larger family's space with few parameters free."""
    few = {p.name: p.default for p in SIMT.parameters() if p.name not in free}

    def narrow(family, problem, limits, held):
        return build_catalogue(family, problem, limits, few if family is SIMT else held)

    monkeypatch.setattr("flashgen.tuner.tune.spaces.build_catalogue", narrow)


def slowed(monkeypatch, family: type[Variant], factor: float) -> None:
    """Makes one family so much slower."""

    def slower(variant: Variant) -> float:
        return cost(variant) * (factor if type(variant) is family else 1)

    monkeypatch.setattr(stand_ins, "cost", slower)
    monkeypatch.setattr("flashgen.tuner.tune.family_run.prior_of", lambda problem, limits: slower)


def test_several_families_compete(options, monkeypatch):
    narrow_simt(monkeypatch, "q_layout", "k_layout", "unroll", "min_blocks")
    evaluator = StandInEvaluator()
    result = run(replace(options, problem=Problem(), families=(LADDER, SIMT), trials=20), evaluator)
    assert len(result.studies) == 2 and result.trials_run == len(evaluator.evaluated) == 20
    families = [type(v) for v in evaluator.evaluated]
    num_simt = families.count(SIMT)
    # What the small space did not need goes to the other.
    assert 2 < num_simt < 10 and families == [LADDER] * 10 + [SIMT] * num_simt + [LADDER] * (10 - num_simt)
    assert cost(result.kernel.variant) == min(map(cost, evaluator.evaluated))
    # The winner's study alone has it; the others give their best trial.
    kept = {type(e.kernel.variant): e.kernel for e in kernels_in_storage(options.storage)}
    assert set(kept) == {LADDER, SIMT}
    assert kept[type(result.kernel.variant)].measurement == result.kernel.measurement


@pytest.mark.parametrize("slow", [LADDER, SIMT])
def test_the_faster_family_gets_the_rest_of_the_budget(options, monkeypatch, slow):
    slowed(monkeypatch, slow, 2.0)
    narrow_simt(monkeypatch, *FEW)
    monkeypatch.setattr("flashgen.tuner.tune.plan.STARTUP_TRIALS", 4)
    evaluator, events = StandInEvaluator(), []
    both = replace(options, problem=Problem(), families=(LADDER, SIMT), trials=20)
    result = run(both, evaluator, report=events.append)
    fast = SIMT if slow is LADDER else LADDER
    families = [type(v) for v in evaluator.evaluated]
    assert families == [LADDER] * 5 + [SIMT] * 5 + [fast] * 10
    assert type(result.kernel.variant) is fast and {type(v) for v in evaluator.finalists} == {fast}
    (more,) = [e for e in events if isinstance(e, SearchGoesOn)]
    assert (more.family, more.done, more.budget) == (fast.family, 5, 15)
    # Resumed with a larger budget, both rounds grow.
    second = StandInEvaluator()
    assert run(replace(both, trials=28), second).trials_earlier == 20
    assert [type(v) for v in second.evaluated] == [slow] * 2 + [fast] * 6


def test_nothing_is_left_to_search_beside_a_fast_family_tried_whole(options, monkeypatch):
    """Decoding, say: one family has few variants, and another's are many times slower."""
    slowed(monkeypatch, LADDER, 5.0)
    narrow_simt(monkeypatch, "unroll")
    monkeypatch.setattr("flashgen.tuner.tune.plan.STARTUP_TRIALS", 4)
    evaluator, events = StandInEvaluator(), []
    both = replace(options, problem=Problem(), families=(LADDER, SIMT), trials=20)
    result = run(both, evaluator, report=events.append)
    families = [type(v) for v in evaluator.evaluated]
    assert families == [LADDER] * 5 + [SIMT] * len(SIMT_UNROLLS)
    assert type(result.kernel.variant) is SIMT and not [e for e in events if isinstance(e, SearchGoesOn)]


def test_what_is_told_of_several_families(options, monkeypatch):
    narrow_simt(monkeypatch, *FEW)
    monkeypatch.setattr("flashgen.tuner.tune.plan.LEADER_SLACK", 2.0)
    monkeypatch.setattr("flashgen.tuner.tune.finalists.FINALIST_SLACK", 3.0)
    monkeypatch.setattr("flashgen.tuner.tune.finalists.NUM_FINALISTS", 60)
    console = Console(record=True, width=160, file=io.StringIO())
    with RunView(console) as view:
        both = replace(options, problem=Problem(), families=(LADDER, SIMT), trials=60)
        result = run(both, report=view)
    show_result(console, result)
    told = console.export_text()
    for family in ("ladder", "simt"):
        assert f"{family}: among the fastest so far, gets 6 more trials" in told
    best = next(line for line in told.splitlines() if line.startswith("trial 1/24"))
    assert "TFLOP/s (" in best  # of one family so far
    finalists = told.partition("finalists")[2]
    assert "ladder: " in finalists and "simt: " in finalists


def test_families_about_as_fast_share_the_rest(options, monkeypatch):
    narrow_simt(monkeypatch, *FEW)
    monkeypatch.setattr("flashgen.tuner.tune.plan.LEADER_SLACK", 2.0)
    evaluator = StandInEvaluator()
    run(replace(options, problem=Problem(), families=(LADDER, SIMT), trials=60), evaluator)
    families = [type(v) for v in evaluator.evaluated]
    assert families == [LADDER] * 24 + [SIMT] * 24 + [LADDER] * 6 + [SIMT] * 6


def test_each_family_is_tried_first_where_the_cost_model_says(options, monkeypatch):
    monkeypatch.setattr(library, "shipped_folder", lambda: options.out)  # no known winners
    narrow_simt(monkeypatch, *FEW)
    evaluator = StandInEvaluator()
    run(replace(options, problem=Problem(), families=(LADDER, SIMT), trials=8, jobs=1), evaluator)
    for family in (LADDER, SIMT):
        own = [v for v in evaluator.evaluated if type(v) is family]
        assert len(own) == 4
        # The prior's best, then the default, then the best of several drawn at random.
        assert cost(own[0]) == min(map(cost, own)) and family() in own


@pytest.mark.thorough
def test_time_left_goes_to_the_faster_family(options, monkeypatch):
    slowed(monkeypatch, LADDER, 2.0)
    narrow_simt(monkeypatch, *FEW)
    evaluator = StandInEvaluator()
    evaluator.on_evaluate = lambda: time.sleep(0.05)
    started = time.monotonic()
    limited = replace(options, problem=Problem(), families=(LADDER, SIMT), trials=None, minutes=0.15)
    run(limited, evaluator)
    assert 4.0 < time.monotonic() - started < 24.0
    families = [type(v) for v in evaluator.evaluated]
    assert families.count(SIMT) > families.count(LADDER) > 3


def test_a_family_that_cannot_serve_is_passed_over(options, monkeypatch):
    def narrow(family, problem, limits, held):
        return build_catalogue(family, problem, limits, {"vec": 4} if family is SIMT else held)

    monkeypatch.setattr("flashgen.tuner.tune.spaces.build_catalogue", narrow)
    both = replace(options, problem=Problem(head_dim=7), families=(SIMT, LADDER), trials=6)
    events = []
    result = run(both, report=events.append)
    assert len(result.studies) == 1 and result.trials_run == 6
    assert [e.family for e in events if isinstance(e, SpaceReady)] == ["ladder"]
    words = (
        r"no kernel family serves f32_d7 on H200.*family simt: removed by rule.*; family ladder: removed by"
    )
    with pytest.raises(FlashgenError, match=words):
        run(replace(both, held={"vec": 4}))


def test_no_family_serves(options):
    both = replace(options, problem=Problem(dtype="bf16"), families=(LADDER, SIMT))
    words = (
        r"no kernel family serves bf16_d64 on H200 \(sm_90\): family ladder computes f32, this problem is "
        r"bf16; family simt computes f32, this problem is bf16; choose another"
    )
    with pytest.raises(FlashgenError, match=words):
        run(both)
    with pytest.raises(FlashgenError, match=r"no variant of 'simt' is legal for bf16_d64.*simt computes f32"):
        run(replace(both, families=(SIMT,)))


def test_a_family_alone_does_not_replace_a_faster_kernel(options, monkeypatch):
    best = run(options)
    slowed(monkeypatch, SIMT, 2.0)
    narrow_simt(monkeypatch, *FEW)
    alone = run(replace(options, families=(SIMT,), trials=6))
    assert alone.kept_faster == best.paths.json
    assert library.read(best.paths.json).kernel.variant == best.kernel.variant
    # Both together may: then it is the winner of all.
    assert run(replace(options, families=(LADDER, SIMT))).kept_faster is None


def test_the_library_seeds_the_search(options):
    run(options)
    evaluator = StandInEvaluator()
    run(replace(options, problem=Problem(head_dim=44), trials=5), evaluator)
    (winner,) = [e.kernel.variant for e in library.entries([options.out]) if e.kernel.problem == PROBLEM]
    assert winner in evaluator.evaluated[:4]  # of the first batch, whichever is built first


def test_an_out_folder_that_cannot_be_written_is_told_at_once(options, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    evaluator = StandInEvaluator()
    with pytest.raises(FlashgenError, match="--out"):
        run(replace(options, out=blocked), evaluator)
    assert not evaluator.evaluated


def test_another_compiler_starts_another_study(options):
    run(options)
    newer = StandInDevice(chain=StandInToolchain(version="stand-in 2.0"))
    assert run(replace(options, device=newer)).trials_earlier == 0


def test_coordinator_overhead_is_small(options):
    started = time.process_time()
    run(replace(options, trials=100, sampler=SamplerName.GP))
    assert time.process_time() - started < 15.0  # some 80 ms of ours each, while the card is busy


# -- on the emulated card, from the command line --------------------------------------------------------


def command(out: Path, *more: str) -> list[str]:
    program = "from flashgen.tuner.cli import main; main()"
    what = ["--device", "sim:gtx-1080", "--d", "32", "--family", "ladder", "--set", "hoisted=true"]
    return [sys.executable, "-c", program, "tune", *what, "--out", str(out), *more]


def finished_trials(out: Path) -> list[dict]:
    """Parameters of the finished trials, by their numbers."""
    storage = open_storage(str(out / "tuning.sqlite3"))
    (name,) = get_all_study_names(storage)
    trials = load_study(study_name=name, storage=storage).trials
    return [t.params for t in trials if t.state.name in ("COMPLETE", "PRUNED")]


def wait_for_trials(out: Path, count: int, process: subprocess.Popen, seconds: float = 90.0) -> None:
    """Waits until so many trials have finished, reading the file only."""
    where = f"file:{out}/tuning.sqlite3?mode=ro"
    finished = "select count(*) from trials where state in ('COMPLETE', 'PRUNED')"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(where, uri=True)) as file:
            if file.execute(finished).fetchone()[0] >= count:
                return
        time.sleep(0.1)
    raise AssertionError(f"no {count} trials within {seconds} s; exit code {process.poll()}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {**os.environ, "FLASHGEN_CACHE": str(without_kernels(tmp_path_factory.mktemp("cache")))}


@pytest.mark.thorough
def test_kill_and_resume_on_the_emulated_card(tmp_path, cache):
    process = subprocess.Popen(
        command(tmp_path, "--trials=50"), env=cache, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_trials(tmp_path, 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = finished_trials(tmp_path)
    done = subprocess.run(
        command(tmp_path, f"--trials={len(before) + 2}", "--json"), env=cache, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["predicted"] is True and result["measurement"]["predicted"] is True
    assert (result["trials_earlier"], result["trials_run"]) == (len(before), 2)
    after = finished_trials(tmp_path)
    assert after[: len(before)] == before
    assert len({json.dumps(p, sort_keys=True) for p in after}) == len(after)
    assert result["measurement"]["error"] < 2e-6
    assert Path(result["files"]["cu"]).parent == tmp_path / "sim_gtx_1080"


@pytest.mark.parametrize("signum", sampled([signal.SIGINT, signal.SIGTERM], 1))
def test_a_signal_ends_the_run_with_the_best_so_far(tmp_path, cache, signum):
    process = subprocess.Popen(
        command(tmp_path, "--trials=50"), env=cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_trials(tmp_path, 1, process)
    process.send_signal(signum)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "ending with the best so far" in output and "the same command goes on" in output
    assert "Traceback" not in errors
    (kernel,) = library.entries([tmp_path])
    assert kernel.predicted


@pytest.mark.parametrize("signum", sampled([signal.SIGINT, signal.SIGKILL], 1))
def test_of_a_run_of_several_problems_no_process_is_left(tmp_path, cache, signum):
    process = subprocess.Popen(
        command(tmp_path, "--trials=50", "--seqlen=64,128"),
        env=cache,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_trials(tmp_path, 1, process)
    # The worker on the card, what looks out for the next problem, and compilers.
    children = descendants(process.pid)
    assert len(children) >= 2
    process.send_signal(signum)
    assert process.wait(60) == (0 if signum == signal.SIGINT else -signal.SIGKILL)
    assert all(map(gone, children))
