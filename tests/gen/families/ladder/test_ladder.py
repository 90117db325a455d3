"""The teaching family: its nine steps, what each changes, and that each is right."""

import difflib
import importlib.util
import io
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.families.ladder.family import STEPS, Ladder, step_of, steps
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import scores_of
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.tuner.bench.ladder import _contenders, _Timer
from flashgen.tuner.bench.ladder_result import CASES, FASTEST, SIMT, LadderResult, Row
from flashgen.tuner.bench.peers import torch_times
from flashgen.tuner.cards.device import Build, Timing
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import UsageError
from flashgen.tuner.evaluate.outcome import Measurement, Outcome, Status
from flashgen.tuner.evaluate.reference import attention
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.option_words import parse_names
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.shelf import emitting, library
from flashgen.tuner.view.ladder import ladder_tables, row_line
from rich.console import Console

from tests.support.emulated import assert_tidy

GTX_1080 = preset("gtx-1080")
NAMES = list(STEPS)


def source(step, head_dim=64):
    return render(steps(head_dim)[step], Problem(head_dim=head_dim), GTX_1080).source


def code(text):
    """Lines of code without comments."""
    lines = (line.split("//")[0].rstrip() for line in text.splitlines())
    return [line for line in lines if line]


def changes(before, after):
    """Lines of code that went, and those that came, in order."""
    diff = difflib.unified_diff(code(source(before)), code(source(after)), n=0, lineterm="")
    changed = [line for line in diff if line[0] in "+-" and line[:3] not in ("+++", "---")]
    return tuple([line[1:] for line in changed if line[0] == sign] for sign in "-+")


@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        (32, {"4.2.2": (32, 32), "4.2.3": (128, 32), "4.2.9": (128, 32), "4.2.10": (128, 64)}),
        (64, {"4.2.2": (32, 32), "4.2.3": (128, 16), "4.2.9": (128, 16), "4.2.10": (128, 32)}),
    ],
)
def test_tiles_are_the_reports(head_dim, tiles):
    assert {name: (steps(head_dim)[name].br, steps(head_dim)[name].bc) for name in tiles} == tiles


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("name", NAMES)
def test_steps_run_on_a_gtx_1080(name, head_dim):
    steps(head_dim)[name].check(Problem(head_dim=head_dim), GTX_1080)


def test_any_head_dim_has_steps():
    for head_dim in range(1, 257):
        illegal = []
        for name, variant in steps(head_dim).items():
            try:
                variant.check(Problem(head_dim=head_dim), GTX_1080)
            except Illegal as error:
                illegal.append((name, error.rule))
        # A long row of Q does not fit in a thread's registers; everything else has a tile.
        assert illegal in ([], [("4.2.10", "registers")])
        assert not illegal or head_dim > 160


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("4.2.2", "4.2.3", {"br", "bc"}),
        ("4.2.3", "4.2.4", {"split_queries"}),
        ("4.2.4", "4.2.5", {"vec"}),
        ("4.2.5", "4.2.6", {"hoisted"}),
        ("4.2.6", "4.2.7", {"coalesced"}),
        ("4.2.7", "4.2.8", {"stats_in_registers"}),
        ("4.2.8", "4.2.9", {"transposed"}),
        ("4.2.9", "4.2.10", {"q_in_registers", "bc"}),
    ],
)
def test_a_step_changes_only_its_own_parameters(before, after, changed):
    old, new = (steps(64)[name].to_dict() for name in (before, after))
    assert {name for name in old if old[name] != new[name]} == changed


def test_a_taller_tile_changes_numbers_alone():
    went, came = changes("4.2.2", "4.2.3")
    assert went != came
    assert [re.sub(r"\d+", "0", line) for line in went] == [re.sub(r"\d+", "0", line) for line in came]


def test_splitting_the_queries_leaves_the_algorithm_alone():
    def algorithm(name):
        lines = code(source(name))
        end = next(i for i, line in enumerate(lines) if line.startswith('extern "C" __global__'))
        return [line for line in lines[:end] if not line.startswith("constexpr")]

    assert algorithm("4.2.3") == algorithm("4.2.4")
    went, _ = changes("4.2.3", "4.2.4")
    assert any(line.lstrip().startswith("for (") for line in went)


def test_coalescing_changes_which_thread_copies_what():
    went, came = changes("4.2.6", "4.2.7")
    assert len(went) == len([line for line in came if not line.startswith("#pragma")]) == 1
    assert "threadIdx.x" in went[0]


@pytest.mark.parametrize("name", NAMES)
def test_sources_read_well(name):
    text = source(name)
    assert f"Step {name} of a ladder" in text
    assert_tidy(text, name)
    assert text == source(name)


