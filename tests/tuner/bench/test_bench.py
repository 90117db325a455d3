"""The benchmark of kernels beside what a user would pick instead, by a stand-in for PyTorch and its clock."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashgen.gen.emit.module import emit_module
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.bench import ceilings, emitted, figures, run
from flashgen.tuner.bench.contenders import CONTENDERS
from flashgen.tuner.bench.event_timer import MAX_ROUNDS, MIN_ROUNDS, WARM_UP_CALLS, EventTimer
from flashgen.tuner.bench.figures import BEST, OURS, BenchRun, Row
from flashgen.tuner.bench.inputs import Inputs
from flashgen.tuner.bench.plan import BenchOptions, contender_names, make_plan
from flashgen.tuner.bench.run import run_bench
from flashgen.tuner.bench.sample import SAMPLED_ROWS
from flashgen.tuner.cards import names
from flashgen.tuner.cli import app
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.shelf import library
from flashgen.tuner.shelf.library import shipped_folder
from flashgen.tuner.suites import SUITES, Workload
from typer.testing import CliRunner

from tests.support import ROOT
from tests.support.peers import served
from tests.support.tuned_kernels import H100, H200, tuned

FAKES = ROOT / "tests" / "support" / "fake_torch"
#: Beside it, a stand-in for FlashAttention-4.
FLASH = ROOT / "tests" / "support" / "fake_flash"
#: And for FlashAttention-3, and for the library that tells of a card's clock.
FLASH_3, NVML = (ROOT / "tests" / "support" / name for name in ("fake_flash_3", "fake_nvml"))
#: No shipped kernel has that head dim.
HALF = Problem(dtype="bf16", batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=12, seqlen_k=12, head_dim=24)
SINGLE = Problem(batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=9, seqlen_k=9, head_dim=24, causal=True)
MODULE = """
import torch


class _bound:
    name = "only"
    keywords = {}
    cubins = {}

    @staticmethod
    def compile(name, arch, causal):
        open(__file__ + f".{arch}.{causal}", "a").write("compiled")
        return f"for {arch}, {causal}".encode()

    @classmethod
    def carry(cls, name, causal, cubin):
        cls.cubins[causal] = cubin


KERNELS = (_bound,)


def attention(q, k, v, causal=None, out=None):
    cubin = _bound.cubins.get(causal) or _bound.compile("only", 90, causal)
    assert cubin == f"for 90, {causal}".encode()
    o = torch.attention("ours", q, k, v, causal)
    if out is not None:
        out.array[...] = o.array
        return out
    return o
"""


#: One whose kernels read what masks and changes of scores are made of.
SCORED = (
    MODULE.partition("def attention")[0]
    + """
import numpy as np


class TileLists:
    pass


_bound.keywords = KEYWORDS


def attention(
    q, k, v, causal=None, out=None, documents=None, bias=None, alibi_slopes=None, lists=None, **asked
):
    assert isinstance(lists, TileLists)
    places = np.arange(k.shape[2])
    if documents is not None:
        begins, ends = (each.array[:, None, :, None] for each in documents)
        asked["mask"] = (begins <= places) & (places < ends)
    if bias is not None:
        assert bias.stride()[:2] == (0, 0)
        asked["change"] = lambda scores: scores + bias.array
    if alibi_slopes is not None:
        distances = np.abs(places[:, None] - places)
        asked["change"] = lambda scores: scores - alibi_slopes.array[..., None, None] * distances
    o = torch.attention("ours", q, k, v, causal, **asked)
    out.array[...] = o.array
    return out
"""
)


@dataclass(frozen=True)
class Card:
    limits: DeviceLimits = H200
    spec: str = "0"
    driver: str = "580.1"
    predicted: bool = False
    lock_key: str = "fake-bench-card"

    def toolchain(self):
        return SimpleNamespace(version="nvcc 13.0.88")

    def open(self):
        raise AssertionError("the benchmark opens no runner")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Sets how the stand-in behaves; flashgen's kernels are in the folder returned."""
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def no_nvcc(arch):
        raise FlashgenError("no nvcc here")

    monkeypatch.setattr(ceilings, "build", no_nvcc)

    def behave(**how):
        monkeypatch.setenv("FAKE_TORCH", json.dumps(how))

    behave(ms={"ours": 1.0})
    yield SimpleNamespace(out=tmp_path / "out", behave=behave)
    forget_torch()


