"""A benchmark run as tables, Markdown and plots, by figures made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.bench import ceilings, figures
from flashgen.tuner.bench.ceilings import Ceilings, bound_of, build, rates_of
from flashgen.tuner.bench.figures import (
    BEST,
    CUDNN,
    FLASH,
    OURS,
    OURS_16_BITS,
    BenchRun,
    Cell,
    KernelErrors,
    Row,
    by_suite,
)
from flashgen.tuner.bench.reference_times import with_reference
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.suites import SUITES, Workload, workload_named
from flashgen.tuner.view.bench import (
    about,
    errors_table,
    host_table,
    ladder_table,
    row_line,
    show,
    suite_table,
    summary_table,
    tables,
    title_of,
)
from flashgen.tuner.view.bench_markers import SECTION, fill, fill_file, section
from flashgen.tuner.view.bench_overview import overview
from flashgen.tuner.view.bench_plots import bars, panels_of, write_plots
from flashgen.tuner.view.bench_roofline import roofline, spread
from flashgen.tuner.view.table import Table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from tests.support import ROOT

CEILINGS = Ceilings(
    {"gemm_bf16": 700e12, "wgmma_bf16": 950e12, "gemm_f32": 50e12, "ffma": 60e12, "gemm_tf32": 360e12}
    | {"ex2": 3.5e12, "copy": 4e12},
    {"gemm_f16": "out of memory"},
)


def timed(workload: Workload, ours: float, error: float = 1e-3, **others: float) -> Row:
    cells = {OURS: Cell(ms=ours, spread=0.01, repeats=9, error=error)}
    for name, ms in others.items():
        cells[name.replace("_", "-")] = Cell(ms=ms, spread=0.01, repeats=9, ours_ms=ours, error=2 * error)
    return Row(name=workload.name, problem=workload.problem, kernel="k", family="f", exact=True, cells=cells)


def synthetic() -> BenchRun:
    """All suites; figures follow from each workload's FLOPs, so that ratios are the same everywhere."""
    rows = []
    for suite in SUITES.values():
        for workload in suite.workloads:
            ms = workload.problem.flops / 500e9
            if workload.problem.dtype == "f32":
                row = timed(workload, ms, mem_eff=2 * ms, math=3 * ms)
            else:
                row = timed(workload, ms, flash=2 * ms, cudnn=1.25 * ms, math=20 * ms)
            if suite.name == "report":
                steps = {"ladder-4.2.2": Cell(ms=9 * ms, scaled_from=512), "ladder-4.2.10": Cell(ms=4 * ms)}
                row = replace(row, cells=row.cells | steps)
            rows.append(row)
    return BenchRun(
        device="NVIDIA H200",
        arch=90,
        driver="580",
        toolkit="nvcc 13.0",
        flashgen="0.1.0",
        began="2026-11-21T12:00:00+00:00",
        libraries={"torch": "2.11", "cudnn": "91900"},
        ceilings=CEILINGS,
        host_us={"bf16": {OURS: 9.5, "sdpa": 12.25}, "f32": {OURS: 9.25}},
        rows=tuple(rows),
    )


RUN = synthetic()


def column(table: Table, name: str) -> list[str]:
    return [row[table.columns.index(name)] for row in table.rows]


def rows_of(suite: str) -> list[Row]:
    return [row for row in RUN.rows if row.name in SUITES[suite].problems]


# -- figures -------------------------------------------------------------------------------------------------


def test_ratios_are_taken_with_the_time_of_the_same_turns() -> None:
    row = Row(
        name="x",
        problem=Problem(),
        cells={
            OURS: Cell(ms=1.0, error=1e-6),
            "mem-eff": Cell(ms=3.0, ours_ms=1.0, error=2e-6),
            "flex": Cell(ms=2.0, ours_ms=0.5, error=4e-6),
            "cupy": Cell(reason="cupy is not installed"),
        },
    )
    assert row.ratio("flex") == 4.0 and row.ratio("mem-eff") == row.ratio(BEST) == 3.0
    assert row.best == "flex" and row.ratio("cupy") is None and row.ratio("none") is None
    assert row.error_ratio == 0.5


def test_a_suite_is_summed_up_by_geometric_mean_and_least() -> None:
    a, b = SUITES["llm"].workloads[:2]
    found = figures.summary([timed(a, 1.0, flash=2.0), timed(b, 1.0, flash=8.0, cudnn=0.5)], CEILINGS)
    assert found["flash"] == {"geomean": pytest.approx(4.0), "least": 2.0, "workloads": 2, "behind": 0}
    assert found["cudnn"] == {"geomean": 0.5, "least": 0.5, "workloads": 1, "behind": 1}
    assert found[BEST]["least"] == 0.5 and found[BEST]["geomean"] == pytest.approx(1.0)
    assert found["roofline"]["workloads"] == 2


def test_the_roofline_is_bound_by_what_takes_longest() -> None:
    llm = SUITES["llm"].problems
    d64, d128 = (bound_of(llm[name], CEILINGS) for name in ("bf16-d64-4096", "bf16-d128-4096"))
    pairs = 4 * 32 * 4096**2
    assert d64 and d64.resource == "exponentials" and d64.ms == pytest.approx(1e3 * pairs / 3.5e12)
    # 512 FLOPs take longer than one exponential.
    assert d128 and d128.resource == "flops" and d128.ms == pytest.approx(1e3 * pairs / 2 * 512 / 950e12)
    decode = bound_of(SUITES["decode"].problems["dec-8k"], CEILINGS)
    assert decode and decode.resource == "bytes"
    assert decode.ms == pytest.approx(1e3 * SUITES["decode"].problems["dec-8k"].min_bytes / 4e12)
    # Of a causal mask, half is work.
    causal = bound_of(llm["bf16-d128-4096c"], CEILINGS)
    assert causal and causal.ms == pytest.approx(d128.ms / 2, rel=1e-3)
    assert bound_of(Problem(), Ceilings({}, {})) is None


