"""A module of several kernels: which one serves, without a GPU. The stand-ins are those of `test_module`."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch as GridOf
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.dtypes import numpy_dtype

from tests.support.formatting import assert_ruff_is_content
from tests.support.modules import import_path
from tests.support.stand_in_driver import (
    DRIVER_TYPES,
    ROUNDING,
    Array,
    D,
    Driver,
    Jax,
    Tensor,
    Wide,
    close,
    expected,
    host,
    make_kernel,
    qkv,
    run,
)

H200 = preset("h200")
FIGURES = {"median_us": 123.4, "tflops": 56.7, "error": 3e-7, "toolkit": "nvcc 13.0.88", "flashgen": "0.1.0"}
SHORT: dict[str, Any]
LONG: dict[str, Any]
HEADS: dict[str, Any]
SHORT, LONG = {"batch": 8, "seqlen_q": 64, "seqlen_k": 64}, {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024}
HEADS = {"num_q_heads": 4, "num_kv_heads": 4}
GROUPED: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2}


def by_hand(threads: int, rows: int | None = 64, **problem: Any) -> Kernel:
    """A kernel told from others by its threads; the driver's stand-in runs any."""
    return make_kernel(GridOf(threads, 4096, rows), f"// {threads}\n", **{**HEADS, **problem})


def three() -> list[Kernel]:
    """For short and long sequences, the latter with a mask too."""
    return [by_hand(32, **SHORT), by_hand(64, **LONG), by_hand(96, causal=True, **LONG)]


def text_of(kernels: list[Kernel], **others: Any) -> str:
    made = [Made(kernel, "NVIDIA H200", FIGURES) for kernel in kernels]
    return emit_many(made, name="several", command=["--suite llm"], **others)


def load(tmp_path: Path, kernels: list[Kernel], **others: Any) -> Any:
    path = tmp_path / "several.py"
    path.write_text(text_of(kernels, **others))
    return import_path(path)


@pytest.fixture
def module(driver: Driver, tmp_path: Path) -> Any:
    return load(tmp_path, three())


def arrays(driver: Driver, batch: int, heads: int, rows: int, keys: int = 0, kv_heads: int = 0) -> list[Any]:
    shape = (batch, kv_heads or heads, keys or rows, D)
    return qkv(driver, (batch, heads, rows, D), shape)


def chosen(module: Any, *shape: int, **how: Any) -> tuple[int, bool]:
    """By its threads the kernel for torch tensors of that shape, and whether it is exact."""
    choice = module.explain(*(np.empty(s, np.float32) for s in shapes(*shape)), **how)
    assert str(choice) == choice.how
    return threads_of(choice.tuned), choice.exact


def threads_of(tuned: Any) -> int:
    (launch,) = tuned.launches
    return launch.threads


def shapes(batch: int, heads: int, rows: int, keys: int = 0, kv_heads: int = 0) -> list[tuple[int, ...]]:
    kv = (batch, kv_heads or heads, keys or rows, D)
    return [(batch, heads, rows, D), kv, kv]


# ---- which kernel ------------------------------------------------------------------------------------------


def test_what_was_tuned_for_just_this_serves(module: Any) -> None:
    assert chosen(module, 8, 4, 64) == (32, True)
    assert chosen(module, 1, 4, 1024) == (64, True)
    assert chosen(module, 1, 4, 1024, causal=True) == (96, True)
    told = module.explain(*(np.empty(s, np.float32) for s in shapes(1, 4, 1024))).how
    assert told == ("f32_d32_b1_h4_n1024 (ladder, 56.7 TFLOP/s on NVIDIA H200): tuned for just this")