def forget_torch() -> None:
    """For good: what monkeypatch takes away it would bring back, and other tests would find the stand-in."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]


def keep(out: Path, problem: Problem, module: str = MODULE) -> None:
    library.write(out, H200.slug, replace(tuned(), problem=problem), "// source", module)


def options(out: Path, *problems: Problem, **others) -> BenchOptions:
    workloads = tuple(Workload(problem.name, problem) for problem in problems)
    return BenchOptions(device=Card(), workloads=workloads, out=out, **others)  # type: ignore[arg-type]


def test_every_contender_is_timed_and_compared(fake):
    fake.behave(
        ms={
            "ours": 1.0,
            "FLASH_ATTENTION": 2.0,
            "CUDNN_ATTENTION": 1.25,
            "EFFICIENT_ATTENTION": 4.0,
            "MATH": 30.0,
            "flex": 3.0,
        },
        noise={"FLASH_ATTENTION": 1e-2},
    )
    keep(fake.out, HALF)
    keep(fake.out, SINGLE)
    saved: list[BenchRun] = []
    run = run_bench(options(fake.out, HALF, SINGLE), save=saved.append)
    half, single = run.rows
    assert {n: c.ms for n, c in half.cells.items() if c.ms} == {
        OURS: 1.0,
        "flash": 2.0,
        "cudnn": 1.25,
        "mem-eff": 4.0,
        "math": 30.0,
        "flex": 3.0,
    }
    assert half.cells["fa3"].reason == "flash_attn_interface is not installed"
    assert half.ratio("flash") == 2.0 and half.ratio(BEST) == 1.25 and half.best == "cudnn"
    assert half.exact and half.kernel == HALF.name
    assert half.tflops == pytest.approx(HALF.flops / 1e9)
    # Of each, against float64: the one is made wrong by a hundredth.
    assert half.cells["flash"].error == pytest.approx(1e-2, rel=0.01)
    ours, theirs = half.cells[OURS].error, half.cells["cudnn"].error
    assert ours and theirs and 0 < ours < 1e-6 and half.error_ratio == pytest.approx(ours / theirs)
    # FlashAttention-2 knows no float32, nor does cuDNN.
    assert half.cells["fa4"].reason == "flash_attn.cute is not installed"
    assert set(single.cells) == {OURS, "mem-eff", "xformers", "math", "cupy", "flex"}
    assert single.ratio(BEST) == 3.0
    assert run.libraries["torch"] == "9.9.0+fake" and run.libraries["cudnn"] == "91900"
    assert set(run.host_us) == {"bf16", "f32"}
    assert {OURS, f"{OURS}, out made", "sdpa"} <= set(run.host_us["bf16"])
    assert run.ceilings.rates["gemm_bf16"] == pytest.approx(2 * 8192**3 / 1e-3)
    assert run.ceilings.rates["copy"] == pytest.approx(2 * 2**30 / 1e-3)
    # Cheap contenders have their turn on all workloads before dear ones have theirs.
    assert [len([c for row in s.rows for c in row.cells.values() if c.ms]) for s in saved[:2]] == [4, 6]
    # Compiled before for that mask alone.
    made = sorted((fake.out / H200.slug).glob("*.py.*.*"))
    assert [path.name for path in made] == [f"{HALF.name}.py.90.False", f"{SINGLE.name}.py.90.True"]
    assert all(path.read_text() == "compiled" for path in made)


def test_masks_and_changes_of_scores_are_timed_beside_who_knows_them(fake, monkeypatch):
    monkeypatch.syspath_prepend(str(FLASH))
    everywhere = {"fa3": "flash_attn_interface is not installed", "xformers": "xformers is not installed"}
    cases = [
        (
            Scoring(window=(3, 0), softcap=2.0, sinks=True),
            {"fa4", "flex"},
            {"flash": "knows no window, softcap, sinks", "cudnn": "knows no softcap, sinks"},
            {"window": ("window_left", "window_right"), "softcap": ("softcap",), "sinks": ("sinks",)},
        ),
        (
            Scoring(documents=3),
            {"fa4", "flex", "cudnn", "mem-eff", "math"},
            {"flash": "knows no documents"},
            {"documents": ("document_begin", "document_end")},
        ),
        (
            Scoring(bias="bf16"),
            {"flex", "cudnn", "mem-eff", "math"},
            {"fa4": "knows no bias"},
            {"bias": ("bias",)},
        ),
        (
            Scoring(alibi=True),
            {"flex", "cudnn", "mem-eff", "math"},
            {"fa4": "knows no alibi"},
            {"alibi_slopes": ("slopes",)},
        ),
    ]
    problems = [replace(HALF, causal=True, num_kv_heads=4, scoring=asked) for asked, *_ in cases]
    for problem, (*_, keywords) in zip(problems, cases, strict=True):
        keep(fake.out, problem, SCORED.replace("KEYWORDS", repr(keywords)))
    run = run_bench(options(fake.out, *problems))
    for row, (_, timed, refused, _) in zip(run.rows, cases, strict=True):
        assert {name for name, cell in row.cells.items() if cell.ms} == timed | {OURS}, row.name
        reasons = {name: cell.reason for name, cell in row.cells.items()}
        assert reasons.items() >= {**everywhere, **refused}.items(), row.name
        # Each computes just what is asked: rounding alone keeps them apart from float64.
        assert all(row.cells[name].error < 3e-3 for name in timed | {OURS}), row.name
    assert {"bf16"} == set(run.host_us)


def test_an_emitted_module_is_told_what_its_kernels_read(clock, tmp_path):
    asked = Scoring(
        window=(7, 0), documents=2, bias="u8", sinks=True, mask="(q - k) % n == 0", scalars=(("n", 2),)
    )
    problem = replace(SINGLE, scoring=asked)
    kernel = render(FAMILIES["simt"](), problem, H200)
    path = tmp_path / "emitted.py"
    path.write_text(emit_module(kernel, device=H200.name))
    module = emitted.load(path)
    inputs = Inputs.draw(clock, problem)
    told = emitted.asked_of(module, inputs)
    assert told["window"] == (7, 0) and told["n"] == 2
    assert [each.shape for each in told["documents"]] == [(1, 9), (1, 9)]
    assert told["sinks"].shape == (2,) and told["bias"].shape == (1, 2, 9, 9)
    assert set(told) == {"window", "documents", "n", "sinks", "bias"}
    plain = emitted.load(shipped_folder() / "nvidia_h200" / "f32_d64.py")
    assert emitted.asked_of(plain, Inputs.draw(clock, SINGLE)) == {}


KINDS = {
    "dense": ("mma", {}),
    "packed": ("mma", {"varlen": "list:3,9", "seqlen_q": 9, "seqlen_k": 9}),
    "pages": ("mma", {"seqlen_q": 2, "seqlen_k": 37, "page_size": 16}),
    "packed on pages": ("mma", {"varlen": "list:3x37,4x9", "seqlen_q": 4, "seqlen_k": 37, "page_size": 16}),
    "latent": ("latent", {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, "latent": True}),
    "latent in pages": (
        "latent",
        {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, "latent": True, "page_size": 64},
    ),
    "gradients": ("mma-backward", {"backward": True}),
    "gradients under a window": ("mma-backward", {"backward": True, "scoring": Scoring(window=(3, 0))}),
    # Its runtime has lists of tiles, of which gradients take none.
    "gradients under ALiBi": ("mma-backward", {"backward": True, "scoring": Scoring(alibi=True)}),
    "lists of tiles": ("mma", {"scoring": Scoring(mask="(q - k) % 3 == 0")}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_as_it_is_emitted_takes_what_it_is_called_with(kind, clock, tmp_path, monkeypatch):
    """No stand-in: compiled ahead under its kernel's name, given what was compiled, and called."""
    family, asked = KINDS[kind]
    problem = replace(HALF, **{"causal": True, "head_dim": 64, "head_dim_v": 64, **asked})
    path = tmp_path / "emitted.py"
    path.write_text(emit_module(render(FAMILIES[family](), problem, H200), device=H200.name))
    module = emitted.load(path)
    monkeypatch.setattr(type(module._bound), "compile", lambda self, name, arch, causal: name.encode())
    assert emitted.compile_module(module, 90, True) == problem.name.encode()
    emitted.give_cubin(module, True, b"cubin")
    called = []
    for name in ("attention", "attention_varlen", "attention_paged", "attention_latent", "gradients"):
        if hasattr(module, name):
            takes = inspect.signature(getattr(module, name))

            def call(*given, name=name, takes=takes, **options):
                called.append((name, options))
                takes.bind(*given, **options)
                return given[0]

            monkeypatch.setattr(module, name, call)
    inputs = Inputs.draw(clock, problem)
    emitted.call_of(module, inputs, inputs.output(float("nan")), same_bits=problem.backward)()
    ((name, options),) = called
    assert (name == "gradients") == problem.backward
    if problem.backward or kind == "lists of tiles":
        assert ("lists" in options) == (not problem.backward)