@pytest.mark.parametrize(
    ("precision", "flops"),
    [("auto", 950e12 / 3), ("ieee", 60e12), ("3xtf32", 120e12), ("3xf16", 950e12 / 3), ("tf32", 360e12)],
)
def test_float32_is_bound_by_the_fastest_arithmetic_that_is_exact_enough(precision, flops) -> None:
    assert CEILINGS.flops(Problem(precision=precision)) == flops


def test_another_runs_times_are_scaled_by_cudnns(tmp_path: Path) -> None:
    workload = SUITES["llm"].workloads[0]
    p = workload.problem
    shape = [p.batch, p.num_q_heads, p.num_kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim]
    there = {"sdpa-cudnn": 2.0, "fa3": 1.5, "sdpa-fa2": 4.0, "sdpa-memeff": 9.0}
    path = tmp_path / "there.json"
    rows = [{"dtype": "bf16", "shape": shape, "causal": 0, "ms": there}]
    path.write_text(json.dumps({"device": "NVIDIA H200", "torch": "2.11", "rows": rows}))
    run = replace(RUN, rows=(timed(workload, 0.5, cudnn=1.0, flash=2.0), RUN.rows[0]))
    run = with_reference(run, path)
    # What was timed here is not taken from there.
    assert run.rows[0].scaled == {"fa3": 0.75}
    assert run.rows[0].ratio("fa3") == 1.5 and not run.rows[1].scaled
    assert run.rows[0].best == CUDNN
    table = suite_table("llm", [run.rows[0]], run)
    assert column(table, "fa3, scaled") == ["0.7500"] and column(table, "over fa3, scaled") == ["\u25b2 1.50"]
    assert "there.json (NVIDIA H200, 2.11)" in table.notes[-1]
    assert "over fa3 (scaled) 1.500" in table.notes[1]
    assert table.notes[0] == "Behind on 0 of 1 rows. Behind scaled times on 0 of 1 rows."
    assert (
        table.notes[2] == "Timed beside flashgen in its run: cudnn, flash. In another run, and scaled: fa3."
    )
    path.write_text("{}")
    with pytest.raises(FlashgenError, match="not a table of reference times"):
        with_reference(run, path)


def test_rows_with_masks_are_found_by_name_or_by_what_they_ask_and_scaled_by_whom_both_timed(
    tmp_path: Path,
) -> None:
    problems = SUITES["masks"].problems
    names = ("window128-d64-16384c", "document16-d128-16384c", "softcap30-d128-8192c")
    window, document, softcap = (Workload(name, problems[name]) for name in names)
    dense = Workload("dense", replace(softcap.problem, scoring=Scoring()))
    p = softcap.problem
    shape = [p.batch, p.num_q_heads, p.num_kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim]
    rows = [
        {"section": "masks", "name": window.name, "ms": {"flex": 4.0, "fa3": 2.0, "fa4": 3.0}},
        {"section": "masks", "name": document.name, "ms": {"flex-document": 4.0, "fa4-varlen": 5.0}},
        {"section": "backward", "name": "dense", "ms": {"flex": 1.0, "fa3": 1.0}},
        {
            "dtype": "bf16",
            "shape": shape,
            "causal": 1,
            "scoring": {"softcap": 30.0},
            "ms": {"flex": 4.0, "fa4": 1.0},
        },
    ]
    path = tmp_path / "there.json"
    path.write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    run = replace(RUN, rows=tuple(timed(each, 1.0, flex=2.0) for each in (window, document, softcap, dense)))
    found = with_reference(run, path)
    assert [row.reference for row in found.rows] == [*["there.json (NVIDIA H200)"] * 3, ""]
    # The dense problem of the same shape is another one.
    assert [row.scaled for row in found.rows] == [{"fa3": 1.0, "fa4": 1.5}, {"fa4": 2.5}, {"fa4": 0.5}, {}]
    # In its own turn the other stood beside a flashgen of 0.8 ms, which the table has at 1.0.
    cells = {**run.rows[0].cells, "flex": Cell(ms=2.0, ours_ms=0.8)}
    (row,) = with_reference(replace(run, rows=(replace(run.rows[0], cells=cells),)), path).rows
    assert row.ratio("flex") == 2.5 and row.ratio("fa3") == pytest.approx(1.25)


def test_beside_eight_bits_others_are_scaled_by_their_times_of_sixteen(tmp_path: Path) -> None:
    workload = SUITES["eight"].workloads[0]
    rows = [
        {"dtype": "bf16", "shape": [8, 32, 32, 2048, 2048, 64], "causal": 0, "ms": {"cudnn": 2, "fa3": 1}}
    ]
    path = tmp_path / "there.json"
    path.write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    (row,) = with_reference(replace(RUN, rows=(timed(workload, 0.5, cudnn=0.6),)), path).rows
    assert row.scaled == {"fa3": 0.3}


