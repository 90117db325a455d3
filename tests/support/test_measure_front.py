"""The script that times calls beside PyTorch's, as far as it goes without a GPU."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import flashgen
import numpy as np
import pytest
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.errors import BuildError
from flashgen.tuner.front.asked import in_steps
from flashgen.tuner.front.bound import noting

from tests.support import measure_front as script
from tests.support.call_problems import NUM_RANDOM, RANDOM, SUITES, Case, cases, random_problems
from tests.support.emulated import needs_compiler

H200 = PRESETS["h200"]
HALF, FLOAT = Problem(dtype="bf16"), Problem(dtype="f32")


def row(
    suite: str, name: str, problem: Problem, us: float, rivals_us: dict[str, float], error: float
) -> dict:
    errors = dict.fromkeys(rivals_us, 1e-3 if problem is HALF else 1e-7)
    told = {"suite": suite, "name": name, "dtype": problem.dtype, "first_s": us / 100, "us": us}
    return told | script.judged(problem, error, errors) | script.compared(us, rivals_us)


def test_what_rows_come_to_is_told_by_suite():
    text = script.summary(
        [
            row("llm", "one", HALF, 100.0, {"cudnn": 200.0, "flash": 250.0}, 2e-3),
            row("llm", "two", HALF, 100.0, {"cudnn": 50.0, "math": 800.0}, 9e-3),
            row("llm", "three", FLOAT, 100.0, {"math": 300.0}, 2e-7),
            row(RANDOM, "four", FLOAT, 300.0, {}, 1.0),
            {"suite": RANDOM, "name": "five", "dtype": "f32", "failed": "LaunchError: it did not run"},
        ],
        {"plain": 2.5},
    )
    assert text.splitlines() == [
        "random: 2, failed 1, wrong 1, without a rival 1",
        "    least: ",
        # The fastest rival's time over ours: 2 and 0.5.
        "llm: 3, 16-bit 1.00 (2), f32 3.00 (1), failed 0, wrong 1, without a rival 0",
        "    least: 0.50 two (cudnn); 2.00 one (cudnn); 3.00 three (math)",
        # Twice a rival's 1e-3 and a rounding of 3.9e-3.
        "wrong: two: error 9.00e-03, 5.91e-03 allowed",
        f"wrong: four: error 1.00e+00, {FLOAT.tolerance:.2e} allowed",
        "failed: five: LaunchError: it did not run",
        "first calls: median 1.00 s, most 3.00 s",
        'host, us per warm call: {"plain": 2.5}',
    ]


@pytest.mark.thorough
def test_random_problems_are_of_all_kinds_and_always_the_same():
    found = random_problems()
    assert found == random_problems() and found != random_problems(seed=1)
    assert len(found) == len({case.name for case in found}) == NUM_RANDOM
    problems = [case.problem for case in found]
    assert {p.dtype for p in problems} == {"f32", "f16", "bf16"}
    assert {name for p in problems for name in p.scoring.to_dict()} == {"window", "softcap", "alibi", "bias"}
    for few in (
        [p for p in problems if p.group > 1],
        [p for p in problems if p.seqlen_q > p.seqlen_k],
        [p for p in problems if p.head_dim % 8],
        [p for p in problems if p.causal and p.scoring.is_plain],
    ):
        assert 10 < len(few) < NUM_RANDOM
    assert [case.suite for case in cases()[NUM_RANDOM:][: len(SUITES)]] == list(SUITES)


@pytest.mark.thorough
def test_it_builds_what_a_call_takes_up_to_what_does_not_spill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    problem = Problem(dtype="f32", batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=64, seqlen_k=64)
    asked = []

    class Toolchain:
        def build(self, kernel):
            asked.append(kernel)
            if len(asked) == 1:
                raise BuildError("made to fail")
            spilled = 8 if len(asked) == 2 else 0
            return Build(kernel, Path("nowhere"), registers=40, spill_bytes=spilled, seconds=0.0)

    monkeypatch.setattr(script, "cuda_toolchain", lambda arch: Toolchain())
    monkeypatch.setattr(script, "_WORKSHOP", script.workshop_of(H200), raising=False)
    made = script.build(problem)
    assert [made[0]["error"], made[1]["spill"], made[2]["spill"]] == ["made to fail", 8, 0] and len(made) == 3
    assert [each["variant"] for each in made] == [kernel.variant.name for kernel in asked]
    monkeypatch.setattr(script, "cases", lambda: [Case("small", "it", problem)] * 2)
    script.dry(1)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("it: ") and told[1] == "1 different kernels for 1 problems"


@needs_compiler
def test_kernels_are_built_for_what_calls_ask(monkeypatch: pytest.MonkeyPatch):
    sizes = {"batch": 3, "num_q_heads": 2, "num_kv_heads": 1, "seqlen_q": 90, "seqlen_k": 90, "head_dim": 32}
    packed = Problem(dtype="f32", varlen="list:17,90,31", causal=True, **sizes)
    starts = np.array([0, 17, 107, 138], np.int32)
    q, k, v = (np.zeros((138, heads, 32), np.float32) for heads in (2, 1, 1))
    asked: list[Problem] = []
    with noting(lambda problem, card: asked.append(problem)):
        flashgen.attention_varlen(
            *(q, k, v, starts, starts), max_seqlen_q=90, max_seqlen_k=90, causal=True, device="sim:a100"
        )
    assert asked == script.asked_for(packed)
    derived = Problem(dtype="f32", backward=True, **sizes)
    assert [each.backward for each in script.asked_for(derived)] == [False, True]
    # An array that is read is told of in steps, as calls have it.
    (window,) = script.asked_for(Problem(dtype="f32", scoring=Scoring(window=(100, 0)), **sizes))
    assert window.scoring == in_steps(Scoring(window=(100, 0)))


@pytest.mark.thorough
def test_a_run_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a card and PyTorch: what is measured is made up."""

    @contextmanager
    def pool_of(processes, begin, limits):
        with ThreadPoolExecutor(1) as pool:
            yield pool

    def measured(torch, timer, problem, at_work):
        at_work[script.AT_WORK] = "flash"
        if problem is FLOAT:
            raise RuntimeError(fault)
        return {"first_s": 0.5, "us": 10.0} | script.compared(10.0, {"flash": 15.0})

    def synchronize():
        if "lose the card" in fault:
            raise RuntimeError(fault)

    cuda = SimpleNamespace(memory_reserved=lambda: 0, synchronize=synchronize)
    torch = SimpleNamespace(cuda=cuda, __version__="2.0", version=SimpleNamespace(cuda="13.0"))

    def build(problem):
        if problem is HALF:
            raise RuntimeError("not built beside")
        return [{"variant": "it", "spill": 0}]

    stand_ins = {
        "pool_of": pool_of,
        "measured": measured,
        "build": build,
        "EventTimer": lambda torch: None,
        "cuda_card": lambda ordinal: SimpleNamespace(limits=replace(H200, name="NVIDIA H200")),
        "cases": lambda: [Case("llm", "half", HALF), Case("fp32", "float", FLOAT)],
        "host_costs": lambda torch: {"plain": 2.5},
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(script, name, stand_in)
    found: list[dict] = []
    fault = "CUDA error: made to lose the card"
    assert script.run(torch, tmp_path / "out", 60.0, found)
    assert not (tmp_path / "out" / "front.txt").exists()
    # What was told is not asked again.
    fault, found = "made to fail", [row for row in found if "failed" not in row]
    assert not script.run(torch, tmp_path / "out", 60.0, found)
    written = json.loads((tmp_path / "out" / "front.json").read_text())
    assert written["limits"]["name"] == "NVIDIA H200" and written["host_us"] == {"plain": 2.5}
    rows = {row["name"]: row for row in written["rows"]}
    assert rows["half"]["ratio"] == 1.5 and "not built beside" in rows["half"]["built"][0]["error"]
    assert rows["float"]["built"] == [{"variant": "it", "spill": 0}]
    assert Problem.from_dict(rows["half"]["problem"]) == HALF
    assert rows["float"]["failed"] == "RuntimeError: made to fail"
    assert "failed: float: (flash) RuntimeError: made to fail" in (tmp_path / "out" / "front.txt").read_text()
