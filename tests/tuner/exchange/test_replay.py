"""Recorded spaces: written, read back, and searches replayed on them."""

from __future__ import annotations

import datetime
import gzip
import importlib.util
import json
import lzma
import sys
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.tuner.cli import app
from flashgen.tuner.errors import FlashgenError, UsageError
from flashgen.tuner.evaluate.outcome import Outcome, Status
from flashgen.tuner.exchange.portable import Ended, Trials
from flashgen.tuner.exchange.recorded_spaces import Entry, RecordedSpace, read, recorded, write
from flashgen.tuner.exchange.replay import ReplayOptions, replay
from flashgen.tuner.exchange.replay_curves import Curves, Replayed
from flashgen.tuner.exchange.replay_methods import default_methods, parse_methods
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.predict.rank_correlation import spearman
from flashgen.tuner.search.sampler_names import parse_sampler
from flashgen.tuner.store.about import About
from flashgen.tuner.view.replay import notes, plot, show_replays
from rich.console import Console
from typer.testing import CliRunner

LADDER = FAMILIES["ladder"]
PROBLEM, CARD = Problem(head_dim=40), preset("gtx-1080")
needs_kernel_tuner = pytest.mark.skipif(
    importlib.util.find_spec("kernel_tuner") is None, reason="needs kernel_tuner: pip install kernel_tuner"
)


def microseconds(variant) -> float:
    v = variant.to_dict()
    return 100.0 + abs(int(v["br"]) - 64) + 2 * abs(int(v["bc"]) - 16) + 20 / int(v["vec"])


@pytest.fixture(scope="module")
def space() -> RecordedSpace:
    """Some hundred variants, of which those without ``hoisted`` and with the widest vectors fail."""
    catalogue = build_catalogue(LADDER, PROBLEM, CARD, {"transposed": True, "q_in_registers": False})
    entries = []
    for row in range(len(catalogue)):
        variant = catalogue.variant(row)
        v = variant.to_dict()
        if v["vec"] == 4 and not v["hoisted"]:
            entries.append(Entry(variant, Status.LAUNCH_FAILED, reason="made to fail"))
        else:
            entries.append(Entry(variant, Status.OK, microseconds(variant), 0.012, 40, 0))
    return RecordedSpace(
        problem=PROBLEM,
        limits=CARD,
        family=LADDER,
        driver="580",
        toolkit="nvcc 13.0",
        flashgen="0.1.0",
        predicted=False,
        entries=tuple(entries),
    )


@pytest.mark.parametrize("ending", [".jsonl.xz", ".jsonl.gz"])
def test_a_space_is_read_as_it_was_written(space, tmp_path, ending):
    path = tmp_path / "new" / f"space{ending}"
    write(path, space)
    assert read(path) == space
    with (lzma if ending.endswith("xz") else gzip).open(path, "rt") as file:
        lines = file.read().splitlines()
    head, first = json.loads(lines[0]), json.loads(lines[1])
    assert head["family"] == "ladder" and head["problem"]["head_dim"] == 40
    assert head["limits"]["name"] == CARD.name and head["flashgen"] == "0.1.0"
    assert first["outcome"] in ("ok", "launch-failed") and first["variant"].keys() == {
        p.name for p in LADDER.parameters()
    }
    assert path.stat().st_size < 30 * len(space.entries)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def rewritten(path, space, change) -> None:
    """The space's file with its lines changed."""
    write(path, space)
    with lzma.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    path.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in change(lines)).encode()))


def test_variants_that_are_no_more_are_left_out_and_counted(space, tmp_path):
    def age(lines):
        lines[1]["variant"]["gone"] = 3
        lines[2]["variant"]["br"] = 12345
        del lines[3]["variant"]["vec"]
        return lines

    path = tmp_path / "old.jsonl.xz"
    rewritten(path, space, age)
    old = read(path)
    assert old.unknown == 2 and len(old.entries) in (len(space.entries) - 2, len(space.entries) - 3)
    assert all(e.variant in {each.variant for each in space.entries} for e in old.entries)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [], "line 1 does not say"),
        (lambda lines: [{**lines[0], "flashgen_space": 99}], "line 1 does not say"),
        (lambda lines: [{**lines[0], "family": "none"}, *lines[1:]], "none"),
        (lambda lines: [{**lines[0], "limits": {"name": "x"}}], "is no recorded space"),
        (lambda lines: [lines[0]], "holds 0 variants"),
        (lambda lines: [lines[0], 7], "line 2"),
        (lambda lines: [lines[0], {**lines[1], "outcome": "fine"}], "line 2: 'fine'"),
        (lambda lines: [lines[0], {"variant": lines[1]["variant"]}], "line 2: 'outcome' is missing"),
        (
            lambda lines: [lines[0], {**lines[1], "outcome": "ok", "median_ms": -1, "spread": 0}],
            "line 2: median_ms is -1",
        ),
    ],
)
def test_a_file_that_is_none_says_where(space, tmp_path, change, words):
    path = tmp_path / "bad.jsonl.xz"
    rewritten(path, space, change)
    with pytest.raises(FlashgenError, match=words):
        read(path)


