"""The report: what it tells, that it stands alone, that a study's strings stay strings, how it looks."""

from __future__ import annotations

import inspect
import json
import random
import re
import shutil
from html.parser import HTMLParser
from io import BytesIO
from itertools import pairwise

import numpy as np
import optuna
import pytest
from flashgen.gen.families import family_named
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.space import enumerate_space
from flashgen.tuner.cli import app
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.outcome import Measurement, Outcome, Status
from flashgen.tuner.option_words import word
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.predict.cost_model import predict
from flashgen.tuner.predict.rank_correlation import spearman
from flashgen.tuner.report import gathering
from flashgen.tuner.report.charts.axes import MOST_TICKS, padded
from flashgen.tuner.report.charts.units import Unit
from flashgen.tuner.report.chosen import choose_group, groups_in
from flashgen.tuner.report.gathering import make_report
from flashgen.tuner.report.page import render_html
from flashgen.tuner.report.words import percent
from flashgen.tuner.request import Shapes
from flashgen.tuner.search.importance import FEWEST_OF_A_VALUE, importance, worth_of
from flashgen.tuner.store.studies import OUTCOME, distributions, open_storage, open_study, outcome_to_dict
from optuna.trial import TrialState
from typer.testing import CliRunner

LIMITS = preset("h200")
PROBLEM = Problem(head_dim=32, batch=1, seqlen_q=512, seqlen_k=512)
#: Enough of the large family's space to draw from; the whole of it takes seconds to enumerate.
HELD = {"ladder": {}, "simt": {"threads_per_block": 128, "vec": 4, "unroll": 4, "k_layout": "transposed"}}
SECTIONS = (
    "winner",
    "why",
    "history",
    "importance",
    "parameters",
    "parallel",
    "resources",
    "failures",
    "model",
    "kernel",
)
HOSTILE = "</style></svg><script>alert('x')</script>\"'><img src=x onerror=alert(1)>&amp;"
#: Elements that have no end tag.
VOID = {"meta", "wbr", "br", "img", "input", "link", "hr"}


def catalogue_of(family_name, problem=PROBLEM, limits=LIMITS):
    return build_catalogue(family_named(family_name), problem, limits, HELD[family_name])


def small_space(family, problem, limits):
    return enumerate_space(family, problem, limits, HELD[family.family])


@pytest.fixture(autouse=True)
def small_spaces(monkeypatch):
    """Spaces that are enumerated at once."""
    monkeypatch.setattr(gathering, "enumerate_space", small_space)


def measured(variant, us):
    return Measurement(
        times_us=(us, us * 1.01, us * 0.99),
        median_us=us,
        spread=0.02,
        tflops=PROBLEM.flops / us / 1e6,
        registers=min(variant.registers(PROBLEM, LIMITS), 255),
        spill_bytes=0,
        smem_bytes=variant.smem_bytes(PROBLEM, LIMITS),
        occupancy=0.5,
        error=5e-7,
    )


def fake_outcomes(family_name, count, *, fail_every=5, noise=0.1, seed=0):
    """Outcomes whose times follow the cost model but for some noise."""
    rng = random.Random(seed)
    catalogue = catalogue_of(family_name)
    found = []
    for i, row in enumerate(rng.sample(range(len(catalogue)), min(count, len(catalogue)))):
        variant = catalogue.variant(row)
        if fail_every and i % fail_every == 0:
            reason = f"{8 * i} bytes of registers spilled to memory, 0 allowed"
            found.append(Outcome(variant=variant, status=Status.SPILLED, reason=reason))
            continue
        us = predict(variant, PROBLEM, LIMITS).median_us * rng.uniform(1 - noise, 1 + noise)
        found.append(Outcome(variant=variant, status=Status.OK, measurement=measured(variant, us)))
    return found


def add_study(storage, family_name, outcomes, mark="0123abcd", slug="h200", **about):
    family = family_named(family_name)
    name = f"{slug}/{PROBLEM.name}/{family_name}/{mark}"
    known = {
        "slug": slug,
        "device": LIMITS.name,
        "driver": "580",
        "limits": LIMITS.to_dict(),
        "predicted": False,
        "toolkit": "nvcc 13.0",
        "problem": PROBLEM.to_dict(),
        "family": family_name,
        "flashgen": "0.1.0",
        "seed": 0,
        **about,
    }
    study = open_study(storage, "memory", name, known)
    for outcome in outcomes:
        trial = study.ask(fixed_distributions=dict(distributions(family)))
        trial.set_user_attr("origin", "random")
        trial.set_user_attr(OUTCOME, outcome_to_dict(outcome))
        if outcome.measurement is not None:
            study.tell(trial, outcome.measurement.median_us)
        else:
            study.tell(trial, state=TrialState.PRUNED)
    return name


