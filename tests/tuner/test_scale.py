"""Studies of thousands of trials: what tells of them takes seconds and a few hundred megabytes, and tells of
all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from flashgen.gen.problem import Problem
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.search.ask_tell import Search
from flashgen.tuner.search.sampler_names import SamplerName
from flashgen.tuner.store.studies import open_storage, open_study
from sqlalchemy import event

from tests.support import ROOT
from tests.support.large_studies import FAMILY, LIMITS, PROBLEM, about_of, believable, fill
from tests.support.postgres import postgres_server
from tests.support.stand_ins import LADDER

#: What 20,000 trials may take of a processor and of memory, tenfold less than they once did.
SECONDS, MEGABYTES = 10.0, 500.0
#: How much slower than today's a machine may be: of those seen the slowest takes 1.7 times as long as the
#: fastest, and a neighbour on the same core adds a third.
SLACK = 3.0
#: A file that browsers open at once.
LARGEST_PAGE = 3e6


# -- two thousand trials, in every run -----------------------------------------------------------------------


@pytest.fixture
def mapped(monkeypatch) -> Iterator[list[str]]:
    """The parameters and attributes of trials of which Optuna's mapper made an object."""
    from optuna.storages._rdb.models import TrialParamModel, TrialUserAttributeModel

    found: list[str] = []

    def note(target: object, _context: object) -> None:
        found.append(type(target).__name__)

    for model in (TrialParamModel, TrialUserAttributeModel):
        event.listen(model, "load", note)
    yield found
    for model in (TrialParamModel, TrialUserAttributeModel):
        event.remove(model, "load", note)


def test_two_thousand_trials_are_told_of_without_an_object_of_each_value(flashgen, tmp_path, mapped):
    catalogue = build_catalogue(LADDER, Problem(head_dim=64), LIMITS)
    about = about_of(catalogue)
    where = str(tmp_path / "trials.sqlite3")
    ran = list(believable(catalogue, 2000))
    fill(where, about, ran)
    told = json.loads(flashgen("report", "page.html", "--storage", where, "--json").stdout)
    timed = [each for each in ran if each.us is not None]
    assert told["trials"] == 2000 == sum(told["statuses"].values())
    assert told["statuses"]["ok"] == len(timed)
    assert sum(told["reasons"].values()) == 2000 - len(timed)
    fastest = min(timed, key=lambda each: each.us or 0.0)
    assert told["winner"]["variant"] == fastest.outcome.variant.to_dict()
    page = (tmp_path / "page.html").read_text()
    assert len(page) < LARGEST_PAGE
    # What is left out of a drawing is said.
    assert f"Of {len(timed):,} trials 600 are drawn, evenly chosen" in page
    assert f"Of {len(timed):,} trials a panel draws 240 at most" in page
    flashgen("export", "trials.json", "--storage", where)
    exported = json.loads((tmp_path / "trials.json").read_text())["cache"]
    assert len(exported) == 2000
    flashgen("list", "--storage", where)
    storage = open_storage(where)
    search = Search(catalogue, open_study(storage, where, about.study, {}), sampler=SamplerName.GP)
    assert len(search.earlier) == 2000 and search.best_us == fastest.us
    assert search.catalogue.num_unseen == len(catalogue) - 2000
    # Those of a trial or two, of which a report asks when the last one began, and no more.
    assert len(mapped) < 500


def test_a_small_study_is_drawn_whole(flashgen, tmp_path):
    catalogue = build_catalogue(LADDER, Problem(head_dim=64), LIMITS)
    where = str(tmp_path / "trials.sqlite3")
    fill(where, about_of(catalogue), believable(catalogue, 60))
    flashgen("report", "page.html", "--storage", where)
    assert "are drawn, evenly chosen" not in (tmp_path / "page.html").read_text()


def test_an_export_is_of_the_study_that_was_used_last_and_reads_no_other(flashgen, tmp_path, monkeypatch):
    where = str(tmp_path / "trials.sqlite3")
    for head_dim, count in ((64, 30), (128, 10)):
        catalogue = build_catalogue(LADDER, Problem(head_dim=head_dim), LIMITS)
        fill(where, about_of(catalogue), believable(catalogue, count))
    told = json.loads(flashgen("export", "trials.json", "--storage", where, "--json").stdout)
    # Trials take as long each: that of more ended last.
    assert told["trials"] == 30 and "f32_d64/" in told["study"]
    (other,) = told["others"]
    assert "f32_d128/" in other


