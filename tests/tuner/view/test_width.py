"""What is printed fits eighty columns, and neither numbers nor names are broken."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.tuner.tune.batch import BatchResult
from flashgen.tuner.tune.coordinator import TuneResult, tune
from flashgen.tuner.view.console import SafeConsole
from flashgen.tuner.view.table import Table
from flashgen.tuner.view.tuned import show_batch, show_result
from rich.cells import cell_len
from rich.console import Console

from tests.support import ROOT
from tests.support.command_line import command_runner
from tests.support.stand_ins import StandInEvaluator

WIDTH = 80
LONG = "nvidia_h200/bf16_d128_b1_h32_kv8_n1_m131072"
COMMANDS = [
    "list --dtype bf16",
    f"diff {LONG} nvidia_h200/bf16_d128 --no-source",
    "diff nvidia_h200/f32_d64 nvidia_h200/f32_d128 --no-source",
    "space --device h200 --dtype bf16 --d 128",
    "space --device rtx-3090 --d 64 --set br=64 --set bc=32",
    f"bench --from {ROOT}/out/bench_nvidia_h200.json",
    "draw --causal --window 700,0,5 --sinks",
    "draw --seqlen 30 --softcap 3 --lengths --bias",
    "devices",
]


def check(text: str) -> None:
    wide = [line for line in text.splitlines() if cell_len(line) > WIDTH and line[:1] in "│┃┏┡├└ "]
    assert not wide, "\n".join(wide)
    assert "…" not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_of_commands_fit(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = command_runner()(*command.split()).stdout
    check(text)
    names = [word for word in command.split() if word.startswith("nvidia_h200/")]
    assert all(name in text for name in names)


@pytest.fixture
def result(tune_options) -> TuneResult:
    options = replace(tune_options, trials=12)
    return tune(options, make_evaluator=lambda device: StandInEvaluator())


def test_what_tuning_found_fits(result):
    console = Console(width=WIDTH, file=io.StringIO(), record=True)
    show_result(console, result)
    text = console.export_text(clear=False)
    check(text)
    for name in result.kernel.variant.to_dict():
        assert f"{name}=" in text, "a parameter's name was broken"
    show_batch(console, BatchResult((result, result), {"f32_d40": "no variant works"}, False, Path("m.py")))
    check(console.export_text())


TABLE = Table(
    "a title",
    ("name", "the first figure", "another", "a third one"),
    (("a-name-of-some-length", "12345.678", "0.1", "99999"), ("b", "1", "2", "3")),
    ("A note of several words.",),
    left=1,
)


@pytest.mark.parametrize("width", [120, 60, 45, 38])
def test_a_wide_table_is_printed_in_parts(width):
    console = Console(width=width, file=io.StringIO(), record=True)
    TABLE.print(console)
    text = console.export_text()
    assert max(map(cell_len, text.splitlines())) <= width
    cells = [cell for row in TABLE.rows for cell in row]
    assert all(f" {cell} " in text for cell in cells)
    parts = text.count("a-name-of-some-length")
    assert parts == {120: 1, 60: 1, 45: 2, 38: 3}[width] and text.count("a title") == parts
    assert text.count("(continued)") == parts - 1 and text.rstrip().endswith("A note of several words.")


@pytest.mark.parametrize("terminal", [True, False])
def test_long_lines_are_broken_between_words_on_a_terminal_alone(terminal):
    settings = " ".join(f"parameter_{i}=value" for i in range(12))
    console = SafeConsole(width=WIDTH, file=io.StringIO(), force_terminal=terminal, color_system=None)
    console.print(settings, markup=False, highlight=False, soft_wrap=True)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert (len(lines) > 1) == terminal and " ".join(line.strip() for line in lines) == settings