def test_gradients_are_scaled_by_those_of_others(tmp_path: Path) -> None:
    workload, outputs = SUITES["backward"].workloads[0], SUITES["llm"].workloads[0]
    shape = [32, 32, 32, 512, 512, 64]
    gflop = workload.problem.flops / 1e9
    rows = [
        {"section": "backward", "name": "bf16-d64-512", "ms": {"cudnn": 0.6, "fa3": 0.5}, "gflop": gflop},
        {"dtype": "bf16", "shape": shape, "causal": 0, "ms": {"cudnn": 0.3, "fa3": 0.1}},
    ]
    path = tmp_path / "there.json"
    path.write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    run = replace(RUN, rows=tuple(timed(each, 0.5, cudnn=0.6) for each in (workload, outputs)))
    found = with_reference(run, path).rows
    assert found[0].scaled["fa3"] == pytest.approx(0.5) and found[1].scaled["fa3"] == pytest.approx(0.2)


def test_runs_are_put_together_the_last_first(tmp_path: Path) -> None:
    llm, odd = rows_of("llm"), rows_of("odd")
    newer = replace(llm[0], cells={OURS: Cell(ms=7.0)})
    a, b = replace(RUN, rows=(odd[0], llm[0])), replace(RUN, rows=(newer,), host_us={"f16": {OURS: 1.0}})
    both = figures.merged([a, b])
    assert [row.name for row in both.rows] == [llm[0].name, odd[0].name]  # as the suites have them
    assert both.rows[0].ours == 7.0 and set(both.host_us) == {"bf16", "f32", "f16"}
    with pytest.raises(FlashgenError, match="NVIDIA H200 and A100"):
        figures.merged([a, replace(b, device="A100")])
    path = tmp_path / "run.json"
    figures.write(path, RUN)
    assert figures.read(path) == RUN


def test_rows_of_another_day_keep_the_ceilings_of_theirs(tmp_path: Path) -> None:
    llm, odd = rows_of("llm")[0], rows_of("odd")[0]
    slow = Ceilings({name: rate / 2 for name, rate in CEILINGS.rates.items()}, {})
    old = replace(RUN, rows=(llm, odd), began="2026-11-20", ceilings=slow)
    stopped = replace(odd, cells={OURS: Cell(reason="stopped before its turn")})
    new = replace(RUN, rows=(replace(llm, cells={OURS: Cell(ms=1.0)}), stopped), began="2026-11-23")
    both = figures.merged([old, new])
    # What the second run had no time for is the first's.
    assert [row.began for row in both.rows] == ["", "2026-11-20"] and both.rows[0].ours == 1.0
    share = odd.of_roofline(slow)
    assert both.rows[1].of_roofline(both.ceilings) == share != odd.of_roofline(both.ceilings)
    path = tmp_path / "run.json"
    figures.write(path, both)
    assert figures.read(path) == both and json.loads(path.read_text())["earlier"].keys() == {"2026-11-20"}
    # Whatever is merged later.
    third = figures.merged([both, replace(RUN, rows=(rows_of("masks")[0],), began="2026-11-24")])
    assert third.row(odd.name) == both.rows[1] and third.row(llm.name).ceilings == CEILINGS  # type: ignore[union-attr]
    assert figures.merged([both, new]).rows[0].ceilings is None


def test_runs_of_two_days_say_so_and_what_was_timed_in_one_is_scaled_in_the_other(tmp_path: Path) -> None:
    llm, masks = rows_of("llm")[0], rows_of("masks")[0]
    timed_there = replace(masks, cells={**masks.cells, "fa4": Cell(ms=3.0)})
    night = replace(RUN, rows=(timed_there,), began="2026-11-23", libraries={"flash-attn-4": "4"})
    both = figures.merged([night, replace(RUN, rows=(llm,))])
    assert [row.began for row in both.rows] == ["", "2026-11-23"] and "flash-attn-4" in both.libraries
    assert about(both).endswith(f"{RUN.began} and 2026-11-23") and figures.merged([both]).rows == both.rows
    path = tmp_path / "there.json"
    p = llm.problem
    shape = [p.batch, p.num_q_heads, p.num_kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim]
    ms = {"sdpa-cudnn": 1.0, "fa4": 2.0}
    rows = [
        {"dtype": "bf16", "shape": shape, "causal": 0, "ms": ms},
        {
            "section": "masks",
            "name": masks.name,
            "gflop": masks.problem.flops / 1e9,
            "ms": {**ms, "fa3": 2.0},
        },
    ]
    path.write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    found = with_reference(both, path)
    # The run that timed it has no other time of it, and the summary takes neither for the other.
    assert [list(row.scaled) for row in found.rows] == [["fa4"], ["fa3"]]
    table = summary_table(found)
    over = [[line.partition(" \u25b2")[0] for line in cell.splitlines()] for cell in column(table, "over")]
    assert "fa4 (scaled)" in over[0] and "fa4" not in over[0]
    assert {"fa4", "fa3 (scaled)"} <= {*over[1]} and "fa4 (scaled)" not in over[1]
    # Another reference leaves what it does not know, and what it counted otherwise.
    rows[1]["gflop"] = 2 * masks.problem.flops / 1e9
    path.write_text(json.dumps({"device": "A100", "rows": rows[1:]}))
    assert with_reference(found, path) == found
    # As earlier versions wrote it, with one reference for all.
    data = found.to_dict()
    for row in data["rows"]:
        del row["reference"], row["began"]
    again = BenchRun.from_dict({**data, "reference": "there"})
    assert [row.reference for row in again.rows] == ["there", "there"]


