"""Times the tuned kernels of a folder beside PyTorch's attention, in one process and one run.

    python tests/gpu/compare.py out/nvidia_h200 --json compare.json
    python tests/gpu/compare.py out/nvidia_h200 --dtype bf16 --markdown
    python tests/gpu/compare.py out/nvidia_h200 --errors

Each kernel is called through its emitted module on PyTorch tensors; medians of CUDA events in turns, the L2
flushed before each. Errors are per head against float64 on the same inputs, on a sample of heads and rows.
Needs PyTorch and PyCUDA.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROUNDS = 15
SAMPLED_ROWS = 256
OURS, FLASH = "flashgen", "flash"
TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
HALF_PEERS = {
    FLASH: SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "mem-eff": SDPBackend.EFFICIENT_ATTENTION,
}
#: PyTorch's backends by dtype, the one that is FlashAttention-2 first.
PEERS = {
    "f32": {"mem-eff": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH},
    "f16": HALF_PEERS,
    "bf16": HALF_PEERS,
}
#: The errors' own problems: (batch, query heads, key/value heads), and the longest sequences.
ERROR_SHAPE, ERROR_LENGTH = (2, 4, 4), 4096
DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "normal": torch.randn,
    "uniform": lambda *shape, **options: 6 * torch.rand(*shape, **options) - 3,
}

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A module's PROBLEM; modules of older versions leave out what came later."""

    dtype: str
    batch: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    precision: str

    @classmethod
    def of(cls, module: ModuleType) -> Problem:
        later = {"precision": "auto", "head_dim_v": module.PROBLEM["head_dim"]}
        return cls(**(later | module.PROBLEM))

    @property
    def class_name(self) -> str:
        return self.dtype if self.precision == "auto" else f"{self.dtype} ({self.precision})"

    @property
    def head_dims(self) -> str:
        return str(self.head_dim) + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")

    @property
    def flops(self) -> float:
        pairs = self.batch * self.num_q_heads * self.seqlen_q * self.seqlen_k
        return 2 * pairs * (self.head_dim + self.head_dim_v) * (0.5 if self.causal else 1)


@dataclass(frozen=True)
class Inputs:
    """q, k, v on the card, and PyTorch's calls on them."""

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def draw(cls, problem: Problem, distribution: str = "normal") -> Inputs:
        def random(heads: int, length: int, columns: int) -> torch.Tensor:
            drawn = DISTRIBUTIONS[distribution](problem.batch, heads, length, columns, device="cuda")
            return drawn.to(TORCH_DTYPES[problem.dtype])

        return cls(
            problem,
            random(problem.num_q_heads, problem.seqlen_q, problem.head_dim),
            random(problem.num_kv_heads, problem.seqlen_k, problem.head_dim),
            random(problem.num_kv_heads, problem.seqlen_k, problem.head_dim_v),
        )

    def peer(self, backend: SDPBackend, causal: bool) -> Call:
        grouped = self.problem.num_kv_heads != self.problem.num_q_heads

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    self.q, self.k, self.v, is_causal=causal, enable_gqa=grouped
                )

        return call

    def peers(self, causal: bool) -> dict[str, Call]:
        """PyTorch's backends that serve the problem. Its causal mask is aligned top-left."""
        if causal and self.problem.seqlen_q != self.problem.seqlen_k:
            return {}
        found: dict[str, Call] = {}
        for name, backend in PEERS[self.problem.dtype].items():
            call = self.peer(backend, causal)
            try:
                call()
                found[name] = call
            except RuntimeError as unsupported:  # or out of memory
                print(f"{self.problem}: {name}: {str(unsupported).splitlines()[0]}", file=sys.stderr)
                torch.cuda.empty_cache()
        return found