@pytest.mark.parametrize(
    ("shape", "causal", "threads"),
    [
        ((8, 4, 100), False, 32),
        ((8, 4, 200), False, 32),
        ((1, 4, 700), False, 64),
        ((1, 4, 2048), True, 96),
        # Only the long one was tuned with the mask, and the mask comes before the lengths.
        ((8, 4, 64), True, 96),
        # A length halfway between: the number of tiles decides.
        ((64, 4, 256), False, 64),
        ((1, 4, 256), False, 32),
        # Not the same heads of keys: near, not exact.
        ((1, 4, 1024, 1024, 2), False, 64),
        ((8, 4, 64, 65), False, 32),
        ((0, 4, 64), False, 32),
        ((8, 4, 0), False, 32),
    ],
)
def test_else_the_nearest(module: Any, shape: tuple[int, ...], causal: bool, threads: int) -> None:
    assert chosen(module, *shape, causal=causal) == (threads, False)


def test_few_rows_are_served_by_what_was_tuned_for_few(driver: Driver, tmp_path: Path) -> None:
    short = {"batch": 1, "seqlen_q": 1, "seqlen_k": 1024}
    module = load(tmp_path, [by_hand(32, **short), by_hand(64, causal=True, **{**SHORT, "batch": 1})])
    # The other one has their mask, and is nearer by its keys.
    for rows in (1, 16):
        assert chosen(module, 1, 4, rows, 64, causal=True) == (32, False)
    assert chosen(module, 1, 4, 17, 1024) == (64, False)
    # One row sees all keys under either mask.
    for causal in (False, True):
        assert chosen(module, 1, 4, 1, 1024, causal=causal) == (32, True)
        q, k, v = arrays(driver, 1, 4, 1, 1024)
        close(module.attention(q, k, v, causal=causal, strict=True), expected(q, k, v, causal=causal).o)


def test_why_is_told(module: Any) -> None:
    told = module.explain(*(np.empty(s, np.float32) for s in shapes(2, 4, 2048, 1024, 2))).how
    assert told.startswith("f32_d32_b1_h4_n1024 (ladder")
    assert (
        "the nearest of 3 (tuned for batch 1, heads 4, seqlen 1024, asked for batch 2, heads 4/2, seqlen "
        "2048x1024, 2 doublings apart)" in told
    )
    alone = three()[:1]
    other = text_of([*alone, by_hand(64, head_dim=64, **SHORT)])
    assert "f32_d32_b8_h4_n64" in other


def test_the_other_mask_serves_where_there_is_none_of_this(driver: Driver, tmp_path: Path) -> None:
    module = load(tmp_path, [by_hand(32, **SHORT), by_hand(64, **LONG)])
    choice = module.explain(*(np.empty(s, np.float32) for s in shapes(1, 4, 1024)), causal=True)
    assert (
        threads_of(choice.tuned) == 64 and not choice.exact and "tuned without the causal mask" in choice.how
    )
    q, k, v = arrays(driver, 1, 4, 9)
    close(module.attention(q, k, v, causal=True), expected(q, k, v, causal=True).o)


