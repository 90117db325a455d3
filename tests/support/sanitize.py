"""compute-sanitizer over a sample of variants: `python -m tests.support.sanitize`.

Draws variants of the simt, mma and wgmma families that between them take every value of every parameter
where they can, of the latter two in every number format, adds the steps of the ladder, builds them, and
launches each over small ragged problems under memcheck, racecheck, initcheck and synccheck, a process per
tool: for racecheck as `flashgen.tuner.prove.sanitizers.for_sanitizer` has them. Prints a table; exits
with 1 when a tool reports anything or a result is wrong, with 77 where compute-sanitizer cannot run.

The launching process needs numpy, for bfloat16 ml_dtypes, and the CUDA driver; no PyCUDA. Every tensor is an
allocation of its own, just as large as it must be, and outputs are left as they came: memcheck and initcheck
see all there is to see. What tensor maps store they do not see: those outputs are filled with NaN before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import ROOT

CANNOT_RUN_EXIT, SANITIZER_EXIT = 77, 86
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TIMEOUT_S = 540
#: Head dim, mask and length that simt variants are sampled for; they run on lengths of their own.
PROBLEMS = (
    (64, False, 4096),
    (64, True, 4096),
    (32, True, 128),
    (128, False, 4096),
    (40, False, 4096),
    (80, True, 1000),
    (7, True, 1000),
    (1, False, 1000),
    (256, False, 1000),
    (90, True, 1000),
    (64, False, 197),
    (64, True, 49),
)
LADDER_HEAD_DIMS = (32, 64)
#: Random variants tried for each parameter value that no search proposes.
MAX_DRAWS = 20_000
#: Keys after which a row's sums have been parked twice. The tools take long over such rows: few kernels do.
LONG_ROW, LONG_ROW_EVERY = 2 * 2048, 8
#: How far from float64 results may be on inputs in ±3, by the class of `Problem.precision` or else the dtype;
#: a kernel that the tool disturbed is further.
ALLOWED_ERRORS = {"f32": 1e-5, "3xtf32": 3e-5, "3xf16": 3e-5, "tf32": 2e-2, "f16": 6e-3, "bf16": 3e-2}
#: Of eight bits by that of weights: those of f16 and results in bf16, or weights of four bits.
ALLOWED_ERRORS |= {"e4m3": 3e-2, "eight": 0.3}
#: What multiplies results beside the scale of scores, where kernels take both.
VALUE_SCALE = 1.0


# ---- the process under the sanitizer -----------------------------------------------------------------------


def launch_all(manifest: Path) -> None:
    """Launches every kernel of the manifest over its shapes; prints a line ``# name`` before each."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(function: str, *arguments: Any) -> None:
        status = getattr(driver, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            driver.cuGetErrorName(status, ctypes.byref(text))
            raise SystemExit(f"{function} failed: {(text.value or b'?').decode()}")

    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)

    def allocate(size: int) -> ctypes.c_void_p:
        address = ctypes.c_void_p()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address

    def numpy_dtype(name: str) -> np.dtype:
        if name in ("bf16", "e4m3"):
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16 if name == "bf16" else ml_dtypes.float8_e4m3fn)
        return np.dtype({"f32": np.float32, "f16": np.float16}[name])

    rng = np.random.default_rng(0)
    for entry in json.loads(manifest.read_text()):
        print(f"# {entry['name']}", flush=True)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoad", ctypes.byref(module), entry["cubin"].encode())
        call("cuModuleGetFunction", ctypes.byref(function), module, entry["symbol"].encode())
        call("cuFuncSetAttribute", function, 8, entry["smem_bytes"])
        launches = [(function, entry["threads"], entry["smem_bytes"])]
        if entry["combine"]:
            combine = ctypes.c_void_p()
            call("cuModuleGetFunction", ctypes.byref(combine), module, entry["combine"]["symbol"].encode())
            launches.append((combine, entry["combine"]["threads"], 0))
        if entry["splits"] > 8:  # more blocks in a cluster than every card forms
            call("cuFuncSetAttribute", function, 14, 1)
        for batch, heads, kv_heads, rows, keys in entry["shapes"]:
            d, dv, dtype = entry["head_dim"], entry["head_dim_v"], numpy_dtype(entry["dtype"])
            shapes = [(batch, heads, rows, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, dv)]
            hosts = [rng.uniform(-3, 3, shape).astype(np.float32).astype(dtype) for shape in shapes]
            made = numpy_dtype(entry["output_dtype"])
            o, lse = np.full((*shapes[0][:3], dv), np.nan, made), np.empty(shapes[0][:3], np.float32)
            blocks = num_blocks(entry, (batch, heads, kv_heads, rows))
            device = [allocate(x.nbytes) for x in (*hosts, o, lse)]
            # initcheck would take what the copy engine stored for uninitialized.
            written = [*hosts, o] if entry["tensor_maps"] else hosts
            for address, x in zip(device, written, strict=False):
                call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(x.nbytes))
            strides = [s // x.itemsize for x in (*hosts, o) for s in x.strides[:3]]
            sizes = (batch, heads, kv_heads, rows, keys)
            scale = 1 / math.sqrt(d)
            scales = (scale, VALUE_SCALE) if entry["has_value_scale"] else (scale,)
            pointers = [a.value or 0 for a in device]
            left = 4 * blocks * entry["workspace_floats"]
            workspace = [allocate(left)] if left else []
            every = [*pointers, *(each.value for each in workspace)]
            arguments = [entry_args(entry["args_format"], every, strides, sizes, scales)]
            if entry["tensor_maps"]:
                arguments.append(entry_maps(entry, pointers, strides, sizes, scale))
            parameters = (ctypes.c_char_p * len(arguments))(*arguments)
            for each, threads, smem_bytes in launches:
                grid = (min(blocks, entry["max_blocks"] or blocks), 1, 1, threads, 1, 1)
                call("cuLaunchKernel", each, *grid, smem_bytes, None, parameters, None)
            call("cuCtxSynchronize")
            for address, x in zip(device[3:], (o, lse), strict=True):
                call("cuMemcpyDtoH_v2", ctypes.c_void_p(x.ctypes.data), address, ctypes.c_size_t(x.nbytes))
            for address in (*device, *workspace):
                call("cuMemFree_v2", address)
            error = difference(o, lse, *hosts, causal=entry["causal"])
            if not error <= entry["allowed_error"]:
                print(f"!!!!!!!!! wrong by {error:.2e} with {rows} rows and {keys} keys", flush=True)
        call("cuModuleUnload", module)
    print("# done", flush=True)


def num_blocks(entry: dict[str, Any], sizes: tuple[int, int, int, int]) -> int:
    """How many blocks a launch has for a batch, its heads, those of keys, and rows."""
    batch, heads, kv_heads, rows = sizes
    cluster, per_block = entry["cluster"], entry["rows_per_block"]
    walked, walkers = rows, heads
    if entry["pack_heads"]:
        walked, walkers = rows * (heads // kv_heads), kv_heads
    elif entry["heads_per_cluster"] > 1:
        per_cluster = entry["heads_per_cluster"]
        walkers = -(-(heads // kv_heads) // per_cluster) * per_cluster * kv_heads
    tiles = -(-walked // (per_block * cluster)) * cluster if per_block else 1
    splits = entry["splits"] * entry["workspace_splits"]
    return -(-batch * walkers // entry["heads_per_block"]) * tiles * splits


def entry_args(layout: str, pointers: Any, strides: Any, sizes: Any, scales: Any) -> bytes:
    import struct

    return struct.pack(layout, *pointers, *strides, *sizes, *scales)


def entry_maps(entry: dict[str, Any], pointers: Any, strides: Any, sizes: Any, scale: float) -> bytes:
    """The tensor maps of a launch, as the kernel takes them."""
    from flashgen.gen.arguments import describe_maps, make_arguments
    from flashgen.gen.launch import Launch, TensorMap
    from flashgen.gen.problem import Problem
    from flashgen.tuner.cards.driver import encode_maps

    maps = tuple(TensorMap(**each) for each in entry["tensor_maps"])
    problem = Problem(dtype=entry["dtype"], head_dim=entry["head_dim"], head_dim_v=entry["head_dim_v"])
    arguments = make_arguments(
        problem,
        dict(zip(("q", "k", "v", "o", "lse"), pointers, strict=True)),
        {name: strides[3 * i : 3 * i + 3] for i, name in enumerate("qkvo")},
        scale=scale,
        sizes=dict(zip(problem.layout.sizes, sizes, strict=True)),
    )
    return encode_maps(describe_maps(Launch(0, 0, None, tensor_maps=maps), problem, arguments))


def difference(
    o: np.ndarray, lse: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool
) -> float:
    """The largest deviation of o and the log-sum-exp from float64's; infinite for NaN."""
    k, v = (np.repeat(x.astype(np.float64), q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
    if causal:
        hidden = np.arange(k.shape[2]) > np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        scores[..., hidden] = -np.inf
    top = np.maximum(scores.max(axis=3, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=3, keepdims=True)
    seen = total > 0
    expected = weights @ v / np.where(seen, total, 1)
    wanted = np.where(seen, np.log(np.where(seen, total, 1)) + top, -np.inf)[..., 0]
    same = np.isneginf(lse) & np.isneginf(wanted)
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(lse - wanted) / np.maximum(1, np.abs(wanted)))
    errors = np.concatenate([np.abs(o.astype(np.float64) - expected).ravel(), apart.ravel()])
    return float(np.where(np.isnan(errors), np.inf, errors).max())


# ---- choosing and building ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What one tool said: findings by kernel, how many kernels ran, whether it could run at all."""

    tool: str
    findings: dict[str, list[str]]
    ran: int
    finished: bool
    supported: bool
    seconds: float
    tail: str

    @property
    def clean(self) -> bool:
        return self.supported and self.finished and not self.findings


def choose(count: int, seed: int, limits: Any) -> list[Any]:
    """Kernels of each family, ``count`` of each at least, those of warpgroups that split float32 or multiply
    eight bits, which have few values of their own, and of the ladder's steps."""
    simt, ladder = choose_simt(count, seed, limits), choose_ladder(limits)
    return (
        simt
        + ladder
        + choose_covering("mma", count, seed, limits)
        + choose_covering("wgmma", count, seed, limits)
        + choose_covering("wgmma in parts", 0, seed, limits)
        + choose_eight_bits(seed, limits)
    )


def choose_simt(count: int, seed: int, limits: Any) -> list[Any]:
    """Kernels of at least ``count`` simt variants over `PROBLEMS`.

    The variants take every value of every parameter that is legal in one of the problems, those too that are
    legal but never searched.
    """
    from flashgen.gen.families.simt.family import Simt
    from flashgen.gen.problem import Problem
    from flashgen.gen.render import render
    from flashgen.gen.variant import Illegal
    from flashgen.tuner.predict.catalogue import build_catalogue

    rng = random.Random(seed)
    problems = [
        Problem(batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=n, seqlen_k=n, head_dim=d, causal=c)
        for d, c, n in PROBLEMS
    ]
    catalogues = [build_catalogue(Simt, problem, limits) for problem in problems]
    parameters = Simt.parameters()
    unseen = {(p.name, choice) for p in parameters for choice in p.choices}
    total = len(unseen)
    kernels: list[Any] = []

    def take(which: int, rows: list[int]) -> None:
        """Of the rows, the one with most values that none before it had."""
        drawn = [(row, catalogues[which].variant(row)) for row in rng.sample(rows, min(100, len(rows)))]
        row, variant = max(drawn, key=lambda each: len(unseen & set(each[1].to_dict().items())))
        catalogues[which].take(row)
        unseen.difference_update(variant.to_dict().items())
        kernels.append(render(variant, problems[which], limits))

    order = list(range(len(problems)))
    for column, parameter in enumerate(parameters):
        for code, choice in enumerate(parameter.choices):
            rng.shuffle(order)
            for which in order if (parameter.name, choice) in unseen else ():
                rows = np.flatnonzero(catalogues[which].codes[column] == code).tolist()
                if rows:
                    take(which, rows)
                    break
    while len(kernels) < count:
        which = len(kernels) % len(problems)
        take(which, catalogues[which].sample(100, rng))
    # What the search leaves out but a user may hold, as long as it runs.
    for name, value in sorted(unseen, key=str):
        for _ in range(MAX_DRAWS):
            problem = rng.choice(problems)
            drawn = {p.name: rng.choice(p.choices) for p in parameters}
            variant = Simt(**{**drawn, name: value})
            try:
                kernels.append(render(variant, problem, limits))
            except Illegal:
                continue
            unseen.difference_update(variant.to_dict().items())
            break
    missing = ", ".join(f"{name}={value}" for name, value in sorted(unseen, key=str))
    print(f"{len(kernels)} simt variants with {total - len(unseen)} of {total} parameter values")
    print(f"nowhere legal here: {missing or 'none'}")
    return kernels


def choose_covering(cover: str, count: int, seed: int, limits: Any) -> list[Any]:
    """Kernels for tensor cores with every value that the cover of `covering` has, in every number format;
    none where the card has no such products."""
    from flashgen.gen.render import render

    from tests.support import covering

    covers = {
        "mma": covering.mma_settings,
        "wgmma": covering.wgmma_settings,
        "wgmma in parts": covering.parts_settings,
    }
    settings = covers[cover]([limits], seed)
    chosen = covering.each_value(settings, count) if settings else []
    print(f"{len(chosen)} {cover} variants with every value that {len(settings)} have")
    return [render(each.variant, each.problem, limits) for each in chosen]


def choose_eight_bits(seed: int, limits: Any) -> list[Any]:
    """Kernels of e4m3, with weights of f16 and of eight bits; none where the card has no such products."""
    from flashgen.gen.families.wgmma.family import Wgmma
    from flashgen.gen.problem import Problem
    from flashgen.gen.render import render

    from tests.support.covering import E4M3_HEAD_DIMS, OF_16_BITS, draw

    rng, kernels = random.Random(seed), []
    # What no legal variant of both kinds has otherwise, or has tests of its own.
    held = {"p_in_shared": False, "q_in_registers": False, "tail": 0, "pack_heads": False}
    held |= {"splits": 1, "cluster": 1, "cluster_over": "rows", **OF_16_BITS}
    for weights, precision in (("f16", "auto"), ("e4m3", "eight")):
        for index, (d, dv) in enumerate(E4M3_HEAD_DIMS):
            causal = index % 2 == 1
            problem = Problem(dtype="e4m3", precision=precision, head_dim=d, head_dim_v=dv, causal=causal)
            drawn = draw(Wgmma, problem, limits, 1, rng, {**held, "weights": weights})
            kernels += [render(variant, problem, limits) for variant in drawn]
    print(f"{len(kernels)} wgmma variants of eight bits")
    return kernels


def choose_ladder(limits: Any) -> list[Any]:
    """Kernels of the ladder's steps, where they run."""
    from flashgen.gen.families.ladder.family import steps
    from flashgen.gen.problem import Problem
    from flashgen.gen.render import render
    from flashgen.gen.variant import Illegal

    kernels: list[Any] = []
    for d in LADDER_HEAD_DIMS:
        for causal in (False, True):
            problem = Problem(head_dim=d, causal=causal)
            for variant in steps(d).values():
                try:
                    kernels.append(render(variant, problem, limits))
                except Illegal as error:
                    print(f"left out: {variant.name}: {error}")
    return kernels


def write_manifest(kernels: list[Any], toolchain: Any, path: Path) -> None:
    """Builds all and writes what `launch_all` needs."""
    from flashgen.gen.launch import COMBINE_ROLE
    from flashgen.tuner.build.compile import CompilePool
    from flashgen.tuner.errors import BuildError

    with CompilePool(toolchain) as pool:
        built = [future.result() for future in [pool.submit(kernel) for kernel in kernels]]
    entries = []
    for index, (kernel, build) in enumerate(zip(kernels, built, strict=True)):
        if isinstance(build, BuildError):
            raise SystemExit(f"{kernel.variant.name} does not build: {build}")
        br, bc = kernel.launch.rows_per_block or kernel.variant.br, kernel.variant.bc
        problem, together = kernel.problem, kernel.launch.heads_per_block
        combine = next((each for each in kernel.launches if each.role == COMBINE_ROLE), None)
        has_runs = kernel.variant.family not in ("mma", "wgmma")
        entries.append(
            {
                "name": f"{problem.name.partition('_b2')[0]} {kernel.variant.name}",
                "cubin": str(build.artifact),
                "symbol": kernel.symbol,
                "threads": kernel.launch.threads,
                "smem_bytes": kernel.launch.smem_bytes,
                "rows_per_block": kernel.launch.rows_per_block,
                "heads_per_block": together,
                "max_blocks": kernel.launch.max_blocks,
                "cluster": kernel.launch.cluster,
                "pack_heads": kernel.launch.pack_heads,
                "splits": kernel.launch.splits,
                "workspace_splits": kernel.launch.workspace_splits,
                "workspace_floats": kernel.variant.partial_floats(problem) if kernel.workspace else 0,
                "combine": combine and {"symbol": kernel.symbol_of(combine), "threads": combine.threads},
                "heads_per_cluster": kernel.launch.heads_per_cluster,
                "tensor_maps": [asdict(each) for each in kernel.launch.tensor_maps],
                "dtype": problem.dtype,
                "output_dtype": problem.output_dtype,
                "has_value_scale": "value_scale" in {field.name for field in kernel.arguments.fields},
                "head_dim": problem.head_dim,
                "head_dim_v": problem.head_dim_v,
                "causal": problem.causal,
                "allowed_error": allowed_error(kernel),
                "args_format": kernel.arguments.format,
                # Two tiles of rows by three of keys, both ragged, with shared heads; less than a tile of
                # each; rows beyond the keys, which a causal mask leaves without any; heads of two batches in
                # one block and a last block with heads missing; rows longer than those summed in one run.
                "shapes": [(1, 2, 1, br + 5, 2 * bc + 3), (2, 1, 1, 3, max(1, bc - 3)), (1, 1, 1, br + 1, 1)]
                + ([(together + 1, 1, 1, 3, bc - 1)] if together > 1 else [])
                + ([(1, 1, 1, 3, LONG_ROW + bc + 3)] if has_runs and index % LONG_ROW_EVERY == 0 else []),
            }
        )
    path.write_text(json.dumps(entries))


def allowed_error(kernel: Any) -> float:
    """The bound of the arithmetic that the kernel's family does."""
    problem = kernel.problem
    if kernel.variant.family == "mma" and problem.dtype == "f32":
        return ALLOWED_ERRORS[kernel.variant.arithmetic(problem)]
    if kernel.variant.family == "wgmma" and problem.dtype == "f32":
        return ALLOWED_ERRORS["3xf16"]
    if problem.precision == "eight":
        return ALLOWED_ERRORS["eight"]
    return ALLOWED_ERRORS[problem.dtype]


# ---- running the tools -------------------------------------------------------------------------------------


def run_tool(tool: str, sanitizer: Path, manifest: Path) -> Report:
    command = [str(sanitizer), "--tool", tool, "--error-exitcode", str(SANITIZER_EXIT), "--print-limit", "50"]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", "tests.support.sanitize", "--launch", str(manifest)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode(errors="replace"), -1
    return parse(tool, output, code, time.monotonic() - started)


def parse(tool: str, output: str, code: int, seconds: float) -> Report:
    """Assigns what the tool said to the kernel that was running."""
    findings: dict[str, list[str]] = {}
    current, ran, summaries = "before the first kernel", 0, 0
    for line in output.splitlines():
        if line.startswith("# "):
            current = line[2:]
            ran += current != "done"
        elif line.startswith("!!!!!!!!! "):
            findings.setdefault(current, []).append(line[10:])
        elif re.match(r"=+ (RACECHECK|ERROR|LEAK)? ?SUMMARY", line):
            summaries += 1
        elif re.match(
            r"=+ (Invalid|Error|Warning|Race|Uninit|Host API|Barrier|Divergent|Program hit|Misaligned|Out)",
            line,
        ):
            findings.setdefault(current, []).append(line.lstrip("= "))
    finished = "\n# done" in f"\n{output}" and summaries > 0
    if finished and code and not findings:
        findings["the process"] = [f"exit code {code}"]
    supported = "Device not supported" not in output
    return Report(tool, findings, ran, finished, supported, seconds, output[-2000:])


def main() -> int:
    from flashgen.tuner.cards.cuda import find_device
    from flashgen.tuner.errors import FlashgenError
    from flashgen.tuner.prove.sanitizers import find_compute_sanitizer, for_sanitizer

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--variants", type=int, default=36, help="variants of each family at least (default 36)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma-separated (default all four)")
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch is not None:
        launch_all(options.launch)
        return 0
    try:
        device, sanitizer = find_device(0), find_compute_sanitizer()
        toolchain = device.toolchain()
    except FlashgenError as error:
        print(error)
        return CANNOT_RUN_EXIT
    with tempfile.TemporaryDirectory(prefix="flashgen-sanitize-") as folder:
        started = time.monotonic()
        kernels = choose(options.variants, options.seed, device.limits)
        tools = options.tools.split(",")
        manifests = {tool: Path(folder) / f"{tool}.json" for tool in tools}
        for tool, manifest in manifests.items():
            write_manifest([for_sanitizer(each, tool) for each in kernels], toolchain, manifest)
        print(f"{len(kernels)} kernels built in {time.monotonic() - started:.0f} s; {sanitizer}", flush=True)
        with ThreadPoolExecutor(len(tools)) as pool:
            reports = list(pool.map(lambda tool: run_tool(tool, sanitizer, manifests[tool]), tools))
    return show(reports, len(kernels))


def show(reports: list[Report], count: int) -> int:
    """Prints the table and every finding; returns the exit code."""
    print(f"{'tool':<10} {'kernels':>8} {'findings':>9} {'seconds':>8}  verdict")
    for report in reports:
        found = sum(map(len, report.findings.values()))
        complete = report.finished and report.ran == count
        verdict = (
            "clean" if report.clean and complete else "FAILED" if report.supported else "cannot run here"
        )
        print(f"{report.tool:<10} {report.ran:>4}/{count:<3} {found:>9} {report.seconds:>8.1f}  {verdict}")
    for report in reports:
        for name, lines in report.findings.items():
            print(f"\n{report.tool}, {name}:")
            print("\n".join(f"    {line}" for line in lines[:5]))
        if not report.finished:
            print(f"\n{report.tool} did not finish:\n{report.tail}")
    if any(not report.supported for report in reports):
        return CANNOT_RUN_EXIT
    return 0 if all(report.clean and report.ran == count for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
