"""Tuned kernels as a FlashInfer Trace data set, held to what its schema asks for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.append import Append
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cli import app
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.outcome import Measurement, TunedKernel
from flashgen.tuner.exchange import trace_definitions, trace_set
from flashgen.tuner.shelf import library
from typer.testing import CliRunner

from tests.support.modules import import_path
from tests.support.trace_schema import check_definition, check_trace_set, read_safetensors

PACKED = Problem(varlen="list:3x7,1x4,5", batch=3, seqlen_q=5, seqlen_k=7, head_dim=16, causal=True)
PACKED = replace(PACKED, num_q_heads=4, num_kv_heads=2)
DENSE = Problem(batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=5, seqlen_k=9, head_dim=16, causal=True)


def tuned(problem: Problem, median_us: float = 100.0, *, predicted: bool = False) -> library.Entry:
    """A tuned kernel, as a study holds it."""
    card = PRESETS["h200"]
    variant: Any = Simt() if problem.dtype == "f32" else Mma()
    rendered = render(variant, problem, card)
    measurement = Measurement(
        times_us=() if predicted else (median_us,) * 3,
        median_us=median_us,
        spread=0.0 if predicted else 0.02,
        tflops=1.0,
        registers=64,
        occupancy=0.5,
        spill_bytes=0,
        smem_bytes=0,
        error=1e-7,
        predicted=predicted,
    )
    made_with = {"driver": "580", "toolkit": "nvcc 13.0", "flashgen": "0.1.0", "seed": 0}
    at = "2026-05-01T12:00:00+00:00"
    common: dict[str, Any] = {"device": "NVIDIA H200", "arch": card.arch, "tuned_at": at, **made_with}
    common |= {"source": rendered.source, "measurement": measurement}
    kernel = TunedKernel(problem=problem, variant=variant, **common)
    return library.Entry(kernel, "nvidia_h200", rendered=rendered)


def test_a_data_set_is_as_its_schema_has_it(tmp_path: Path) -> None:
    slower, other = tuned(DENSE, 150.0), replace(DENSE, seqlen_q=9, batch=7)
    half = replace(DENSE, dtype="f16", causal=False)
    entries = [slower, tuned(DENSE), tuned(other, predicted=True), tuned(half), tuned(PACKED)]
    entries.append(tuned(replace(DENSE, scoring=Scoring(window=(3, 0)))))
    done = trace_set.write_trace_set(tmp_path, entries)
    counts = check_trace_set(tmp_path)
    assert counts == {"definitions": 3, "solutions": 4, "workloads": 4, "traces": 2}
    assert counts == {name: getattr(done, name) for name in counts}
    assert list(done.left_out.values()) == [1]
    # Of the same problem the fastest, and no times that a model predicted or of less than is defined.
    (line,) = (tmp_path / "traces/flashgen/gqa_dense/gqa_dense_causal_h4_kv2_d16_fp32.jsonl").open()
    trace = json.loads(line)
    assert trace["evaluation"]["performance"]["latency_ms"] == 0.1
    assert trace["evaluation"]["environment"]["hardware"] == "NVIDIA_H200"
    assert trace["evaluation"]["correctness"]["extra"] == {"head_error": 1e-7}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    trace_set.write_trace_set(tmp_path, entries)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_packed_sequences_are_told_as_the_data_set_has_them(tmp_path: Path) -> None:
    trace_set.write_trace_set(tmp_path, [tuned(replace(PACKED, dtype="bf16"))])
    assert check_trace_set(tmp_path)["traces"] == 0
    (line,) = (tmp_path / "workloads/gqa_ragged/gqa_ragged_prefill_causal_h4_kv2_d16.jsonl").open()
    workload = json.loads(line)["workload"]
    assert workload["axes"] == {"len_indptr": 4, "total_q": 9, "total_kv": 16}
    arrays = read_safetensors(tmp_path / workload["inputs"]["qo_indptr"]["path"])
    assert arrays["qo_indptr"].tolist() == [0, 3, 4, 9] and arrays["kv_indptr"].tolist() == [0, 7, 11, 16]


@pytest.mark.parametrize("problem", [DENSE, replace(DENSE, causal=False), PACKED], ids=lambda each: each.stem)
def test_references_compute_what_kernels_do(problem: Problem) -> None:
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and __import__("torch")
    told = trace_definitions.definition_of(problem)
    check_definition(told)
    space: dict[str, Any] = {}
    exec(told["reference"], space)
    rng = np.random.default_rng(0)
    packed, rows = problem.layout.is_packed, (problem.total_q, problem.total_k)
    if packed:
        shapes = [(rows[0], 4, 16), (rows[1], 2, 16), (rows[1], 2, 16)]
    else:
        shapes = [(2, 4, 5, 16), (2, 2, 9, 16), (2, 2, 9, 16)]
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    if not packed:
        exact = reference.attention(q, k, v, scale=0.3, scores=problem.scores)
        np.testing.assert_allclose(space["run"](*tensors, 0.3), exact.o, atol=1e-5)
        return
    offsets = trace_definitions.offsets_of(problem)
    o, lse = space["run"](
        *tensors, *(torch.tensor(each, dtype=torch.int32) for each in offsets.values()), 0.3
    )
    for i in range(3):
        of_q, of_k = (slice(*each[i : i + 2]) for each in offsets.values())
        one = (x[part].swapaxes(0, 1)[None] for x, part in ((q, of_q), (k, of_k), (v, of_k)))
        exact = reference.attention(*one, scale=0.3, scores=problem.scores)
        np.testing.assert_allclose(o[of_q], exact.o[0].swapaxes(0, 1), atol=1e-5)
        np.testing.assert_allclose(lse[of_q], exact.lse[0].T / np.log(2), atol=1e-5)


@pytest.mark.parametrize("problem", [DENSE, PACKED], ids=lambda each: each.stem)
def test_solutions_call_their_kernels(problem: Problem, tmp_path: Path) -> None:
    trace_set.write_trace_set(tmp_path, [tuned(problem)])
    (path,) = tmp_path.glob("solutions/*/*/*/*.json")
    (tmp_path / "main.py").write_text(json.loads(path.read_text())["sources"][0]["content"])
    module, q, k = import_path(tmp_path / "main.py"), np.zeros((8, 4, 16)), np.zeros((16, 2, 16))

    def note(*arrays: Any, **told: Any) -> Any:
        return (arrays, told), np.ones((4, 8))

    if problem.layout.is_packed:
        module.attention_varlen = note
        ((arrays, told), lse) = module.run(q, k, k, "starts", "first keys", 0.5)
        assert arrays[3:] == ("starts", "first keys") and (told["max_seqlen_q"], told["max_seqlen_k"]) == (
            8,
            16,
        )
        assert told["return_lse"] and lse.shape == (8, 4) and np.allclose(lse, 1 / np.log(2))
    else:
        module.attention = note
        (arrays, told), _ = module.run(q, k, k, 0.5)
        assert arrays[0] is q
    assert told["causal"] is True and told["scale"] == 0.5


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": "e4m3"}, "e4m3 has scales"),
        ({"backward": True}, "gradients are defined nowhere"),
        ({"scoring": Scoring(softcap=3.0)}, "written into no reference"),
        ({"page_size": 16}, "caches are told by other indices"),
        ({"append": Append(), "seqlen_k": 16}, "caches are told by other indices"),
        ({"seqlen_q": 16}, "rows that see no key"),
    ],
)
def test_what_has_no_definition_says_why(changed: dict[str, Any], why: str) -> None:
    problem = replace(DENSE, **changed)
    assert why in str(trace_definitions.why_undefined(problem))
    with pytest.raises(ValueError, match=why):
        trace_definitions.definition_of(problem)


def test_nothing_to_write_is_told(tmp_path: Path) -> None:
    windowed = tuned(replace(DENSE, scoring=Scoring(window=(3, 0))))
    with pytest.raises(FlashgenError, match=r"no kernel .* 1 because masks and changes of scores"):
        trace_set.write_trace_set(tmp_path, [windowed])
    assert not list(tmp_path.iterdir())


def test_the_command_writes_the_shipped_kernels_that_fit(tmp_path: Path) -> None:
    words = ["export", str(tmp_path / "set"), "--format", "flashinfer-trace", "--device", "h200", "--json"]
    words += ["--dtype", "bf16", "--d", "128", "--causal", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    told, counts = json.loads(found.output), check_trace_set(tmp_path / "set")
    assert counts == {name: told[name] for name in counts} and counts["traces"] > 0
    assert told["schema"] == trace_definitions.SCHEMA
    refused = CliRunner().invoke(app, [*words, "--study", "one"])
    assert refused.exit_code == 2 and "--study names trials" in refused.output