#: One of packed sequences.
PACKED_MODULE = (
    MODULE.partition("def attention")[0]
    + """
def attention_varlen(q, k, v, starts_q, starts_k, *, max_seqlen_q, max_seqlen_k, causal, out):
    lengths = starts_k.array[1:] - starts_k.array[:-1]
    assert max(lengths) == max_seqlen_k and max_seqlen_q == 9
    o = torch.packed_attention("ours", q, k, v, starts_q.array, starts_k.array, causal)
    out.array[...] = o.array
    return out
"""
)


#: One of keys in pages, of queries in batches or packed.
PAGED_MODULE = (
    MODULE.partition("def attention")[0]
    + """
def attention_paged(
    q, k, v, table, used, *, causal, out, max_seqlen_k, cu_seqlens_q=None, max_seqlen_q=None
):
    assert max_seqlen_k == max(used.array)
    k, _ = torch.from_pages(k, table, used)
    v, starts = torch.from_pages(v, table, used)
    if cu_seqlens_q is not None:
        assert max_seqlen_q == 4
        o = torch.packed_attention("ours", q, k, v, cu_seqlens_q.array, starts, causal).array
    else:
        batch, heads, rows, columns = q.shape
        flat = q.transpose(1, 2).reshape(-1, heads, columns)
        o = torch.packed_attention("ours", flat, k, v, range(0, batch * rows + 1, rows), starts, causal)
        o = o.reshape(batch, rows, heads, columns).transpose(1, 2).array
    out.array[...] = o
    return out
"""
)


def test_packed_sequences_are_timed_beside_who_takes_them(fake, monkeypatch):
    monkeypatch.syspath_prepend(str(FLASH))
    fake.behave(ms={"ours": 1.0, "fa4": 2.0, "varlen": 3.0, "nested": 4.0, "flex": 5.0})
    packed = replace(HALF, varlen="list:3,9,1,5", batch=4, causal=True)
    unequal = replace(packed, varlen="list:3x12,0x4,9x2,5x5")
    for problem in (packed, unequal):
        keep(fake.out, problem, PACKED_MODULE)
    run = run_bench(options(fake.out, packed, unequal))
    equal, other = ({name: cell.ms for name, cell in row.cells.items() if cell.ms} for row in run.rows)
    assert equal == {OURS: 1.0, "fa4": 2.0, "torch-varlen": 3.0, "nested": 4.0, "flex": 5.0}
    assert other == {OURS: 1.0, "fa4": 2.0, "torch-varlen": 3.0, "flex": 5.0}
    for row in run.rows:
        assert all(cell.error < 1e-6 for cell in row.cells.values() if cell.ms)
        assert row.cells["flash"].reason == "takes sequences of one length, not packed sequences"
        assert row.cells["fa3"].reason and row.cells["fa2"].reason
    assert "top-left" in run.rows[1].cells["nested"].reason
    # The caller's time is told of sequences of one length alone.
    assert not run.host_us and run.rows[0].tflops == pytest.approx(packed.flops / 1e9)


def test_keys_in_pages_are_timed_beside_who_finds_them(fake, monkeypatch):
    monkeypatch.syspath_prepend(str(FLASH))
    fake.behave(ms={"fa4": 2.0, "varlen": 3.0})
    paged = replace(HALF, seqlen_q=2, seqlen_k=37, page_size=8, causal=True)
    packed = replace(paged, varlen="list:3x37,4x9", seqlen_q=4)
    for problem in (paged, packed):
        keep(fake.out, problem, PAGED_MODULE)
    run = run_bench(options(fake.out, paged, packed))
    for row in run.rows:
        times = {name: cell.ms for name, cell in row.cells.items() if cell.ms}
        assert times == {OURS: 1.0, "fa4": 2.0, "torch-varlen": 3.0}
        assert all(cell.error < 1e-6 for cell in row.cells.values() if cell.ms)
    takes = "takes sequences of one length or packed sequences, not "
    assert [row.cells["flex"].reason.removeprefix(takes) for row in run.rows] == [
        "keys in pages",
        "packed queries on keys in pages",
    ]


def test_flash_attention_3_is_timed_wherever_it_serves(fake, monkeypatch):
    """Dense, under windows and soft caps, packed, in pages, and of few rows with keys shared among blocks."""
    monkeypatch.syspath_prepend(str(FLASH_3))
    fake.behave(ms={"fa3": 2.0, "fa3-split": 0.5})
    capped = replace(HALF, causal=True, num_kv_heads=4, scoring=Scoring(window=(3, 0), softcap=2.0))
    keywords = {"window": ("window_left", "window_right"), "softcap": ("softcap",)}
    packed = replace(HALF, varlen="list:3,9,1,5", batch=4, causal=True)
    paged = replace(HALF, seqlen_q=2, seqlen_k=37, page_size=8, causal=True)
    both = replace(paged, varlen="list:3x37,4x9", seqlen_q=4)
    few = replace(HALF, seqlen_q=2, seqlen_k=40)
    modules = {
        HALF: MODULE,
        capped: SCORED.replace("KEYWORDS", repr(keywords)),
        packed: PACKED_MODULE,
        **dict.fromkeys((paged, both), PAGED_MODULE),
        few: MODULE,
    }
    for problem, module in modules.items():
        keep(fake.out, problem, module)
    rows = run_bench(options(fake.out, *modules, contenders=("fa3",))).rows
    assert [row.ms("fa3") for row in rows] == [2.0, 2.0, 2.0, 0.5, 0.5, 0.5]
    assert all(row.cells["fa3"].error < 3e-3 for row in rows)
    assert [sorted(row.behind) for row in rows] == [[]] * 3 + [["fa3"]] * 3


