"""Emitted modules that differentiate under masks and changes of scores, with the real PyTorch, where it is
installed, and without a GPU: launches compute in float64 what their arguments say of tensors of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from flashgen.gen.scoring.asked import Scoring

from tests.support.host_tensors import Graphs, fresh_driver, real_torch, take_host_tensors, tensors
from tests.support.stand_in_driver import D, Driver
from tests.templates.gradient_kernels import backward_kernel, computing, forward_kernel, load
from tests.templates.test_gradients_torch import close, grads_of

ROWS, KEYS = 9, 12
BIAS = Scoring(bias="f32", sinks=True, softcap=3.0)
TABLE = Scoring(score="score + t * table[h, q - k]", scalars=(("t", 0.5),))
WINDOW = Scoring(window=(5, 0), alibi=True)


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
            module = load(path, *kernels, name=f"scored_{len(modules)}", for_good=True)
            modules[key] = take_host_tensors(module, library)
        return modules[key]

    return of


@pytest.fixture
def serving(
    torch: Any, library: Any, loaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """The module of a kernel and one of its gradients for each scoring, whose launches compute."""
    fresh_driver(torch, library, monkeypatch)
    running = []

    def of(*scorings: Scoring) -> Any:
        made = [make(scoring=each) for each in scorings for make in (forward_kernel, backward_kernel)]
        kernels = [replace(each, source=f"// {each.entry}\n") for each in made]
        running.append(computing(Driver(library), *kernels))
        running[-1].__enter__()
        return loaded(*kernels)

    yield of
    for each in running:
        each.__exit__(None, None, None)


@pytest.fixture
def driver(library: Any) -> Driver:
    return Driver(library)


def qkv(torch: Any) -> list[Any]:
    made = tensors(torch, (2, 4, ROWS, D), *[(2, 2, KEYS, D)] * 2)
    return [x.requires_grad_() for x in made]


def by_torch(torch: Any, q: Any, k: Any, v: Any, change: Any, sinks: Any = None, hidden: Any = None) -> Any:
    """(o, lse) as PyTorch computes them of scores that are changed."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = change(q @ k.transpose(2, 3) * D**-0.5)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(3) @ v, scores.logsumexp(3)
    wide = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    return wide.softmax(3)[..., :-1] @ v, wide.logsumexp(3)


def drawn(torch: Any, *shape: int) -> Any:
    return tensors(torch, shape)[0].requires_grad_()


def capped(scores: Any, bias: Any) -> Any:
    return 3 * (scores / 3).tanh() + bias


@pytest.mark.parametrize("shape", [(ROWS, KEYS), (2, 1, 1, KEYS), (1, 4, ROWS, 1)])
@pytest.mark.parametrize("return_lse", [False, True])
def test_gradients_of_attention_and_of_its_bias(
    serving: Any, torch: Any, driver: Driver, shape: tuple[int, ...], return_lse: bool
) -> None:
    module, bias, sinks = serving(BIAS), drawn(torch, *shape), drawn(torch, 4)
    inputs = [*qkv(torch), bias, sinks]
    made = module.attention(*inputs[:3], bias=bias, sinks=sinks, softcap=3, return_lse=return_lse)
    expected = by_torch(torch, *inputs[:3], lambda scores: capped(scores, bias), sinks)
    found = grads_of(torch, made, inputs)
    assert [x.shape for x in found] == [x.shape for x in inputs]
    close(torch, found, grads_of(torch, expected if return_lse else expected[0], inputs))
    assert len(driver.launches()) == 1 + 3 + 2


