"""The emitted module within PyTorch, Hugging Face's models and JAX, on a real card."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flashgen.gen.emit.module import emit_module
from flashgen.gen.families import family_named
from flashgen.gen.kernel import Kernel
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.cuda import CudaDevice
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.serving import serving_families
from flashgen.tuner.shelf import choice, library
from flashgen.tuner.shelf.emitted_kernels import read_emitted
from flashgen.tuner.shelf.guess import best_guess

from tests.support.modules import import_path

D = 64


@pytest.fixture(autouse=True)
def nothing_compiled_before(torch: Any) -> None:
    torch._dynamo.reset()


def load(folder: Path, kernel: Kernel) -> Any:
    """By a name of its own, by which compiled functions find it."""
    path = folder / f"{kernel.problem.name}_{kernel.digest}.py"
    path.write_text(emit_module(kernel, device="this card"))
    return import_path(path, for_good=True)


def some_kernel(device: CudaDevice, family: str, **problem: Any) -> Kernel:
    """The legal variant of a family nearest to its default. Skips where none is."""
    wanted, variants = Problem(**{"head_dim": D, **problem}), family_named(family)
    catalogue = build_catalogue(variants, wanted, device.limits, {})
    row = catalogue.nearest(variants())
    if row is None:
        pytest.skip(f"{device.limits.name} runs nothing of {family} for {wanted.stem}")
    return render(catalogue.variant(row), wanted, device.limits)


def best_kernel(device: CudaDevice, problem: Problem) -> Kernel:
    """The shipped kernel that `flashgen emit` would choose, or the cost model's guess."""
    match = choice.find(library.entries([library.shipped_folder()]), problem, device.limits)
    if match is not None and match.entry.json_path is not None:
        return read_emitted(match.entry.json_path.with_suffix(".py")).kernel
    families = serving_families(problem, device.limits)
    return render(best_guess(families, problem, device.limits), problem, device.limits)


KINDS: dict[str, Any] = {
    "f32": {"family": "simt"},
    "f16": {"family": "mma", "dtype": "f16", "head_dim": 40, "head_dim_v": 72},
    "bf16": {"family": "wgmma", "dtype": "bf16", "causal": True},
}


@pytest.fixture(scope="module", params=list(KINDS))
def module(request: pytest.FixtureRequest, device: CudaDevice, tmp_path_factory: Any, torch: Any) -> Any:
    return load(tmp_path_factory.mktemp("module"), some_kernel(device, **KINDS[request.param]))


