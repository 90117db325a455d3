"""The emitted module with the real PyTorch, where it is installed, and without a GPU.

Tensors lie in host memory, on which the stand-in driver of `test_module` runs plain attention.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module
from flashgen.gen.launch import Launch as GridOf

from tests.support.host_tensors import Graphs, fresh_driver, real_torch, take_host_tensors, tensors
from tests.support.modules import import_path
from tests.support.stand_in_driver import DRIVER_TYPES, D, Driver, make_kernel

#: Half the last place of a result near 1, and of a sum of a few.
BOUNDS = {"f32": 2e-6, "bf16": 2e-2}


@pytest.fixture(scope="module")
def torch() -> Any:
    return real_torch()


@pytest.fixture(scope="module")
def modules(torch: Any, library: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The module of a dtype, or of "several" kernels, which takes tensors of the CPU for such of a card.
    Operators are for good, so there is one of each."""
    loaded: dict[str, Any] = {}

    def module_of(kind: str) -> Any:
        if kind not in loaded:
            # Compiled functions import it by its name.
            path = tmp_path_factory.mktemp("module") / f"emitted_{kind}.py"
            path.write_text(text_of(kind))
            loaded[kind] = take_host_tensors(import_path(path, for_good=True), library)
        return loaded[kind]

    return module_of


def text_of(kind: str) -> str:
    if kind != "several":
        return emit_module(make_kernel(GridOf(128, 4096, 64), dtype=kind), device="H200")
    # Of 64 rows and of 2000, which threads tell apart.
    made = [
        Made(
            make_kernel(GridOf(threads, 4096, 64), f"// {rows}\n", seqlen_q=rows, seqlen_k=rows), "H200", None
        )
        for threads, rows in ((128, 64), (256, 2000))
    ]
    return emit_many(made, name="several", command=())