def test_step_of_knows_the_steps_and_nothing_else():
    for name, variant in steps(64).items():
        step = step_of(variant, 64)
        assert step is not None and step.name == name
    assert step_of(Ladder(br=64), 64) is None


@pytest.mark.parametrize(
    ("variant", "head_dim", "message"),
    [
        (Ladder(), 66, "divisibility: vec=4 does not divide head dim 66"),
        (Ladder(hoisted=False), 64, "combination: q_in_registers=true needs hoisted=true"),
        (Ladder(br=64, bc=32), 192, "registers: about 284 per thread, 255 allowed with blocks of 64 threads"),
        (Ladder(q_in_registers=False), 128, "shared memory: needs 98304 bytes, sm_61 allows 49152"),
    ],
)
def test_illegal_variants_say_why(variant, head_dim, message):
    try:
        variant.check(Problem(head_dim=head_dim), GTX_1080)
    except Illegal as error:
        assert message in str(error)
    else:
        pytest.fail("was legal")


def test_the_space_can_be_enumerated():
    space = enumerate_space(Ladder, Problem(head_dim=64), GTX_1080)
    assert set(steps(64).values()) <= set(space.legal)
    assert space.total == len(space.legal) + sum(space.removed.values())


@pytest.mark.nvcc
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize(("name", "head_dim"), [("4.2.2", 80), ("4.2.5", 6), ("4.2.9", 40), ("4.2.10", 64)])
def test_shared_memory_is_exact(name, head_dim, tmp_path):
    """The static_assert on sizeof(SharedStorage) compares pruning's bytes with the compiler's."""
    path = tmp_path / "kernel.cu"
    path.write_text(source(name, head_dim))
    command = [
        "nvcc",
        "-std=c++17",
        "-arch=sm_75",
        "-cubin",
        "-o",
        str(path.with_suffix(".cubin")),
        str(path),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# -- on the emulated card ------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler is on PATH"
)


def emulate(name, head_dim, *, causal):
    """A step's build on the emulated GTX 1080 and what runs it."""
    device = SimDevice("gtx-1080", preset("gtx-1080"))
    problem = Problem(head_dim=head_dim, causal=causal)
    return device.toolchain().build(render(steps(head_dim)[name], problem, device.limits)), device.open()


@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_right(name, causal):
    """Ragged lengths, grouped heads, the log-sum-exp, strides and scales of either sign, against float64."""
    build, runner = emulate(name, 64, causal=causal)
    assert 0 < validate(runner, build, seed=5) < 2e-6


@needs_compiler
@pytest.mark.parametrize(
    ("name", "head_dim"), [("4.2.2", 2), ("4.2.7", 3), ("4.2.9", 90), ("4.2.10", 80), ("4.2.9", 256)]
)
def test_other_head_dims_are_right(name, head_dim):
    build, runner = emulate(name, head_dim, causal=True)
    assert 0 < validate(runner, build, seed=6) < 2e-6


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_very_negative_scores_are_right(name):
    """A maximum that starts at 0 would leave exp2 of these scores, and with them the row, at zero."""
    build, runner = emulate(name, 32, causal=False)
    rng = np.random.default_rng(7)
    q = np.full((1, 1, 40, 32), -3.0, np.float32)
    k = (3 + 0.01 * rng.standard_normal((1, 1, 70, 32))).astype(np.float32)
    v = rng.standard_normal((1, 1, 70, 32), dtype=np.float32)
    o, lse = runner.attend(build, q, k, v, scale=1.0, want_lse=True)
    expected = attention(q, k, v, scale=1.0, scores=scores_of(causal=False))
    assert lse is not None and lse.max() < -250
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-6)
    np.testing.assert_allclose(o, expected.o, atol=1e-4)


# -- the run and its table -----------------------------------------------------------------------------------


def measurement(median_us):
    return Measurement(
        times_us=(median_us,),
        median_us=median_us,
        spread=0.0,
        tflops=1.0,
        registers=64,
        spill_bytes=0,
        smem_bytes=1024,
        occupancy=0.5,
        error=3e-7,
    )


def row(name, median_us, **changes):
    status = Status.OK if median_us else Status.LAUNCH_FAILED
    return Row(
        **{"case": "t10", "name": name, "title": name, "status": status, "median_us": median_us, **changes}
    )


def result(*rows):
    return LadderResult(device="Card", driver="1", toolkit="nvcc", predicted=False, rows=rows)


def test_the_reports_cases():
    shapes = {name: (p.batch, p.num_q_heads, p.seqlen_q, p.seqlen_k, p.head_dim) for name, p in CASES.items()}
    assert shapes == {
        "t10": (10, 1, 2048, 2048, 64),
        "t11": (13600, 1, 128, 128, 32),
        "t22": (500, 1, 2048, 2048, 64),
        "t29": (4, 1, 32768, 32768, 32),
        "t30": (2, 1, 32768, 32768, 64),
    }