def test_autograd_enters_no_operator(serving: Any, torch: Any) -> None:
    """But where a mode of PyTorch must see one."""
    from torch.utils._python_dispatch import TorchDispatchMode

    module, bias, sinks = serving(BIAS), drawn(torch, ROWS, KEYS), drawn(torch, 4)
    seen: list[str] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, told: Any = (), named: Any = None) -> Any:
            seen.append(str(function))
            return function(*told, **(named or {}))

    inputs = [*qkv(torch), bias, sinks]
    made = module.attention(*inputs[:3], bias=bias, sinks=sinks)
    assert made.grad_fn.name() == "AttentionBackward"
    found = grads_of(torch, made, inputs)
    with Seeing():
        close(
            torch, grads_of(torch, module.attention(*inputs[:3], bias=bias, sinks=sinks), inputs), found, 0.0
        )
    named = [each for each in seen if each.startswith("flashgen.")]
    assert [each.partition(".default")[0].rpartition("_")[2] for each in named] == ["lse", "gradients"]


def test_only_what_is_wanted_is_made(serving: Any, torch: Any, driver: Driver) -> None:
    """Of a bias that requires a gradient alone, and of a step in which it requires none."""
    module, (bias, sinks) = serving(BIAS), (drawn(torch, ROWS, KEYS), drawn(torch, 4))
    q, k, v = (x.detach() for x in qkv(torch))
    expected = by_torch(torch, q, k, v, lambda scores: capped(scores, bias), sinks.detach())[0]
    made = module.attention(q, k, v, bias=bias, sinks=sinks.detach(), softcap=3)
    close(torch, grads_of(torch, made, [bias]), grads_of(torch, expected, [bias]))
    assert len(driver.launches()) == 1 + 3 + 1
    made = module.attention(q.requires_grad_(), k, v, bias=bias.detach(), sinks=sinks.detach(), softcap=3)
    grads_of(torch, made, [q])
    assert len(driver.launches()) == 2 * (1 + 3) + 1