def report_on(storage, tmp_path, **options):
    group = choose_group(groups_in(storage, "memory"), "memory", shapes=Shapes(), **options)
    return make_report(storage, "memory", group, out=tmp_path)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a study of two families."""
    storage = optuna.storages.InMemoryStorage()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "enumerate_space", small_space)
        add_study(storage, "ladder", fake_outcomes("ladder", 30))
        add_study(storage, "simt", fake_outcomes("simt", 40, seed=1))
        return render_html(report_on(storage, tmp_path_factory.mktemp("none")))


class Elements(HTMLParser):
    """Every start tag with its attributes; complains of end tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


def words_of(page: str) -> str:
    return re.sub(r"\s+", " ", "".join(Elements(page).words))


def test_has_every_section_and_stands_alone(page):
    elements = Elements(page)
    assert not elements.open
    assert [a["id"] for tag, a in elements.found if tag == "section"] == list(SECTIONS)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in elements.found:
        assert not any(name.startswith("on") for name in attributes), tag
        assert "src" not in attributes and "xlink:href" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in page
    assert len(page) < 2_000_000


def test_is_accessible(page):
    elements = Elements(page).found
    drawings = [a for tag, a in elements if tag == "svg"]
    assert len(drawings) > 15
    assert all(a["role"] == "img" and len(a["aria-label"] or "") > 10 for a in drawings)
    tables = sum(tag == "table" for tag, _ in elements)
    assert tables == sum(tag == "caption" for tag, _ in elements) > 4
    assert sum(tag == "h1" for tag, _ in elements) == 1
    levels = [int(tag[1]) for tag, _ in elements if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_tells_why_it_wins_and_what_was_removed(page):
    words = words_of(page)
    assert "alone would take" in words and "by the cost model's count" in words
    assert "blocks per SM" in words and "bound by" in words
    assert "Spearman's rho" in words and "its first choice costs" in words
    removed = catalogue_of("ladder").removed
    assert removed and all(f"{count:,}" in words for count in removed.values())
    assert "bytes of registers spilled to memory" in words
    assert "flashgen emit best.cu --preset h200 --d 32 --batch 1 --seqlen 512" in words
    assert "__global__" in words and "faster half" in words


def test_says_how_much_of_the_cards_peak_the_winner_reaches(tmp_path):
    """H200: 132 SMs x 4096 FLOPs x 1830 MHz of its tensor cores, a third of it for float32 of three parts."""
    storage = optuna.storages.InMemoryStorage()
    add_study(storage, "ladder", fake_outcomes("ladder", 9))
    add_study(storage, "simt", fake_outcomes("simt", 9))
    report = report_on(storage, tmp_path)
    assert report.peak is not None and report.winner is not None
    assert report.peak.tflops == pytest.approx(132 * 4096 * 1.83e-3 / 3)
    share = report.winner.measurement.tflops / report.peak.tflops
    assert report.to_dict()["winner"]["peak_share"] == pytest.approx(share)
    words, told = words_of(render_html(report)), percent(share).replace("\xa0", " ")
    assert f"{told} of the card's 330 (tensor cores, three products of f16 for one)" in words
    assert "of the card's peak" in words and "of the card's 4,800" in words


def test_the_fastest_trials_are_told_by_what_differs_from_the_winner(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    add_study(storage, "ladder", fake_outcomes("ladder", 9, fail_every=0))
    report = report_on(storage, tmp_path)
    assert report.winner is not None
    page = render_html(report)
    told = [
        " ".join(cell.split()) for cell in re.findall(r'<td class="settings">(.*?)</td>', page, re.DOTALL)
    ]
    fastest = sorted(report.timed, key=lambda trial: trial.median_us or 0)
    own = report.winner.variant.to_dict()
    expected = [
        " ".join(f"{k}={word(v)}" for k, v in trial.variant.to_dict().items() if v != own[k])
        for trial in fastest
    ]
    assert told == ["the winner", *expected[1:]] and all(expected[1:])


def test_the_source_lies_folded(page):
    """Hundreds of lines: a tap away."""
    assert re.search(
        r'<details>\s*<summary>\d{3,} lines of CUDA C\+\+, [^<]*</summary>\s*<pre class="code"', page
    )
    assert page.count("__global__") >= 1


def test_what_few_trials_cannot_tell_is_marked(tmp_path):
    """A value that was timed once is worth nothing certain; an importance from two dozen is a hint."""
    storage = optuna.storages.InMemoryStorage()
    outcomes = fake_outcomes("ladder", 24, fail_every=0)
    add_study(storage, "ladder", outcomes)
    report = report_on(storage, tmp_path)
    assert report.winner is not None
    told = [worth for worth in report.winner.worth if worth.rival is not None]
    for worth in told:
        having = sum(getattr(o.variant, worth.name) == worth.value for o in outcomes)
        others = sum(getattr(o.variant, worth.name) == worth.rival for o in outcomes)
        assert (worth.trials, worth.rival_trials) == (having, others)
        assert worth.is_chance == (min(having, others) < FEWEST_OF_A_VALUE)
    chances = [worth.is_chance for worth in told]
    assert any(chances) and not all(chances) and chances == sorted(chances)
    page = render_html(report)
    words = words_of(page)
    assert words.count("too few to say") == page.count('class="chance"') == sum(chances)
    assert "From 24 timed trials alone, of which the fastest tenth is 2: a hint." in words
    many = importance(*zip(*((o.variant, o.measurement.median_us) for o in outcomes * 5), strict=True))
    assert many is not None and not many.is_rough


def test_hostile_strings_stay_strings(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    outcomes = fake_outcomes("ladder", 8, fail_every=0)
    outcomes.append(Outcome(variant=outcomes[0].variant, status=Status.WRONG, reason=HOSTILE))
    about = {"device": HOSTILE, "toolkit": HOSTILE, "driver": HOSTILE, "flashgen": HOSTILE, "seed": HOSTILE}
    add_study(storage, "ladder", outcomes, mark=HOSTILE.replace("/", ""), **about)
    study = optuna.load_study(study_name=storage.get_all_studies()[0].study_name, storage=storage)
    trial = study.ask()
    trial.set_user_attr("origin", HOSTILE)
    trial.set_user_attr(OUTCOME, outcome_to_dict(outcomes[1]))
    study.tell(trial, 1.0)
    page = render_html(report_on(storage, tmp_path))
    elements = Elements(page)
    assert not elements.open
    assert not {"script", "img"} & {tag for tag, _ in elements.found}
    assert "<script" not in page
    assert HOSTILE in "".join(elements.words)


def test_a_variant_of_an_older_version_has_defaults(tmp_path):
    """A parameter that came later is missing from what was stored; a value that is gone cannot be read."""
    storage = optuna.storages.InMemoryStorage()
    outcomes = fake_outcomes("ladder", 6, fail_every=0)
    name = add_study(storage, "ladder", outcomes)
    study = optuna.load_study(study_name=name, storage=storage)
    older, gone = outcome_to_dict(outcomes[0]), outcome_to_dict(outcomes[1])
    older["variant"].popitem()
    gone["variant"] = {**gone["variant"], "bc": 12345}
    for data in (older, gone):
        trial = study.ask()
        trial.set_user_attr(OUTCOME, data)
        study.tell(trial, data["measurement"]["median_us"])
    told = report_on(storage, tmp_path)
    assert len(told.trials) == 7
    assert told.families[0].unreadable == 1
    assert "1 trial of ladder with values that this version does not know is left out" in words_of(
        render_html(told)
    )


@pytest.mark.parametrize("failures", [0, 7])
def test_says_so_where_nothing_works(tmp_path, failures):
    storage = optuna.storages.InMemoryStorage()
    outcomes = [
        Outcome(variant=o.variant, status=Status.COMPILE_FAILED, reason="error: no such thing")
        for o in fake_outcomes("ladder", failures, fail_every=0)
    ]
    add_study(storage, "ladder", outcomes)
    told = report_on(storage, tmp_path)
    page = render_html(told)
    words = words_of(page)
    assert [a["id"] for tag, a in Elements(page).found if tag == "section"] == list(SECTIONS)
    assert told.winner is None
    if failures:
        assert "Nothing works: none of the 7 variants tried" in words
        assert "compile-failed: error: no such thing" in words
        assert "No trial was timed: all of them failed." in words
    else:
        assert "No trial has ended yet, so there is no winner." in words


@pytest.mark.parametrize("count", [1, 2])
def test_few_trials_make_a_page(tmp_path, count):
    storage = optuna.storages.InMemoryStorage()
    add_study(storage, "ladder", fake_outcomes("ladder", count, fail_every=0))
    words = words_of(render_html(report_on(storage, tmp_path)))
    assert "too few trials with times to tell what matters" in words
    assert "no run has timed the finalists in turns yet" in words


def test_predictions_are_called_so(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    add_study(storage, "ladder", fake_outcomes("ladder", 5), slug="sim_h200", predicted=True)
    words = words_of(render_html(report_on(storage, tmp_path)))
    assert "predicted, not measured" in words
    assert "there is no measurement to hold it to" in words


# -- which study -----------------------------------------------------------------------------------------


def test_studies_by_other_compilers_and_cost_models_are_groups_of_their_own():
    storage = optuna.storages.InMemoryStorage()
    first = {"slug": "sim_h200", "predicted": True}
    makers = [{}, {"toolkit": "nvcc 13.1"}, {"flashgen": "0.2.0", "identity": "1f" * 8, "cost_model": 2}]
    for i, each in enumerate(makers):
        add_study(storage, "ladder", [], mark=f"{i}", **{**first, **each})
    # Resumed, a study says what version 0.1.0 did not say; it stays beside those that it was beside.
    add_study(storage, "simt", [], mark="r", **first, identity="2e" * 8, cost_model=1)
    members = [{name.rpartition("/")[2] for name in g.names} for g in groups_in(storage, "memory")]
    assert sorted(map(sorted, members)) == [["0", "r"], ["1"], ["2"]]


def test_families_of_one_problem_are_one_group():
    storage = optuna.storages.InMemoryStorage()
    outcomes = fake_outcomes("ladder", 2, fail_every=0)
    add_study(storage, "ladder", outcomes, mark="old")
    add_study(storage, "ladder", outcomes, mark="new")
    add_study(storage, "simt", [], mark="new")
    storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], "somebody else's")
    groups = groups_in(storage, "memory")
    new, old = groups
    assert {name.split("/", 2)[2] for name in new.names} == {"ladder/new", "simt/new"}
    assert [name.split("/", 2)[2] for name in old.names] == ["ladder/old"]
    assert choose_group(groups, "memory", study=old.names[0], shapes=Shapes()) == old
    assert choose_group(groups, "memory", study=new.label, shapes=Shapes()) == new
    assert choose_group(groups, "memory", shapes=Shapes(head_dim=(32,)), card="nvidia_h200") == new
    with pytest.raises(FlashgenError, match="did you mean"):
        choose_group(groups, "memory", study=groups[0].label[:-1], shapes=Shapes())
    with pytest.raises(FlashgenError, match=r"no study of --dtype bf16 --d 64; there are h200/"):
        choose_group(groups, "memory", shapes=Shapes(dtype=("bf16",), head_dim=(64,)))
    with pytest.raises(FlashgenError, match="on the emulated h200"):
        choose_group(groups, "memory", shapes=Shapes(), card="h200", emulated=True)


@pytest.fixture
def flashgen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    apart = "mix_stderr" in inspect.signature(CliRunner.__init__).parameters
    runner = CliRunner(mix_stderr=False) if apart else CliRunner()  # pyright: ignore[reportCallIssue]

    def run(*arguments: str, code: int = 0):
        result = runner.invoke(app, ["report", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run


def test_command_writes_the_page_beside_the_kernel(flashgen, tmp_path):
    add_study(open_storage("out/tuning.sqlite3"), "ladder", fake_outcomes("ladder", 6))
    told = json.loads(flashgen("--json").stdout)
    file = tmp_path / "out" / "h200" / f"{PROBLEM.name}.html"
    assert told["target"] == str(file.relative_to(tmp_path)) and file.exists()
    assert told["winner"]["family"] == "ladder" and told["families"]["ladder"]["trials"] == 6
    assert "wrote best.html" in flashgen("best.html", "--d", "32", "--device", "h200").stdout
    assert "flashgen report" in flashgen("--help").stdout


def test_command_errors_name_the_way_out(flashgen, tmp_path):
    assert "flashgen tune --device 0 --d 64" in flashgen(code=1).stderr
    assert not (tmp_path / "out").exists()
    assert "name the file .html" in flashgen("content.pdf", code=2).stderr
    assert "leave --device" in flashgen("--study", "x", "--d", "64", code=2).stderr
    open_storage("empty.sqlite3")
    assert "holds no study" in flashgen("--storage", "empty.sqlite3", code=1).stderr


# -- figures ---------------------------------------------------------------------------------------------


def test_spearman_counts_ranks():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert spearman(np.array([1.0, 2.0, 3.0, 4.0]), np.array([4.0, 3.0, 2.0, 1.0])) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9486833)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 3]) == pytest.approx(8 / 9)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2], [1, 2]) is None