@pytest.mark.parametrize("case", CASES)
def test_the_ladder_ends_with_the_kernels_that_are_held_for_its_cases(case, tmp_path):
    """On the card whose kernels are shipped: what was tuned for multiply-adds alone, and what is fastest,
    which another may be by now."""
    known = library.entries(library.folders(tmp_path))
    found = {c.name: c for c in _contenders(SimDevice("sim:h200", preset("h200")), case, NAMES[-1:], known)}
    assert list(found) == [NAMES[-1], SIMT, FASTEST]
    shipped = {e.kernel.problem: e.kernel for e in known}
    for name, problem in ((SIMT, replace(CASES[case], precision="ieee")), (FASTEST, CASES[case])):
        tuned = shipped[problem]
        assert found[name].tuned and found[name].kernel is not None
        family = tuned.variant.family
        if found[name].variant == tuned.variant:
            assert found[name].title == f"{family}, tuned: {problem.name} for NVIDIA H200, measured"
        else:
            assert (
                name == FASTEST
                and f"{family}, tuned: what was tuned for just this should be far slower" in found[name].title
            )
    assert found[SIMT].variant.family == "simt" != found[FASTEST].variant.family


def test_where_nothing_was_tuned_the_cost_models_guesses_are_said_to_be_some(monkeypatch):
    """A card older than tensor cores: one family serves, and stands there once."""
    held = {"threads_per_block": 128, "vec": 4, "unroll": 4, "br": 64, "k_layout": "transposed"}
    monkeypatch.setattr(emitting, "build_catalogue", lambda *what: build_catalogue(*what, held))
    found = list(_contenders(SimDevice("sim:gtx-1080", GTX_1080), "t10", [], []))
    assert [(c.name, c.tuned, c.variant.family) for c in found] == [(SIMT, False, "simt")]
    assert "untuned" in found[0].title and found[0].kernel is not None
    rows = [
        row("4.2.10", 800.0),
        row(SIMT, 90.0, tuned=False, title=found[0].title, variant=found[0].variant),
        row(FASTEST, 50.0, tuned=True, title="mma, tuned: here", variant=FAMILIES["mma"]()),
    ]
    console = Console(width=80, file=io.StringIO())
    for table in ladder_tables(result(*rows)):
        console.print(table)
    text = console.file.getvalue()
    assert "untuned" in text and "│ mma" in text and "mma, tuned: here" in text and "fastest" not in text
    assert row_line(rows[2]) == "t10 mma: 0.050 ms"
    data = result(*rows).to_dict()["cases"]["t10"]["rows"]
    assert [(each["family"], each["tuned"]) for each in data[1:]] == [("simt", False), ("mma", True)]


def test_speedups_pass_over_steps_without_a_time():
    rows = [row("4.2.2", 800.0), row("4.2.3", None), row("4.2.4", 200.0), row("simt", 50.0)]
    table = result(*rows)
    assert [table.speedups(r) for r in rows] == [(1.0, None), (None, None), (4.0, 4.0), (16.0, None)]
    data = table.to_dict()["cases"]["t10"]["rows"]
    assert [each["ms"] for each in data] == [0.8, None, 0.2, 0.05]
    assert data[2]["speedup_over_previous"] == 4.0
    assert data[3]["tflops"] == pytest.approx(CASES["t10"].flops / 50e-6 / 1e12)


def test_the_table_shows_times_scaling_and_failures():
    rows = [
        row("4.2.2", 90e6, scaled_from=8192, measurement=measurement(5.6e6)),
        row("4.2.3", None, reason="registers: too many"),
        row("fused", 400.0),
    ]
    console = Console(width=160, file=io.StringIO())
    for table in ladder_tables(result(*rows)):
        console.print(table)
    text = console.file.getvalue()
    assert "~90000.0" in text and "scaled from seqlen 8192" in text
    assert "registers: too many" in text
    assert "0.400" in text and "225000.00x" in text
    assert row_line(rows[0]) == "t10 4.2.2: ~90000.0 ms"


class SlowCard:
    """Answers as a worker does; a launch takes ``us_per_square`` for each squared row of length."""

    def __init__(self, us_per_square):
        self.us_per_square = us_per_square
        self.lengths = []

    def evaluate(self, build, problem, *, max_spill_bytes):
        self.lengths.append(problem.seqlen_q)
        time_us = self.us_per_square * problem.seqlen_q**2
        return Outcome(variant=build.kernel.variant, status=Status.OK, measurement=measurement(time_us))

    def measure_interleaved(self, builds, problem, rounds):
        return [Timing((self.us_per_square * problem.seqlen_q**2,)) for _ in builds]


