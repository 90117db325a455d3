"""Trials in other tuners' files: what is written, what is read back, and all that is refused."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.tuner.cli import app
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.measure import median, spread, tflops
from flashgen.tuner.evaluate.outcome import Measurement, Outcome, Status
from flashgen.tuner.exchange import kernel_tuner_cache, t4_results
from flashgen.tuner.exchange.checked_values import CONTROL
from flashgen.tuner.exchange.portable import Ended, Trials, fits, put, take
from flashgen.tuner.exchange.trial_figures import FIGURES
from flashgen.tuner.exchange.trial_files import FORMATS, KERNEL_TUNER, T4, BadFile, encoded, export, read
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.request import Shapes
from flashgen.tuner.shelf.winners import kernels_in_storage
from flashgen.tuner.store.about import About
from flashgen.tuner.store.studies import open_storage
from optuna.study import load_study
from typer.testing import CliRunner

SIMT = FAMILIES["simt"]
PROBLEM = Problem(head_dim=64, causal=True)
CARD = PRESETS["h200"]
ABOUT = About(
    problem=PROBLEM,
    limits=CARD,
    family=SIMT,
    predicted=False,
    driver="580.95.05 (CUDA 13.0)",
    toolkit="nvcc 13.0.48",
    flashgen="0.1.0",
    seed=3,
    mark="0123abcd",
)
NOON = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)


def document_of(trials: Trials, style: str) -> Any:
    return json.loads(bytes(encoded(trials, style)))


def ended(variant, status: Status, number: int) -> Ended:
    measurement = None
    if status in (Status.OK, Status.SLOW):
        times = tuple(1000.0 + number + i / 3 for i in range(5))
        measurement = Measurement(
            times_us=times,
            median_us=median(times),
            spread=spread(times),
            tflops=tflops(PROBLEM, median(times)),
            registers=128,
            spill_bytes=0,
            smem_bytes=49152,
            occupancy=0.25,
            error=5e-7,
            busy="process 7 keeps 40% of the SMs busy" if number == 1 else "",
        )
    outcome = Outcome(
        variant=variant,
        status=status,
        reason="" if status is Status.OK else f"made to be {status}",
        measurement=measurement,
        seconds={"compile": 2.0, "validate": 0.5, "measure": 0.25},
    )
    return Ended(outcome, NOON + datetime.timedelta(seconds=number))


@pytest.fixture(scope="module")
def trials() -> Trials:
    catalogue = build_catalogue(SIMT, PROBLEM, CARD, {"br": 64, "bc": 32})
    statuses = [Status.OK, Status.OK, *Status]
    rows = [i * len(catalogue) // len(statuses) for i in range(len(statuses))]
    made = enumerate(zip(rows, statuses, strict=True))
    return Trials(ABOUT, tuple(ended(catalogue.variant(row), status, i) for i, (row, status) in made))


def assert_same(read_back: Trials, trials: Trials) -> None:
    """But for the last bits of times, which the files hold in milliseconds."""
    assert read_back.about == trials.about
    assert [e.at for e in read_back.ended] == [e.at for e in trials.ended]
    for one, other in zip(read_back.ended, trials.ended, strict=True):
        a, b = one.outcome, other.outcome
        assert (a.variant, a.status, a.reason, a.seconds) == (b.variant, b.status, b.reason, b.seconds)
        assert (a.measurement is None) == (b.measurement is None)
        if a.measurement is not None and b.measurement is not None:
            for name, value in vars(b.measurement).items():
                same = pytest.approx(value, rel=1e-9) if isinstance(value, float | tuple) else value
                assert getattr(a.measurement, name) == same, name


@pytest.mark.parametrize("style", FORMATS)
def test_what_is_written_is_read_back(trials, tmp_path, style):
    path = tmp_path / "trials.json"
    export(path, trials, style)
    assert_same(read(path), trials)


@pytest.mark.parametrize("suffix", ["sqlite3", "journal"])
def test_trials_go_through_a_storage(trials, tmp_path, suffix):
    where = str(tmp_path / f"trials.{suffix}")
    done = put(where, trials)
    assert (done.added, done.known) == (len(trials.ended), 0)
    taken, others = take(where, lambda about: True)
    assert_same(taken, trials)
    assert others == []
    again = put(where, trials)
    assert (again.added, again.known) == (0, len(trials.ended))
    # The winner is found and its source rendered anew.
    (kept,) = kernels_in_storage(where)
    best = min(
        (e.outcome for e in trials.ended if e.outcome.status is Status.OK),
        key=lambda o: o.measurement.median_us,
    )
    assert kept.kernel.variant == best.variant and kept.slug == "h200"
    assert f"br = {best.variant.to_dict()['br']}" in kept.kernel.source


def test_the_dashboard_finds_figures_by_name(trials, tmp_path):
    where = str(tmp_path / "trials.sqlite3")
    put(where, trials)
    study = load_study(study_name=ABOUT.study, storage=open_storage(where))
    assert study.metric_names == ["median_us"] and study.direction.name == "MINIMIZE"
    fine = [t for t in study.trials if t.state.name == "COMPLETE"]
    assert fine and {"tflops", "registers", "occupancy", "error", "status"} <= fine[0].user_attrs.keys()
    assert all(t.user_attrs["status"] for t in study.trials)
    assert fine[0].params.keys() == {p.name for p in SIMT.parameters()}


def test_kernel_tuners_own_fields(trials):
    data = document_of(trials, KERNEL_TUNER)
    assert list(data)[-1] == "cache" and data["objective"] == "time"
    assert data["tune_params_keys"] == [p.name for p in SIMT.parameters()] == list(data["tune_params"])
    assert all(isinstance(n, int) for n in data["problem_size"])
    for (key, entry), each in zip(data["cache"].items(), trials.ended, strict=True):
        values = each.outcome.variant.to_dict()
        assert key == ",".join(map(str, values.values())) and " " not in key
        assert all(value in data["tune_params"][name] for name, value in values.items())
        if each.outcome.measurement is None:
            assert entry["time"] == entry["__error__"]
            assert entry["__error__"] in (
                "InvalidConfig", "CompilationFailedConfig", "RuntimeFailedConfig",
            )  # fmt: skip
        else:
            assert entry["time"] == each.outcome.measurement.median_us / 1000 and "__error__" not in entry
        assert (entry["compile_time"], entry["verification_time"], entry["benchmark_time"]) == (
            2000,
            500,
            250,
        )


def test_t4s_own_fields(trials):
    data = document_of(trials, T4)
    assert (data["schema_version"], data["metadata"]["timeunit"]) == ("1.0.0", "milliseconds")
    found = {str(e.outcome.status): r for e, r in zip(trials.ended, data["results"], strict=True)}
    said = {status: (r["invalidity"], r["correctness"]) for status, r in found.items()}
    assert said == {
        "ok": ("correct", 1),
        "slow": ("correct", 1),
        "illegal": ("constraints", 0),
        "spilled": ("constraints", 0),
        "compile-failed": ("compile", 0),
        "launch-failed": ("runtime", 0),
        "timed-out": ("timeout", 0),
        "wrong": ("correctness", 0),
    }
    assert len(found["ok"]["times"]["runtimes"]) == 5 and found["wrong"]["times"]["runtimes"] == []


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_no_parameter_is_called_like_a_figure(family):
    figures = {"time", "times", "status", "reason", "busy", "tflops", "timestamp", *FIGURES}
    figures |= {*kernel_tuner_cache.PHASES.values(), *t4_results.PHASES.values()}
    assert not figures & {p.name for p in family.parameters()}


def test_kernel_tuner_simulates_on_it(trials, tmp_path, monkeypatch):
    kernel_tuner = pytest.importorskip("kernel_tuner", reason="pip install kernel_tuner")
    monkeypatch.chdir(tmp_path)
    export(tmp_path / "cache.json", trials, KERNEL_TUNER)
    results, _ = kernel_tuner.tune_cache("cache.json", strategy="brute_force", quiet=True)
    best = min(e.outcome.measurement.median_us for e in trials.ended if e.outcome.measurement)
    assert min(r["time"] for r in results) == best / 1000
    # With its failures: all that were tried pass, the rest of the product does not.
    data = json.loads(Path("cache.json").read_text())
    tried = {tuple(entry[name] for name in data["tune_params_keys"]) for entry in data["cache"].values()}

    def was_tried(values: dict[str, Any]) -> bool:
        return tuple(values.values()) in tried

    results, _ = kernel_tuner.tune_kernel(
        data["kernel_name"], "", data["problem_size"], [], data["tune_params"], cache="cache.json",
        restrictions=[was_tried], simulation_mode=True, quiet=True,
    )  # fmt: skip
    assert len(results) == len(trials.ended)


# -- what is refused -------------------------------------------------------------------------------------


def entry(data: dict[str, Any]) -> dict[str, Any]:
    """The first measured one."""
    return next(e for e in data["cache"].values() if "__error__" not in e)


def change(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(data: dict[str, Any]) -> None:
        at: Any = data
        for name in path[:-1]:
            at = entry(data) if name == "entry" else at[name]
        at[path[-1]] = to

    return apply


ATTACKS = {
    "code as a parameter": (change("entry", "br", to="64); system(\"id\""), "br='64"),
    "a choice as text": (change("entry", "br", to="64"), "is not a choice"),
    "true for one": (change("entry", "stages", to=True), "stages=True is not a choice"),
    "a float for a number": (change("entry", "br", to=64.0), "is not a choice"),
    "no such value": (change("entry", "bc", to=33), "bc=33 is not a choice; choose from"),
    "an illegal variant": (change("entry", "bc", to=1024), "bc=1024"),
    "a list as a parameter": (change("entry", "br", to=[64]), "is not a choice"),
    "a negative time": (change("entry", "times", to=[-1.0]), "a time is -1.0"),
    "no times": (change("entry", "times", to=[]), "0 times"),
    "times as text": (change("entry", "times", to="1.0"), "not a list"),
    "a huge time": (change("entry", "times", to=[1e300]), "not a number"),
    "a huge whole number": (change("entry", "times", to=[10**400]), "not a number"),
    "an infinite time": (change("entry", "times", to=[float("inf")]), "Infinity is no figure"),
    "not a number": (change("entry", "error", to=float("nan")), "NaN is no figure"),
    "a wrong kernel called right": (change("entry", "error", to=0.5), "error is 5.0e-01, 2.0e-06 allowed"),
    "registers in halves": (change("entry", "registers", to=1.5), "not a whole number"),
    "an unknown status": (change("entry", "status", to="fine"), "none of ok"),
    "a time of day that is none": (change("entry", "timestamp", to="yesterday"), "ISO 8601"),
    "a line break in the card's name": (
        change("flashgen", "limits", "name", to="H200\n#include \"/etc/passwd\""), "name is 'H200",
    ),
    "the end of a comment": (change("flashgen", "limits", "name", to="*/ int x; /*"), "are read"),
    "a line that goes on": (change("flashgen", "toolkit", to="nvcc \\"), "are read"),
    "a path as a mark": (change("flashgen", "mark", to="../../x"), "eight hex digits"),
    "a path as a family": (change("flashgen", "family", to="../ladder"), "unknown family"),
    "a path as a card": (change("flashgen", "limits", "name", to="../.."), "the card has no name"),
    "text for a size": (change("flashgen", "problem", "head_dim", to="64"), "head_dim is '64'"),
    "a card without multiprocessors": (change("flashgen", "limits", "num_sms", to=0), "from 1"),
    "a dtype of its own": (change("flashgen", "problem", "dtype", to="f32;"), "dtype 'f32;' is not served"),
    "a problem with more": (change("flashgen", "problem", "hook", to="x"), "see ['hook']"),
    "a newer version": (change("flashgen", "version", to=2), "version 2"),
    "another tool's file": (lambda data: data.pop("flashgen"), "no block 'flashgen'"),
    "entries in a list": (change("cache", to=[]), "not an object"),
    "neither of both": (lambda data: data.pop("cache"), "neither"),
}  # fmt: skip


@pytest.mark.parametrize(("attack", "words"), ATTACKS.values(), ids=list(ATTACKS))
def test_what_is_not_as_it_must_be_is_refused(trials, tmp_path, attack, words):
    data = document_of(trials, KERNEL_TUNER)
    attack(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(BadFile, match=re.escape(words)) as refused:
        read(path)
    assert str(path) in str(refused.value) and "flashgen export" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be imported"),
        ("[" * 100_000, "too deep"),
        ("[1, 2]", "not an object"),
        ('{"cache": {"x": {}}, "flashgen": 1}', "flashgen is 1"),
        ("\udcff", "it is no text"),
    ],
    ids=["empty", "deep", "list", "number", "binary"],
)
def test_what_is_no_export_is_refused(tmp_path, text, words):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadFile, match=words):
        read(path)


def test_what_terminals_obey_is_dropped(trials, tmp_path):
    data = document_of(trials, KERNEL_TUNER)
    failed = next(e for e in data["cache"].values() if e["status"] == "wrong")
    failed["reason"] = "\x1b[2Jgone\r\x9b31m"
    path = tmp_path / "trials.json"
    path.write_text(json.dumps(data))
    (outcome,) = [e.outcome for e in read(path).ended if e.outcome.status is Status.WRONG]
    assert not CONTROL.search(outcome.reason) and "gone" in outcome.reason


def test_derived_figures_are_not_taken_from_the_file(trials, tmp_path):
    data = document_of(trials, KERNEL_TUNER)
    entry(data)["time"], entry(data)["tflops"] = 1e-9, 1e9
    path = tmp_path / "trials.json"
    path.write_text(json.dumps(data))
    assert_same(read(path), trials)


def test_a_refused_file_leaves_the_storage_alone(trials, tmp_path):
    data = document_of(trials, KERNEL_TUNER)
    list(data["cache"].values())[-1]["br"] = "x"
    (tmp_path / "bad.json").write_text(json.dumps(data))
    done = CliRunner().invoke(
        app, ["import", str(tmp_path / "bad.json"), "--storage", str(tmp_path / "t.sqlite3")]
    )
    assert done.exit_code == 1 and not (tmp_path / "t.sqlite3").exists()


# -- the command line ------------------------------------------------------------------------------------


def test_export_and_import_by_the_command_line(trials, tmp_path):
    first, second = str(tmp_path / "first.sqlite3"), str(tmp_path / "second.journal")
    put(first, trials)

    def flashgen(*arguments: str) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    for style in (KERNEL_TUNER, T4):
        target = str(tmp_path / f"{style}.json")
        wrote = flashgen("export", target, "--format", style, "--storage", first, "--device", "h200")
        assert (wrote["study"], wrote["trials"]) == ("h200/f32_d64_causal/simt/0123abcd", len(trials.ended))
        took = flashgen("import", target, "--storage", second)
        assert took["added"] + took["known"] == len(trials.ended)
    taken, _ = take(second, lambda about: True)
    assert_same(taken, trials)


def test_the_study_is_chosen_by_what_it_is_of(trials, tmp_path):
    where = str(tmp_path / "trials.sqlite3")
    put(where, trials)
    later = Trials(
        About(**{**vars(ABOUT), "mark": "ffffffff", "predicted": True}),
        tuple(Ended(e.outcome, e.at + datetime.timedelta(days=1)) for e in trials.ended),
    )
    put(where, later)
    anything = fits(Shapes(), None, None)
    chosen, others = take(where, anything)
    assert chosen.about.mark == "ffffffff" and others == [ABOUT.study]
    assert take(where, anything, ABOUT.study)[0].about == ABOUT
    for asked in (
        Shapes(head_dim=(128,)),
        Shapes(head_dim=(64,), causal=(True,), batch=(3,)),
        Shapes(dtype=("f16",)),
    ):
        with pytest.raises(FlashgenError, match="no study that was asked for"):
            take(where, fits(asked, None, None))
    take(where, fits(Shapes(causal=(True,)), CARD, SIMT))
    with pytest.raises(FlashgenError, match=r"has no study 'x'; it has .*0123abcd"):
        take(where, anything, "x")
    with pytest.raises(FlashgenError, match="does not exist"):
        take(str(tmp_path / "none.sqlite3"), anything)
    assert not (tmp_path / "none.sqlite3").exists()
