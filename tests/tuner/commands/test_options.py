"""Options mean the same in all commands, each is declared once, and what any --help shows can be run."""

from __future__ import annotations

import ast
import re
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.tuner.cards.names import limits_named, resolve
from flashgen.tuner.cli import MODULES, Commands
from flashgen.tuner.commands import flags
from flashgen.tuner.errors import FlashgenError, UsageError
from flashgen.tuner.shelf import guess
from flashgen.tuner.shelf.library import shipped_folder

from tests.support.command_line import command_runner

COMMANDS = Commands()
FOLDER = Path(flags.__file__).parent
#: Arguments without which a command is none.
NEEDED = {
    "emit": ["best.cu"],
    "renew": ["out/nvidia_h200"],
    "diff": ["a", "b"],
    "export": ["trials.json"],
    "import": ["trials.json"],
    "record": ["space.jsonl.xz"],
    "replay": ["space.jsonl.xz"],
    "validate": ["best.py"],
}
#: Options of one name that mean something else in another command.
OTHERWISE = {"--limit", "--sampler", "--batch"}


@pytest.fixture
def flashgen(tmp_path, monkeypatch):
    """Runs a command in an empty folder on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    return command_runner()


def options_of(name: str) -> set[str]:
    return {flag for parameter in COMMANDS[name].params for flag in parameter.opts}


def with_option(option: str) -> list[str]:
    return [name for name in MODULES if option in options_of(name)]


def parsed(name: str, *arguments: str) -> dict[str, object]:
    """What a command makes of arguments; exits with 2 where they are wrong."""
    return COMMANDS[name].make_context(name, list(arguments)).params


def test_what_several_commands_know_is_declared_once():
    declared: dict[str, list[str]] = defaultdict(list)
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option":
                names = [each.value for each in node.args if isinstance(each, ast.Constant)]
                for name in filter(lambda each: each.startswith("--"), names):
                    declared[name.partition("/")[0]].append(path.name)
    shapes = {flag for each in flags.SHAPE_OPTIONS.values() for flag in each.flags}
    for name, places in declared.items():
        if name not in OTHERWISE:
            assert len(places) == 1 and name not in shapes, f"{name} is declared in {places}"
        if len(with_option(name)) > 1 and name not in OTHERWISE:
            assert places == ["flags.py"], f"{name} is of {with_option(name)}"


@pytest.mark.parametrize("name", MODULES)
def test_help_fits_and_shows_words_of_its_own(flashgen, name):
    text = flashgen(name, "--help").stdout
    assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text
    assert not re.search(r"<\w+", text), "a type of Python's"
    assert f"Usage: {'flashgen' if name in text else ''}" in text
    # A paragraph's lines are as long as they can be.
    told = text.split("╭")[0].splitlines()
    for line, after in pairwise(told):
        first = after.split()[0] if after.split() else ""
        if line.strip() and first and not line.lstrip().startswith(("Usage", "Example")):
            assert len(f"{line.rstrip()} {first}") > 79, f"broken too early: {line}"


@pytest.mark.parametrize("name", with_option("--dtype"))
def test_what_is_no_value_of_an_option_is_told_with_the_choices(flashgen, name):
    card = ["--device", "h100"] if "--device" in options_of(name) else []
    wrong = [name, *NEEDED.get(name, []), *card, "--dtype", "f61"]
    told = flashgen(*wrong, code=2).stderr
    assert "unknown dtype 'f61'; did you mean 'f16'? (there are f32, f16, bf16, e4m3)" in told
    text = " ".join(flashgen(name, "--help").stdout.replace("│", " ").split())
    assert "Data type: f32, f16, bf16 or e4m3" in text
    filters = name in ("list", "export", "report", "record", "accuracy")
    assert ("64 by default" in text) != filters


def test_a_value_that_no_problem_has_fits_nothing(flashgen):
    for option, value in {"--d": "300", "--batch": "0", "--suite": "lm", "--precision": "tf23"}.items():
        assert value in flashgen("list", option, value, code=2).stderr


@pytest.mark.parametrize("spec", ["h100", "sim:h100", "sm_90", "rtx-3090"])
def test_a_card_by_its_name_is_one_everywhere(spec):
    assert resolve(spec).limits == limits_named(spec)
    assert resolve(spec).predicted and resolve(spec).spec.startswith("sim:")


@pytest.mark.parametrize("name", with_option("--device"))
def test_no_command_knows_a_card_that_others_do_not(flashgen, name, tmp_path):
    if name == "validate":
        flashgen("emit", "best.py", "--device", "gtx-1080", "--d", "32", "--set=br=64", "--family=ladder")
    told = flashgen(name, *NEEDED.get(name, []), "--device", "h300", code=2).stderr
    assert "unknown device 'h300'; did you mean 'h200'?" in told or "did you mean 'h100'?" in told


@pytest.mark.parametrize("text", ["", "gpu", "-1", "²", "sim:", "cuda:x"])
def test_what_is_no_card_is_told_alike(text):
    told = []
    for named in (resolve, limits_named):
        with pytest.raises(UsageError, match="unknown") as error:
            named(text)
        told.append(str(error.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("name", with_option("--causal"))
def test_both_masks_can_be_asked_of_every_command(name):
    for words in (["--causal", "both"], ["--causal=both"]):
        assert parsed(name, *NEEDED.get(name, []), *words)["both_masks"] is True
    assert flags.shapes_of(both_masks=True).causal == (False, True)


def test_several_problems_are_shown_in_turn(flashgen):
    words = ["space", "--device", "gtx-1080", "--family", "ladder", "--limit", "1", "--causal", "both"]
    text = flashgen(*words, "--d", "32").stdout
    assert text.index("d 32, no mask") < text.index("d 32, causal")


def test_the_families_that_help_names_are_those_there_are():
    assert set(flags.FAMILY_NAMES.split(", ")) == set(FAMILIES)


# -- examples ------------------------------------------------------------------------------------------------


def examples() -> list[str]:
    """Every command line that a --help shows, whole; options alone behind their command."""
    found = []
    for name in MODULES:
        for text in re.findall(r"\[bold\](.*?)\[/bold\]", COMMANDS[name].help):
            found.append(text if text.startswith("flashgen ") else f"flashgen {name} {text}")
    return found


@pytest.mark.parametrize("example", examples())
def test_every_example_is_well_formed(example):
    _, name, *words = example.split()
    needed = [] if any(not word.startswith("-") for word in words[:1]) else NEEDED.get(name, [])
    parsed(name, *needed, *words)


def no_compiler(arch: int) -> Any:
    """In the place of what finds one: builds take long."""
    raise FlashgenError(f"no compiler for sm_{arch}")


@pytest.mark.parametrize("name", ["space", "emit", "list", "diff", "draw", "devices"])
def test_the_examples_run(flashgen, name, monkeypatch):
    monkeypatch.setattr(guess, "cuda_toolchain", no_compiler)
    example = next(each for each in examples() if each.split()[1] == name)
    result = flashgen(*example.split()[1:])
    assert "illegal" not in result.output


@pytest.mark.thorough
def test_the_examples_run_in_their_order(flashgen, tmp_path):
    """A new user types what --help shows, command after command, in one folder."""
    shutil.copytree(shipped_folder() / "nvidia_h200", tmp_path / "out" / "nvidia_h200")
    for name in MODULES:
        example = next(each for each in examples() if each.split()[1] == name)
        if name in ("ladder", "bench", "record", "replay", "accuracy"):
            continue  # These need a card, or a space that was tried whole.
        flashgen(*example.split()[1:])