class Reference:
    """float64 attention of a sample: the first and the last head, and some rows of each."""

    def __init__(self, inputs: Inputs, causal: bool) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        offset = k.shape[2] - q.shape[2]
        self.rows = torch.randperm(q.shape[2], device="cuda")[:SAMPLED_ROWS]
        group = q.shape[1] // k.shape[1]
        self.expected: dict[tuple[int, int], torch.Tensor] = {}
        for batch, head in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
            keys, values = k[batch, head // group].double(), v[batch, head // group].double()
            scores = q[batch, head, self.rows].double() @ keys.T / math.sqrt(q.shape[3])
            if causal:
                hidden = torch.arange(k.shape[2], device="cuda")[None, :] > self.rows[:, None] + offset
                scores = scores.masked_fill(hidden, -math.inf)
            # A row that sees no key is zero.
            self.expected[batch, head] = scores.softmax(-1).nan_to_num(0.0) @ values

    def error(self, o: torch.Tensor) -> float:
        """Largest ‖o - ref‖ / ‖ref‖ of the heads; NaN where one has it."""
        errors = [
            (o[batch, head, self.rows].double() - expected).norm() / expected.norm()
            for (batch, head), expected in self.expected.items()
        ]
        return torch.stack(errors).max().item()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def empty_output(inputs: Inputs) -> torch.Tensor:
    """Like q, with the columns of v, and NaN where nobody writes."""
    return torch.full(
        (*inputs.q.shape[:3], inputs.v.shape[3]), math.nan, dtype=inputs.q.dtype, device=inputs.q.device
    )


def allow_tf32(problem: Problem) -> None:
    torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"


# ---- times -------------------------------------------------------------------------------------------------


def medians_ms(calls: dict[str, Call], flush: torch.Tensor) -> dict[str, float]:
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
    problem = Problem.of(module)
    allow_tf32(problem)
    inputs = Inputs.draw(problem)
    out = empty_output(inputs)

    def ours() -> torch.Tensor:
        return module.attention(inputs.q, inputs.k, inputs.v, out=out)

    calls = {OURS: ours, **inputs.peers(problem.causal)}
    reference = Reference(inputs, problem.causal)
    errors = {name: reference.error(call()) for name, call in calls.items()}
    ms = medians_ms(calls, flush)
    best = min((name for name in calls if name != OURS), key=ms.__getitem__, default=None)
    return {
        "kernel": path.stem,
        "class": problem.class_name,
        "head_dims": problem.head_dims,
        "problem": vars(problem),
        "ms": ms,
        "tflops": problem.flops / ms[OURS] / 1e9,
        "best_peer": best,
        "speedup": None if best is None else ms[best] / ms[OURS],
        "speedup_over_flash": ms[FLASH] / ms[OURS] if FLASH in ms else None,
        "errors": errors,
        "error_ratio": None if best is None else errors[OURS] / errors[best],
    }


def by_class(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["class"], []).append(row)
    return found


def workload(problem: dict[str, Any]) -> str:
    heads = str(problem["num_q_heads"])
    if problem["num_kv_heads"] != problem["num_q_heads"]:
        heads += f"/{problem['num_kv_heads']}"
    length = str(problem["seqlen_q"])
    if problem["seqlen_k"] != problem["seqlen_q"]:
        length += f"x{problem['seqlen_k']}"
    return f"({problem['batch']}, {heads}, {length})"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def markdown(rows: list[dict[str, Any]], dtype: str) -> list[str]:
    """One class's table: milliseconds, and times faster than PyTorch's fastest and FlashAttention-2."""
    peers = list(PEERS[dtype])
    over_flash = ["over FA2"] if FLASH in peers else []
    columns = [
        "(batch, heads, seqlen)",
        "head dim",
        "mask",
        "flashgen ms",
        "TFLOP/s",
        *(f"{p} ms" for p in peers),
    ]
    columns += ["speed-up", *over_flash, "error", "PyTorch's", "ratio"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "--:|" * len(columns)]
    for row in sorted(rows, key=lambda row: -(row["speedup"] or 0)):
        ms, best = row["ms"], row["best_peer"]
        cells = [
            workload(row["problem"]),
            row["head_dims"],
            "causal" if row["problem"]["causal"] else "",
            f"{ms[OURS]:.3f}",
            f"{row['tflops']:.1f}",
            *(number(ms.get(name), ".3f") for name in peers),
            "-" if best is None else f"**{row['speedup']:.2f}**",
            *(number(row["speedup_over_flash"], ".2f") for _ in over_flash),
            f"{row['errors'][OURS]:.1e}",
            number(row["errors"].get(best), ".1e"),
            number(row["error_ratio"], ".2f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def table(rows: list[dict[str, Any]], dtype: str) -> list[str]:
    peers = list(PEERS[dtype])
    heading = f"{'kernel':38} {'ms':>9} {'TFLOP/s':>8} " + " ".join(f"{name:>9}" for name in peers)
    lines = [f"{heading} {'speed-up':>8} {'over FA2':>8} {'error':>8} {'PyTorch':>8} {'ratio':>6}"]
    for row in rows:
        ms = row["ms"]
        lines.append(
            f"{row['kernel']:38} {ms[OURS]:9.4f} {row['tflops']:8.1f} "
            + " ".join(f"{number(ms.get(name), '.4f'):>9}" for name in peers)
            + f" {number(row['speedup'], '.2f'):>8} {number(row['speedup_over_flash'], '.2f'):>8}"
            + f" {row['errors'][OURS]:8.1e} {number(row['errors'].get(row['best_peer']), '.1e'):>8}"
            + f" {number(row['error_ratio'], '.2f'):>6}"
        )
    for name, key in (("PyTorch's fastest", "speedup"), ("FlashAttention-2", "speedup_over_flash")):
        ratios = [row[key] for row in rows if row[key] is not None]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            lines.append(
                f"times faster than {name}: {mean:.3f} on (geometric) average, at least {min(ratios):.3f}"
            )
    return lines


# ---- errors ------------------------------------------------------------------------------------------------


def errors_of(path: Path) -> list[dict[str, Any]]:
    """A kernel's errors beside PyTorch's on the same inputs, under both masks, by distribution."""
    module = load(path)
    tuned = Problem.of(module)
    allow_tf32(tuned)
    batch, heads, kv_heads = ERROR_SHAPE
    shape = {"batch": batch, "num_q_heads": heads, "num_kv_heads": kv_heads}
    length = min(ERROR_LENGTH, tuned.seqlen_q)
    problem = Problem(**(vars(tuned) | shape | {"seqlen_q": length, "seqlen_k": length}))
    rows = []
    for distribution in DISTRIBUTIONS:
        for causal in (False, True):
            inputs = Inputs.draw(problem, distribution)
            reference = Reference(inputs, causal)
            out = empty_output(inputs)
            module.attention(inputs.q, inputs.k, inputs.v, causal=causal, out=out)
            errors = {OURS: reference.error(out)}
            errors |= {name: reference.error(call()) for name, call in inputs.peers(causal).items()}
            rows.append(
                {
                    "kernel": path.stem,
                    "class": problem.class_name,
                    "head_dims": problem.head_dims,
                    "dims": (problem.head_dim, problem.head_dim_v),
                    "inputs": distribution,
                    "causal": causal,
                    "length": length,
                    "errors": errors,
                }
            )
    return rows


def largest(errors: Iterable[float | None]) -> float | None:
    """NaN where one is; None without any."""
    known = [error for error in errors if error is not None]
    return next(filter(math.isnan, known), max(known, default=None))


def error_table(rows: list[dict[str, Any]]) -> list[str]:
    """Largest errors by class, head dims and inputs, over all kernels and both masks."""
    peers = list(dict.fromkeys(name for row in rows for name in row["errors"] if name != OURS))
    lines = [
        "| class | head dim | inputs | flashgen | " + " | ".join(peers) + " | ratio to PyTorch's least |"
    ]
    lines.append("|" + "--:|" * (len(peers) + 5))
    groups: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    names: dict[tuple[Any, ...], str] = {}
    for row in rows:
        key = (row["class"], row["dims"], row["inputs"])
        groups.setdefault(key, []).append(row["errors"])
        names[key] = f"{row['class']} | {row['head_dims']} | {row['inputs']}"
    for key in sorted(groups):
        worst = {name: largest(errors.get(name) for errors in groups[key]) for name in (OURS, *peers)}
        theirs = [worst[name] for name in peers if worst[name] is not None]
        ratio = worst[OURS] / min(theirs) if theirs else None
        cells = [number(worst[name], ".1e") for name in (OURS, *peers)]
        lines.append(f"| {names[key]} | " + " | ".join(cells) + f" | {number(ratio, '.2f')} |")
    return lines


# ---- the command -------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="such as out/nvidia_h200")
    parser.add_argument("--dtype", choices=PEERS, help="kernels of this dtype alone")
    parser.add_argument("--kernels", default="*", help="kernels of these names alone, as in 'bf16_d128*'")
    parser.add_argument("--errors", action="store_true", help="compare errors alone, on inputs of two kinds")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the README too")
    arguments = parser.parse_args()
    dtypes = [arguments.dtype] if arguments.dtype else list(PEERS)
    found = sorted(arguments.folder.glob(f"{arguments.kernels}.py"))
    paths = [path for path in found if path.stem.partition("_")[0] in dtypes]
    if not paths:
        parser.error(f"no kernel of {arguments.folder} is called so")
    properties = torch.cuda.get_device_properties(0)
    flush = torch.empty(4 * properties.L2_cache_size, dtype=torch.int8, device="cuda")
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for path in paths:
            rows += errors_of(path) if arguments.errors else [compare(path, flush)]
            torch.cuda.empty_cache()
    if arguments.errors:
        print(*error_table(rows), sep="\n")
    else:
        for name, group in by_class(rows).items():
            dtype = group[0]["problem"]["dtype"]
            print(f"\n{name}", *table(group, dtype), sep="\n")
            if arguments.markdown:
                print("", *markdown(group, dtype), sep="\n")
    if arguments.json:
        host = {"device": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda}
        arguments.json.write_text(json.dumps({**host, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