@pytest.mark.parametrize("kind", ["numpy", "torch", "cupy", "pycuda", "dlpack"])
def test_it_is_launched_whatever_the_arrays_are(
    module: Any, driver: Driver, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = request.getfixturevalue({"cupy": "cupy", "numpy": "driver", "pycuda": "driver"}.get(kind, "torch"))
    if kind == "dlpack":
        monkeypatch.setattr(of, "from_dlpack", lambda array: Tensor(array.host), raising=False)
        monkeypatch.setattr(Jax, "dtype", property(lambda self: self.host.dtype), raising=False)
        monkeypatch.setattr(Jax, "shape", property(lambda self: self.host.shape), raising=False)

    def wrap(x: np.ndarray) -> Any:
        match kind:
            case "torch":
                return Tensor(x)
            case "cupy":
                return of.ndarray(x, of.current)
            case "pycuda":
                array = sys.modules["pycuda.gpuarray"].GPUArray(x.shape, np.float32, "pool", x.strides)
                array.host[...] = x
                return array
            case "dlpack":
                return Jax(x)
        return x

    wanted = []
    for shape, causal, threads in (
        ((8, 4, 64), False, 32),
        ((1, 4, 500), True, 96),
        ((1, 4, 500), False, 64),
    ):
        q, k, v = arrays(driver, *shape)
        wrapped = [wrap(x) for x in (q, k, v)]
        assert threads_of(module.explain(*wrapped, causal).tuned) == threads
        o, lse = module.attention(*wrapped, causal, return_lse=True)
        reference = expected(q, k, v, causal=causal)
        close(o if kind == "numpy" else o.host, reference.o)
        close(lse if kind == "numpy" else lse.host, reference.lse)
        wanted.append((threads, int(causal)))
    assert [(each.threads, each.causal) for each in driver.launches()] == wanted
    # Each was compiled once, from its own source.
    assert [c["source"] for c in driver.compiled] == [f"// {threads}\n" for threads, _ in wanted]


def test_blocks_are_those_of_the_kernel_that_serves(driver: Driver, tmp_path: Path) -> None:
    kernels = [
        make_kernel(GridOf(32, 4096, 64), **HEADS, **SHORT),
        make_kernel(GridOf(64, 8192, None, heads_per_block=2), "// all rows\n", **HEADS, **LONG),
        make_kernel(GridOf(96, 4096, 64, max_blocks=5), "// stays\n", causal=True, **HEADS, **SHORT),
        make_kernel(GridOf(128, 4096, 64, cluster=2), "// cluster\n", causal=True, **HEADS, **LONG),
        make_kernel(GridOf(128, 4096, 32, heads_per_cluster=4), "// heads\n", causal=True, **GROUPED, **LONG),
        make_kernel(GridOf(32, 4096, 64, pack_heads=True), "// packed\n", **GROUPED, **LONG),
        make_kernel(GridOf(64, 4096, 16, pack_heads=True, splits=16), "// split\n", **GROUPED, **SHORT),
    ]
    module = load(tmp_path, kernels)
    for kernel in kernels:
        problem = replace(
            kernel.problem, batch=3, num_q_heads=6, num_kv_heads=2, seqlen_q=kernel.problem.seqlen_q + 65
        )
        module.use(kernel.problem.name)
        q, k, v = qkv(driver, (3, 6, problem.seqlen_q, D), (3, 2, 7, D))
        module.attention(q, k, v, problem.causal)
        launch = driver.launches()[-1]
        assert (launch.threads, launch.smem) == (kernel.launch.threads, kernel.launch.smem_bytes)
        assert launch.blocks == kernel.launch.grid(replace(problem, seqlen_k=7))
        assert driver.library.fake_large_clusters() == (kernel.launch.splits > 8)


def test_strict_refuses_all_but_exact_matches(module: Any, driver: Driver) -> None:
    q, k, v = arrays(driver, 8, 4, 64)
    close(module.attention(q, k, v, strict=True), expected(q, k, v).o)
    with pytest.raises(
        LookupError, match=r"nothing was tuned for just this, and strict=True: .*nearest of 3"
    ):
        module.attention(q[:4], k[:4], v[:4], strict=True)
    with pytest.raises(LookupError, match=r"asked for batch 8, heads 4, seqlen 64"):
        module.attention(q, k, v, causal=True, strict=True)
    assert len(driver.launches()) == 1


def test_one_kernel_may_be_asked_for(module: Any, driver: Driver) -> None:
    q, k, v = arrays(driver, 8, 4, 64)
    module.attention(q, k, v)
    module.use("f32_d32_b1_h4_n1024")
    module.attention(q, k, v)
    module.use(None)
    module.attention(q, k, v)
    assert [launch.threads for launch in driver.launches()] == [32, 64, 32]
    with pytest.raises(ValueError, match=r"no kernel 'best'; there are f32_d32_b8_h4_n64, f32"):
        module.use("best")


def test_strides_that_a_kernel_cannot_step_by_leave_it_out(driver: Driver, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Narrow(Wide):
        def access_width(self, problem: Problem) -> int:
            return 1

    narrow = by_hand(64, **LONG)
    narrow = replace(narrow, variant=Narrow())
    module = load(tmp_path, [by_hand(32, **SHORT), narrow])
    memory = driver.own(host(8, 4, 64, D + 1))
    q = memory[..., :D]  # rows D + 1 apart
    k, v = driver.own(host(8, 4, 64, D)), driver.own(host(8, 4, 64, D, seed=2))
    out = driver.own(np.empty((8, 4, 64, D), np.float32))
    assert threads_of(module.explain(k, k, v).tuned) == 32
    choice = module.explain(Array(q), Array(k), Array(v))
    assert threads_of(choice.tuned) == 64 and "others cannot step by these strides" in choice.how
    module.attention(Array(q), Array(k), Array(v), out=Array(out))
    close(out, expected(q, k, v).o)
    stuck = load(tmp_path, three())
    assert "tuned for just this, but it cannot step" in stuck.explain(Array(q), Array(k), Array(v)).how
    with pytest.raises(
        ValueError, match=r"kernel f32_d32_b8_h4_n64 reads 4 elements at once.*contiguous\(\)"
    ):
        stuck.attention(Array(q), Array(k), Array(v), out=Array(out))


# ---- types and cards ---------------------------------------------------------------------------------------


def mixed() -> list[Kernel]:
    """By the copy engine on Hopper alone, by tensor cores from Ampere on, and of other types."""
    return [
        render(Wgmma(br=64, bc=64), Problem(dtype="bf16", head_dim=D, **HEADS, **LONG), H200),
        render(Mma(), Problem(dtype="bf16", head_dim=D, **HEADS, **SHORT), preset("a100")),
        render(Mma(), Problem(dtype="f16", head_dim=D, head_dim_v=16, **HEADS, **SHORT), H200),
        render(steps(D)["4.2.10"], Problem(head_dim=D, **HEADS, **SHORT), H200),
    ]


def of_type(driver: Driver, dtype: str, batch: int, rows: int, dv: int = D) -> list[np.ndarray]:
    widths = (D, D, dv)
    driver.library.fake_kernel(dv, DRIVER_TYPES[dtype])
    kind = numpy_dtype(dtype)
    return [driver.own(host(batch, 4, rows, w, seed=i, dtype=kind)) for i, w in enumerate(widths)]


@pytest.mark.parametrize(
    ("dtype", "rows", "dv", "index"),
    [("bf16", 300, D, 0), ("bf16", 60, D, 1), ("f16", 300, 16, 2), ("f32", 9, D, 3)],
)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_types_and_head_dims_keep_among_themselves(
    driver: Driver, tmp_path: Path, torch: Any, dtype: str, rows: int, dv: int, index: int, kind: str
) -> None:
    kernels = mixed()
    module = load(tmp_path, kernels)
    driver.library.fake_maps(len(kernels[index].launch.tensor_maps))
    q, k, v = of_type(driver, dtype, 1 if rows > 100 else 8, rows, dv)
    wrap = Tensor if kind == "torch" else np.asarray
    assert module.explain(wrap(q), wrap(k), wrap(v), True).tuned is module.KERNELS[index]
    o, lse = module.attention(wrap(q), wrap(k), wrap(v), True, return_lse=True)
    o, lse = (o.host, lse.host) if kind == "torch" else (o, lse)
    wanted = expected(*(x.astype(np.float32) for x in (q, k, v)), causal=True)
    assert o.dtype == q.dtype and lse.dtype == np.float32 and o.shape == wanted.o.shape
    assert np.abs(o.astype(np.float64) - wanted.o).max() <= 2 * ROUNDING[dtype]
    (launch,) = driver.launches()
    assert launch.threads == kernels[index].launch.threads
    assert driver.compiled[0]["arch"] == ("sm_90a" if index == 0 else "sm_90")
    maps = {0: [9, 9, 9, 9]}.get(index, [0] * 4)
    assert [m.type for m in launch.maps] == maps


def test_a_kernel_of_another_architecture_is_left_out(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path, mixed())
    driver.library.fake_reset(D, 8, 0, 166912)
    q, k, v = (Tensor(x) for x in of_type(driver, "bf16", 1, 1024))
    choice = module.explain(q, k, v)
    assert choice.tuned is module.KERNELS[1] and "1 others do not run on sm_80" in choice.how
    module.attention(q, k, v)
    # Compiled for the card that is here, from the source.
    assert driver.compiled[-1]["arch"] == "sm_80"
    alone = load(tmp_path, [mixed()[0], mixed()[3]])
    words = r"instructions of sm_90 alone, device 0 is sm_80; they were made for NVIDIA H200: run"
    with pytest.raises(RuntimeError, match=words):
        alone.attention(q, k, v)
    driver.library.fake_reset(D, 9, 0, 1024)
    module = load(tmp_path, mixed())
    with pytest.raises(
        RuntimeError, match=r"kernel bf16_d32_b8_h4_n64 needs \d+ bytes .* allows 1024; it was made for"
    ):
        module.attention(*(Tensor(x) for x in of_type(driver, "bf16", 8, 64)))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda x: (x.astype(np.float64),) * 3,
            TypeError,
            "float64; this module has kernels for bfloat16, float16, float32",
        ),
        (lambda x: (x, x, x[..., :16].astype(np.float16)), TypeError, "q is float32, .*v float16"),
        (
            lambda x: (x[..., :24],) * 3,
            ValueError,
            "q has float32 of head dim 24; there are kernels for bfloat16 of head",
        ),
        (lambda x: (x, x, x[..., :16]), ValueError, "v has float32 of head dim 16"),
        (
            lambda x: (x.astype(np.float16),) * 3,
            ValueError,
            r"v has float16 of head dim 32; .*float16 of head dim 32/16",
        ),
        (lambda x: (x[0],) * 3, ValueError, "3 dimensions"),
        (lambda x: (x, x[:, :3], x[:, :3]), ValueError, "theirs must divide"),
    ],
)
@pytest.mark.parametrize("function", ["attention", "explain"])
def test_what_no_kernel_computes_is_told(
    driver: Driver, tmp_path: Path, make: Any, error: type[Exception], words: str, function: str
) -> None:
    module = load(tmp_path, mixed())
    q, k, v = make(host(2, 4, 9, D))
    with pytest.raises(error, match=words):
        getattr(module, function)(q, k, v)