# -- twenty thousand, in the thorough run --------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """What a process printed last, and what it took: seconds of a processor and megabytes."""

    told: str
    seconds: float
    megabytes: float


#: Runs a command and prints what it took. A process of its own: Linux counts what the parent held at a fork
#: as the child's, and a test worker may hold more than the command.
MEASURED = """
import json, resource, subprocess, sys
ended = subprocess.run(sys.argv[1:])
took = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([took.ru_utime + took.ru_stime, took.ru_maxrss / 1024]))
sys.exit(ended.returncode)
"""


def spent(*command: str) -> Spent:
    """Runs a Python command to its end."""
    program = [sys.executable, "-c", MEASURED, sys.executable, *command]
    ended = subprocess.run(program, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stdout
    *told, took = ended.stdout.strip().splitlines()
    return Spent(told[-1], *json.loads(took))


@pytest.fixture(
    scope="module", params=["sqlite", "postgresql", pytest.param("journal", marks=pytest.mark.exhaustive)]
)
def large(request, tmp_path_factory) -> Iterator[tuple[str, str]]:
    """A storage of 20,000 trials: its kind and its name."""
    folder = tmp_path_factory.mktemp("large")
    catalogue = build_catalogue(FAMILY, PROBLEM, LIMITS)
    about, ran = about_of(catalogue), believable(catalogue, 20_000)
    if request.param == "postgresql":
        with postgres_server() as url:
            fill(url, about, ran)
            yield request.param, url
    else:
        where = str(folder / {"sqlite": "trials.sqlite3", "journal": "trials.journal"}[request.param])
        fill(where, about, ran)
        yield request.param, where


@pytest.mark.thorough
def test_twenty_thousand_trials_take_seconds_and_little_memory(large, tmp_path):
    kind, where = large
    program = ("-c", "from flashgen.tuner.cli import main; main()")
    rest = ("--storage", where, "--out", str(tmp_path / "out"))
    resumed = ("-m", "tests.support.resumed", where)
    page, exported = tmp_path / "page.html", tmp_path / "trials.json"
    took = {
        "list": spent(*program, "list", *rest),
        "report": spent(*program, "report", str(page), *rest),
        "export": spent(*program, "export", str(exported), *rest),
        "finals": spent(*resumed, "20000", str(tmp_path / "tuned")),
        "finished": spent(*resumed, "20000", str(tmp_path / "tuned")),
        "resumed": spent(*resumed, "20010", str(tmp_path / "tuned")),
    }
    for what, each in took.items():
        print(f"{kind} {what}: {each.seconds:.1f} s, {each.megabytes:.0f} MB")
        assert each.megabytes < MEGABYTES, what
        assert each.seconds < SLACK * (SECONDS / 2 if what == "finished" else SECONDS), what
    assert page.stat().st_size < LARGEST_PAGE and "20000 trials" in page.read_text()
    assert len(json.loads(exported.read_text())["cache"]) == 20_000
    finals, finished = (json.loads(took[name].told) for name in ("finals", "finished"))
    assert (finals["run"], finals["earlier"]) == (0, 20_000) and finals["finals"]
    assert finished == finals | {"finals": 0}
    assert json.loads(took["resumed"].told)["run"] == 10


@pytest.mark.thorough
def test_times_without_number_fit_too(tmp_path: Path):
    """Two hundred times of each trial, as a sweep on a card keeps them."""
    catalogue = build_catalogue(FAMILY, PROBLEM, LIMITS)
    where = str(tmp_path / "trials.sqlite3")
    fill(where, about_of(catalogue), believable(catalogue, 20_000, times=200))
    program = ("-c", "from flashgen.tuner.cli import main; main()")
    for what in (("report", str(tmp_path / "page.html")), ("export", str(tmp_path / "trials.json"))):
        took = spent(*program, *what, "--storage", where, "--out", str(tmp_path / "out"))
        print(f"{what[0]}: {took.seconds:.1f} s, {took.megabytes:.0f} MB")
        assert took.megabytes < MEGABYTES and took.seconds < SLACK * SECONDS