@pytest.fixture(params=["f32"])
def module(
    request: pytest.FixtureRequest,
    torch: Any,
    library: Any,
    modules: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    fresh_driver(torch, library, monkeypatch)
    library.fake_kernel(D, DRIVER_TYPES.get(request.param, 0))
    yield modules(request.param)
    torch.set_autocast_enabled("cuda", False)


@pytest.fixture
def driver(library: Any) -> Driver:
    return Driver(library)


def qkv(
    torch: Any, rows: int = 9, keys: int = 7, heads: int = 4, kv_heads: int = 2, dtype: Any = None
) -> Any:
    return tensors(torch, (2, heads, rows, D), *[(2, kv_heads, keys, D)] * 2, dtype=dtype)


def reference(torch: Any, q: Any, k: Any, v: Any, causal: bool = False, scale: float | None = None) -> Any:
    """(o, lse) in float64, with a mask aligned bottom-right; a row without keys is zero."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (D**-0.5 if scale is None else scale)
    if causal:
        visible = torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(3).nan_to_num(0) @ v, scores.logsumexp(3)


def close(found: Any, wanted: Any, bound: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    difference = (found.double() - wanted).abs().nan_to_num(0)  # both -inf
    assert (difference <= bound * (1 + wanted.abs().nan_to_num(0, 0, 0))).all(), difference.max()


# ---- tensors as they lie -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (lambda x: x.contiguous(), (4 * 9 * D, 9 * D, D, 1)),
        (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), (9 * 4 * D, D, 4 * D, 1)),
        (lambda x: x.transpose(0, 2).contiguous().transpose(0, 2), (D, 2 * D, 4 * 2 * D, 1)),
        (lambda x: x.repeat(1, 3, 1, 1)[:, 4:8], (4 * 9 * D, 9 * D, D, 1)),
        (lambda x: x[:1].expand(2, 4, 9, D), (4 * 9 * D, 9 * D, D, 1)),
    ],
    ids=["contiguous", "rows first", "batch last", "packed", "broadcast"],
)
def test_results_are_dense_in_the_order_of_q(module: Any, torch: Any, view: Any, strides: Any) -> None:
    q, k, v = qkv(torch)
    q = view(q)
    o, lse = module.attention(q, k, v, return_lse=True)
    assert o.stride() == strides and lse.is_contiguous()
    close(o, reference(torch, q, k, v)[0])
    close(lse, reference(torch, q, k, v)[1])
    close(module.attention(q, k, v, out=torch.empty_like(q, memory_format=torch.contiguous_format)), o)


# ---- the operator ------------------------------------------------------------------------------------------


def test_compiled_without_a_break(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = qkv(torch)
    graphs = Graphs()

    def layer(q: Any, k: Any, v: Any) -> Any:
        return 2 * module.attention(q + 1, k, v, causal=True, scale=0.3)

    found = torch.compile(layer, backend=graphs, fullgraph=True)(q, k, v)
    assert "flashgen.attention_f32_d32" in graphs.targets()
    assert torch.equal(found, layer(q, k, v))
    close(found, 2 * reference(torch, q + 1, k, v, causal=True, scale=0.3)[0])
    assert len(driver.launches()) == 2


def test_compiled_with_all_its_arguments(module: Any, torch: Any) -> None:
    q, k, v = qkv(torch)
    rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def into(q: Any, k: Any, v: Any, return_lse: bool) -> Any:
        out = torch.zeros(2, 9, 3, 4, D)[:, :, 1].transpose(1, 2)
        return module.attention(q, k, v, out=out, return_lse=return_lse), out

    def bshd(q: Any, k: Any, v: Any) -> Any:
        return module.attention(q, k, v, True, layout="bshd", return_lse=True)

    o, lse = reference(torch, q, k, v)
    graphs = Graphs()
    found, out = torch.compile(into, backend=graphs, fullgraph=True)(q, k, v, False)
    assert "_out" in graphs.targets() and found.stride() == out.stride() == (9 * 3 * 4 * D, D, 3 * 4 * D, 1)
    close(found, o)
    close(out, o)
    (found, found_lse), out = torch.compile(into, backend=Graphs(), fullgraph=True)(q, k, v, True)
    close(found, o)
    close(out, o)
    close(found_lse, lse)
    o, lse = reference(torch, q, k, v, causal=True)
    found, found_lse = torch.compile(bshd, backend=Graphs(), fullgraph=True)(*rows_first)
    assert found.is_contiguous() and found_lse.is_contiguous()
    close(found.transpose(1, 2), o)
    close(found_lse, lse)


def test_compiled_once_for_all_lengths(module: Any, torch: Any) -> None:
    graphs = Graphs()
    layer = torch.compile(module.attention, backend=graphs, fullgraph=True, dynamic=True)
    for rows, keys in ((9, 7), (30, 11), (5, 40)):
        q, k, v = qkv(torch, rows, keys)
        close(layer(q, k, v), reference(torch, q, k, v)[0])
    assert len(graphs.made) == 1


def test_first_use_in_a_compiled_function(torch: Any, tmp_path: Path) -> None:
    """Imported before torch, and no operator is registered before dynamo arrives."""
    kernel = make_kernel(GridOf(128, 4096, 64), source="// of a process of its own\n")
    (tmp_path / "best.py").write_text(emit_module(kernel, device="H200"))
    script = (
        "import sys, best; assert 'torch' not in sys.modules; import torch; "
        "f = torch.compile(best.attention, backend='aot_eager', fullgraph=True); "
        f"q = torch.randn(2, 4, 9, {D}, device='meta'); print(tuple(f(q, q, q).shape), f(q, q, q).device)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == f"(2, 4, 9, {D}) meta", done.stderr


def test_the_operators_pass_torchs_own_checks(module: Any, torch: Any) -> None:
    name = module.register_torch()
    assert name == module.register_torch() and name.startswith("attention_f32_d32_")
    operators = [getattr(torch.ops.flashgen, name + suffix).default for suffix in ("", "_lse", "_out")]
    plain, with_lse, into = operators
    for causal, layout in ((None, "bhsd"), (True, "bshd")):
        q, k, v = qkv(torch)
        if layout == "bshd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        torch.library.opcheck(plain, (q, k, v, causal, 0.2, layout))
        torch.library.opcheck(with_lse, (q, k, v, causal, 0.2, layout))
        torch.library.opcheck(into, (q, k, v, torch.empty_like(q), causal, 0.2, layout))
    differentiable = [x.requires_grad_() for x in qkv(torch)]
    torch.library.opcheck(plain, tuple(differentiable))
    torch.library.opcheck(with_lse, tuple(differentiable))


def test_what_cannot_be_stepped_by_is_copied(module: Any, torch: Any) -> None:
    plain = getattr(torch.ops.flashgen, module.register_torch())
    q, k, v = qkv(torch)
    wide = torch.randn(2, 9, 4, D + 1)[..., 1:].transpose(1, 2)
    misaligned = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    for compute in (plain, module.attention):
        found = compute(wide, k, v)
        close(found, reference(torch, wide, k, v)[0])
        assert found.stride() == (9 * 4 * D, D, 4 * D, 1)
        close(compute(misaligned, k, v), reference(torch, q, k, v)[0])
    with pytest.raises(ValueError, match=r"pass q\.contiguous\(\)"):
        module.attention(wide, k, v, out=torch.empty(2, 4, 9, D))


def test_tensors_without_data(module: Any, torch: Any) -> None:
    q, k, v = (x.to("meta") for x in qkv(torch))
    o, lse = module.attention(q, k, v, return_lse=True)
    assert o.is_meta and o.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    with pytest.raises(ValueError, match="q has 4 heads, k and v have 3"):
        module.attention(q, k.expand(2, 2, 7, D).repeat(1, 2, 1, 1)[:, :3], v.repeat(1, 2, 1, 1)[:, :3])
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, 4, 9, D)
        assert type(module.attention(fake, fake, fake)) is type(fake)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(module: Any, torch: Any, strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any) -> Any:
            return module.attention(q + 1, q, q) + module.sdpa(q, q, q)

    q = qkv(torch)[0]
    exported = torch.export.export(Layer(), (q,), strict=strict)
    assert sum("flashgen" in str(node.target) for node in exported.graph.nodes) == 2
    close(exported.module()(q), reference(torch, q + 1, q, q)[0] + reference(torch, q, q, q)[0])


def test_tensors_of_eight_bits(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their operator takes the values' scale, too."""
    (tmp_path / "eight_bits.py").write_text(
        emit_module(make_kernel(GridOf(128, 4096, 64), dtype="e4m3"), device="H200")
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("eight_bits")
    q = torch.empty(2, 9, 4, D, device="meta").to(torch.float8_e4m3fn)

    def layer(q: Any) -> Any:
        out = torch.empty(q.shape, device=q.device, dtype=torch.bfloat16)
        module.attention(q, q, q, True, out=out, layout="bshd", scales=(1.0, 2.0, 3.0))
        return out, module.attention(q, q, q, True, return_lse=True, layout="bshd", scales=(1.0, 2.0, 3.0))

    graphs = Graphs()
    out, (o, lse) = torch.compile(layer, backend=graphs, fullgraph=True)(q)
    assert o.dtype == out.dtype == torch.bfloat16 and o.shape == out.shape == q.shape
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 9)
    scale, value_scale = 2 * D**-0.5, 3.0
    (into, with_lse) = (n for n in graphs.made[0].graph.nodes if "flashgen" in str(n.target))
    assert into.args[5:] == with_lse.args[4:] == (pytest.approx(scale), "bshd", value_scale)
    assert module.attention(q, q, q).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"leave stream out .* under torch"):
        module.attention(q, q, q, stream=0)


