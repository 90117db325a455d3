"""The pages say what is: links lead somewhere, commands parse, paths exist, tables are those of the code."""

from __future__ import annotations

import ast
import inspect
import re
from datetime import datetime
from pathlib import Path

import pytest
import typer
from flashgen.gen.families import FAMILIES
from flashgen.gen.problem import TOLERANCES
from flashgen.gen.variant import Variant
from flashgen.templates.runtime import Attention
from flashgen.templates.runtime.packed_attention import PackedAttention
from flashgen.templates.runtime.paged_attention import PagedAttention
from flashgen.templates.runtime.scored_attention import ScoredAttention
from flashgen.tuner.bench import figures
from flashgen.tuner.cli import MODULES, app
from flashgen.tuner.shelf import library
from flashgen.tuner.view import bench_markers

from tests.support import ROOT
from tests.support.emulated import needs_compiler
from tests.support.markdown import Page, replaced

README, CONTRIBUTING, CHANGELOG = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))
DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [README, CONTRIBUTING, CHANGELOG, *DOCS, *sorted(ROOT.glob("out/*/README.md"))]
#: Folders of the repository whose files are named in the text; what stands in out/ is a user's.
PATHS = re.compile(r"((?:gen|tuner|templates|tests|docs|\.ci)/[\w./*{},-]*)(?:::(\w+))?")
#: Options of others than flashgen.
OTHERS_OPTIONS = {"--update-golden", "--winners", "--superseded"}
FIRST_SCREEN_LINES = 25
#: What stands behind a fence of code in Python.
PYTHON = (
    "python",
    "python emulated",
    *(f"python signatures{of}" for of in ("", " of masks", " of packed", " of pages")),
)
#: A time or a speed.
FIGURE = re.compile(r"\d (?:ms|us|µs|[TG]FLOP/s|[TG]B/s)\b")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    page = Page(path)
    broken = []
    for link in page.links:
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in Page(target).anchors):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_commands_parse(path: Path) -> None:
    """By the program's own parser: a renamed option, or one of another command, is found here."""
    program = typer.main.get_command(app)
    for words in Page(path).commands():
        name, *arguments = words
        if name.startswith("-"):
            assert name in ("--version", "--help")
            continue
        command = program.commands[name]  # type: ignore[attr-defined]
        if arguments:
            command.make_context(name, list(arguments))