@pytest.fixture
def launches(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    made: list[Any] = []
    launch = module._launch
    monkeypatch.setattr(module, "_launch", lambda *arguments: (made.append(arguments), launch(*arguments)))
    yield made


def dtype_of(torch: Any, module: Any) -> Any:
    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[module.PROBLEM["dtype"]]


def qkv(torch: Any, module: Any, rows: int = 197, keys: int = 333, kv_heads: int = 2, heads: int = 4) -> Any:
    torch.manual_seed(0)
    d, dv = module.PROBLEM["head_dim"], module.PROBLEM["head_dim_v"]
    shapes = (2, heads, rows, d), (2, kv_heads, keys, d), (2, kv_heads, keys, dv)
    return [torch.randn(shape, device="cuda").to(dtype_of(torch, module)) for shape in shapes]


def reference(torch: Any, q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """Attention in float64 under a mask aligned bottom-right."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        visible = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2]), -math.inf)
    return scores.softmax(3).nan_to_num(0) @ v


def close(module: Any, found: Any, wanted: Any, factor: float = 1) -> None:
    """Per head within the class's bound."""
    assert found.shape == wanted.shape
    found, wanted = found.double(), wanted.double()
    distance, norm = (found - wanted).norm(dim=(2, 3)), wanted.norm(dim=(2, 3))
    assert (distance <= factor * module.KERNELS[0].tolerance * norm).all(), (distance / norm).max()


# ---- the operator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor_without_a_break(module: Any, torch: Any, mode: str) -> None:
    """The latter by CUDA graphs."""
    if mode == "reduce-overhead" and module.PROBLEM["dtype"] == "f16":
        pytest.skip("two types will do")
    q, k, v = qkv(torch, module)

    def layer(q: Any, k: Any, v: Any) -> Any:
        o, lse = module.attention(q + q, k, v, causal=True, return_lse=True)
        return o * 2, lse + 1

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(3):
            found, lse = compiled(q, k, v)
            close(module, found / 2, reference(torch, q + q, k, v, causal=True))
            assert lse.shape == q.shape[:3]


def test_compiled_in_place_and_by_rows_first(module: Any, torch: Any) -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv(torch, module))

    def layer(q: Any, k: Any, v: Any) -> Any:
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        module.attention(q, k, v, False, out=out, layout="bshd")
        return out.transpose(1, 2)

    found = torch.compile(layer, fullgraph=True)(q, k, v)
    close(module, found, reference(torch, *(x.transpose(1, 2) for x in (q, k, v))))


def test_compiled_once_for_all_lengths(module: Any, torch: Any) -> None:
    compiled = torch.compile(module.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, keys in ((197, 333), (64, 100), (500, 40)):
        q, k, v = qkv(torch, module, rows, keys)
        close(module, compiled(q, k, v, False), reference(torch, q, k, v))


def test_the_operators_pass_torchs_own_checks(module: Any, torch: Any) -> None:
    q, k, v = qkv(torch, module, 33, 50)
    out = module.attention(q, k, v)
    name = module.register_torch()
    plain, with_lse, into = (
        getattr(torch.ops.flashgen, name + suffix).default for suffix in ("", "_lse", "_out")
    )
    for causal in (None, False):
        torch.library.opcheck(plain, (q, k, v, causal, 0.2))
        torch.library.opcheck(with_lse, (q, k, v, causal, 0.2))
        torch.library.opcheck(into, (q, k, v, out, causal, 0.2))


def test_the_operators_copy_what_cannot_be_stepped_by(module: Any, torch: Any) -> None:
    q, k, v = qkv(torch, module)
    misaligned = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    found = getattr(torch.ops.flashgen, module.register_torch())(misaligned, k, v, False)
    close(module, found, reference(torch, q, k, v))
    close(module, module.attention(misaligned, k, v, False), reference(torch, q, k, v))
    odd_rows = torch.empty(*k.shape[:3], k.shape[3] + 1, dtype=k.dtype, device="cuda")[..., :-1].copy_(k)
    close(module, module.attention(q, odd_rows, v, False), reference(torch, q, k, v))


def test_tensors_of_eight_bits_compiled(device: CudaDevice, torch: Any, tmp_path: Path) -> None:
    module = load(tmp_path, some_kernel(device, "wgmma", dtype="e4m3"))
    q, k, v = (
        x.to(torch.float8_e4m3fn) for x in (torch.randn(2, 4, 150, D, device="cuda") for _ in range(3))
    )
    scales = (1.5, 0.5, 2.0)

    def layer(q: Any, k: Any, v: Any) -> Any:
        return module.attention(q, k, v, True, scales=scales, return_lse=True)

    found, wanted = torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    meant = (x.double() * scale for x, scale in zip((q, k, v), scales, strict=True))
    close(module, found[0], reference(torch, *meant, causal=True))


# ---- graphs and streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["attention", "sdpa", "operator"])
def test_captured_in_a_graph(module: Any, torch: Any, through: str) -> None:
    """With the output's memory, from the graph's own pool, and replayed on new data."""
    q, k, v = qkv(torch, module, kv_heads=4)
    operator = getattr(torch.ops.flashgen, module.register_torch())
    attend = {
        "attention": lambda: module.attention(q, k, v, False),
        "sdpa": lambda: module.sdpa(q, k, v),
        "operator": lambda: operator(q, k, v, False),
    }[through]
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend()
    for factor in (0.5, 2.0):
        q.mul_(factor)
        o.zero_()
        graph.replay()
        close(module, o, reference(torch, q, k, v))


@pytest.mark.parametrize("through", ["sdpa", "operator"])
def test_runs_on_the_current_stream(module: Any, torch: Any, through: str) -> None:
    q, k, v = qkv(torch, module, kv_heads=4)
    operator = getattr(torch.ops.flashgen, module.register_torch())
    module.attention(q, k, v, False)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        o = module.sdpa(late, k, v) if through == "sdpa" else operator(late, k, v, False)
        late.zero_()
        o = o.clone()
        torch.cuda.current_stream().synchronize()
    close(module, o, reference(torch, q, k, v))


# ---- autocast, gradients -----------------------------------------------------------------------------------


def test_autocast(module: Any, torch: Any, launches: list[Any]) -> None:
    """To the kernel's type, from any other; the drop-in where PyTorch would cast to that."""
    dtype = dtype_of(torch, module)
    q, k, v = (x.float() for x in qkv(torch, module, kv_heads=4))
    wanted = reference(torch, *(x.to(dtype) for x in (q, k, v)))
    compiled = torch.compile(module.attention, fullgraph=True, backend="aot_eager")
    operator = getattr(torch.ops.flashgen, module.register_torch())
    with torch.autocast("cuda", dtype=torch.bfloat16 if dtype == torch.float32 else dtype), torch.no_grad():
        for attend in (module.attention, compiled, operator):
            o = attend(q, k, v, False)
            assert o.dtype == dtype
            close(module, o, wanted)
        assert len(launches) == 3
        o = module.sdpa(q, k, v)
        assert len(launches) == (3 if dtype == torch.float32 else 4)
        assert o.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)


def test_gradients_are_refused(module: Any, torch: Any) -> None:
    q, k, v = qkv(torch, module)
    with pytest.raises(RuntimeError, match=r"k requires a gradient.*forward only.*recompute=True"):
        module.attention(q, k.requires_grad_(), v)
    with torch.no_grad():
        close(module, module.attention(q, k, v, False), reference(torch, q, k, v))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(128, 128), (60, 100), (100, 60)])