def test_times_on_pages_stand_in_rows_of_their_own_and_unmasked_ones_nowhere(tmp_path: Path) -> None:
    name = "b32-q4-k8192-h32/8-d128"
    names = (name, f"{name}-page16", f"{name}-page128", "b32-q1-k8192-h32/8-d128")
    problems = SUITES["few"].problems | SUITES["paged"].problems
    ms = {"flashgen": 0.25, "cudnn-nomask": 0.5, "fa4-s1": 0.2, "fa4-page16": 0.4, "fa4-page128": 0.3}
    rows = [{"section": "few", "name": names[i], "gflop": None, "ms": ms | {"fa3": 0.1}} for i in (0, 3)]
    path = tmp_path / "there.json"
    path.write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    timed_here = tuple(timed(Workload(each, problems[each]), 1.0, fa4=2.0) for each in names)
    found = with_reference(replace(RUN, rows=timed_here), path)
    assert [row.scaled for row in found.rows] == [{"fa3": 1.0}, {}, {}, {"cudnn": 5.0, "fa3": 1.0}]
    # Those on pages are scaled by who was timed on pages.
    alone = replace(RUN, rows=(timed(Workload(names[1], problems[names[1]]), 1.0, cudnn=1.0), timed_here[1]))
    assert not with_reference(alone, path).rows[0].scaled


# -- tables --------------------------------------------------------------------------------------------------


def test_a_suites_table() -> None:
    rows = rows_of("llm")
    table = suite_table("llm", rows, RUN)
    assert table.columns[:6] == ("workload", OURS, "TFLOP/s", FLASH, CUDNN, "math")
    assert set(column(table, "over flash")) == {"\u25b2 2.00"}
    assert set(column(table, "over best")) == set(column(table, "over cudnn")) == {"\u25b2 1.25"}
    assert set(column(table, "TFLOP/s")) == {"500"} and set(column(table, "of PyTorch's")) == {"0.50"}
    assert column(table, OURS)[6] == f"{rows[6].ours:#.4g}"
    assert table.notes == (
        "Behind on 0 of 36 rows.",
        "Times faster, geometric mean of 36 workloads: over flash 2.000 (least 2.000), over cudnn 1.250 "
        "(least 1.250), over math 20.000 (least 20.000), over the best 1.250 (least 1.250).",
    )


def test_flashgens_own_sixteen_bits_stand_beside_eight() -> None:
    workloads = SUITES["eight"].workloads[:2]
    ours = ((1.0, 1.25), (1.0, 0.8))
    rows = [
        replace(row, cells={**row.cells, OURS_16_BITS: Cell(ms=own, ours_ms=ms, error=1e-4)})
        for each, (ms, own) in zip(workloads, ours, strict=True)
        for row in [timed(each, ms, error=0.05, cudnn=1.5)]
    ]
    table = suite_table("eight", rows, RUN, names=False)
    assert column(table, "dtype") == ["e4m3_eight"] * 2
    assert column(table, OURS_16_BITS) == ["1.250", "0.8000"]
    assert column(table, f"over {OURS_16_BITS}") == column(table, "over best")
    assert column(table, "over best") == ["\u25b2 1.25", "\u25bc 0.80"]
    # The least error of others is not our own.
    assert column(table, "of PyTorch's") == ["0.50"] * 2
    # Ceilings of sixteen bits tell nothing of eight.
    assert "of roofline" not in table.columns and "bound by" not in table.columns
    assert f"{workloads[1].name} (flashgen-bf16 \u25bc 0.80)" in table.notes[0]
    assert any(f"over {BEST} counts" in note for note in table.notes)
    unit, panels = panels_of("eight", rows)
    assert unit == "TFLOP/s" and [p.title for p in panels] == ["head dim 64", "head dim 64, causal"]
    assert all(OURS_16_BITS in values for panel in panels for _, values in panel.groups)


def test_what_was_not_timed_leaves_its_cell_empty_and_the_nearest_kernel_a_star() -> None:
    a, b = rows_of("odd")[:2]
    b = replace(b, exact=False, cells={**b.cells, FLASH: Cell(reason="no"), "fa3": Cell(reason="absent")})
    table = suite_table("odd", [a, b], RUN)
    assert column(table, FLASH)[1] == "" and column(table, OURS)[1].endswith("*")
    assert "fa3" not in table.columns and any(b.name in note for note in table.notes)
    assert "over flash 2.000 (least 2.000, 1 of 2)" in table.notes[1]