def test_streams_are_not_of_graphs(module: Any, torch: Any) -> None:
    layer = torch.compile(lambda q: module.attention(q, q, q, stream=0), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="leave stream out where gradients are needed, and under torch"):
        layer(qkv(torch)[0])


# ---- gradients ---------------------------------------------------------------------------------------------


def test_gradients_are_refused_unless_asked_for(module: Any, torch: Any) -> None:
    q, k, v = qkv(torch)
    v.requires_grad_()
    with pytest.raises(RuntimeError, match=r"v requires a gradient.*torch\.no_grad\(\).*recompute=True"):
        module.attention(q, k, v)
    compiled = torch.compile(module.attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="v requires a gradient"):
        compiled(q, k, v)
    with pytest.raises(RuntimeError, match="no gradient is taken through out"):
        module.attention(q, k, v, out=torch.empty_like(q), recompute=True)
    with pytest.raises(ValueError, match="leave stream out"):
        module.attention(q, k, v, stream=0, recompute=True)
    with torch.no_grad():
        close(module.attention(q, k, v), reference(torch, q, k, v)[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("rows", "keys", "causal", "layout"),
    [(9, 7, False, "bhsd"), (8, 8, True, "bhsd"), (9, 7, True, "bshd"), (5, 11, True, "bhsd")],
)
def test_gradients_by_recomputation(
    module: Any, torch: Any, rows: int, keys: int, causal: bool, layout: str, compiled: bool
) -> None:
    def loss(attend: Callable[..., Any], arrays: list[Any], with_lse: bool) -> Any:
        o, lse = attend(*arrays)
        weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
        seen = lse[..., max(rows - keys, 0) :] if causal else lse  # of the others it is -inf
        return (o * weights).sum() + (seen.sin().sum() if with_lse else 0)

    def ours(q: Any, k: Any, v: Any) -> Any:
        if layout == "bshd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o, lse = module.attention(q, k, v, causal, 0.3, return_lse=True, layout=layout, recompute=True)
        return (o.transpose(1, 2) if layout == "bshd" else o), lse

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return reference(torch, q, k, v, causal, 0.3)

    attend = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    for with_lse in (False, True):
        arrays = [x.requires_grad_() for x in qkv(torch, rows, keys)]
        exact = [x.detach().double().requires_grad_() for x in arrays]
        loss(attend, arrays, with_lse).backward()
        loss(theirs, exact, with_lse).backward()
        for found, wanted in zip(arrays, exact, strict=True):
            close(found.grad, wanted.grad.nan_to_num(0), 1e-4)


# ---- several kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["several"], indirect=True)
def test_the_nearest_kernel_serves_in_graphs_too(module: Any, driver: Driver, torch: Any) -> None:
    compiled = torch.compile(module.attention, backend="aot_eager", fullgraph=True, dynamic=True)
    operator = getattr(torch.ops.flashgen, module.register_torch())
    for rows, threads in ((70, 128), (900, 256)):
        q, k, v = qkv(torch, rows, rows)
        wanted, lse = reference(torch, q, k, v, causal=True)
        for o in (compiled(q, k, v, True), operator(q, k, v, True), module.attention(q, k, v, True)):
            close(o, wanted)
        found, found_lse = compiled(q, k, v, True, return_lse=True)
        close(found, wanted)
        close(found_lse, lse)
        sdpa = torch.compile(module.sdpa, backend="aot_eager", fullgraph=True)
        close(sdpa(q, k, v, is_causal=True, enable_gqa=True), wanted)
        launched = {launch.threads for launch in driver.launches()[-5:]}
        assert launched == {threads}
    q, k, v = (x.requires_grad_() for x in qkv(torch, 20, 20))
    module.attention(q, k, v, True, recompute=True).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    reference(torch, *exact, causal=True)[0].sum().backward()
    close(q.grad, exact[0].grad, 1e-4)
    assert module.attention(*(x.detach().to("meta") for x in (q, k, v))).is_meta


# ---- autocast ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["bf16"], indirect=True)
def test_autocast_casts_to_the_kernels_type(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = qkv(torch)
    with pytest.raises(TypeError, match=r"q is torch\.float32"):
        module.attention(q, k, v)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    for attend in (
        lambda: module.attention(q, k, v.bfloat16()),
        lambda: module.attention(q, k, v, out=torch.empty_like(q, dtype=torch.bfloat16)),
        lambda: module.sdpa(q, k, v.double().bfloat16(), enable_gqa=True),
        lambda: torch.compile(module.attention, backend="aot_eager", fullgraph=True)(q, k, v),
    ):
        found = attend()
        assert found.dtype == torch.bfloat16
        close(found, reference(torch, q.bfloat16(), k.bfloat16(), v.bfloat16())[0], 2e-2)
    assert len(driver.launches()) == 4


def test_autocast_to_another_type_is_torchs(module: Any, driver: Driver, torch: Any) -> None:
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    q, k, v = qkv(torch, kv_heads=4)
    module.sdpa(q, k, v)
    assert not driver.launches()
    assert module.attention(q.half(), k, v).dtype == torch.float32


# ---- the drop-in -------------------------------------------------------------------------------------------


def test_the_signature_is_torchs(module: Any) -> None:
    """torch's own has no signature that Python knows, but a documented one."""
    import inspect

    from torch.nn.functional import scaled_dot_product_attention

    documented = " ".join((scaled_dot_product_attention.__doc__ or "").split())
    names = list(inspect.signature(module.sdpa).parameters)
    assert (
        f"scaled_dot_product_attention({', '.join(names[:3])}, attn_mask=None, dropout_p=0.0," in documented
    )
    assert names[3:] == ["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    defaults = [p.default for p in inspect.signature(module.sdpa).parameters.values()][3:]
    assert defaults == [None, 0.0, False, None, False]


def case(name: str, served: bool, shapes: Any, change: Callable[..., Any] = lambda *x: x, **how: Any) -> Any:
    return pytest.param(served, shapes, change, how, id=name)


SQUARE = ((2, 4, 9, D),) * 3
GROUPED = ((2, 4, 9, D), (2, 2, 9, D), (2, 2, 9, D))
LONGER_KEYS = ((2, 4, 5, D), (2, 4, 9, D), (2, 4, 9, D))
LONGER_QUERIES = ((2, 4, 9, D), (2, 4, 5, D), (2, 4, 5, D))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("served", "shapes", "change", "how"),
    [
        case("plain", True, SQUARE),
        case("scale", True, LONGER_KEYS, scale=0.3),
        case("causal", True, SQUARE, is_causal=True),
        case("causal, longer keys", True, LONGER_KEYS, is_causal=True),
        case("causal, longer queries", False, LONGER_QUERIES, is_causal=True),
        case("one row", True, ((2, 4, 1, D), (2, 4, 9, D), (2, 4, 9, D))),
        case("one row, causal", True, ((2, 4, 1, D), (2, 4, 9, D), (2, 4, 9, D)), is_causal=True),
        case("grouped", True, GROUPED, enable_gqa=True),
        case(
            "transposed", True, SQUARE, lambda *x: [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
        ),
        case("dropout of nothing", True, SQUARE, dropout_p=0.0),
        case("three dimensions", False, ((4, 9, D),) * 3),
        case("another head dim", False, ((2, 4, 9, 40),) * 3),
        case("values of another head dim", False, (*SQUARE[:2], (2, 4, 9, 16))),
        case("another type", False, SQUARE, lambda *x: [y.double() for y in x]),
        case("a gradient", False, SQUARE, lambda q, k, v: (q, k.requires_grad_(), v)),
        case("uneven strides", False, ((2, 4, 9, D + 1),) * 3, lambda *x: [y[..., 1:] for y in x]),
        case("a head dim of strides", False, SQUARE, lambda q, k, v: (q, k.mT.contiguous().mT, v)),
        case("no rows", False, ((2, 4, 0, D), *SQUARE[1:])),
    ],
)
def test_the_drop_in_computes_what_torch_does(
    module: Any, driver: Driver, torch: Any, served: bool, shapes: Any, change: Any, how: Any, compiled: bool
) -> None:
    arrays = change(*tensors(torch, *shapes))
    sdpa = torch.compile(module.sdpa, backend="aot_eager", fullgraph=True) if compiled else module.sdpa
    found = sdpa(*arrays, **how)
    wanted = torch.nn.functional.scaled_dot_product_attention(*arrays, **how)
    assert found.dtype == wanted.dtype
    close(found, wanted.double())
    assert len(driver.launches()) == served


def test_the_drop_in_passes_masks_dropout_and_errors_on(module: Any, driver: Driver, torch: Any) -> None:
    q, k, v = tensors(torch, *SQUARE)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(module.sdpa(q, k, v, mask), wanted.double())
    assert module.sdpa(q, k, v, None, 0.5).shape == q.shape
    with pytest.raises(RuntimeError):
        module.sdpa(*tensors(torch, *GROUPED))
    with pytest.raises(TypeError, match=r"query is a numpy\.ndarray; pass torch tensors"):
        module.sdpa(q.numpy(), k.numpy(), v.numpy())
    misaligned = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    close(module.sdpa(misaligned, k, v), reference(torch, q, k, v)[0])
    assert not driver.launches()


# ---- Hugging Face ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers(torch: Any) -> Any:
    return pytest.importorskip("transformers", reason="needs transformers")


def gpt2(transformers: Any) -> Any:
    config = transformers.GPT2Config(
        n_embd=2 * D, n_head=2, n_layer=3, vocab_size=99, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def vit(transformers: Any) -> Any:
    config = transformers.ViTConfig(
        hidden_size=2 * D,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    return transformers.ViTForImageClassification(config).eval()


def test_a_language_model(module: Any, driver: Driver, torch: Any, transformers: Any) -> None:
    module.register_transformers()
    torch.manual_seed(0)
    model = gpt2(transformers)
    words = torch.randint(1, 99, (2, 20))
    padded = torch.ones_like(words)
    padded[0, :5] = 0
    found = {}
    for name in ("sdpa", "tuned"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            plain, with_padding = model(words).logits, model(words, attention_mask=padded).logits
            longer = model.generate(words, max_new_tokens=3, do_sample=False)
        found[name] = plain, with_padding, longer
    close(found["tuned"][0], found["sdpa"][0].double())
    close(found["tuned"][1], found["sdpa"][1].double())
    assert torch.equal(found["tuned"][2], found["sdpa"][2])
    # Three layers each: of the plain run, and of the first pass and two more words; padding needs a mask.
    assert len(driver.launches()) == 3 + 3 * 3
    assert [launch.causal for launch in driver.launches()] == [1] * 6 + [0] * 6


def test_a_vision_model(module: Any, driver: Driver, torch: Any, transformers: Any) -> None:
    module.register_transformers("mine")
    torch.manual_seed(0)
    model, images = vit(transformers), torch.randn(2, 3, 32, 32)
    found = []
    for name in ("sdpa", "mine"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append(model(images).logits)
    close(found[1], found[0].double())
    assert len(driver.launches()) == 2
    model(images).logits.sum().backward()  # by PyTorch's attention
    assert len(driver.launches()) == 2


def mistral(transformers: Any, window: int) -> Any:
    config = transformers.MistralConfig(
        hidden_size=4 * D,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=D,
        num_hidden_layers=2,
        intermediate_size=64,
        vocab_size=99,
        sliding_window=window,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.MistralForCausalLM(config).eval()


def bert(transformers: Any) -> Any:
    config = transformers.BertConfig(
        hidden_size=2 * D,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=64,
        vocab_size=99,
        max_position_embeddings=64,
    )
    return transformers.BertModel(config).eval()


@pytest.mark.parametrize(
    ("make", "options", "served"),
    [
        pytest.param(gpt2, {}, 3, id="gpt2"),
        pytest.param(lambda library: mistral(library, 21), {}, 2, id="a window of all"),
        pytest.param(lambda library: mistral(library, 20), {}, 0, id="a window of some"),
        pytest.param(bert, {}, 2, id="bert"),
        # Nobody looks into a mask while a graph is made of it.
        pytest.param(gpt2, {"attention_mask": 5}, 0, id="gpt2, padded"),
        pytest.param(bert, {"attention_mask": 0}, 0, id="bert, maybe padded"),
    ],
)
def test_compiled_models(
    make: Any, options: Any, served: int, module: Any, driver: Driver, torch: Any, transformers: Any
) -> None:
    """Masks are left out that say no more than that a model is causal, or nothing; others are PyTorch's."""
    module.register_transformers("compiled")
    torch.manual_seed(0)
    model, words = make(transformers), torch.randint(1, 99, (2, 20))
    if "attention_mask" in options:
        padding = torch.ones_like(words)
        padding[0, : options["attention_mask"]] = 0
        options = {"attention_mask": padding}
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        wanted = model(words, **options)[0]
        model.set_attn_implementation("compiled")
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(words, **options)[0]
    close(found, wanted.double())
    assert len(driver.launches()) == served


def test_a_compiled_model_word_by_word(module: Any, driver: Driver, torch: Any, transformers: Any) -> None:
    module.register_transformers("compiled")
    torch.manual_seed(0)
    model, words = gpt2(transformers), torch.randint(1, 99, (2, 9))
    model.set_attn_implementation("compiled")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        wanted = model(words).logits
        cache = model(words[:, :6]).past_key_values
        for i in range(6, 9):
            close(compiled(words[:, i : i + 1], past_key_values=cache).logits[:, 0], wanted[:, i].double())
    assert [launch.args.seqlen_k for launch in driver.launches()[6:]] == [7] * 3 + [8] * 3 + [9] * 3


@pytest.mark.parametrize("strict", [None, False, True], ids=["compiled", "exported", "exported strictly"])
def test_exported_graphs_have_a_mask(module: Any, torch: Any, transformers: Any, strict: bool | None) -> None:
    """They may run on other lengths. What is compiled is for these."""
    module.register_transformers("graphs")
    make = transformers.AttentionMaskInterface()["graphs"]

    class Masked(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            mask = make(
                batch_size=1,
                q_length=9,
                kv_length=9,
                attention_mask=None,
                allow_is_causal_skip=True,
                device=x.device,
            )
            return x if mask is None else x + mask.sum()

    x = torch.zeros(2)
    if strict is None:
        assert torch.compile(Masked(), backend="eager", fullgraph=True)(x)[0] == 0
    else:
        assert torch.export.export(Masked(), (x,), strict=strict).module()(x)[0] == 45


def test_attention_sinks_are_refused(module: Any, torch: Any, transformers: Any) -> None:
    with pytest.raises(ValueError, match="choose a name without 'flash'"):
        module.register_transformers("flashgen")
    module.register_transformers("sinks")
    attend = transformers.AttentionInterface()["sinks"]
    q, k, v = tensors(torch, *SQUARE)
    with pytest.raises(ValueError, match="attention sinks"):
        attend(torch.nn.Module(), q, k, v, None, s_aux=torch.zeros(4))
