"""The script that times what searches would try first, as far as it goes without a GPU."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.variant import Variant
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.cards.device import Timing
from flashgen.tuner.cards.names import resolve
from flashgen.tuner.evaluate.measure import summarize
from flashgen.tuner.exchange import measured_tables
from flashgen.tuner.shelf import library
from flashgen.tuner.suites import SUITES
from flashgen.tuner.workload import Suite, Workload

from tests.support import measure_choices as script
from tests.support.emulated import needs_compiler

H200 = PRESETS["h200"]
SMALL = Problem(batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=40, seqlen_k=40, head_dim=32)
#: The same kernels serve it.
LONGER = replace(SMALL, seqlen_q=50, seqlen_k=50)
SUITE = Suite("small", "of this test", (Workload("short", SMALL), Workload("long", LONGER)))


def timed(variant: Variant, us: float) -> script.Timed:
    build = Build(render(variant, SMALL, H200), Path("nowhere"), registers=40, spill_bytes=0, seconds=0.0)
    figures = summarize(Timing((us,)), build, SMALL, occupancy=0.5, error=1e-7, predicted=False)
    return script.Timed(build, figures)


def test_a_table_is_read_as_those_of_measured_times_are(tmp_path: Path):
    variants = Simt(), Simt(br=32), Simt(bc=32)
    cases = [script.Case("small", "short", SMALL, variants), script.Case("small", "long", LONGER, variants)]
    found = [[timed(v, us) for v, us in zip(variants, (20.04, 10.0, 50.1), strict=True)], []]
    text = script.table(cases, found, resolve("sim:h200"))
    (tmp_path / "table.json").write_text(text)
    (measured,) = measured_tables.read(tmp_path / "table.json")
    # Fastest first, and without what takes over five times as long.
    assert measured.variants == (Simt(br=32), Simt()) and measured.us.tolist() == [10.0, 20.0]
    assert (measured.sample, measured.problem, measured.limits) == ("small", SMALL, H200)
    assert json.loads(text)["about"].startswith("Predicted times")
    assert json.loads(text)["sets"][0]["rows"][0] == [10.0, 40, "simt", {"br": 32}]


def test_what_is_around_a_kernel_differs_in_one_parameter_and_then_in_two():
    def differing(variant: Variant) -> int:
        return sum(value != Simt().to_dict()[name] for name, value in variant.to_dict().items())

    problem = replace(SMALL, batch=4, num_q_heads=16, num_kv_heads=16, seqlen_q=4096, seqlen_k=4096)
    found = script.around(problem, H200, [Simt()], 60)
    steps = [differing(variant) for variant in found]
    assert len(set(found)) == 60 and steps == sorted(steps) and set(steps) == {0, 1, 2}
    for variant in found[1:]:
        variant.check(problem, H200)
        assert variant.advice(problem, H200) is None
    assert found == script.around(problem, H200, [Simt()], 60)
    assert script.around(problem, H200, [Simt()], 3) == found[:3]
    assert script.around(problem, H200, [], 3) == []


def test_a_plan_is_read_as_it_was_written(tmp_path: Path):
    cases = [
        script.Case("small", "short", SMALL, (Simt(br=32), Simt())),
        script.Case("other", "short", SMALL, (Simt(),)),
    ]
    script.write_plan(tmp_path / "plan.json", cases)
    assert script.read_plan(tmp_path / "plan.json", ["small", "other"], []) == cases
    assert script.read_plan(tmp_path / "plan.json", ["small"], ["simt"]) == cases[:1]
    assert script.read_plan(tmp_path / "plan.json", ["small"], ["mma"]) == []


def test_the_next_finalist_wins_where_the_fastest_is_wrong(monkeypatch: pytest.MonkeyPatch):
    def side_by_side(work, items, device, processes, until):
        assert work is script.proved
        return [
            script.Failed("wrong result") if build.kernel.variant == Simt() else 2e-7 for build, _ in items
        ]

    monkeypatch.setattr(script, "side_by_side", side_by_side)
    cases = [script.Case("small", name, SMALL, ()) for name in ("both", "none", "one", "not timed")]
    right, wrong = timed(Simt(br=32), 11.0), timed(Simt(), 10.0)
    won = script.Measuring(cases, resolve("sim:h200"), 1, math.inf).winners(
        [[wrong, right], [wrong], [right], []]
    )
    assert won.keys() == {0, 2}
    assert all(each.build is right.build and each.figures.error == 2e-7 for each in won.values())


def dies_of_two(item: int) -> int:
    if item == 2:
        os._exit(1)
    if item == 3:
        time.sleep(60)
    return item + 1


@pytest.mark.thorough
def test_what_dies_is_to_blame_alone_and_what_takes_too_long_is_ended():
    device = resolve("sim:h200")
    result = script.side_by_side(dies_of_two, [0, 2, 1], device, 2, math.inf)
    assert result == [1, script.Failed("its process died"), 2]
    began = time.monotonic()
    first, second = script.side_by_side(dies_of_two, [0, 3], device, 2, time.monotonic() + 12)
    assert (first, second) == (1, script.Failed("out of time"))
    assert time.monotonic() - began < 40


@needs_compiler
@pytest.mark.thorough
def test_a_suite_is_timed_and_its_winners_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """On the emulated card, whose times are the cost model's."""
    monkeypatch.setitem(SUITES, "small", SUITE)
    plan, table, out = (tmp_path / name for name in ("plan.json", "table.json", "out"))
    script.main(["small", "--family", "simt", "--first", "2", "--plan", "--candidates", str(plan)])
    planned = script.read_plan(plan, ["small"], [])
    assert [case.problem for case in planned] == [SMALL, LONGER]
    assert all(len(set(case.variants)) == 2 for case in planned)
    told = ["small", "--candidates", str(plan), "--table", str(table), "--out", str(out)]
    script.main([*told, "--device", "sim:h200", "--processes", "2"])
    for measured, case in zip(measured_tables.read(table), planned, strict=True):
        assert set(measured.variants) == set(case.variants)
    kept = {entry.kernel.problem: entry for entry in library.entries([out])}
    assert kept.keys() == {SMALL, LONGER} and all(entry.slug == "sim_h200" for entry in kept.values())
    for measured in measured_tables.read(table):
        winner = kept[measured.problem].kernel
        assert winner.variant == measured.variants[0]
        assert 0 < winner.measurement.error < measured.problem.tolerance
    assert "2 of 2 problems timed" in capsys.readouterr().out