def test_the_clock_is_sampled_while_contenders_are_timed(fake, monkeypatch):
    monkeypatch.syspath_prepend(str(NVML))
    keep(fake.out, HALF)
    row = run_bench(options(fake.out, HALF, contenders=("flash",))).rows[0]
    assert {name: row.cells[name].clock_mhz for name in (OURS, "flash")} == {OURS: 1500, "flash": 1500}
    assert row.peak_tflops == pytest.approx(989, rel=1e-3) and row.peak_mhz == 1830
    assert row.peak_at_clock == pytest.approx(989 * 1500 / 1830, rel=1e-3)


#: One of latent attention, of keys in pages or without.
LATENT_MODULE = (
    MODULE.partition("def attention")[0]
    + """
def attention_latent(q, cache, table=None, used=None, *, causal, out, max_seqlen_k=None):
    batch, rows, heads, columns = q.shape
    if table is None:
        k, starts = cache.reshape(-1, 1, columns), range(0, batch * 9 + 1, 9)
    else:
        assert max_seqlen_k == max(used.array)
        k, starts = torch.from_pages(cache, table, used)
    flat, starts_q = q.reshape(-1, heads, columns), range(0, batch * rows + 1, rows)
    o = torch.packed_attention("ours", flat, k, k, starts_q, starts, causal)
    out.array[...] = o.reshape(batch, rows, heads, columns).array[..., :32]
    return out
"""
)


def test_values_of_latent_attention_are_columns_of_its_keys(fake):
    fake.behave(ms={"CUDNN_ATTENTION": 2.0, "flex": 3.0})
    latent = Problem(
        dtype="bf16", batch=2, num_q_heads=4, num_kv_heads=1, seqlen_q=1, seqlen_k=9, head_dim=48,
        head_dim_v=32, latent=True,
    )  # fmt: skip
    paged = replace(latent, page_size=4)
    for problem in (latent, paged):
        keep(fake.out, problem, LATENT_MODULE)
    plain, other = run_bench(options(fake.out, latent, paged, contenders=("cudnn", "flex", "flashmla"))).rows
    assert {name: cell.ms for name, cell in plain.cells.items() if cell.ms} == {
        OURS: 1.0,
        "cudnn": 2.0,
        "flex": 3.0,
    }
    assert other.ours == 1.0
    for row in (plain, other):
        assert all(cell.error < 1e-6 for cell in row.cells.values() if cell.ms)
    assert other.cells["flashmla"].reason == "flash_mla is not installed"


def test_a_causal_mask_of_few_queries_is_given_to_who_takes_masks(fake):
    fake.behave(ms={"CUDNN_ATTENTION": 2.0})
    few = replace(HALF, seqlen_q=2, seqlen_k=37, causal=True)
    (row,) = run_bench(options(fake.out, few, contenders=("flash", "cudnn"))).rows
    assert row.ms("cudnn") == 2.0 and row.cells["cudnn"].error < 1e-3
    assert "top-left" in row.cells["flash"].reason


def test_heads_of_one_batch_are_compared_on_rows_of_their_own(fake):
    fake.behave(ms={"CUDNN_ATTENTION": 2.0})
    longer = replace(HALF, batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=2 * SAMPLED_ROWS + 9)
    (row,) = run_bench(options(fake.out, longer, contenders=("cudnn",))).rows
    assert row.cells["cudnn"].error < 1e-3 and row.ms("cudnn") == 2.0


def test_who_computes_something_else_is_not_timed(fake):
    fake.behave(noise={"FLASH_ATTENTION": 0.2, "CUDNN_ATTENTION": float("nan")})
    keep(fake.out, HALF)
    row = run_bench(options(fake.out, HALF, contenders=("flash", "cudnn", "mem-eff"))).rows[0]
    assert row.cells["flash"].reason == "is wrong: its error is 2.0e-01" and row.ms("flash") is None
    assert row.cells["cudnn"].reason == "is wrong: its error is nan" and row.best == "mem-eff"


def test_a_refusal_a_crash_and_a_hang_cost_one_cell_each(fake):
    fake.behave(
        ms={"ours": 1.0, "EFFICIENT_ATTENTION": 2.0},
        refuse=["FLASH_ATTENTION"],
        die=["CUDNN_ATTENTION"],
        hang=["MATH"],
        only=24,
    )
    keep(fake.out, HALF)
    notes: list[str] = []
    contenders = ("flash", "cudnn", "mem-eff", "math")
    run = run_bench(
        options(
            fake.out, HALF, replace(HALF, head_dim=16, head_dim_v=16), contenders=contenders, contender_s=5.0
        ),
        note=notes.append,
    )
    row, other = run.rows
    assert row.ours == 1.0 and row.ms("mem-eff") == 2.0
    reasons = {name: cell.reason for name, cell in row.cells.items() if cell.ms is None}
    assert reasons == {
        "flash": "FLASH_ATTENTION is not for you",
        "cudnn": "killed by SIGABRT",
        "math": "took longer than 5 s",
    }
    assert any("cudnn: killed by SIGABRT" in note for note in notes)
    # Where no kernel is known the others are timed all the same.
    assert all(other.ms(name) for name in contenders)
    assert other.cells[OURS].reason.startswith("no kernel is known for bf16_d16; `flashgen tune`")
    assert not other.kernel


def test_too_much_memory_is_not_asked_for(fake):
    fake.behave(free_bytes=9 * 9 * 2 * 16)
    keep(fake.out, SINGLE)
    row = run_bench(options(fake.out, SINGLE, contenders=("mem-eff", "math"))).rows[0]
    assert row.ms("mem-eff") == 1.0
    assert "would need about" in row.cells["math"].reason


def test_after_its_minutes_nothing_more_is_begun(fake, monkeypatch):
    keep(fake.out, HALF)
    monkeypatch.setattr(run.time, "time", lambda: 0.0)
    with pytest.raises(FlashgenError, match=r"nothing could be timed: the 0\.5 minutes were over"):
        run_bench(options(fake.out, HALF, minutes=0.5))


def test_stopping_keeps_what_there_is(fake):
    fake.behave(hang=["flex"])
    keep(fake.out, HALF)
    stop = threading.Event()
    run = run_bench(
        options(fake.out, HALF, contenders=("flash", "math", "flex")),
        on_row=lambda row: stop.set() if "math" in row.cells else None,
        stop=stop,
    )
    assert run.rows[0].ms("math") == 1.0 and run.notes == ("stopped before its turn",)
    assert run.rows[0].cells["flex"].reason == "stopped before its turn"