def test_gradients_by_recomputation(module: Any, torch: Any, rows: int, keys: int, compiled: bool) -> None:
    attend = (
        torch.compile(module.attention, fullgraph=True, backend="aot_eager") if compiled else module.attention
    )
    arrays = [x.requires_grad_() for x in qkv(torch, module, rows, keys)]
    exact = [x.detach().double().requires_grad_() for x in arrays]
    o = attend(*arrays, True, recompute=True)
    wanted = reference(torch, *exact, causal=True)
    weights = torch.randn_like(o)
    (o * weights).sum().backward()
    (wanted * weights.double()).sum().backward()
    for found, expected in zip(arrays, exact, strict=True):
        expected.grad.nan_to_num_(0)
        distance = (found.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert distance <= (1e-3 if module.PROBLEM["dtype"] == "f32" else 2 * module.KERNELS[0].tolerance)


# ---- the drop-in -------------------------------------------------------------------------------------------


def case(
    name: str, served: bool, change: Callable[..., Any] = lambda *x: x, lengths: Any = (), **how: Any
) -> Any:
    return pytest.param(served, change, lengths, how, id=name)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("served", "change", "lengths", "how"),
    [
        case("plain", True),
        case("scale", True, scale=0.3),
        case("causal", True, lengths=(100, 100), is_causal=True),
        case("causal, longer keys", True, lengths=(100, 200), is_causal=True),
        case("causal, longer queries", False, lengths=(200, 100), is_causal=True),
        case("grouped", True, lambda q, k, v: (q, k[:, :2], v[:, :2]), enable_gqa=True),
        case("transposed", True, lambda *x: [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]),
        case("a mask", False, lambda q, k, v: (q, k, v, some_mask(q, k))),
        case("three dimensions", False, lambda *x: [y[0] for y in x]),
        case("another head dim", False, lambda *x: [y[..., :16].contiguous() for y in x]),
        case("another type", False, lambda *x: [y.double() for y in x]),
        case("the CPU", False, lambda *x: [y.float().cpu() for y in x]),
        case("a gradient", False, lambda q, k, v: (q, k, v.requires_grad_())),
    ],
)
def test_the_drop_in_computes_what_torch_does(
    module: Any,
    torch: Any,
    launches: list[Any],
    served: bool,
    change: Any,
    lengths: Any,
    how: Any,
    compiled: bool,
) -> None:
    arrays = change(*qkv(torch, module, *lengths, kv_heads=4))
    sdpa = torch.compile(module.sdpa, fullgraph=True, backend="aot_eager") if compiled else module.sdpa
    found = sdpa(*arrays, **how)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() if x.is_floating_point() else x for x in arrays), **how
    )
    assert found.dtype == arrays[0].dtype and found.device == arrays[0].device
    if found.dim() == 3:
        found, wanted = found[None], wanted[None]
    close(module, found, wanted, 2)
    assert len(launches) == served