def test_who_is_faster_is_marked_as_plainly_as_who_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    workloads = SUITES["llm"].workloads[:4]
    near, ahead, far, alone = (
        timed(each, 1.0, fa4=ms) for each, ms in zip(workloads, (0.9996, 1.25, 0.5, 2.0), strict=True)
    )
    alone = replace(alone, cells={**alone.cells, OURS: Cell(reason="no kernel is known")})
    alone = replace(alone, cells={**alone.cells, "fa4": Cell(ms=2.0)})
    scaled = replace(ahead, scaled={"fa3": 0.75, "fa4": 0.1}, reference="there")
    rows = [near, scaled, far, alone]
    table = suite_table("llm", rows, RUN)
    # What is below 1 never reads as 1.
    assert column(table, "over fa4") == ["\u25bc 0.999", "\u25b2 1.25", "\u25bc 0.50", ""]
    # Who was timed in the run has no scaled column, whatever another run said.
    assert (
        column(table, "over fa3, scaled") == ["", "\u25bc 0.75", "", ""]
        and "fa4, scaled" not in table.columns
    )
    assert table.notes[0] == (
        f"\u25bc Behind on 2 of 3 rows: {near.name} (fa4 \u25bc 0.999), {far.name} (fa4 \u25bc 0.50). "
        f"Behind scaled times on 1 of 1 rows: {scaled.name} (fa3 \u25bc 0.75). "
        f"Others alone were timed on 1: {alone.name}."
    )
    text = table.markdown()
    assert "| **\u25bc 0.50** |" in text and "| \u25b2 1.25 |" in text and f"**{table.notes[0]}**" in text
    table.print(Console(width=200, force_terminal=True, color_system="standard"))
    shown = capsys.readouterr().out
    assert "\x1b[1;31m\u25bc 0.50\x1b[0m" in shown and "\x1b[32m\u25b2 1.25\x1b[0m" in shown
    assert "\x1b[1;31m\u25bc Behind on 2 of 3 rows" in shown
    assert "fa4 0.5000 (\u25bc 0.50x)" in row_line(far)
    whole = summary_table(replace(RUN, rows=tuple(rows)))
    assert column(whole, "behind on") == ["\u25bc 2 of 3"] and whole.notes == (
        "\u25bc Behind on 2 of 3 rows. Behind scaled times on 1 of 1 rows. Others alone were timed on 1.",
    )
    (over,) = column(whole, "over")
    assert over.splitlines()[1:] == ["fa3 (scaled) \u25bc 0.75 (\u25bc 0.75)"]
    bold = "**fa4 \u25bc 0.85 (\u25bc 0.50)**, **fa3 (scaled) \u25bc 0.75 (\u25bc 0.75)**"
    assert f"| llm | {bold} | 4 |" in whole.markdown()


def test_a_scaled_time_stands_where_a_contender_could_not_be_timed() -> None:
    row = timed(SUITES["llm"].workloads[0], 1.0, cudnn=2.0)
    row = replace(
        row,
        cells={**row.cells, "fa3": Cell(reason="flash_attn_interface is not installed")},
        scaled={"fa3": 3.0},
    )
    table = suite_table("llm", [row], RUN)
    assert row.ratio("fa3") == 3.0 and column(table, "over fa3, scaled") == ["\u25b2 3.00"]
    assert "over fa3" not in table.columns


def test_the_peak_stands_there_at_the_clock_that_was_sampled_and_at_the_data_sheets() -> None:
    def at(row: Row, mhz: float | None) -> Row:
        cells = {**row.cells, OURS: replace(row.cells[OURS], clock_mhz=mhz)}
        return replace(row, cells=cells, peak_tflops=989.0, peak_mhz=1830)

    a, b = rows_of("llm")[:2]
    table = suite_table("llm", [at(a, 1464.0), at(b, None)], RUN)
    assert column(table, "SM MHz") == ["1464", ""] and column(table, "peak") == ["989", ""]
    assert column(table, "peak at SM MHz") == ["791", ""]
    assert any(note.startswith("SM MHz: the median clock") for note in table.notes)
    # Arithmetic's peak says nothing of what is told in bytes.
    few = suite_table("few", [at(rows_of("few")[0], 1464.0)], RUN)
    assert column(few, "SM MHz") == ["1464"] and "peak" not in few.columns
    assert "SM MHz" not in suite_table("llm", [a, b], RUN).columns


def test_gradients_of_the_same_bits_have_columns_of_their_own() -> None:
    workloads = SUITES["backward"].workloads[:2]
    loose, own = (timed(each, 2.0, cudnn=3.0, fa4=2.5, fa4_det=2.2) for each in workloads)
    loose = replace(loose, cells={**loose.cells, "flashgen-det": Cell(ms=2.4, ours_ms=2.0)})
    table = suite_table("backward", [loose, replace(own, deterministic=True)], RUN)
    assert column(table, "flashgen-det") == ["2.400", "2.000"]
    assert column(table, "over fa4-det") == ["\u25bc 0.92", "\u25b2 1.10"]
    assert set(column(table, "over best")) == {"\u25b2 1.25"} and "over flashgen-det" not in table.columns
    assert any(note.startswith("-det: gradients of the same bits") for note in table.notes)
    _, (panel,) = panels_of("backward", [loose, replace(own, deterministic=True)])
    work = own.problem.flops * 1e-9
    assert panel.groups[0][1]["flashgen-det"] == pytest.approx(loose.problem.flops * 1e-9 / 2.4)
    assert panel.groups[1][1]["flashgen-det"] == panel.groups[1][1][OURS] == pytest.approx(work / 2)


def test_who_was_not_ready_in_time_is_named() -> None:
    (workload,) = (w for w in SUITES["backward"].workloads if w.problem.scoring.alibi)
    row = timed(workload, 2.0, cudnn=3.0)
    late = replace(row, cells={**row.cells, "flex": Cell(reason="took longer than 180 s")})
    told = "Not ready in time, and not timed: backward-alibi-bf16-d64-8192c: flex took longer than 180 s."
    assert told in suite_table("backward", [late], RUN).notes
    assert not any(note.startswith("Not ready") for note in suite_table("backward", [row], RUN).notes)


def test_gradients_are_drawn_by_head_dim_and_what_else_is_special() -> None:
    _, panels = panels_of("backward", rows_of("backward"))
    assert {panel.title: panel.groups[0][0] for panel in panels} == {
        "head dim 64": "d64-512",
        "head dim 128": "d128-512",
        "head dim 256": "d256-512",
        "other head dims": "d40-4096c",
        "float32": "d64-4096",
        "masks and changes of scores": "window128-d64-16384c",
    }
    assert sum(len(panel.groups) for panel in panels) == len(SUITES["backward"].workloads)
    masked = next(panel for panel in panels if panel.title.startswith("masks"))
    assert [name for name, _ in masked.groups][1:] == [
        "window128-d128-16384c",
        "document16-d128-16384c",
        "alibi-d64-8192c",
        "relbias-d64-2048c",
        "relbias-d128-2048c",
    ]