def test_a_kernel_that_does_not_compile_is_told(fake):
    keep(
        fake.out,
        HALF,
        MODULE.replace("        open(", "        raise RuntimeError('nvcc failed:\\nmore')\n        open("),
    )
    row = run_bench(options(fake.out, HALF, contenders=("cudnn",))).rows[0]
    assert row.cells[OURS].reason == "does not compile: nvcc failed:" and row.ms("cudnn") == 1.0


def test_errors_alone_are_taken_under_both_masks_on_inputs_of_two_kinds(fake):
    fake.behave(noise={"ours": 1e-3, "CUDNN_ATTENTION": 2e-3})
    keep(fake.out, HALF)
    run = run_bench(options(fake.out, HALF, contenders=("cudnn", "flash"), errors_alone=True))
    assert [(e.inputs, e.problem.causal) for e in run.errors] == [
        (kind, causal) for kind in ("normal", "uniform") for causal in (False, True)
    ]
    for each in run.errors:
        assert each.kernel == HALF.name and each.problem.num_kv_heads == 4
        assert each.errors[OURS] == pytest.approx(1e-3, rel=0.01)
        assert each.errors["cudnn"] == pytest.approx(2e-3, rel=0.01)
    assert not run.rows[0].ours


def test_without_pytorch_or_a_card_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "torch_installed", lambda: False)
    with pytest.raises(FlashgenError, match="pip install torch"):
        run_bench(options(tmp_path, HALF))
    emulated = replace(options(tmp_path, HALF), device=Card(predicted=True, spec="sim:h200"))  # type: ignore[arg-type]
    with pytest.raises(FlashgenError, match="emulated card"):
        run_bench(emulated)


