"""Several problems in one run of `tune`."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import replace

import pytest
from flashgen.gen.limits import PRESETS
from flashgen.tuner.errors import FlashgenError, NotServed, UsageError
from flashgen.tuner.request import Shapes
from flashgen.tuner.shelf import library
from flashgen.tuner.shelf.emitted_kernels import read_each
from flashgen.tuner.store.studies import open_storage
from flashgen.tuner.tune import lookout
from flashgen.tuner.tune.batch import tune_each
from flashgen.tuner.tune.coordinator import tune, tune_at
from flashgen.tuner.tune.options import TuneOptions
from flashgen.tuner.tune.spaces import NoneLegal
from flashgen.tuner.view.progress import RunView
from flashgen.tuner.view.tuned import show_batch
from rich.console import Console

from tests.support.answering import AnswersInPlace
from tests.support.caches import without_kernels
from tests.support.stand_ins import LADDER, PROBLEM, StandInDevice, StandInEvaluator

HELD = {"br": 64, "bc": 16, "hoisted": True, "vec": 4}
LENGTHS = [replace(PROBLEM, seqlen_q=n, seqlen_k=n) for n in (128, 256, 512)]


@pytest.fixture
def view():
    console = Console(file=io.StringIO(), width=160)
    with RunView(console) as shown:
        yield shown, console.file.getvalue  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def options(tmp_path):
    return TuneOptions(
        device=StandInDevice(), problem=PROBLEM, families=(LADDER,), trials=3, out=tmp_path / "out",
        storage=str(tmp_path / "trials.journal"),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def foresight_in_a_thread(monkeypatch):
    monkeypatch.setattr(lookout, "start_process", AnswersInPlace)


def tune_all(options, compete, view, *, stop=None, **others):
    return tune_each(
        options,
        LENGTHS,
        compete,
        view=view[0],
        stop=stop or threading.Event(),
        make_evaluator=lambda device: StandInEvaluator(),
        **others,
    )


def everything(problem):
    return (LADDER,), HELD


def test_each_is_tuned_with_its_share_of_the_minutes(options, view):
    asked = []

    def run(place, options, **others):
        asked.append(options)
        return tune_at(place, options, **others)

    done = tune_all(replace(options, minutes=30.0), everything, view, run=run)
    assert [o.problem for o in asked] == LENGTHS and all(o.held == HELD for o in asked)
    assert [o.minutes for o in asked] == pytest.approx([10, 15, 30], rel=0.05)
    assert [r.kernel.problem for r in done.results] == LENGTHS and not done.failed and not done.interrupted
    text = view[1]()
    assert f"-- {LENGTHS[1].name}, 2 of 3" in text
    known = library.entries([options.out])
    assert {e.kernel.problem for e in known} == set(LENGTHS)
    assert len(json.loads(json.dumps(done.to_dict()))["kernels"]) == 3
    console = Console(file=io.StringIO(), width=160)
    show_batch(console, done)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(p.name in shown for p in LENGTHS) and "wrote 3 kernels to" in shown


class Never(AnswersInPlace):
    """Foresees nothing."""

    def receive(self, timeout_s):
        super().receive(timeout_s)


def run_of_all(options, folder, view, **others):
    """The batch, and the trials of all studies."""
    options = replace(options, trials=6, storage=str(folder / "t.journal"), out=folder)
    done = tune_all(options, lambda problem: ((LADDER,), {"hoisted": True}), view, **others)
    storage = open_storage(options.storage)
    trials = {
        study.study_name: [trial.params for trial in storage.get_all_trials(study._study_id)]
        for study in storage.get_all_studies()
    }
    return done, trials


def test_the_same_is_tried_and_wins_whether_it_was_built_ahead_or_not(options, view, tmp_path, monkeypatch):
    done, trials = run_of_all(options, tmp_path / "ahead", view)
    monkeypatch.setattr(lookout, "start_process", Never)
    without, the_same = run_of_all(options, tmp_path / "not", view)
    assert trials == the_same and len(trials) == 3
    told = [[result.kernel.variant for result in each.results] for each in (done, without)]
    assert told[0] == told[1]
    # And what is complete is neither tried nor built again.
    monkeypatch.setattr(lookout, "start_process", AnswersInPlace)
    again, the_same = run_of_all(options, tmp_path / "ahead", view)
    assert the_same == trials and [result.trials_run for result in again.results] == [0, 0, 0]


def test_what_is_complete_is_not_built_ahead(options, view, tmp_path, monkeypatch):
    made: list[AnswersInPlace] = []

    def start():
        made.append(AnswersInPlace())
        return made[-1]

    monkeypatch.setattr(lookout, "start_process", start)
    run_of_all(options, tmp_path, view)
    run_of_all(options, tmp_path, view)
    first, again = made
    assert all(foreseen.kernels for foreseen in first.answers if foreseen.problem == LENGTHS[1])
    assert again.answers and not any(foreseen.kernels for foreseen in again.answers)


def test_cards_and_storages_are_opened_once_for_all(options, view):
    made: list[StandInEvaluator] = []

    def make(device):
        made.append(StandInEvaluator())
        return made[-1]

    tune_each(options, LENGTHS, everything, view=view[0], stop=threading.Event(), make_evaluator=make)
    assert len(made) == 1 and made[0].started == 1 and made[0].closed


def test_what_nothing_serves_is_passed_over(options, view):
    def compete(problem):
        if problem is LENGTHS[1]:
            raise NotServed("family mma: needs another card")
        return everything(problem)

    done = tune_all(options, compete, view)
    assert [r.kernel.problem for r in done.results] == [LENGTHS[0], LENGTHS[2]]
    assert done.failed == {LENGTHS[1].name: "family mma: needs another card"}
    assert f"{LENGTHS[1].name} is left out: family mma: needs another card" in view[1]()
    console = Console(file=io.StringIO(), width=160)
    show_batch(console, done)
    assert f"not tuned: {LENGTHS[1].name}" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_what_concerns_all_ends_all(options, view):
    def run(place, options, **others):
        raise FlashgenError("nvcc was not found")

    with pytest.raises(FlashgenError, match="nvcc was not found"):
        tune_all(options, everything, view, run=run)

    def refuse(problem):
        raise NotServed(f"nothing serves {problem.name}")

    with pytest.raises(NotServed, match=LENGTHS[2].name):
        tune_all(options, refuse, view)


def test_stopped_with_the_best_so_far(options, view):
    stop = threading.Event()

    def run(place, options, **others):
        if options.problem is LENGTHS[1]:
            stop.set()
            raise NotServed("interrupted before the first trial ended")
        return tune_at(place, options, **others)

    done = tune_all(options, everything, view, stop=stop, run=run)
    assert done.interrupted and len(done.results) == 1 and not done.failed


def test_held_parameters_that_allow_nothing_are_both_wrong_usage_and_no_obstacle_to_others(options):
    big = replace(PROBLEM, head_dim=256, head_dim_v=0)
    held = {"br": 128, "bc": 64, "hoisted": True}
    small = StandInDevice(limits=replace(PRESETS["h200"], smem_per_block=1024))
    with pytest.raises(NoneLegal) as told:
        tune(
            replace(options, device=small, problem=big, held=held),
            make_evaluator=lambda device: StandInEvaluator(),
        )
    assert isinstance(told.value, UsageError) and isinstance(told.value, NotServed)


@pytest.mark.thorough
def test_from_the_command_line(flashgen, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE", str(without_kernels(tmp_path / "cache")))
    held = ["--family=ladder", *(f"--set={s}" for s in ("br=64", "bc=32", "hoisted=true", "transposed=true"))]
    lists = ["--d", "32", "--seqlen", "64", "--causal", "both", "--batch", "1", "--heads", "2"]
    # No family serves bf16 there: the others are tuned, and the exit code tells.
    command = [
        "tune",
        "--device",
        "sim:gtx-1080",
        "--dtype",
        "f32,bf16",
        *lists,
        *held,
        "--trials",
        "1",
        "--json",
    ]
    result = flashgen(*command, code=1)
    told = json.loads(result.stdout)
    wanted = Shapes(head_dim=(32,), seqlen=(64,), causal=(False, True), batch=(1,), heads=(2,)).problems()
    assert [each["problem"] for each in told["kernels"]] == [p.to_dict() for p in wanted]
    assert len(told["failed"]) == 2 and all("bf16" in name for name in told["failed"])
    assert "2 of 4" in result.stderr
    folder = tmp_path / "out" / "sim_gtx_1080"
    assert {path.name for path in folder.glob("*.json")} == {f"{p.name}.json" for p in wanted}
    # And one module of both.
    assert told["module"] == "out/sim_gtx_1080/f32_bf16_d32_many.py"
    module = read_each(folder / "f32_bf16_d32_many.py")
    assert [each.kernel.problem for each in module] == wanted