def built(tmp_path):
    kernel = render(steps(64)["4.2.2"], CASES["t30"], GTX_1080)
    return Build(kernel, tmp_path / "kernel.cubin", registers=64, spill_bytes=0, seconds=0.0)


@pytest.mark.parametrize(
    ("seconds_at_full_length", "lengths"),
    [(5, [512, 2048, 8192, 32768]), (60, [512, 2048, 8192]), (6000, [512])],
)
def test_no_launch_takes_longer_than_the_limit(seconds_at_full_length, lengths, tmp_path):
    card = SlowCard(seconds_at_full_length * 1e6 / 32768**2)
    outcome, length = _Timer(card, False, limit_s=10).time(built(tmp_path), CASES["t30"])
    assert card.lengths == lengths
    assert length == lengths[-1]
    assert outcome.measurement.median_us == pytest.approx(card.us_per_square * length**2)


def test_an_emulated_kernel_is_checked_once(tmp_path):
    card = SlowCard(1e-3)
    timer, build = _Timer(card, True, limit_s=10), built(tmp_path)
    first, _ = timer.time(build, CASES["t10"])
    second, length = timer.time(build, CASES["t30"])
    assert card.lengths == [2048] and length == 32768
    assert second.measurement.median_us == pytest.approx(256 * first.measurement.median_us)
    assert second.measurement.error == first.measurement.error


def test_names_are_parsed_in_their_order():
    assert parse_names("t22, t10", list(CASES), "case") == ["t10", "t22"]
    assert parse_names(None, NAMES, "step") == NAMES
    with pytest.raises(UsageError, match=r"unknown step '4\.2\.11'; did you mean '4\.2\.1"):
        parse_names("4.2.11", NAMES, "step")
    with pytest.raises(UsageError, match="no case was named"):
        parse_names(",", list(CASES), "case")


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_a_pytorch_that_cannot_run_is_an_entry_with_a_reason():
    entries = list(torch_times([CASES["t10"]], 0))
    assert [(e.problem, e.median_us) for e in entries] == [(0, None)]
    assert "torch" in entries[0].reason


def test_a_chatty_pytorch_neither_stops_nor_confuses_the_timing(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    (package / "nn").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import contextlib, sys, types\n"
        "print('welcome'); print('w' * 2**20, file=sys.stderr)\n"
        "backends = types.SimpleNamespace(cuda=types.SimpleNamespace(matmul=types.SimpleNamespace()))\n"
        "properties = types.SimpleNamespace(L2_cache_size=64)\n"
        "cuda = types.SimpleNamespace(device=contextlib.nullcontext, empty_cache=lambda: None,\n"
        "    current_device=lambda: 0, get_device_properties=lambda device: properties)\n"
        "int8, no_grad = 'int8', contextlib.nullcontext\n"
        "def empty(*shape, dtype, device): return shape\n"
        "def randn(*shape, device): raise RuntimeError(f'no memory for {shape}\\nand more')\n"
    )
    (package / "nn" / "__init__.py").touch()
    (package / "nn" / "attention.py").write_text(
        "import types\n"
        "SDPBackend = types.SimpleNamespace(EFFICIENT_ATTENTION=1, MATH=2)\n"
        "def sdpa_kernel(backend): ...\n"
    )
    (package / "nn" / "functional.py").write_text("scaled_dot_product_attention = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = list(torch_times([CASES["t10"], CASES["t22"]], 0))
    assert [(e.problem, e.backend, e.fused, e.median_us) for e in entries] == [
        (problem, backend, fused, None)
        for problem in (0, 1)
        for backend, fused in (("memory-efficient", True), ("cudnn", True), ("math", False))
    ]
    assert entries[0].reason == "no memory for (10, 1, 2048, 64)"


def test_it_knows_no_mask_but_the_causal_one_and_says_who_does():
    asked = Problem(scoring=Scoring(window=(127, 0), softcap=30.0))
    assert Ladder.serves.why_not("ladder", Problem(causal=True), GTX_1080) is None
    told = Ladder.serves.why_not("ladder", asked, GTX_1080)
    assert (
        told
        == "family ladder knows the causal mask alone, not window, softcap; family simt serves all of them"
    )
    assert Simt.serves.why_not("simt", asked, GTX_1080) is None


def test_it_knows_values_as_wide_as_keys_alone():
    other = Problem(head_dim_v=32)
    assert Ladder.serves.why_not("ladder", other, GTX_1080) == (
        "family ladder needs values as wide as keys, not 32 beside 64"
    )
    assert Simt.serves.why_not("simt", other, GTX_1080) is None