def test_options_in_the_text_are_options_of_some_command() -> None:
    program = typer.main.get_command(app)
    known = {
        option
        for name in MODULES
        for parameter in program.commands[name].params  # type: ignore[attr-defined]
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for path in PAGES:
        for code in Page(path).inline_code:
            if found := re.match(r"--[a-z][a-z-]*", code):
                assert found[0] in known | OTHERS_OPTIONS | {"--help", "--version"}, f"{path.name}: {code}"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_paths_in_the_text_exist(path: Path) -> None:
    for code in Page(path).inline_code:
        for word in code.split():
            found = PATHS.fullmatch(word)
            if found is None or "{" in found[1]:
                continue
            files = list(ROOT.glob(found[1].rstrip("/")))
            assert files, f"{word} does not exist"
            if found[2]:
                assert f"def {found[2]}(" in files[0].read_text(), f"{word}: no such function"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_python_compiles(path: Path) -> None:
    page = Page(path)
    for code in [each for kind in PYTHON for each in page.fenced(kind)]:
        ast.parse(code)


def test_the_readme_is_short_and_begins_with_what_matters() -> None:
    page = Page(README)
    lines = page.text.splitlines()
    assert len(lines) < 250
    first = "\n".join(lines[:FIRST_SCREEN_LINES])
    assert re.search(r"!\[.*\]\(out/bench/\w+\.svg\)", first)
    commands = re.findall(r"^    python3 -m venv .*$", first, re.MULTILINE)
    assert ["flashgen tune" in commands[0], "pytest" in commands[1]] == [True, True]
    for name in ("Install", "Use", "The API", "Limits", "More"):
        assert f"\n## {name}\n" in page.text
    linked = {link.partition("#")[0] for link in page.links}
    missing = {named(each) for each in (*DOCS, CONTRIBUTING, CHANGELOG)} - linked
    assert not {each for each in missing if not each.startswith("docs/examples/")}
    assert "LICENSE" in linked


def test_the_readme_names_every_command() -> None:
    rows = [line for line in Page(README).text.splitlines() if line.startswith("| `flashgen ")]
    told = {word for row in rows for word in re.findall(r"`(?:flashgen )?([a-z]+)", row.split(" | ")[0])}
    assert told == set(MODULES)


def test_figures_older_than_their_kernels_say_so() -> None:
    """Figures come from the committed run: what is tuned anew is to be timed anew with the others, and marked
    until it is."""
    run = figures.read(ROOT / "out" / "bench_nvidia_h200.json")
    folder = ROOT / "out" / "nvidia_h200"
    assert len({row.kernel for row in run.rows if row.ours}) > 50
    for row in run.rows:
        if not row.ours:
            continue
        tuned = datetime.fromisoformat(library.read(folder / f"{row.kernel}.json").kernel.tuned_at)
        is_older = datetime.fromisoformat(row.began or run.began) < tuned
        assert bool(row.tuned_since) == is_older, f"{row.name}: {row.kernel} was tuned at {tuned}"


@pytest.mark.parametrize("path", [each for each in PAGES if each.name != "notebook.md"], ids=named)
def test_figures_are_generated_or_dated(path: Path) -> None:
    """A time or a speed written by hand says of which day it is; the notebook says so of all its own."""
    for paragraph in bench_markers.SECTION.sub("", Page(path).text).split("\n\n"):
        if found := FIGURE.search(paragraph):
            dated = re.search(r"\d+ (November|December) 2026|that day", paragraph)
            assert dated, f"{found[0]}: {paragraph[:200]}"


def test_the_notebook_dates_its_figures() -> None:
    page = Page(ROOT / "docs" / "notebook.md")
    first = page.text.partition("\n## ")[0]
    assert FIGURE.search(page.text) and "November 2026" in first and "NVIDIA\nH200" in first


# -- what is generated, and what must be as the code has it --------------------------------------------------


def parameter_table(family: type[Variant]) -> str:
    """A family's parameters as a table."""
    rows = ["| parameter | values, the default first | what it means |", "|---|---|---|"]
    for each in family.parameters():
        rows.append(f"| `{each.name}` | {', '.join(map(str, each.choices))} | {each.doc} |")
    return "\n".join(rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_family(name: str, request: pytest.FixtureRequest) -> None:
    """Mended by ``pytest tests/docs/test_pages.py --update-golden``."""
    path = ROOT / "docs" / "kernels.md"
    text = path.read_text(encoding="utf-8")
    made = replaced(text, "parameters", name, parameter_table(FAMILIES[name]))
    if request.config.getoption("--update-golden"):
        path.write_text(made, encoding="utf-8")
    else:
        assert made == text


@pytest.mark.parametrize(
    ("name", "kind", "offered"),
    [
        ("emitted-api", "python signatures", Attention),
        ("emitted-api", "python signatures of masks", ScoredAttention),
        ("serving", "python signatures of packed", PackedAttention),
        ("serving", "python signatures of pages", PagedAttention),
    ],
)
def test_signatures_are_those_of_the_runtime(name: str, kind: str, offered: type) -> None:
    (code,) = Page(ROOT / "docs" / f"{name}.md").fenced(kind)
    for function in ast.parse(code).body:
        assert isinstance(function, ast.FunctionDef)
        scope: dict[str, object] = {}
        exec(compile(ast.Module([function], []), "signature", "exec"), scope)
        told = inspect.signature(scope[function.name])  # type: ignore[arg-type]
        have = inspect.signature(getattr(offered, function.name))
        taken = [p for p in have.parameters.values() if p.name != "self"]
        have = have.replace(
            parameters=[p.replace(annotation=p.empty) for p in taken],
            return_annotation=inspect.Signature.empty,
        )
        assert str(told) == str(have), function.name


@needs_compiler
def test_what_a_page_shows_on_an_emulated_card_runs() -> None:
    codes = [code for path in DOCS for code in Page(path).fenced("python emulated")]
    assert codes
    for code in codes:
        exec(compile(code, "page", "exec"), {})


def test_bounds_are_those_of_the_classes() -> None:
    rows = re.findall(r"^\| .* \| `--(dtype|precision) (\w+)`.* \| (\S+) \|$", _accuracy(), re.MULTILINE)
    told = {name: float(bound) for _, name, bound in rows}
    float32 = dict.fromkeys(("f32", "ieee", "3xtf32", "3xf16"), TOLERANCES["f32"])
    assert told == {**TOLERANCES, **float32}


def _accuracy() -> str:
    return (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
