"""Emitted modules that differentiate, with the real PyTorch, where it is installed, and without a GPU.

Tensors lie in host memory, on which the stand-in driver computes what launches are told, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.host_tensors import Graphs, fresh_driver, real_torch, take_host_tensors, tensors
from tests.support.stand_in_driver import OTHER_DEVICE, PRIMARY, D, Driver
from tests.templates.gradient_kernels import backward_kernel, computing, forward_kernel, load, unordered


@pytest.fixture(scope="module")
def torch() -> Any:
    return real_torch()


@pytest.fixture(scope="module")
def loaded(torch: Any, library: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Modules that take tensors of the CPU for such of a card. Operators are for good, so there is one of
    each."""
    modules: dict[tuple[str, ...], Any] = {}

    def of(*kernels: Any) -> Any:
        key = tuple(each.digest for each in kernels)
        if key not in modules:
            path = tmp_path_factory.mktemp("module")
            module = load(path, *kernels, name=f"differentiable_{len(modules)}", for_good=True)
            modules[key] = take_host_tensors(module, library)
        return modules[key]

    return of


KERNELS = forward_kernel(), backward_kernel()


@pytest.fixture
def module(
    torch: Any, library: Any, loaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    fresh_driver(torch, library, monkeypatch)
    with computing(Driver(library), *KERNELS):
        yield loaded(*KERNELS)
    torch.set_autocast_enabled("cuda", False)


@pytest.fixture
def driver(library: Any) -> Driver:
    return Driver(library)


def qkv(torch: Any, rows: int = 9, keys: int = 12, *, heads: int = 4, kv_heads: int = 2) -> list[Any]:
    made = tensors(torch, (2, heads, rows, D), *[(2, kv_heads, keys, D)] * 2)
    return [x.requires_grad_() for x in made]


def by_torch(torch: Any, q: Any, k: Any, v: Any, causal: bool = False, scale: float | None = None) -> Any:
    """(o, lse) as PyTorch computes them; the mask is aligned bottom-right."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        hidden = ~torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(3) @ v, scores.logsumexp(3)


def grads_of(torch: Any, made: Any, inputs: Any, seed: int = 3) -> list[Any]:
    """The gradients of a sum over outputs, each weighed by something drawn."""
    generator = torch.Generator().manual_seed(seed)
    made = made if isinstance(made, tuple) else (made,)
    total = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in made)
    return list(torch.autograd.grad(total, inputs))


def close(torch: Any, found: list[Any], wanted: list[Any], bound: float = 2e-5) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_gradients_of_attention(module: Any, torch: Any, causal: bool, return_lse: bool) -> None:
    inputs = qkv(torch)
    made = module.attention(*inputs, causal, 0.3, return_lse=return_lse)
    expected = by_torch(torch, *inputs, causal, 0.3)
    expected = expected if return_lse else expected[0]
    close(torch, grads_of(torch, made, inputs), grads_of(torch, expected, inputs))


def test_gradients_of_what_no_output_depends_on(module: Any, torch: Any) -> None:
    """Of the log-sum-exp alone; and of tensors of which one alone requires a gradient."""
    q, k, v = qkv(torch)
    lse = module.attention(q, k, v, return_lse=True)[1]
    close(torch, grads_of(torch, lse, [q, k]), grads_of(torch, by_torch(torch, q, k, v)[1], [q, k]))
    frozen = k.detach(), v.detach()
    found = grads_of(torch, module.attention(q, *frozen), [q])
    close(torch, found, grads_of(torch, by_torch(torch, q, *frozen)[0], [q]))


def test_of_rows_first_and_of_what_cannot_be_stepped_by(module: Any, torch: Any) -> None:
    inputs = qkv(torch)
    expected = grads_of(torch, by_torch(torch, *inputs)[0].transpose(1, 2), inputs)
    rows_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs]
    found = grads_of(torch, module.attention(*rows_first, layout="bshd"), rows_first)
    assert all(x.is_contiguous() for x in found)
    close(torch, [x.transpose(1, 2) for x in found], expected)
    wide = [torch.zeros(*x.shape[:3], D + 1)[..., 1:].copy_(x.detach()).requires_grad_() for x in inputs]
    found = grads_of(torch, module.attention(*wide).transpose(1, 2), wide)
    close(torch, found, expected)
    # Gradients that are one number everywhere have no strides.
    (found,) = torch.autograd.grad(module.attention(*inputs).sum(), inputs[2:])
    (expected,) = torch.autograd.grad(by_torch(torch, *inputs)[0].sum(), inputs[2:])
    close(torch, [found], [expected])


def test_gradients_as_a_function(module: Any, torch: Any) -> None:
    inputs = [x.detach() for x in qkv(torch)]
    o, lse = module.attention(*inputs, return_lse=True)
    (dout,) = tensors(torch, tuple(o.shape))
    found = module.gradients(*inputs, o, lse, dout)
    leaves = [x.clone().requires_grad_() for x in inputs]
    close(torch, list(found), list(torch.autograd.grad(by_torch(torch, *leaves)[0], leaves, dout)))
    compiled = torch.compile(module.gradients, backend=Graphs(), fullgraph=True)
    close(torch, list(compiled(*inputs, o, lse, dout)), list(found), 0.0)


def test_as_torchs_own(module: Any, torch: Any, driver: Driver) -> None:
    inputs = qkv(torch, 9, 9, kv_heads=4)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found = grads_of(torch, module.sdpa(*inputs, is_causal=True), inputs)
    assert len(driver.launches()) == 1 + 3
    close(torch, found, grads_of(torch, sdpa(*inputs, is_causal=True), inputs))
    # Later keys are seen by no row: their gradients are zeros.
    longer = qkv(torch, 9, 12, kv_heads=4)
    found = grads_of(torch, module.sdpa(*longer, is_causal=True), longer)
    close(torch, found, grads_of(torch, sdpa(*longer, is_causal=True), longer))


def test_a_step_compiles_without_a_break(module: Any, torch: Any, driver: Driver) -> None:
    graphs, inputs = Graphs(), qkv(torch)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (module.attention(2 * q, k, v, causal=True) ** 2).sum() + module.sdpa(
            q, k, v, enable_gqa=True
        ).sum()

    wanted = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    close(torch, list(torch.autograd.grad(compiled(*inputs), inputs)), list(wanted))
    assert len(graphs.made) == 1 and "_lse" in graphs.targets()
    expected = (by_torch(torch, 2 * inputs[0], *inputs[1:], True)[0] ** 2).sum()
    expected = expected + by_torch(torch, *inputs)[0].sum()
    close(torch, list(wanted), list(torch.autograd.grad(expected, inputs)), 1e-4)


def test_the_operators_pass_torchs_own_checks(module: Any, torch: Any) -> None:
    name = module.register_torch()
    operators = torch.ops.flashgen
    inputs = qkv(torch)
    for suffix in ("", "_lse"):
        torch.library.opcheck(getattr(operators, name + suffix).default, tuple(inputs))
    q, k, v = (x.detach() for x in inputs)
    o, lse = getattr(operators, name + "_lse")(q, k, v)
    (dout, dlse) = tensors(torch, tuple(o.shape), tuple(lse.shape))
    backward = getattr(operators, name + "_gradients").default
    torch.library.opcheck(backward, (q, k, v, o, lse, dout))
    told = (q, k, v, o, lse, dout, dlse, True, 0.2, "bhsd", True)
    torch.library.opcheck(backward, told)
    turned = [x.transpose(1, 2) for x in (q, k, v, o, dout)]
    torch.library.opcheck(backward, (*turned[:4], lse, turned[4], None, False, None, "bshd"))


def test_gradcheck(module: Any, torch: Any) -> None:
    """Against differences of float64's own, of results that are float32: steps are large, and errors in
    proportion."""
    q, k, v = (x.detach().double().requires_grad_() for x in qkv(torch, 2, 3, heads=2, kv_heads=1))

    def attention(*inputs: Any) -> Any:
        o, lse = module.attention(*(x.float() for x in inputs), causal=True, return_lse=True)
        return o.double(), lse.double()

    assert torch.autograd.gradcheck(
        attention, (q[:1], k[:1], v[:1]), eps=2e-2, atol=2e-3, rtol=1e-3, nondet_tol=0.0, fast_mode=True
    )


def test_gradients_of_gradients_are_refused(module: Any, torch: Any) -> None:
    inputs = qkv(torch)
    (dq,) = torch.autograd.grad(module.attention(*inputs).sum(), inputs[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients are not taken"):
        torch.autograd.grad(dq.sum(), inputs)


def test_checkpoints_compute_again(module: Any, torch: Any, driver: Driver) -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = qkv(torch)
    found = grads_of(torch, checkpoint(module.attention, *inputs, use_reentrant=False), inputs)
    assert len(driver.launches()) == 2 + 3
    close(torch, found, grads_of(torch, module.attention(*inputs), inputs), 0.0)


def test_saved_tensors_may_come_back_laid_out_anew(module: Any, torch: Any) -> None:
    """As hooks that keep them elsewhere meanwhile return them."""
    inputs = qkv(torch)
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().clone(), lambda x: x):
        made = module.attention(*turned, causal=True)
    close(torch, grads_of(torch, made, turned), grads_of(torch, by_torch(torch, *inputs, True)[0], inputs))


def test_a_scale_is_for_one_call(module: Any, torch: Any) -> None:
    inputs = qkv(torch)
    for scale in (None, 0.3, 0.3, None):
        found = grads_of(torch, module.attention(*inputs, scale=scale), inputs)
        close(torch, found, grads_of(torch, by_torch(torch, *inputs, scale=scale)[0], inputs))


def test_gradients_run_in_the_primary_context(module: Any, torch: Any, driver: Driver) -> None:
    """Whichever is current as they begin; only elsewhere is a pointer asked for its own."""
    inputs = qkv(torch)
    for current in (PRIMARY, OTHER_DEVICE, PRIMARY):
        made = module.attention(*inputs)
        driver.library.fake_push(current)
        asked = driver.library.fake_calls(b"cuPointerGetAttribute")
        grads_of(torch, made, inputs)
        asked = driver.library.fake_calls(b"cuPointerGetAttribute") - asked
        assert [launch.context for launch in driver.launches()[-3:]] == [PRIMARY] * 3
        assert asked == int(current != PRIMARY)
    assert driver.library.fake_context_depth() == 4


def test_autocast(module: Any, torch: Any) -> None:
    """To the only type that there are kernels of; gradients are of the inputs' own."""
    inputs = [x.detach().half().requires_grad_() for x in qkv(torch)]
    torch.set_autocast_enabled("cuda", True)
    made = module.attention(*inputs)
    torch.set_autocast_enabled("cuda", False)
    assert made.dtype == torch.float32
    found = grads_of(torch, made, inputs)
    assert {x.dtype for x in found} == {torch.float16}
    wide = [x.detach().float().requires_grad_() for x in inputs]
    expected = grads_of(torch, by_torch(torch, *wide)[0], wide)
    close(torch, [x.float() for x in found], expected, 2e-3)


def test_determinism_is_torchs_to_ask_for(loaded: Callable[..., Any], module: Any, torch: Any) -> None:
    inputs = qkv(torch)
    torch.use_deterministic_algorithms(True)
    try:
        grads_of(torch, module.attention(*inputs), inputs)
        forward, backward = (replace(each, source=f"{each.source}// any order\n") for each in KERNELS)
        other = loaded(forward, unordered(backward))
        with pytest.raises(RuntimeError, match="makes the same bits every time"):
            grads_of(torch, other.attention(*inputs), inputs)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="makes the same bits every time"):
            grads_of(torch, other.attention(*inputs), inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def test_transformers_train(module: Any, torch: Any, driver: Driver) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    configuration = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=2 * D, n_positions=32, vocab_size=61,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    module.register_transformers("tuned_gradients")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(configuration).train()
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    found = []
    for name in ("tuned_gradients", "sdpa"):
        model.set_attn_implementation(name)
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append([loss.detach(), *(x.grad.clone() for x in model.parameters())])
    assert len(driver.launches()) == 2 * (1 + 3)
    close(torch, found[0], found[1], 1e-5)