def test_the_ladder_has_a_table_of_its_own() -> None:
    table = ladder_table(RUN)
    assert table and table.columns == ("step", "what", "t10", "t11", "t22", "t29", "t30")
    assert [row[0] for row in table.rows] == ["4.2.2", "4.2.10", OURS]
    assert table.rows[0][2].startswith("~") and "~" not in table.rows[1][2]
    # Beside other contenders its last step alone stands.
    report = suite_table("report", rows_of("report"), RUN)
    assert "ladder-4.2.10" in report.columns and "ladder-4.2.2" not in report.columns
    assert ladder_table(replace(RUN, rows=tuple(rows_of("llm")))) is None


def test_few_queries_are_told_by_the_bytes_of_their_keys() -> None:
    for suite in ("few", "paged"):
        rows = rows_of(suite)
        table = suite_table(suite, rows, RUN, names=False)
        assert "TFLOP/s" not in table.columns and "TB/s" in table.columns
        assert ("page" in table.columns) == (suite == "paged")
        first, ms = rows[0].problem, rows[0].ours
        assert ms and float(column(table, "TB/s")[0]) == pytest.approx(
            2 * first.batch * first.seqlen_k * 8 * 128 * 2 / ms / 1e9, rel=5e-3
        )
        assert "TB/s: of keys and values, read once." in table.notes
        unit, panels = panels_of(suite, rows)
        assert unit == "TB/s of keys and values" and len(panels) == (2 if suite == "paged" else 1)
        assert panels[0].groups[0][0] == "b32-q1-k8192-h32/8-d128"
    varlen = suite_table("varlen", rows_of("varlen"), RUN, names=False)
    assert "TFLOP/s" in varlen.columns and "TB/s" not in varlen.columns
    assert column(varlen, "lengths")[0] == "16 sequences of 43125 queries and 43125 keys in all"
    mla = suite_table("mla", rows_of("mla"), RUN, names=False)
    assert column(mla, "head dim")[:4:3] == ["192 / 128", "576 / 512"]
    # Latent attention is told both ways.
    assert all(column(mla, "TFLOP/s")) and [bool(cell) for cell in column(mla, "TB/s")[2:4]] == [False, True]


def test_the_summary_has_a_row_for_each_suite() -> None:
    table = summary_table(RUN)
    assert [row[0] for row in table.rows] == list(SUITES)
    twice = "\u25b2 2.00 (\u25b2 2.00)"
    # Training has float32 too, and no workload without a rival.
    assert [f"flash {twice}" in cell for cell in column(table, "over")] == [False] * 3 + [True] * (
        len(SUITES) - 3
    )
    assert column(table, "behind on")[3] == "0 of 36" and table.notes == (
        f"Behind on 0 of {len(RUN.rows)} rows.",
    )
    assert column(table, "workloads")[3] == "36"


def test_host_times_and_errors() -> None:
    host = host_table(RUN)
    assert host and host.rows == ((OURS, "9.5", "9.2"), ("sdpa", "12.2", ""))
    nan = float("nan")
    told = [
        KernelErrors(kernel="k", problem=Problem(), inputs="normal", errors={OURS: 1e-7, "math": 2e-7}),
        KernelErrors(kernel="l", problem=Problem(), inputs="normal", errors={OURS: 3e-7, "math": 1e-7}),
        KernelErrors(kernel="m", problem=Problem(dtype="f16"), inputs="uniform", errors={OURS: nan}),
    ]
    assert errors_table(told).rows == (
        ("f16", "64", "uniform", "nan", "", ""),
        ("f32", "64", "normal", "3.0e-07", "2.0e-07", "1.50"),
    )


def test_all_tables_print(capsys: pytest.CaptureFixture[str]) -> None:
    show(Console(width=40), RUN)
    shown = capsys.readouterr().out
    assert "│ bf16-d64-512     │" in shown  # however narrow the terminal
    for words in ("bf16-d256-16384c", "dec-8k", "running maximum", "wgmma alone", "by suite"):
        assert (words in shown) is (words != "running maximum"), words
    line = row_line(rows_of("llm")[0])
    assert line.startswith("bf16-d64-512: flashgen 0.") and "flash 0." in line and "(\u25b2 2.00x)" in line
    assert "not timed (why)" in row_line(replace(RUN.rows[0], cells={OURS: Cell(reason="why")}))


# -- Markdown ------------------------------------------------------------------------------------------------

TEXT = """before
<!-- bench:bf16-d64-4096* gpt2 -->
| old |
<!-- /bench -->
between
<!-- bench:summary -->
<!-- /bench -->
<!-- bench:about -->
<!-- /bench -->
"""


def test_markdown_is_filled_between_its_markers(tmp_path: Path) -> None:
    text = fill(TEXT, RUN)
    assert "| old |" not in text and text.startswith("before\n<!-- bench:bf16-d64-4096* gpt2 -->\n| dtype |")
    table = [line for line in text.splitlines() if line.startswith(("| bf16 |", "| f32 |"))]
    assert len(table) == 3 and "| causal |" in table[1]
    assert "NVIDIA H200, PyTorch 2.11, cuDNN 91900, driver 580" in text
    assert fill(text, RUN) == text
    path = tmp_path / "README.md"
    path.write_text(TEXT)
    fill_file(path, RUN)
    assert path.read_text() == text
    with pytest.raises(FlashgenError, match="asks for what the run does not have"):
        fill("<!-- bench:bert -->\n<!-- /bench -->", RUN)
    path.write_text("nothing")
    with pytest.raises(FlashgenError, match="to fill"):
        fill_file(path, RUN)