def test_what_matters_is_found():
    """Times that depend on one parameter alone."""
    variants = [o.variant for o in fake_outcomes("ladder", 40, fail_every=0)]
    times = [100.0 * (1 + variant.to_dict()["bc"]) for variant in variants]
    found = importance(variants, times)
    assert found is not None
    assert next(iter(found.shares)) == "bc" and found.shares["bc"] > 0.8
    best = min(variants, key=lambda v: v.to_dict()["bc"])
    first = worth_of(best, variants, times)[0]
    assert first.name == "bc" and first.loss is not None and first.loss > 0.3


@pytest.mark.parametrize("ends", [(1, 1.01), (0.9, 2.2), (5, 900), (67.2, 191), (1000, 1e6), (0.001, 0.0012)])
def test_axes_have_a_few_round_ticks(ends):
    axis = padded(ends, 0, 100, log=True)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= MOST_TICKS
    assert all(axis.low <= tick <= axis.high for tick in ticks)
    assert not any("e" in Unit("us", 1.0).tick(tick) for tick in ticks)


# -- how it looks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    """A Chromium: the one that is installed, or Playwright's own."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright and a Chromium")
    pytest.importorskip("PIL", reason="needs Pillow to look at screenshots")
    installed = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()


#: What is wrong on a page, as its browser sees it: texts of a drawing that touch, what scrolls sideways, and
#: tables that leave the room beside them empty.
TOUCHING = """[...document.querySelectorAll('svg')].filter(e => e.getClientRects().length).flatMap(svg => {
    const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()])
    const touch = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3
    return texts.flatMap(([words, box], i) =>
        texts.slice(i + 1).filter(other => touch(box, other[1])).map(other => [words, other[0]]))
})"""
CLIPPED = """[...document.querySelectorAll('.command, .box')].filter(e => e.getClientRects().length)
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.trim().slice(0, 40))"""
HALF_EMPTY = """[...document.querySelectorAll('table')].filter(table => {
    const pair = table.closest('.pair'), around = pair || table.closest('section')
    const columns = pair ? getComputedStyle(pair).gridTemplateColumns.split(' ').length : 1
    const room = around.getBoundingClientRect().width - (pair ? 40 : 90)
    return table.getBoundingClientRect().width < 0.95 * room / columns || around.children.length < columns
}).map(table => table.caption.textContent)"""


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_looks_right(page, browser, tmp_path, width):
    from PIL import Image

    file = tmp_path / "content.html"
    file.write_text(page, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 800})
    shown = context.new_page()
    troubles: list[str] = []
    shown.on("console", lambda message: troubles.append(message.text))
    shown.on("request", lambda request: troubles.append(request.url))
    shown.goto(file.as_uri())
    assert troubles == [file.as_uri()]
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    small = shown.evaluate(
        "[...document.querySelectorAll('nav a, summary')].filter(e => e.getBoundingClientRect().height < 44)"
        ".map(e => e.textContent)"
    )
    assert small == []
    shown.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    drawings = [each for each in shown.query_selector_all("svg") if each.is_visible()]
    assert len(drawings) > 10
    boxes = {each.get_attribute("aria-label"): each.bounding_box() for each in drawings}
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes.values())
    for scheme in ("light", "dark"):
        shown.emulate_media(color_scheme=scheme)
        whole = Image.open(BytesIO(shown.screenshot(full_page=True))).convert("RGB")
        lightness = sum(whole.getpixel((2, 2))) / 3
        assert lightness > 200 if scheme == "light" else lightness < 60
        for what, box in boxes.items():
            left, top = round(box["x"]), round(box["y"])
            region = whole.crop((left, top, left + round(box["width"]), top + round(box["height"])))
            colours = region.getcolors(maxcolors=1 << 20)
            assert box["height"] > 20 and (colours is None or len(colours) > 8), what
    beyond = shown.evaluate(
        """[...document.querySelectorAll('svg text')].filter(text => text.getClientRects().length)
        .filter(text => {
            const t = text.getBoundingClientRect(), s = text.ownerSVGElement.getBoundingClientRect();
            return t.left < s.left - 2 || t.right > s.right + 2
        })
        .map(text => text.textContent)"""
    )
    assert beyond == []
    assert shown.evaluate(TOUCHING) == []
    assert shown.evaluate(CLIPPED) == []
    assert shown.evaluate(HALF_EMPTY) == []
    context.close()