def test_files_that_cannot_be_read_or_written(space, tmp_path):
    for path in (tmp_path / "none.jsonl.xz", tmp_path / "plain.json"):
        with pytest.raises(FlashgenError, match=r"cannot be read|ends in"):
            read(path)
    cut = tmp_path / "cut.jsonl.xz"
    write(cut, space)
    cut.write_bytes(cut.read_bytes()[:-40])
    with pytest.raises(FlashgenError, match="cannot be read"):
        read(cut)
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(b"no json\n"))
    with pytest.raises(FlashgenError, match="line 1 is no JSON"):
        read(tmp_path / "text.jsonl.gz")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FlashgenError, match="cannot be written"):
        write(tmp_path / "file" / "space.jsonl.xz", space)


def test_nothing_timed_is_nothing_to_replay(space):
    failed = tuple(e for e in space.entries if e.median_us is None)
    with pytest.raises(FlashgenError, match=f"none of {len(failed)} recorded variants"):
        _ = replace(space, entries=failed).best_us


def test_the_recorded_are_the_catalogue(space):
    catalogue = space.catalogue()
    assert {catalogue.variant(row) for row in range(len(catalogue))} == {e.variant for e in space.entries}
    assert catalogue.num_unseen == len(space.entries)


def trials_of(space: RecordedSpace) -> Trials:
    """The study that such a space was recorded from."""
    about = About(
        problem=space.problem,
        limits=space.limits,
        family=space.family,
        predicted=space.predicted,
        driver=space.driver,
        toolkit=space.toolkit,
        flashgen=space.flashgen,
        seed=0,
        mark="0123abcd",
    )
    now = datetime.datetime.now(datetime.UTC)
    outcomes = [Outcome(variant=e.variant, status=Status.LAUNCH_FAILED, reason="no") for e in space.entries]
    return Trials(about, tuple(Ended(outcome, now) for outcome in outcomes))


def test_a_study_that_was_not_exhaustive_is_not_recorded(space):
    """Two parameters were held; what they leave is whole, and one variant less is not."""
    trials = trials_of(space)
    count = len(space.entries)
    assert len(recorded(trials).entries) == count
    with pytest.raises(FlashgenError, match=rf"{count - 1} of {count} legal variants .* --trials {count}"):
        recorded(replace(trials, ended=trials.ended[1:]))
    with pytest.raises(FlashgenError, match=r"^1 of \d{3,} legal variants"):
        recorded(replace(trials, ended=trials.ended[:1]))


# -- replays ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_ours_find_the_best_sooner_than_chance(space):
    options = ReplayOptions(methods=("gp", "gp:no-prior", "forest", "tpe", "random"), seeds=3, evaluations=30)
    (found,) = replay([("here", space)], options)
    curves = {c.method: c for c in found.curves}
    for c in curves.values():
        assert c.shares.shape == (3, 30)
        assert (np.diff(c.shares, axis=1) >= 0).all() and c.shares.max() <= 1
    assert curves["gp:no-prior"].mean[-1] > curves["random"].mean[-1]
    assert curves["gp"].mean[-1] > 0.99 and np.median(curves["gp"].until()) <= 30
    assert found.allowed == 100 and found.curves[0].at(31) is None
    assert found.rho == pytest.approx(
        spearman(*np.array([(e.median_us, predicted(e)) for e in space.entries if e.median_us]).T)
    )


def test_predicted_times_are_not_held_against_predictions(space):
    """They are the cost model's own: a correlation of 1 would say nothing."""
    entries = tuple(replace(e, median_us=predicted(e)) for e in space.entries)
    guessed = replace(space, predicted=True, entries=entries)
    (found,) = replay([("guessed", guessed)], ReplayOptions(methods=("random",), seeds=1, evaluations=5))
    assert found.rho is None
    assert found.to_dict()["spearman"] is None and found.to_dict()["predicted"] is True
    told = notes(found)[0]
    assert "the cost model's own" in told and "rho" not in told and "correlation" not in told


def predicted(entry: Entry) -> float:
    from flashgen.tuner.predict.prior import prior_of

    return prior_of(PROBLEM, CARD)(entry.variant)