def test_a_recorded_run_of_serving_fills_tables_and_draws(tmp_path: Path) -> None:
    """Of times as an H200's were once, in milliseconds: flashgen's before any work on these, and rivals'."""
    recorded = {
        "16x..4096-d128-h32-8c": {"fa4": 1.828},
        "128x..512-d64-h16-16": {"fa4": 0.3114, "torch-varlen": 0.3362, "nested": 4.014},
        "b32-q16-k8192-h32/8-d128": {OURS: 0.3978, "cudnn": 0.7775, "fa4": 0.2519},
        "b32-q16-k8192-h32/8-d128-page16": {"fa4": 0.2906},
        "192/128-16384c": {"fa4": 1.741},
    }
    problems = {name: p for suite in SUITES.values() for name, p in suite.problems.items()}
    rows = tuple(
        Row(name=name, problem=problems[name], cells={each: Cell(ms=t) for each, t in ms.items()})
        for name, ms in recorded.items()
    )
    path, page = tmp_path / "run.json", tmp_path / "page.md"
    figures.write(path, replace(RUN, rows=rows))
    page.write_text(
        "".join(f"<!-- bench:{n} -->\n<!-- /bench -->\n" for n in ("varlen", "few", "paged", "mla"))
    )
    fill_file(page, figures.read(path))
    filled = page.read_text()
    assert "| 16 sequences of 43125 queries and 43125 keys in all | causal |" in filled
    few = next(line for line in filled.splitlines() if "| 16 x 8192 |" in line and "0.3978" in line)
    assert "| 2.70 |" in few and "| \u25b2 1.95 | **\u25bc 0.63** | **\u25bc 0.63** |" in few
    assert "**\u25bc Behind on 1 of 1 rows: b32-q16-k8192-h32/8-d128 (fa4 \u25bc 0.63).**" in filled
    drawn = write_plots(tmp_path / "plots", figures.read(path))
    assert {each.stem for each in drawn} == {"few", "overview", "roofline"}


def test_every_line_of_a_table_has_as_many_cells() -> None:
    for table in tables(RUN):
        lines = [line for line in table.markdown().splitlines() if line.startswith("|")]
        assert {line.count("|") for line in lines} == {len(table.columns) + 1}


@pytest.mark.parametrize(
    "name",
    [
        str(path.relative_to(ROOT))
        for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("out/*/README.md"))
        if SECTION.search(path.read_text(encoding="utf-8"))
    ],
)
def test_what_is_committed_is_what_its_run_generates(name: str) -> None:
    """Mended by ``flashgen bench --from out/bench_nvidia_h200.json --readme README.md``, and each other."""
    text = (ROOT / name).read_text(encoding="utf-8")
    card = "h100" if name == "docs/h100.md" else "h200"
    assert fill(text, figures.read(ROOT / "out" / f"bench_nvidia_{card}.json")) == text


# -- plots ---------------------------------------------------------------------------------------------------


def test_plots_are_drawn_as_png_and_svg(tmp_path: Path) -> None:
    run = replace(RUN, rows=(*rows_of("llm")[:3], *rows_of("gpt2")))
    paths = write_plots(tmp_path, run)
    names = ["gpt2", "llm", "overview", "roofline"]
    assert sorted(paths) == sorted(tmp_path / f"{n}.{s}" for n in names for s in ("png", "svg"))
    assert all(path.read_bytes().startswith((b"\x89PNG", b"<?xml")) for path in paths)
    before = (tmp_path / "gpt2.svg").read_bytes()
    write_plots(tmp_path, replace(run, rows=tuple(rows_of("gpt2")), ceilings=Ceilings({}, {})))
    assert (tmp_path / "gpt2.svg").read_bytes() == before


def test_the_overview_has_a_dot_for_each_workload_and_a_line_for_each_suite() -> None:
    axis = overview(RUN).axes[0]
    dots = [dot for drawn in axis.collections for dot in drawn.get_offsets()[:, 0]]
    timed = [row for row in RUN.rows if row.ratio(BEST)]
    assert timed and len(dots) == len(timed) + sum(len(row.scaled) for row in RUN.rows)
    suites = {title_of(name) for name in by_suite(RUN.rows)}
    assert {label.get_text() for label in axis.get_yticklabels()} == suites
    assert "faster" in axis.get_xlabel() and RUN.device in axis.get_title()


def test_bars_stand_by_head_dim_and_mask() -> None:
    unit, panels = panels_of("llm", rows_of("llm"))
    assert unit == "TFLOP/s" and [panel.title for panel in panels][:2] == [
        "head dim 64",
        "head dim 64, causal",
    ]
    assert len(panels) == 6 and [label for label, _ in panels[0].groups][:2] == ["512", "1024"]
    speeds = panels[0].groups[0][1]
    assert speeds[OURS] == pytest.approx(500) and speeds["cudnn"] == pytest.approx(400)
    unit, (decode,) = panels_of("decode", rows_of("decode"))
    workload = SUITES["decode"].workloads[1]
    row = next(row for row in RUN.rows if row.name == workload.name)
    assert row.ours
    assert unit == "GB/s"
    assert decode.groups[1] == (workload.name, pytest.approx(speeds_of(row)))