def some_mask(q: Any, k: Any) -> Any:
    """Boolean, of which each row has a key."""
    mask = q[:, :, :, :1] * k[:, :, :, 0][:, :, None] > 0
    mask[..., 0] = True
    return mask


# ---- time --------------------------------------------------------------------------------------------------


def test_what_a_call_costs_the_host(module: Any, torch: Any) -> None:
    """Ten microseconds, or a fifth more than PyTorch's own attention costs where the host is slow."""
    q, k, v = qkv(torch, module, 16, 16, heads=2)
    out = module.attention(q, k, v)
    calls = {
        "attention": lambda: module.attention(q, k, v),
        "attention, out=": lambda: module.attention(q, k, v, out=out),
        "sdpa": lambda: module.sdpa(q, k, v),
        "PyTorch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    best = dict.fromkeys(calls, math.inf)
    with torch.no_grad():
        for _ in range(30):
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(200):
                    call()
                best[name] = min(best[name], (time.perf_counter() - begin) / 200)
                torch.cuda.synchronize()
    print(
        f"{module.PROBLEM['dtype']}, host time per call:", {k: f"{v * 1e6:.1f} us" for k, v in best.items()}
    )
    allowed = max(10e-6, 1.2 * best["PyTorch"])
    assert all(spent <= allowed for spent in best.values()), best


# ---- Hugging Face ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers(torch: Any) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers", reason="needs transformers")


def gpt2(torch: Any, transformers: Any) -> tuple[Any, Any, Problem]:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    problem = Problem(batch=8, num_q_heads=12, num_kv_heads=12, seqlen_q=1024, head_dim=64, causal=True)
    return model, torch.randint(50257, (8, 1024), device="cuda"), problem


def vit(torch: Any, transformers: Any) -> tuple[Any, Any, Problem]:
    model = transformers.ViTForImageClassification(transformers.ViTConfig())
    return (
        model,
        torch.randn(64, 3, 224, 224, device="cuda"),
        Problem(batch=64, num_q_heads=12, num_kv_heads=12, seqlen_q=197, head_dim=64),
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("make", [gpt2, vit])
def test_a_model_of_random_weights(
    make: Callable[..., Any], dtype: str, device: CudaDevice, torch: Any, transformers: Any, tmp_path: Path
) -> None:
    """The same logits as by PyTorch's attention, within the bound of the type, and the time beside."""
    torch.manual_seed(0)
    model, inputs, problem = make(torch, transformers)
    problem = Problem(**{**problem.to_dict(), "dtype": dtype, "seqlen_k": problem.seqlen_q})
    kernel = best_kernel(device, problem)
    module = load(tmp_path, kernel)
    module.register_transformers()
    calls = count_calls(module)
    torch_type = torch.float32 if dtype == "f32" else torch.bfloat16
    with torch.inference_mode():
        if inputs.is_floating_point():
            inputs = inputs.to(torch_type)
        few = inputs[:2]
        model = model.eval().cuda().to(torch_type).double()
        model.set_attn_implementation("eager")
        exact = model(few.double() if few.is_floating_point() else few).logits
        model = model.to(torch_type)
        errors, found = {}, {}
        for name in ("sdpa", "tuned"):
            model.set_attn_implementation(name)
            found[name] = model(few).logits.double()
            errors[name] = float((found[name] - exact).norm() / exact.norm())
        assert len(calls) == 12
        apart = float((found["tuned"] - found["sdpa"]).norm() / found["sdpa"].norm())
        ms = {name: statistics.median(times) for name, times in timed(torch, model, inputs).items()}
    print(
        f"{type(model).__name__}, {dtype}, by {kernel.problem.name} of {kernel.variant.family}: "
        f"logits {apart:.1e} apart, from float64 {errors['tuned']:.1e} (PyTorch {errors['sdpa']:.1e}); "
        f"whole model {ms['tuned']:.2f} ms (PyTorch {ms['sdpa']:.2f}, {ms['sdpa'] / ms['tuned']:.2f} times)"
    )
    # Roundings of all other layers are in these numbers as well, in bf16 most of them.
    assert apart <= max(kernel.problem.tolerance, errors["tuned"] + errors["sdpa"])
    # Of one draw of weights and inputs, in which either attention may come out nearer by chance.
    assert errors["tuned"] <= max(kernel.problem.tolerance, 2 * errors["sdpa"])


def count_calls(module: Any) -> list[Any]:
    made: list[Any] = []
    launch = module._launch
    module._launch = lambda *arguments: (made.append(arguments), launch(*arguments))
    return made


def timed(torch: Any, model: Any, inputs: Any, repeats: int = 10) -> dict[str, list[float]]:
    """Milliseconds of whole passes, in turns."""
    ms: dict[str, list[float]] = {"sdpa": [], "tuned": []}
    for turn in range(repeats + 2):
        for name, times in ms.items():
            model.set_attn_implementation(name)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            model(inputs)
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times.append(begin.elapsed_time(end))
    return ms


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_compiled_model(
    dtype: str, device: CudaDevice, torch: Any, transformers: Any, tmp_path: Path
) -> None:
    """The kernel serves it but for what is padded, and logits are those by PyTorch's attention."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, vocab_size=1000)
    model = transformers.GPT2LMHeadModel(config).eval().cuda()
    model = model.to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    module = load(tmp_path, some_kernel(device, "mma", dtype=dtype, causal=True))
    module.register_transformers("compiled")
    calls = count_calls(module)
    words = torch.randint(1000, (2, 256), device="cuda")
    padding = torch.ones_like(words)
    padding[0, :50] = 0
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        wanted = model(words).logits.double()
        wanted_padded = model(words, attention_mask=padding).logits[padding == 1].double()
        model.set_attn_implementation("compiled")
        found = torch.compile(model, fullgraph=True)(words).logits.double()
        assert len(calls) == 2
        padded = torch.compile(model, fullgraph=True, backend="aot_eager")
        found_padded = padded(words, attention_mask=padding).logits[padding == 1].double()
        assert len(calls) == 2
    # Each layer rounds, and the next one what has been rounded otherwise.
    bound = 2 * module.KERNELS[0].tolerance
    assert (found - wanted).norm() <= bound * wanted.norm()
    assert (found_padded - wanted_padded).norm() <= bound * wanted_padded.norm()


# ---- JAX ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jax(torch: Any) -> Any:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax = pytest.importorskip("jax", reason="needs JAX")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA")
    return jax


def test_jax_arrays_by_dlpack(module: Any, torch: Any, jax: Any) -> None:
    tensors = qkv(torch, module)
    q, k, v = (
        jax.numpy.asarray(x.float().cpu().numpy()).astype(str(x.dtype).removeprefix("torch."))
        for x in tensors
    )
    o, lse = module.attention(q * 1, k, v, False, return_lse=True)
    assert isinstance(o, jax.Array) and o.dtype == q.dtype and isinstance(lse, jax.Array)
    assert lse.shape == q.shape[:3] and lse.dtype == "float32"
    wanted = reference(torch, *tensors)
    close(module, torch.from_dlpack(o), wanted)
    # What JAX still computes is waited for, and it waits for the kernel.
    for _ in range(20):
        late = (q.astype("float32") * 1.0).astype(q.dtype)
        o = module.attention(late, k, v, False) + 0
    close(module, torch.from_dlpack(o), wanted)


def test_other_arrays_by_dlpack(module: Any, torch: Any) -> None:
    """Of a library that offers nothing else, and takes results back."""

    class Foreign:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack__(self, **how: Any) -> Any:
            return self.tensor.__dlpack__(**how)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

        def __array_namespace__(self) -> Any:
            return Namespace

    class Namespace:
        @staticmethod
        def from_dlpack(array: Any) -> Foreign:
            return Foreign(torch.from_dlpack(array))

    tensors = qkv(torch, module)
    o = module.attention(*(Foreign(x) for x in tensors), False)
    assert isinstance(o, Foreign)
    close(module, o.tensor, reference(torch, *tensors))