def test_a_layout_or_array_that_is_none(module: Any) -> None:
    x = host(2, 4, 9, D)
    with pytest.raises(ValueError, match="choose 'bhsd' or 'bshd'"):
        module.explain(x, x, x, layout="sbhd")
    with pytest.raises(TypeError, match=r"q is a builtins\.list, not an array"):
        module.explain([1], x, x)
    assert chosen(module, 8, 64, 4, layout="bshd") == (32, True)


# ---- PyTorch -----------------------------------------------------------------------------------------------


def test_the_drop_in_serves_what_a_kernel_computes(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = arrays(driver, 1, 4, 900)
    o = module.sdpa(Tensor(q), Tensor(k), Tensor(v), is_causal=True)
    close(o.host, expected(q, k, v, causal=True).o)
    assert driver.launches()[-1].threads == 96
    q, k, v = arrays(driver, 8, 4, 64)
    close(module.sdpa(Tensor(q), Tensor(k), Tensor(v)).host, expected(q, k, v).o)
    assert driver.launches()[-1].threads == 32
    half = Tensor(q[..., :16])
    assert module.sdpa(half, half, half)[0] == "torch"
    wide = Tensor(q.astype(np.float16))
    assert module.sdpa(wide, wide, wide)[0] == "torch"


def test_autocast_casts_to_what_there_are_kernels_for(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module = load(tmp_path, mixed())
    torch.autocast = torch.bfloat16
    q, k, v = of_type(driver, "bf16", 8, 64)
    wide = [Tensor(x.astype(np.float32)) for x in (q, k, v)]
    assert module.attention(*wide).dtype == torch.bfloat16
    assert module.sdpa(*wide).dtype == torch.bfloat16
    alone = load(tmp_path, three())
    driver.library.fake_kernel(D, DRIVER_TYPES["f32"])
    assert alone.attention(*wide).dtype == torch.float32
    assert alone.sdpa(*wide)[0] == "torch"


# ---- carried cubins ----------------------------------------------------------------------------------------


def test_what_it_carries_needs_no_compiler(driver: Driver, tmp_path: Path) -> None:
    kernels = three()
    cubins = {
        (kernel.digest, causal): f"causal={int(causal)}".encode()
        for kernel in kernels
        for causal in (False, True)
    }
    module = load(tmp_path, kernels, cubins=cubins)
    q, k, v = arrays(driver, 8, 4, 64)
    for causal in (False, True):
        close(module.attention(q, k, v, causal), expected(q, k, v, causal=causal).o)
    assert not driver.compiled
    assert "carried" not in module.explain(q, k, v).how
    text = (tmp_path / "several.py").read_text()
    assert "Kernels are in it as compiled for sm_90;" in text


def test_on_another_card_it_compiles_its_source(driver: Driver, tmp_path: Path, torch: Any) -> None:
    kernels = three()
    cubins = {(kernel.digest, causal): b"of another card" for kernel in kernels for causal in (False, True)}
    module = load(tmp_path, kernels, cubins=cubins)
    driver.library.fake_reset(D, 8, 6, 101376)
    q, k, v = arrays(driver, 8, 4, 64)
    tensors = [Tensor(x) for x in (q, k, v)]
    assert "compiled from its source by the first call" in module.explain(*tensors).how
    close(module.attention(*tensors).host, expected(q, k, v).o)
    assert driver.compiled[0]["arch"] == "sm_86" and driver.compiled[0]["source"] == "// 32\n"


@pytest.mark.parametrize("arch", [(9, 0), (8, 6)])
def test_a_module_of_one_kernel_may_carry_cubins_too(
    driver: Driver, tmp_path: Path, arch: tuple[int, int]
) -> None:
    kernel = by_hand(32, **SHORT)
    path = tmp_path / "one.py"
    path.write_text(emit_module(kernel, device="H200", cubins={False: b"causal=0", True: b"causal=1"}))
    one = import_path(path)
    driver.library.fake_reset(D, *arch, 101376)
    q, k, v = arrays(driver, 8, 4, 64)
    for causal in (False, True):
        close(one.attention(q, k, v, causal), expected(q, k, v, causal=causal).o)
    assert len(driver.compiled) == (0 if arch == (9, 0) else 2)


# ---- the text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made", [three, mixed, lambda: mixed()[2:], lambda: mixed()[:2]], ids=["f32", "all", "no-bf16", "bf16"]
)
@pytest.mark.parametrize("embedded", [False, True], ids=["", "embedded"])
def test_the_module_is_deterministic_and_clean(made: Any, embedded: bool, tmp_path: Path) -> None:
    kernels = made()
    cubins = (
        {(kernel.digest, causal): bytes(99) for kernel in kernels for causal in (False, True)}
        if embedded
        else None
    )
    text = text_of(kernels, cubins=cubins)
    assert text == text_of(made(), cubins=cubins)
    compile(text, "several.py", "exec")
    code = text
    for kernel in kernels:
        assert kernel.source in text
        code = code.replace(kernel.source, "")
    assert "\n\n\n\n" not in code and not re.search(r"[ \t]\n", code) and text.endswith(")\n")
    assert code.count("def _launch(") == code.count("def _load(") == 1
    path = tmp_path / "several.py"
    path.write_text(text)
    assert_ruff_is_content(path)


def test_it_says_what_it_holds(tmp_path: Path) -> None:
    head = text_of(mixed()).partition('"""\n\nfrom __future__')[0]
    assert "bf16, head dim 32 and f16, head dim 32 (values 16) and f32, head dim 32." in head
    assert "4 kernels for NVIDIA H200 (sm_90) and NVIDIA H200 (sm_80)." in head
    assert re.search(r"    bf16_d32_b1_h4_n1024 +wgmma +123\.4 us  56\.7 TFLOP/s  3\.0e-07\n", head)
    assert "    flashgen emit several.py \\\n        --suite llm\n" in head
    predicted = emit_many(
        [Made(k, "GTX", {**FIGURES, "predicted": True}) for k in three()], name="x", command=[]
    )
    assert "Times are predicted by a cost model, not measured." in " ".join(predicted.split())
    unmeasured = emit_many([Made(k, "GTX") for k in three()], name="x", command=[])
    assert "Not measured: emitted of variants that were chosen" in unmeasured


def test_equal_sources_are_carried_once() -> None:
    one = render(steps(D)["4.2.10"], Problem(head_dim=D, **SHORT), H200)
    other = render(steps(D)["4.2.10"], Problem(head_dim=D, **LONG), H200)
    assert one.source == other.source
    assert text_of([one, other]).count(one.source) == 1


def test_it_imports_without_pycuda_or_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(text_of(three()))
    script = (
        "import sys, several; loaded = {m.partition('.')[0] for m in sys.modules}; "
        "print(*several.__all__, *loaded & {'flashgen', 'pycuda', 'torch', 'cupy', 'jinja2'}); "
        "print(len(several.KERNELS), several.KERNELS[0].problem['batch'], *several.KERNELS[0].measurement)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    names, figures = result.stdout.splitlines()
    assert names.split() == [
        "KERNELS", "SOURCES", "Choice", "Launch", "TensorMap", "Tuned",
        "attention", "explain", "register_torch", "register_transformers", "sdpa", "use",
    ]  # fmt: skip
    assert figures == "3 8 median_us tflops error toolkit flashgen"


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (lambda: three()[:1], "asked for with 1"),
        (lambda: [*three(), by_hand(128, **SHORT)], "two kernels were tuned for f32_d32_b8_h4_n64"),
        (
            lambda: [by_hand(32, **SHORT), by_hand(32, precision="tf32", **SHORT)],
            "which precision of f32 it wants, and there are kernels of auto, tf32",
        ),
    ],
)
def test_what_makes_no_module_of_several(kernels: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        text_of(kernels())


# ---- as a program ------------------------------------------------------------------------------------------


def test_run_as_a_program_it_checks_and_times_each(
    driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"batch": 1, "num_q_heads": 2, "num_kv_heads": 1}
    module = load(
        tmp_path,
        [by_hand(32, **tiny, seqlen_q=64, seqlen_k=64), by_hand(64, **tiny, seqlen_q=32, seqlen_k=32)],
    )
    assert run(module) == 0
    told = capsys.readouterr().out
    assert "Here, on Fake, with a warm cache:" in told and told.count("2e-06 allowed: correct") == 2
    assert "f32_d32_b1_h2_kv1_n64: 250.0 us" in told
    assert {launch.threads for launch in driver.launches()} == {32, 64}
    driver.library.fake_reset(D // 2, 9, 0, 232448)  # half of each row stays unwritten
    assert run(module) == 1
    assert capsys.readouterr().out.count("WRONG") == 2
    driver.library.fake_fail_launch(2)
    assert run(module) == 1
    assert "failed: launching" in capsys.readouterr().out
    assert module._bound._table.only is None