def test_of_expressions(serving: Any, torch: Any) -> None:
    """Elements at computed places: never in one order."""
    module, table = serving(TABLE), drawn(torch, 4, ROWS + KEYS)
    inputs = [*qkv(torch), table]
    places = torch.arange(ROWS)[:, None] - torch.arange(KEYS)
    expected = by_torch(torch, *inputs[:3], lambda scores: scores + 0.25 * table[:, places])
    close(
        torch,
        grads_of(torch, module.attention(*inputs[:3], table=table, t=0.25), inputs),
        grads_of(torch, expected[0], inputs),
    )
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="elements of table are read at computed places"):
            grads_of(torch, module.attention(*inputs[:3], table=table), inputs)
        grads_of(torch, module.attention(*inputs[:3], table=table.detach()), inputs[:3])
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_compiles_without_a_break(serving: Any, torch: Any) -> None:
    module, graphs = serving(BIAS), Graphs()
    bias, sinks = drawn(torch, 2, 1, ROWS, KEYS), drawn(torch, 4)
    inputs = [*qkv(torch), bias, sinks]

    def loss(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        return (module.attention(2 * q, k, v, attn_mask=bias.exp(), sinks=sinks, causal=True) ** 2).sum()

    wanted = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    close(torch, list(torch.autograd.grad(compiled(*inputs), inputs)), list(wanted))
    assert len(graphs.made) == 1 and "_lse" in graphs.targets()


def test_the_operators_pass_torchs_own_checks(serving: Any, torch: Any) -> None:
    module = serving(BIAS)
    name, operators = module.register_torch(), torch.ops.flashgen
    inputs, bias, sinks = qkv(torch), drawn(torch, 1, 4, ROWS, 1), drawn(torch, 4)
    settings = (True, 0.3, "bhsd", [bias, sinks], [3.0])
    for suffix in ("", "_lse"):
        torch.library.opcheck(getattr(operators, name + suffix).default, (*inputs, *settings))
    q, k, v, bias, sinks = (x.detach() for x in (*inputs, bias, sinks))
    o, lse = getattr(operators, name + "_lse")(q, k, v, *settings)
    o, lse = o.detach(), lse.detach()
    backward = getattr(operators, name + "_gradients").default
    told = (q, k, v, o, lse, torch.ones_like(o), None, True, 0.3, "bhsd", False, [bias, sinks], [3.0])
    for wanted in ([True, True], [False, True], [False, False]):
        torch.library.opcheck(backward, (*told, wanted))


def test_several_kinds_of_one_module(serving: Any, torch: Any, driver: Driver) -> None:
    """Each with gradients of its own, plain attention and torch's function among them."""
    module, slopes = serving(Scoring(), WINDOW, BIAS), drawn(torch, 4)
    inputs = [*qkv(torch), slopes]
    distance = torch.arange(ROWS)[:, None] + KEYS - ROWS - torch.arange(KEYS)
    hidden = (distance > 5) | (distance < 0)

    def falling(scores: Any) -> Any:
        return scores - slopes[:, None, None] * distance.abs()

    expected = by_torch(torch, *inputs[:3], falling, hidden=hidden)[0]
    made = module.attention(*inputs[:3], window=(5, 0), alibi_slopes=slopes)
    close(torch, grads_of(torch, made, inputs), grads_of(torch, expected, inputs))
    expected = by_torch(torch, *inputs[:3], lambda scores: scores)[0]
    exact = grads_of(torch, expected, inputs[:3])
    close(torch, grads_of(torch, module.attention(*inputs[:3]), inputs[:3]), exact)
    close(torch, grads_of(torch, module.sdpa(*inputs[:3], enable_gqa=True), inputs[:3]), exact)
    assert len(driver.launches()) == (1 + 3 + 1) + 2 * (1 + 3)


def test_a_mask_of_torchs_function_has_a_gradient(serving: Any, torch: Any, driver: Driver) -> None:
    module, bias = serving(Scoring(bias="f32")), drawn(torch, ROWS, KEYS)
    inputs = [*qkv(torch), bias]
    found = grads_of(torch, module.sdpa(*inputs, enable_gqa=True), inputs)
    assert len(driver.launches()) == 1 + 3 + 1
    sdpa = torch.nn.functional.scaled_dot_product_attention
    close(torch, found, grads_of(torch, sdpa(*inputs, enable_gqa=True), inputs))


def test_gradients_as_a_function(serving: Any, torch: Any) -> None:
    module, bias, sinks = serving(BIAS), drawn(torch, 4, ROWS, 1), drawn(torch, 4)
    inputs = [*qkv(torch), bias, sinks]
    q, k, v, *told = (x.detach() for x in inputs)
    asked = dict(zip(("bias", "sinks"), told, strict=True))
    o, lse = module.attention(q, k, v, **asked, return_lse=True)
    (dout,) = tensors(torch, tuple(o.shape))
    wanted = ["sinks", "bias"]
    found = module.gradients(q, k, v, o, lse, dout, **asked, wanted=wanted)
    expected = by_torch(torch, *inputs[:3], lambda scores: capped(scores, bias), sinks)[0]
    exact = torch.autograd.grad(expected, [*inputs[:3], sinks, bias], dout)
    close(torch, list(found), list(exact))

    def call(q: Any, k: Any, v: Any, o: Any, lse: Any, dout: Any, bias: Any, sinks: Any) -> Any:
        return module.gradients(q, k, v, o, lse, dout, bias=bias, sinks=sinks, wanted=["sinks", "bias"])

    compiled = torch.compile(call, backend=Graphs(), fullgraph=True)
    close(torch, list(compiled(q, k, v, o, lse, dout, *told)), list(found), 0.0)


def test_what_has_no_gradient_is_refused(loaded: Any, serving: Any, torch: Any) -> None:
    """Of a module without kernels for them; and gradients of gradients."""
    module, bias, sinks = serving(BIAS), drawn(torch, ROWS, KEYS), drawn(torch, 4)
    q, k, v = qkv(torch)
    (dq,) = torch.autograd.grad(
        module.attention(q, k, v, bias=bias, sinks=sinks).sum(), [q], create_graph=True
    )
    with pytest.raises(NotImplementedError, match="gradients of gradients are not taken"):
        torch.autograd.grad(dq.sum(), [q])
    forward = loaded(forward_kernel(scoring=Scoring(bias="f32")))
    with pytest.raises(RuntimeError, match="bias requires a gradient, but this kernel is forward only"):
        forward.attention(q.detach(), k.detach(), v.detach(), bias=bias)