def test_masks_stand_by_what_is_asked() -> None:
    unit, panels = panels_of("masks", rows_of("masks"))
    assert unit == "TFLOP/s"
    assert [panel.title for panel in panels] == ["windows", "changes of scores", "other masks, and none"]
    kinds = {label: panel.title for panel in panels for label, _ in panel.groups}
    assert len(kinds) == len(SUITES["masks"].problems)
    assert kinds["gemma-d256-8192c"] == "changes of scores" and kinds["dilation2-d64-8192c"] == "windows"
    table = section("window128-* gemma-*", RUN).splitlines()
    assert "| causal, window of 127 keys before and 0 after |" in table[2]
    assert "causal, window of 4095 keys before and 0 after, soft cap 50" in table[4]


def speeds_of(row: Row) -> dict[str, float]:
    return {name: row.problem.min_bytes * 1e-6 / cell.ms for name, cell in row.cells.items() if cell.ms}


def shipped_run() -> BenchRun:
    return figures.read(ROOT / "out" / "bench_nvidia_h200.json")


def texts_that_touch(figure: Figure) -> list[tuple[str, str]]:
    """The pairs of words in a figure's drawing, key and titles that lie on each other, or beyond its edge."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axis,) = figure.axes
    key = axis.get_legend()
    assert key is not None
    shown: list[Text] = [*axis.texts, *key.get_texts(), axis.title, axis.xaxis.label, axis.yaxis.label]
    boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in shown]
    width, height = canvas.get_width_height()
    beyond = [(w, "edge") for w, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > width or b.y1 > height]
    return beyond + [
        (words, other)
        for i, (words, box) in enumerate(boxes)
        for other, its in boxes[i + 1 :]
        if min(box.x1, its.x1) - max(box.x0, its.x0) > 1 and min(box.y1, its.y1) - max(box.y0, its.y0) > 1
    ]


def test_plots_have_the_rivals_that_the_tables_have() -> None:
    """FlashAttention-3, which another run timed, stands in both."""
    run = shipped_run()
    rows = figures.by_suite(run.rows)["llm"]
    names = suite_table("llm", rows, run).columns
    _, panels = panels_of("llm", rows)
    for panel in panels:
        assert panel.across == "sequence length"
        for _, values in panel.groups:
            assert all(name in names for name in values) and "fa3, scaled" in values
    row = rows[0]
    assert panels[0].groups[0][1]["fa3, scaled"] == pytest.approx(
        row.problem.flops * 1e-9 / row.scaled["fa3"]
    )


@pytest.mark.parametrize("suite", ["report", "gpt2", "odd"])
def test_bars_say_what_their_axes_are_and_have_a_whole_key(suite: str) -> None:
    run = shipped_run()
    figure = bars(suite, figures.by_suite(run.rows)[suite], run)
    assert [(a.get_xlabel(), a.get_ylabel()) for a in figure.axes] == [("workload", "TFLOP/s")]
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (key,) = figure.legends
    box = key.get_window_extent(canvas.get_renderer())
    assert box.x0 >= 0 and box.x1 <= canvas.get_width_height()[0]
    scaled = [text.get_text() for text in key.get_texts() if text.get_text().endswith("scaled")]
    assert sorted(scaled) == (["fa3, scaled"] if suite == "odd" else [])
    assert ("another run" in key.get_title().get_text()) == bool(scaled)


@pytest.mark.parametrize("run", [shipped_run(), RUN], ids=["shipped", "made up"])
def test_words_of_the_roofline_do_not_touch(run: BenchRun) -> None:
    figure = roofline(run)
    words = [text.get_text() for text in figure.axes[0].texts]
    assert {"products, 16 bits", "products, f32", "exponentials, head dim 64"} <= set(words)
    assert any(text.startswith("device memory, 4") for text in words)
    assert texts_that_touch(figure) == []


def test_places_are_moved_apart_no_further_than_they_must() -> None:
    assert spread([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    assert spread([0.52, 0.48, 0.1], 0.1) == pytest.approx([0.55, 0.45, 0.1])
    # Moved, the second would touch the third: all three are one group.
    assert spread([0.50, 0.50, 0.58], 0.1) == pytest.approx([0.4267, 0.5267, 0.6267], abs=1e-3)


# -- ceilings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [61, 75, 80, 90, 100])
def test_the_ceilings_source_has_a_kernel_for_each_rate(arch: int) -> None:
    text = ceilings.source(arch)
    for rate in rates_of(arch):
        assert f" {rate.symbol}(float* out, float a, int steps)" in text
    assert text.count("extern") == len(rates_of(arch))
    assert ("wgmma" in text) is (arch == 90)


@pytest.mark.nvcc
def test_the_ceilings_compile() -> None:
    assert build(90).read_bytes()[:4] == b"\x7fELF"


# -- names of shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        Problem(),
        Problem(precision="tf32", head_dim=40, causal=True),
        Problem(dtype="bf16", head_dim=192, head_dim_v=128, batch=3, num_q_heads=8, num_kv_heads=2),
        *SUITES["decode"].problems.values(),
        *SUITES["odd"].problems.values(),
    ],
)
def test_a_shape_is_named_as_kernels_are(problem: Problem) -> None:
    assert workload_named(problem.name) == Workload(problem.name, problem)


@pytest.mark.parametrize("text", ["bf16", "f64_d64", "bf16_d64_x3", "f16_tf32_d64", "f32_d300"])
def test_what_is_no_shape_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"shape|precision|head_dim"):
        workload_named(text)