def test_a_pytorch_that_does_not_start_ends_the_run(fake, monkeypatch, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libtorch is gone')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "broken"))
    with pytest.raises(FlashgenError, match="on the card: ImportError: libtorch is gone"):
        run_bench(options(fake.out, HALF))


# -- the plan ------------------------------------------------------------------------------------------------


def test_a_kernel_for_another_shape_serves_and_says_so(tmp_path):
    longer = replace(HALF, seqlen_q=4096, seqlen_k=4096)
    keep(tmp_path / "out", longer)
    plan = make_plan(options(tmp_path / "out", HALF, longer), tmp_path)
    near, exact = plan.rows
    assert not near.exact and near.kernel == longer.name and "the best match is" in near.how
    assert exact.exact and plan.modules[0] == plan.modules[1]


def test_the_reports_steps_are_contenders_on_its_cases_alone(tmp_path):
    workloads = (*SUITES["report"].workloads, *SUITES["gpt2"].workloads)
    plan = make_plan(BenchOptions(device=Card(), workloads=workloads, out=tmp_path), tmp_path)  # type: ignore[arg-type]
    assert all(len(steps) == 9 for steps in plan.steps[:5]) and not plan.steps[5]
    assert len(list(tmp_path.glob("ladder_*.py"))) == 18  # one for each step and head dim
    of_halves = {"flash", "cudnn", "fa3", "fa4"}
    of_sequences = {"fa2", "torch-varlen", "nested", "flashmla"}
    of_gradients = {"fa3-det", "fa4-det", "flashgen-det"}
    timed = {n for row in plan.contenders for n in row}
    of_eight_bits = {"flashgen-bf16"}
    assert set(contender_names()) == timed | of_halves | of_sequences | of_gradients | of_eight_bits
    assert set(plan.modules) - {None} and all(row.kernel for row in plan.rows)
    assert sum(row.exact for row in plan.rows) >= 4
    assert all(
        row.exact or "what was tuned for just this should be far slower" in row.how for row in plan.rows
    )


def test_a_step_too_slow_at_full_length_is_scaled(fake, tmp_path):
    fake.behave(ms={"ours": 100.0})
    module = tmp_path / "step.py"
    module.write_text(MODULE)
    problem = replace(SINGLE, num_q_heads=1, num_kv_heads=1, seqlen_q=4096, seqlen_k=4096, head_dim=1)
    request = {
        "device": 0,
        "pci_bus_id": "none",
        "rows": [
            {
                "problem": problem,
                "module": None,
                "contenders": {"ladder-4.2.2": 0},
                "steps": {"ladder-4.2.2": str(module)},
            }
        ],
        "cubins": {},
        "tasks": [(0, 0)],
        "skip": {0: {OURS: "none"}},
        "until": time.time() + 60,
        "budget_ms": 1.0,
        "contender_s": 60,
        "errors_alone": False,
        "host": False,
        "ceilings": None,
    }
    child = run._Child(request, ())
    events = list(child.events(threading.Event()))
    child.close()
    assert child.ended, child.reason
    cells = next(event["cells"] for event in events if event["event"] == "cells")
    # 100 ms at 512 rows: 2048 would take 1.6 s by the square, 4096 6.4.
    assert cells["ladder-4.2.2"].ms == 6400.0 and cells["ladder-4.2.2"].scaled_from == 512


# -- the timer -----------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.delenv("FAKE_TORCH", raising=False)
    yield importlib.import_module("torch")
    forget_torch()


def test_calls_take_turns_each_with_the_l2_flushed(clock):
    timer = EventTimer(clock)
    calls = {name: lambda name=name: clock.launch(name) for name in ("a", "b", "c")}
    times = timer.in_turns(calls, budget_ms=12)
    assert times == dict.fromkeys(calls, (1.0,) * 5)
    done = clock.launches
    assert [done[i : i + 2] for i in range(0, len(done), 3)] == [["flush", "idle"]] * (len(done) // 3)
    order = "".join(done[2::3])
    assert order == "abc" * 2 + "abc" + "bca" + "cab" + "cba" + "acb"
    # Half a millisecond of the clock that the card tells, or of a usual one.
    assert set(clock.idled) == {1_000_000}
    clock.idled.clear()
    told = SimpleNamespace(L2_cache_size=64, clock_rate=1_980_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock.cuda, "get_device_properties", lambda device: told)
        EventTimer(clock).once(lambda: None)
    assert clock.idled == [990_000]


def test_the_card_idles_until_a_slow_caller_has_enqueued_its_call(clock):
    def slow() -> None:
        time.sleep(0.003)
        clock.launch("slow")

    clock.idled.clear()
    EventTimer(clock).in_turns({"slow": slow, "fast": lambda: clock.launch("fast")}, budget_ms=8)
    warm_up, rounds = clock.idled[: 2 * WARM_UP_CALLS], clock.idled[2 * WARM_UP_CALLS :]
    assert set(warm_up) == {1_000_000}
    # Twice the three milliseconds that it took, and what the machine added; as many cycles as ever otherwise.
    assert 12_000_000 <= max(rounds) <= 20_000_000 and min(rounds) == 1_000_000
    assert rounds.count(max(rounds)) == rounds.count(min(rounds)) == MIN_ROUNDS


def test_the_card_is_watched_while_it_is_at_work(clock):
    seen: list[tuple[str, str]] = []
    events: list[Any] = []

    class Event(clock.Event):
        def __init__(self, enable_timing):
            super().__init__(enable_timing)
            events.append(self)

    def watch(name: str) -> None:
        start, end = events[-2:]
        # It has come to the call, and nobody has waited for its end.
        assert start.awaited and not end.awaited
        seen.append((name, clock.launches[-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock.cuda, "Event", Event)
        calls = {name: lambda name=name: clock.launch(name) for name in ("a", "b")}
        EventTimer(clock).in_turns(calls, 8, watch)
    assert len(seen) == 2 * MIN_ROUNDS and all(name == launched for name, launched in seen)


def test_rounds_follow_from_how_long_calls_take(clock):
    timer = EventTimer(clock)
    clock.BEHAVIOUR["ms"] = {"long": 500.0, "short": 0.01}
    assert len(timer.in_turns({"x": lambda: clock.launch("long")}, 100)["x"]) == 3
    assert len(timer.in_turns({"x": lambda: clock.launch("short")}, 100)["x"]) == MAX_ROUNDS
    clock.BEHAVIOUR.clear()


def test_peers_are_timed_as_contenders_are(clock):
    """The yardstick of `flashgen ladder`: backends in turns, those that refuse left out."""
    clock.BEHAVIOUR.update(ms={"FLASH_ATTENTION": 2.0, "MATH": 30.0}, refuse=["CUDNN_ATTENTION"])
    told = served((HALF, SINGLE), budget_ms=4.0)
    clock.BEHAVIOUR.clear()
    found = {(e.problem, e.backend): (e.fused, e.median_us, e.reason) for e in told}
    refused = (True, None, "CUDNN_ATTENTION is not for you")
    assert found == {
        (0, "flash"): (True, 2000.0, ""),
        (0, "memory-efficient"): (True, 1000.0, ""),
        (0, "cudnn"): refused,
        (0, "math"): (False, 30000.0, ""),
        (1, "memory-efficient"): (True, 1000.0, ""),
        (1, "cudnn"): refused,
        (1, "math"): (False, 30000.0, ""),
    }
    # One call each to see who serves, then warm-up and rounds in turns.
    done, turns = clock.launches, ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    assert done[:3] == turns
    timed = done[3 : 3 + 9 * (WARM_UP_CALLS + MIN_ROUNDS)]
    assert timed[:9] == [work for name in turns for work in ("flush", "idle", name)]
    assert sorted(timed[2::3]) == sorted(turns * (WARM_UP_CALLS + MIN_ROUNDS))


# -- the file ------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(fake, tmp_path):
    keep(fake.out, HALF)
    run = run_bench(options(fake.out, HALF, contenders=("flash", "fa3")))
    cells = run.rows[0].cells
    wrong = replace(run.rows[0], cells={**cells, OURS: replace(cells[OURS], error=float("nan"))})
    run = replace(run, rows=(wrong,))
    path = tmp_path / "deep" / "run.json"
    figures.write(path, run)
    again = figures.read(path)
    assert repr(again) == repr(run)
    data = json.loads(path.read_text())
    assert data["rows"][0]["ratios"]["flash"] == 1.0 and data["summary"]["shapes"]["flash"]["workloads"] == 1
    path.write_text(json.dumps({**data, "format": 99}))
    with pytest.raises(FlashgenError, match="its format is 99"):
        figures.read(path)
    path.write_text("[]")
    with pytest.raises(FlashgenError, match="run it again"):
        figures.read(path)
    with pytest.raises(FlashgenError, match="cannot be read"):
        figures.read(tmp_path / "none.json")


def test_rows_of_asdict_are_whole() -> None:
    row = Row(name="x", problem=HALF)
    # Ceilings are a run's, which tells them once for all of its rows.
    assert set(row.to_dict()) == {*asdict(row), "ratios"} - {"ceilings"}


# -- the command ---------------------------------------------------------------------------------------------


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_times_writes_fills_and_draws(fake, tmp_path, monkeypatch):
    keep(fake.out, HALF)
    monkeypatch.setattr(names, "resolve", lambda spec: Card())
    monkeypatch.setenv("COLUMNS", "200")
    readme, target = tmp_path / "README.md", tmp_path / "run.json"
    readme.write_text(f"<!-- bench:{HALF.name} -->\n<!-- /bench -->\n")
    shape = ["--shape", HALF.name, "--contenders", "flash,cudnn", "--out", str(fake.out)]
    printed = invoke(*shape, "--to", str(target), "--readme", str(readme), "--plots", str(tmp_path / "plots"))
    assert (
        f"{HALF.name}: flashgen 1.000 ms, flash 1.000 (\u25b2 1.00x), cudnn 1.000 (\u25b2 1.00x)" in printed
    )
    assert "Behind on 0 of 1 rows." in printed
    assert "geometric mean of 1 workloads" in printed
    filled = readme.read_text()
    assert "| bf16 | 2 | 4 / 2 | 12 | 24 |  | 1.000 |" in filled
    assert (tmp_path / "plots" / "shapes.svg").exists()
    readme.write_text(f"<!-- bench:{HALF.name} -->\nold\n<!-- /bench -->\n")
    invoke("--from", str(target), "--readme", str(readme))
    assert readme.read_text() == filled


def test_plots_that_cannot_be_drawn_are_refused_before_anything_is_timed(fake, tmp_path, monkeypatch):
    def resolve(spec):
        raise AssertionError("a card was looked for")

    monkeypatch.setattr(names, "resolve", resolve)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setenv("COLUMNS", "200")
    told = invoke("--shape", HALF.name, "--plots", str(tmp_path / "plots"), code=1)
    assert "`pip install matplotlib`" in told and "pip install -e '.[plots]'" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lmm"], "did you mean 'llm'?"),
        (["--shape", "bf16"], "is not of the form dtype_dHEADDIM"),
        (["--row", "dec4k-b1"], "no suite has a row 'dec4k-b1'; rows are named as in 'dec-4k-b1'"),
        (["--contenders", "flsh", "llm"], "did you mean 'flash'?"),
        (["--from", "x.json", "llm"], "leave suites, rows, shapes and --errors out"),
        (["--from", "x.json", "--row", "gpt2"], "leave suites, rows, shapes and --errors out"),
        (["--device", "sim:h200", "gpt2"], "is an emulated card"),
        (["--from", "none.json"], "cannot be read"),
    ],
)
def test_mistakes_are_told(arguments, words):
    code = 1 if words in ("is an emulated card", "cannot be read") else 2
    assert words in " ".join(invoke(*arguments, code=code).split())


#: One of gradients, which a module of outputs has no names for.
TRAINED = (
    MODULE.partition("def attention")[0].replace("KERNELS", "GRADIENTS")
    + """
import numpy as np


def gradients(
    q, k, v, o, lse, dout, causal=None, window=None, documents=None, alibi_slopes=None, deterministic=False
):
    place = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - np.arange(k.shape[2])
    seen = (place >= 0) | np.logical_not(causal)
    if window is not None:
        seen = seen & (place <= window[0])
    if documents is not None:
        begins, ends = (each.array[:, None, :, None] for each in documents)
        seen = seen & (begins <= np.arange(k.shape[2])) & (np.arange(k.shape[2]) < ends)
    added = 0.0 if alibi_slopes is None else -alibi_slopes.array[..., None, None] * np.abs(place)
    assert o.shape == dout.shape and lse.shape == q.shape[:3] and np.isfinite(lse.array).all()
    assert_passed(q.array, k.array, v.array, o.array, lse.array, seen, added)
    found = torch.gradients("ours", q.array, k.array, v.array, dout.array, seen, added)
    return tuple(torch.Tensor(x) for x in found)


def assert_passed(q, k, v, o, lse, seen, added):
    keys, values = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.where(seen, q @ keys.swapaxes(2, 3) * q.shape[-1] ** -0.5 + added, -np.inf)
    weights = np.exp(scores - lse[..., None])
    assert np.allclose(weights.sum(axis=3), 1, atol=1e-3) and np.allclose(weights @ values, o, atol=2e-2)
"""
)


def test_gradients_are_timed_beside_who_has_some(fake, monkeypatch):
    monkeypatch.syspath_prepend(str(FLASH))
    fake.behave(
        ms={"ours backward": 2.0, "CUDNN_ATTENTION backward": 3.0, "fa4 backward": 2.5},
        noise={"EFFICIENT_ATTENTION backward": 0.5, "MATH backward": 1e-2},
    )
    plain = replace(HALF, backward=True, causal=True)
    windowed = replace(plain, scoring=Scoring(window=(3, 0)))
    for problem in (plain, windowed):
        told = {"window": ("window_left", "window_right")} if problem is windowed else {}
        keep(fake.out, problem, TRAINED.replace("keywords = {}", f"keywords = {told!r}"))
    run = run_bench(options(fake.out, plain, windowed))
    row, masked = run.rows
    assert {name: cell.ms for name, cell in row.cells.items() if cell.ms} == {
        OURS: 2.0,
        "flash": 1.0,
        "cudnn": 3.0,
        "math": 1.0,
        "fa4": 2.5,
        "fa4-det": 1.0,
    }
    assert row.cells["mem-eff"].reason.startswith("is wrong: its error is 5.0e-01")
    assert row.cells["math"].error == pytest.approx(1e-2, rel=0.01)
    assert row.cells["fa3"].reason == "flash_attn_interface is not installed"
    assert not {"flex", "xformers", "cupy"} & set(row.cells)  # whose gradients are not timed
    # Of operations there are 2.5 times those of outputs.
    assert row.tflops == pytest.approx(2.5 * replace(plain, backward=False).flops / 2.0e9)
    assert {name for name, cell in masked.cells.items() if cell.ms} >= {OURS, "cudnn", "math", "fa4", "flex"}
    assert masked.cells["flash"].reason == "knows no window"
    assert not run.host_us


#: By what is asked for: the keywords of a module, who is timed, and who is not, for what reason.
MASKED_GRADIENTS = {
    "documents": (
        Scoring(documents=3),
        {"documents": ("document_begin", "document_end")},
        {"cudnn", "mem-eff", "math", "fa3", "fa3-det", "fa4", "fa4-det", "torch-varlen", "flex"},
        {"flash": "knows no documents", "fa2": "flash_attn.flash_attn_interface is not installed"},
    ),
    "slopes": (
        Scoring(alibi=True),
        {"alibi_slopes": ("slopes",)},
        {"cudnn", "mem-eff", "math", "flex"},
        dict.fromkeys(("flash", "fa3", "fa3-det", "fa4", "fa4-det"), "knows no alibi"),
    ),
}


@pytest.mark.parametrize("kind", MASKED_GRADIENTS)
def test_gradients_under_documents_and_slopes_are_timed_beside_who_knows_them(kind, fake, monkeypatch):
    for folder in (FLASH, FLASH_3):
        monkeypatch.syspath_prepend(str(folder))
    asked, keywords, timed, refused = MASKED_GRADIENTS[kind]
    fake.behave(ms={"ours backward": 2.0, "flex backward": 5.0, "varlen backward": 3.0})
    # Heads differ, and so do batches: each has what is its own.
    training = replace(HALF, backward=True, causal=True, num_kv_heads=4, scoring=asked)
    keep(fake.out, training, TRAINED.replace("keywords = {}", f"keywords = {keywords!r}"))
    (row,) = run_bench(options(fake.out, training)).rows
    reasons = {name: cell.reason for name, cell in row.cells.items() if cell.ms is None}
    assert {name for name, cell in row.cells.items() if cell.ms} - {"flashgen-det"} == timed | {OURS}, reasons
    assert reasons.items() >= refused.items() and not {"xformers", "cupy", "nested"} & set(row.cells)
    assert all(row.cells[name].error < 4e-3 for name in timed | {OURS}), row.cells
    assert row.ms("flex") == 5.0 and row.ratio("flex") == 2.5
    assert row.ms("torch-varlen") == (3.0 if kind == "documents" else None)


def test_gradients_beside_sinks_are_told_of(fake):
    sunk = replace(HALF, backward=True, scoring=Scoring(sinks=True))
    with pytest.raises(FlashgenError, match="gradients beside sinks are not timed"):
        run_bench(options(fake.out, sunk, contenders=("flex",)))


def test_gradients_that_are_compiled_have_more_time_and_say_when_it_was_not_enough(fake):
    fake.behave(hang=["flex backward"], only=24)
    windowed = replace(HALF, backward=True, causal=True, scoring=Scoring(window=(3, 0)))
    keyword = {"window": ("window_left", "window_right")}
    keep(fake.out, windowed, TRAINED.replace("keywords = {}", f"keywords = {keyword!r}"))
    notes: list[str] = []
    asked = options(fake.out, windowed, contenders=("cudnn", "flex"), contender_s=3.0)
    run = run_bench(asked, note=notes.append)
    (row,) = run.rows
    assert CONTENDERS["flex"].patience == 2.0
    assert row.cells["flex"].reason == "took longer than 6 s" and row.ms("cudnn") and row.ours
    told = f"{row.name}: flex: took longer than 6 s"
    assert told in notes and told in run.notes


def test_compiled_gradients_are_timed_under_masks_alone():
    problems = SUITES["backward"].problems
    looked_at = {name for name, problem in problems.items() if CONTENDERS["flex"].may_serve(problem)}
    assert looked_at == {name for name, problem in problems.items() if not problem.scoring.is_plain}
    packed = {name for name, problem in problems.items() if CONTENDERS["torch-varlen"].may_serve(problem)}
    assert packed == {"backward-document16-bf16-d128-16384c"}


def backward_variant(dq_path: str):
    return FAMILIES["mma-backward"](dq_path=dq_path)


def test_gradients_of_the_same_bits_every_run_are_held_against_each_other(fake, monkeypatch):
    for folder in (FLASH, FLASH_3):
        monkeypatch.syspath_prepend(str(folder))
    fake.behave(
        ms={
            "ours backward": 2.0,
            "same backward": 2.4,
            "fa3 backward": 3.0,
            "fa3-det backward": 3.6,
            "fa4 backward": 2.5,
            "fa4-det backward": 2.2,
        }
    )
    training = replace(HALF, backward=True, causal=True)
    longer = replace(training, seqlen_q=24, seqlen_k=24)
    same = TRAINED.replace('"ours"', '"same"')
    # Of the shorter sequences it is asked for because of its bits.
    same = same.replace("    place = np", "    assert deterministic or q.shape[2] == 24\n    place = np")
    fast, slow = (tuned(training, variant=backward_variant(path), us=1.0) for path in ("atomics", "launch"))
    library.write(fake.out, H200.slug, fast, "// source", TRAINED)
    library.write(fake.out, H100.slug, replace(slow, device=H100.name), "// source", same)
    library.write(fake.out, H200.slug, tuned(longer, variant=slow.variant), "// source", same)
    row, exact = run_bench(options(fake.out, training, longer)).rows
    timed = {name: cell.ms for name, cell in row.cells.items() if cell.ms}
    expected = {OURS: 2.0, "flashgen-det": 2.4, "fa3-det": 3.6, "fa4-det": 2.2}
    assert {name: timed.get(name) for name in expected} == pytest.approx(expected)
    assert not row.deterministic and row.same_bits_ms == pytest.approx(2.4)
    assert row.ratio("fa3-det") == pytest.approx(1.5) and row.ratio("fa4-det") == pytest.approx(2.2 / 2.4)
    # These are no rivals of a kernel whose bits may differ.
    assert row.ratio(BEST) == min(row.ratio(n) for n in ("flash", "cudnn", "mem-eff", "math", "fa3", "fa4"))
    assert row.behind.keys() >= {"fa4-det"} and row.ratio("flashgen-det") is None
    # The other row's kernel makes them itself.
    assert (
        exact.deterministic and "flashgen-det" not in exact.cells and exact.same_bits_ms == pytest.approx(2.4)
    )
    assert exact.ratio("fa3-det") == pytest.approx(1.5)


def test_who_promises_the_same_bits_is_taken_at_its_word(fake, monkeypatch):
    monkeypatch.syspath_prepend(str(FLASH))
    fake.behave(restless=["fa4-det"])
    training = replace(HALF, backward=True)
    library.write(
        fake.out, H200.slug, tuned(training, variant=backward_variant("atomics")), "// source", TRAINED
    )
    row = run_bench(options(fake.out, training)).rows[0]
    assert row.cells["fa4"].ms and row.cells["fa4-det"].reason == "its bits differ from run to run"
    assert row.same_bits_ms is None and row.cells["fa3-det"].reason.endswith("is not installed")
    assert (
        "flashgen-det"
        not in make_plan(options(fake.out, training, contenders=("fa4",)), fake.out).contenders[0]
    )


def test_the_same_bits_are_of_the_kernel_that_calls_get_which_ask_for_them(tmp_path):
    training = replace(HALF, backward=True)
    folder = tmp_path / "made"
    folder.mkdir()

    def planned(*problems: Problem, path: str = "atomics", at: DeviceLimits = H200):
        for problem in problems:
            found = replace(tuned(problem, variant=backward_variant(path), us=1.0), device=at.name)
            library.write(tmp_path / "out", at.slug, found, "// source", TRAINED)
        return make_plan(options(tmp_path / "out", training), folder)

    nothing = make_plan(options(tmp_path / "none", training), folder)
    assert "flashgen-det" not in nothing.contenders[0] and nothing.skip[0][OURS].startswith(
        "no kernel is known"
    )
    # None was tuned: emitted for the occasion.
    plan = planned(training)
    made = Path(plan.steps[0]["flashgen-det"])
    assert made.parent == folder and emitted.load(made).GRADIENTS[0].deterministic
    assert not plan.rows[0].deterministic
    # One that was tuned, for just this.
    plan = planned(training, path="launch", at=H100)
    assert Path(plan.steps[0]["flashgen-det"]).parent.name == H100.slug
    # None beside a kernel that makes them.
    plan = planned(training, path="launch")
    assert plan.rows[0].deterministic and not plan.steps[0]
    # `simt` has no other gradients; of a family without the choice the nearest tuned one serves.
    whole = replace(training, dtype="f32", num_kv_heads=4)
    found = tuned(whole, variant=FAMILIES["simt-backward"]())
    library.write(tmp_path / "out", H200.slug, found, "// source", TRAINED)
    assert make_plan(options(tmp_path / "out", whole), folder).rows[0].deterministic
