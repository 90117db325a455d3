"""New runs of some suites put beside what was measured before, by one command: JSON, tables and plots, by
figures made up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.tuner.bench import figures
from flashgen.tuner.bench.ceilings import Ceilings
from flashgen.tuner.bench.figures import OURS, OURS_SAME_BITS, BenchRun, Cell, Row
from flashgen.tuner.cli import app
from flashgen.tuner.shelf import library
from flashgen.tuner.suites import SUITES, Workload
from flashgen.tuner.view.bench_markers import SECTION
from typer.testing import CliRunner

from tests.support import ROOT

SHIPPED = ROOT / "out" / "bench_nvidia_h200.json"
PAGES = ("README.md", "docs/emitted-api.md", "out/nvidia_h200/README.md")
NEW = ("varlen", "few", "paged", "mla", "backward", "masks", "eight")
BEGAN = "2030-01-02T03:04:05+00:00"
#: Others, and how many times longer they take on all but the first row of a suite, where they take half.
RIVALS = {"fa3": 1.25, "fa4": 1.5}


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def row(workload: Workload, first: bool) -> Row:
    """flashgen at 400 TFLOP/s of a problem, or at 4 TB/s where bytes take longer, at 1500 MHz."""
    p = workload.problem
    ms = max(p.flops / 400e9, p.min_bytes / 4e9)
    cells = {OURS: Cell(ms=ms, spread=0.01, repeats=40, clock_mhz=1500, error=2e-3)}
    others = RIVALS if p.dtype != "f32" else {"mem-eff": 3.0}
    cells |= {
        name: Cell(ms=ms * (0.5 if first else times), repeats=40, ours_ms=ms, clock_mhz=1500, error=2e-3)
        for name, times in others.items()
    }
    if p.backward and p.dtype != "f32":
        cells |= {OURS_SAME_BITS: Cell(ms=1.1 * ms), "fa4-det": Cell(ms=1.65 * ms, ours_ms=ms)}
    return Row(
        name=workload.name, problem=p, kernel="k", family="f", exact=True, cells=cells,
        peak_tflops=989.0, peak_mhz=1830,
    )  # fmt: skip


def new_run(began: str, *suites: str) -> BenchRun:
    return BenchRun(
        device="NVIDIA H200",
        arch=90,
        driver="580",
        toolkit="nvcc 13.0",
        flashgen="0.2.0",
        began=began,
        libraries={"torch": "9.9", "flash-attn-3": "3.0"},
        ceilings=Ceilings({"gemm_bf16": 500e12, "ffma": 50e12, "ex2": 2e12, "copy": 3e12}, {}),
        rows=tuple(
            row(each, first=not i) for name in suites for i, each in enumerate(SUITES[name].workloads)
        ),
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy of what the command reads and writes."""
    for name in (*PAGES, "out/bench_nvidia_h200.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def merge(files: Path, *runs: Path) -> str:
    kept = files / "out" / "bench_nvidia_h200.json"
    given = [word for run in (kept, *runs) for word in ("--from", str(run))]
    pages = [word for name in PAGES for word in ("--readme", str(files / name))]
    return invoke(*given, "--to", str(kept), *pages, "--plots", str(files / "out" / "bench"))


def table_of(page: str, marker: str) -> list[str]:
    return next(found[0] for found in SECTION.finditer(page) if found[2] == marker).splitlines()


def test_the_page_of_tables_has_a_place_for_every_suite() -> None:
    page = (ROOT / PAGES[-1]).read_text(encoding="utf-8")
    asked = {word for found in SECTION.finditer(page) for word in found[2].split()}
    assert set(SUITES) <= asked and {f"../bench/{name}" for name in NEW} <= asked


def test_the_command_is_told_as_it_is_run() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    flashgen bench --from \S+ --from .*$", text, re.MULTILINE)
    assert line.split()[2:] == [
        *("--from", "out/bench_nvidia_h200.json", "--from", "new.json", "--to", "out/bench_nvidia_h200.json"),
        *(word for name in PAGES for word in ("--readme", name)),
        *("--plots", "out/bench"),
    ]


def test_figures_of_kernels_tuned_since_are_marked(files: Path) -> None:
    """Of whatever run: the library says when the kernel that serves a row was tuned."""
    kernel, name = "f32_d128", "f32-d128-4096"
    tuned = library.read(ROOT / "out" / "nvidia_h200" / f"{kernel}.json").kernel.tuned_at
    for began, marked in (("2026-01-01T00:00:00+00:00", True), (tuned, False), (BEGAN, False)):
        run = new_run(began, "fp32")
        rows = tuple(replace(r, kernel=kernel) if r.name == name else r for r in run.rows)
        figures.write(files / "run.json", replace(run, rows=rows))
        invoke(
            "--from",
            str(files / "run.json"),
            "--to",
            str(files / "to.json"),
            "--readme",
            str(files / PAGES[-1]),
        )
        found = figures.read(files / "to.json").row(name)
        assert found and found.tuned_since == (tuned if marked else "")
        table = table_of((files / PAGES[-1]).read_text(encoding="utf-8"), "gpt2 fp32")
        assert sum("†" in line for line in table) == (2 if marked else 0)
        assert not marked or f"not yet timed beside others: {name}." in "\n".join(table)


def test_new_suites_stand_beside_the_old_in_json_tables_and_plots(files: Path) -> None:
    night, morning = files / "night.json", files / "morning.json"
    figures.write(night, new_run("2030-01-01", "varlen", "few", "paged"))
    figures.write(morning, new_run(BEGAN, "mla", "backward", "masks", "eight"))
    before, page_before = figures.read(SHIPPED), (files / PAGES[-1]).read_text(encoding="utf-8")
    told = merge(files, night, morning)
    assert "▼ 1 of " in told

    both = figures.read(files / "out" / "bench_nvidia_h200.json")
    assert [r.name for r in both.rows] == [w.name for s in SUITES.values() for w in s.workloads]
    began = {suite: {r.began for r in rows} for suite, rows in figures.by_suite(both.rows).items()}
    assert began["varlen"] == {"2030-01-01"} and began["masks"] == {""} and both.began == BEGAN
    # What was measured before is as it was, under the ceilings of its day; what was measured anew is new.
    for suite in ("llm", "odd", "decode", "fp32"):
        for name in SUITES[suite].problems:
            old, now = before.row(name), both.row(name)
            assert old and now and now.cells == old.cells and now.scaled == old.scaled
            assert now.of_roofline(both.ceilings) == old.of_roofline(before.ceilings)
        assert began[suite] == {r.began or before.began for r in figures.by_suite(before.rows)[suite]}
    assert not any(r.scaled for r in figures.by_suite(both.rows)["masks"])

    page = (files / PAGES[-1]).read_text(encoding="utf-8")
    assert "Not timed yet" not in page
    for marker in ("llm", "odd", "decode", "gpt2 fp32", "report"):
        assert table_of(page, marker) == table_of(page_before, marker), marker
    for suite in NEW:
        lines = table_of(page, suite)
        assert sum(line.startswith(("| bf16", "| f16", "| f32", "| e4m3")) for line in lines) == len(
            SUITES[suite].workloads
        )
        first = SUITES[suite].workloads[0].name
        (behind,) = (line for line in lines if line.startswith("**▼ Behind on 1 of "))
        assert f"{first} (fa3 ▼ 0.50, fa4 ▼ 0.50)" in behind
        assert "scaled" not in "".join(lines) and "| ▲ 1.25 |" in "".join(lines)
        assert f"![{suite}, NVIDIA H200](../bench/{suite}.svg)" in page
        drawn = (files / "out" / "bench" / f"{suite}.svg").read_text(encoding="utf-8")
        assert drawn.startswith("<?xml") and (files / "out" / "bench" / f"{suite}.png").exists()
    varlen = table_of(page, "varlen")
    assert "SM MHz | peak | peak at SM MHz | of roofline" in varlen[1] and "| 1500 | 989 | 811 |" in varlen[3]
    assert "TB/s" in table_of(page, "few")[1] and "TFLOP/s" not in table_of(page, "few")[1]
    assert "flashgen-det" in table_of(page, "backward")[1]
    summary = table_of((files / "README.md").read_text(encoding="utf-8"), "summary")
    assert [line.split(" | ")[0] for line in summary[3:-3]] == [f"| {name}" for name in SUITES]
    about = table_of((files / "README.md").read_text(encoding="utf-8"), "about")[1]
    assert f"{before.began} and {sorted({r.began for r in before.rows} - {''})[0]}" not in about
    # Of the runs before those are told of which some row is left.
    left = {each for suite in began.keys() - set(NEW) for each in began[suite]}
    assert about.endswith(" and ".join([*sorted(left), "2030-01-01", BEGAN]))


def test_the_same_run_twice_changes_nothing_and_a_stopped_one_takes_nothing_away(files: Path) -> None:
    new = files / "new.json"
    figures.write(new, new_run(BEGAN, *NEW))
    merge(files, new)
    kept = {path: path.read_bytes() for path in sorted(files.rglob("*")) if path.is_file()}
    merge(files, new)
    assert {path: path.read_bytes() for path in sorted(files.rglob("*")) if path.is_file()} == kept
    # As it is kept while it goes on: rows whose turn never came.
    over = {OURS: Cell(reason="the 9 minutes were over")}
    stopped = new_run("2030-01-03", "few", "mla")
    rows = (stopped.rows[0], *(replace(each, cells=over) for each in stopped.rows[1:]))
    figures.write(new, replace(stopped, rows=rows))
    merge(files, new)
    both = json.loads((files / "out" / "bench_nvidia_h200.json").read_text(encoding="utf-8"))
    few = [each for each in both["rows"] if each["name"] in SUITES["few"].problems]
    assert all("ms" in each["cells"][OURS] for each in few)
    assert [each["began"] for each in few] == ["", *[BEGAN] * (len(few) - 1)]


def test_libraries_of_another_day_are_scaled_beside_a_new_run(files: Path) -> None:
    """In the same command: FlashAttention-3 where the new run had FlashAttention-4 alone."""
    name = SUITES["varlen"].workloads[0].name
    there = {"rows": [{"section": "varlen", "name": name, "ms": {"fa4": 2.0, "fa3": 1.0}}]}
    (files / "there.json").write_text(json.dumps(there))
    run = new_run(BEGAN, "varlen")
    alone = tuple(
        replace(each, cells={n: cell for n, cell in each.cells.items() if n != "fa3"}) for each in run.rows
    )
    figures.write(files / "new.json", replace(run, rows=alone))
    kept = files / "out" / "bench_nvidia_h200.json"
    page = files / PAGES[-1]
    invoke(
        *("--from", str(kept), "--from", str(files / "new.json"), "--to", str(kept)),
        *("--reference", str(files / "there.json"), "--readme", str(page)),
    )
    both = figures.read(kept)
    found = both.row(name)
    assert found and found.scaled["fa3"] == pytest.approx(found.ms("fa4") / 2)  # type: ignore[operator]
    # The rows of other days keep what they were scaled by.
    assert both.row("bf16-d64-512").scaled == figures.read(SHIPPED).row("bf16-d64-512").scaled  # type: ignore[union-attr]
    lines = "\n".join(table_of(page.read_text(encoding="utf-8"), "varlen"))
    assert "fa3, scaled" in lines and "fa4, scaled" not in lines
    assert "Timed beside flashgen in its run: fa4. In another run, and scaled: fa3." in lines