@pytest.mark.thorough
def test_a_replay_is_the_same_again_alone_in_batches_and_on_more_cores(space):
    options = ReplayOptions(methods=("gp", "random"), seeds=2, evaluations=14, batch=6)
    runs = [replay([("a", space)], replace(options, jobs=jobs)) for jobs in (1, 2)]
    for one, other in zip(runs[0][0].curves, runs[1][0].curves, strict=True):
        assert (one.shares == other.shares).all()
    whole = replay([("a", space)], ReplayOptions(methods=("exhaustive",), seeds=1, evaluations=10_000))
    shares = whole[0].curves[0].shares
    assert shares.shape == (1, len(space.entries)) and shares[0, -1] == 1.0


@needs_kernel_tuner
def test_kernel_tuner_replays_the_same_data(space):
    methods = ("random", "kt:genetic_algorithm", "kt:diff_evo")
    (found,) = replay([("here", space)], ReplayOptions(methods=methods, seeds=2, evaluations=40))
    for c in found.curves:
        assert c.shares.shape == (2, 40) and 0.5 < c.mean[-1] <= 1
    # Different starts go different ways.
    assert not (found.curves[1].shares[0] == found.curves[1].shares[1]).all()
    assert {m for m in default_methods() if m.startswith("kt:")}
    with pytest.raises(UsageError, match="no strategy 'genetics'"):
        parse_methods(["kt:genetics"])


def test_methods_that_there_are_not():
    assert parse_methods(["gp", "tpe", "gp"]) == ("gp", "tpe")
    with pytest.raises(UsageError, match="did you mean 'forest'"):
        parse_methods(["forrest"])
    with pytest.raises(UsageError, match="unknown sampler 'tpe:no-prior'"):
        parse_methods(["tpe:no-prior"])


def test_forests_are_compared_where_they_are_installed(monkeypatch):
    assert "forest" in default_methods()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert default_methods()[:2] == ("gp", "gp:no-prior") and "forest" not in default_methods()
    for name in ("forest", "forest:no-prior"):
        with pytest.raises(UsageError, match="pip install scikit-learn"):
            parse_methods([name])
    with pytest.raises(UsageError, match="pip install scikit-learn"):
        parse_sampler("forest")


def test_who_is_ahead_is_told(space):
    def curves(method: str, *steps: float) -> Curves:
        return Curves(method, np.repeat(np.array(steps), 50)[None, :])

    replayed = Replayed(
        "here", space, 0.81, (curves("gp", 0.98, 0.99, 0.99, 1.0), curves("tpe", 0.9, 0.995, 1.0, 1.0))
    )
    assert replayed.ahead_of("gp") == [(100, "tpe", 0.995, 0.99)]
    told = "\n".join(notes(replayed))
    assert "(Spearman's rho): 0.81" in told
    assert "gp: 97 % in the mean after 1 evaluations, 100 allowed" in told
    assert "ahead of gp: tpe at 100 (99.5 against 99.0 %)" in told


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_plot_is_drawn(space, tmp_path, ending):
    drawn = [
        Replayed("here", space, 0.5, (Curves("gp", np.full((2, 30), 0.9)), Curves("tpe", np.ones((2, 30)))))
    ] * 4
    plot(tmp_path / f"curves.{ending}", drawn)
    start = (tmp_path / f"curves.{ending}").read_bytes()[:200]
    assert start.startswith(b"\x89PNG") or b"<svg" in start or b"<?xml" in start
    console = Console(record=True, width=80)
    show_replays(console, drawn)
    told = console.export_text()
    assert "mean over 4 spaces" in told and "kt:" not in told and "…" not in told


def test_the_command_line(space, tmp_path, monkeypatch):
    write(tmp_path / "space.jsonl.xz", space)
    arguments = ["replay", str(tmp_path / "space.jsonl.xz"), "--seeds", "2", "--evaluations", "12"]
    arguments += ["--sampler", "gp", "--sampler", "random", "--jobs", "1"]
    done = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "p.svg")])
    assert done.exit_code == 0, done.output
    assert "Spearman's rho" in done.output and (tmp_path / "p.svg").exists()
    done = CliRunner().invoke(app, [*arguments, "--json"])
    (data,) = json.loads(done.stdout)
    assert [len(m["mean"]) for m in data["methods"]] == [12, 12]
    assert data["variants"] == len(space.entries) > data["timed"]
    wrong = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "p.txt")])
    assert wrong.exit_code == 1 and "ends in .txt" in wrong.output
    assert CliRunner().invoke(app, [*arguments, "--sampler", "nix"]).exit_code == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    missing = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "q.svg")])
    assert missing.exit_code == 1 and "pip install matplotlib" in missing.output
