"""Times the tuned kernels of a folder beside PyTorch's fp32 attention, in one process and one run.

    python tests/gpu/compare.py out/nvidia_h200 --json compare.json

Each kernel is called through its emitted module on PyTorch tensors; medians of CUDA events in turns, the L2
flushed before each. Errors are per head against float64, on a sample of rows. Needs PyTorch and PyCUDA.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROUNDS = 15
SAMPLED_HEADS, SAMPLED_ROWS = 2, 256
PEERS = {"memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(problem: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_shape = (problem["batch"], problem["num_q_heads"], problem["seqlen_q"], problem["head_dim"])
    kv_shape = (problem["batch"], problem["num_kv_heads"], problem["seqlen_k"], problem["head_dim"])
    return tuple(torch.randn(shape, device="cuda") for shape in (q_shape, kv_shape, kv_shape))  # type: ignore[return-value]


def worst_error(o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> float:
    """Largest per-head ‖o - ref‖ / ‖ref‖ over sampled batches, heads and rows."""
    length, offset = q.shape[2], k.shape[2] - q.shape[2]
    rows = torch.randperm(length, device="cuda")[:SAMPLED_ROWS]
    group = q.shape[1] // k.shape[1]
    worst = 0.0
    for batch, head in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1))[:SAMPLED_HEADS]:
        keys, values = k[batch, head // group].double(), v[batch, head // group].double()
        scores = q[batch, head, rows].double() @ keys.T / math.sqrt(q.shape[3])
        if causal:
            hidden = torch.arange(k.shape[2], device="cuda")[None, :] > rows[:, None] + offset
            scores = scores.masked_fill(hidden, -math.inf)
        expected = scores.softmax(-1) @ values
        worst = max(worst, ((o[batch, head, rows] - expected).norm() / expected.norm()).item())
    return worst


def medians_ms(calls: dict[str, Callable[[], Any]], flush: torch.Tensor) -> dict[str, float]:
    """Median milliseconds of each call, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2):
        for call in calls.values():
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def compare(path: Path, flush: torch.Tensor) -> dict[str, Any]:
    module = load(path)
    problem = module.PROBLEM
    q, k, v = tensors(problem)
    causal = problem["causal"]
    out = torch.full_like(q, math.nan)
    calls: dict[str, Callable[[], Any]] = {"flashgen": lambda: module.attention(q, k, v, out=out)}

    def peer(backend: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    for name, backend in PEERS.items():
        try:
            peer(backend)()
            calls[name] = peer(backend)
        except RuntimeError as unsupported:  # or out of memory
            print(f"{path.stem}: {name}: {str(unsupported).splitlines()[0]}", file=sys.stderr)
            torch.cuda.empty_cache()
    times = medians_ms(calls, flush)
    flops = 4 * problem["batch"] * problem["num_q_heads"] * problem["seqlen_q"] * problem["seqlen_k"]
    flops *= problem["head_dim"] * (0.5 if causal else 1)
    best_peer = min(ms for name, ms in times.items() if name != "flashgen")
    return {
        "kernel": path.stem,
        "problem": problem,
        "ms": times,
        "tflops": flops / times["flashgen"] / 1e9,
        "speedup": best_peer / times["flashgen"],
        "error": worst_error(out, q, k, v, causal),
    }


COLUMNS = [
    "batch",
    "heads",
    "seqlen",
    "head_dim",
    "mask",
    "flashgen",
    "TFLOP/s",
    "fused",
    "unfused",
    "speed-up",
    "error",
]


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The README's table: milliseconds; the speed-up is over the faster of PyTorch's two."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "--:|" * len(COLUMNS)]
    for row in sorted(rows, key=lambda row: -row["speedup"]):
        problem, ms = row["problem"], row["ms"]
        cells = [
            *(problem[name] for name in ("batch", "num_q_heads", "seqlen_q", "head_dim")),
            "causal" if problem["causal"] else "",
            f"{ms['flashgen']:.3f}",
            f"{row['tflops']:.1f}",
            *(f"{ms[name]:.3f}" if name in ms else "-" for name in PEERS),
            f"**{row['speedup']:.2f}**",
            f"{row['error']:.1e}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="such as out/nvidia_h200")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README too")
    arguments = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    flush = torch.empty(4 * properties.L2_cache_size, dtype=torch.int8, device="cuda")
    with torch.inference_mode():
        rows = [compare(path, flush) for path in sorted(arguments.folder.glob("f32_*.py"))]
    print(f"{'kernel':34} {'ms':>9} {'TFLOP/s':>8} {'mem-eff':>9} {'math':>9} {'speed-up':>8} {'error':>8}")
    for row in rows:
        ms = row["ms"]
        peers = " ".join(f"{ms.get(name, math.nan):9.4f}" for name in PEERS)
        print(
            f"{row['kernel']:34} {ms['flashgen']:9.4f} {row['tflops']:8.1f} {peers} "
            f"{row['speedup']:8.2f} {row['error']:8.1e}"
        )
    mean = math.exp(statistics.fmean(math.log(row["speedup"]) for row in rows))
    print(f"geometric mean of the speed-ups: {mean:.3f}; least: {min(row['speedup'] for row in rows):.3f}")
    if arguments.markdown:
        print(*markdown(rows), sep="\n")
    if arguments.json:
        host = {"device": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda}
        arguments.json.write_text(json.dumps({**host, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
