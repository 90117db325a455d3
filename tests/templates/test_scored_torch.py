"""Emitted modules of kernels with masks and changes of scores, with the real PyTorch, where it is installed.

Tensors lie in host memory; launches compute what the problem asks of what their arguments lead to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.scoring.asked import Scoring

from tests.support.host_tensors import fresh_driver, real_torch, take_host_tensors, tensors
from tests.support.stand_in_driver import D, Driver
from tests.templates.scored_kernels import computing, load_scored, load_with_lists, problem_of
from tests.templates.test_scored import DILATED, SCORINGS, asked, drawn, wanted

Q, K = (2, 4, 21, D), (2, 2, 37, D)


@pytest.fixture(scope="module")
def torch() -> Any:
    return real_torch()


@pytest.fixture
def load(
    torch: Any, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Loads modules that take tensors of the CPU for such of a card."""
    fresh_driver(torch, library, monkeypatch)
    count = iter(range(99))

    def loaded(*scorings: Scoring, **others: Any) -> Any:
        module = load_scored(tmp_path, *scorings, name=f"emitted_{next(count)}", for_good=True, **others)
        return take_host_tensors(module, library)

    yield loaded
    library.fake_on_launch(None)


@pytest.fixture
def driver(library: Any) -> Driver:
    return Driver(library)


def as_tensor(torch: Any, array: Any) -> Any:
    if isinstance(array, tuple):
        return tuple(as_tensor(torch, each) for each in array)
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", SCORINGS)
def test_tensors_eager_and_compiled(name: str, compiled: bool, load: Any, torch: Any, driver: Driver) -> None:
    scoring = SCORINGS[name]
    module = load(scoring)
    arrays, values = tensors(torch, Q, K, K), drawn(scoring)
    for key, array in asked(scoring, values).items():
        if key in values and array.dtype.itemsize == 2:
            values[key] = array.astype(np.float64)
    named = {key: as_tensor(torch, each) for key, each in asked(scoring, values).items()}
    attention = (
        torch.compile(module.attention, backend="aot_eager", fullgraph=True) if compiled else module.attention
    )
    expected = wanted(scoring, [x.numpy() for x in arrays], values, causal=True)
    with computing(driver, problem_of(scoring)):
        o, lse = attention(*arrays, causal=True, return_lse=True, **named)
        out = torch.full_like(arrays[0], float("nan"))
        assert attention(*arrays, causal=True, out=out, **named) is out
    close(o, expected.o)
    close(lse, expected.lse)
    close(out, expected.o)


def test_documents_of_tensors(load: Any, torch: Any, driver: Driver) -> None:
    scoring = Scoring(documents=4)
    module = load(scoring)
    arrays = tensors(torch, Q, K, K)
    ids = torch.sort(torch.randint(0, 5, (2, 37), generator=torch.Generator().manual_seed(1))).values
    begins, ends = module.document_bounds(ids, 21)
    from_numpy = module.document_bounds(ids.numpy(), 21)
    assert (begins.numpy() == from_numpy[0]).all() and (ends.numpy() == from_numpy[1]).all()
    values = {"document_begin": from_numpy[0], "document_end": from_numpy[1]}
    expected = wanted(scoring, [x.numpy() for x in arrays], values).o
    compiled = torch.compile(module.attention, backend="aot_eager", fullgraph=True)
    with computing(driver, problem_of(scoring)):
        close(module.attention(*arrays, documents=ids), expected)
        close(compiled(*arrays, documents=ids), expected)


def test_numbers_of_compiled_functions_and_refusals(load: Any, torch: Any, driver: Driver) -> None:
    scoring = Scoring(window=(9, 2), bias="f32")
    module, arrays = load(scoring), tensors(torch, Q, K, K)
    bias = torch.randn(21, 37, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"bias requires a gradient.*pass bias\.detach\(\)"):
        module.attention(*arrays, bias=bias)
    compiled = torch.compile(module.attention, backend="aot_eager", fullgraph=True)
    values = {
        "bias": np.broadcast_to(bias.detach().numpy(), (2, 4, 21, 37)),
        "window_left": 4,
        "window_right": 0,
    }
    with computing(driver, problem_of(scoring)), torch.no_grad():
        expected = wanted(scoring, [x.numpy() for x in arrays], values).o
        close(module.attention(*arrays, bias=bias, window=(4, 0)), expected)
        close(compiled(*arrays, bias=bias, window=(4, 0)), expected)
        # Transposed, its last axis is laid out; beside a stream nothing is.
        turned = bias.T.contiguous().T
        close(module.attention(*arrays, bias=turned, window=(4, 0)), expected)
        with pytest.raises(ValueError, match="nothing is copied: pass a contiguous array"):
            module.attention(*arrays, bias=turned, stream=0)
        with pytest.raises(TypeError, match=r"bias is float16.*pass bias\.to\(torch\.float32\)"):
            module.attention(*arrays, bias=bias.half())
        with pytest.raises(TypeError, match=r"q is a torch\.Tensor, but bias a numpy\.ndarray"):
            module.attention(*arrays, bias=bias.numpy())


def test_graphs_leave_no_lists_of_tiles_to_calls_behind_them(
    torch: Any, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: Driver
) -> None:
    """What runs in a graph may have memory that is taken back from it."""
    fresh_driver(torch, library, monkeypatch)
    module = take_host_tensors(load_with_lists(tmp_path, DILATED, for_good=True), library)
    arrays = tensors(torch, Q, K, K)
    compiled = torch.compile(module.attention, backend="aot_eager", fullgraph=True)
    expected = wanted(DILATED, [x.numpy() for x in arrays], {"dilation": 2}).o

    def lists_made(attention: Any) -> bool:
        before = len(driver.launches())
        close(attention(*arrays, dilation=2), expected)
        return [each.threads for each in driver.launches()[before:]] == [64, 128]

    with computing(driver, problem_of(DILATED)), torch.no_grad():
        assert [lists_made(each) for each in (compiled, compiled)] == [True, True]
        assert [lists_made(module.attention) for _ in range(2)] == [True, False]
        assert not lists_made(compiled)


def test_operators_take_arrays_in_another_order_than_calls(load: Any, torch: Any, driver: Driver) -> None:
    scoring = Scoring(sinks=True, score="score + z[h]")
    module, arrays = load(scoring), tensors(torch, Q, K, K)
    compiled = torch.compile(module.attention, backend="aot_eager", fullgraph=True)
    one, four = torch.tensor([0.5]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    with computing(driver, problem_of(scoring)), torch.no_grad():
        for sinks, z in ((four, one), (one, four), (four, one)):
            values = {"sinks": sinks.expand(4).numpy(), "z": z.expand(4).numpy()}
            expected = wanted(scoring, [x.numpy() for x in arrays], values).o
            for attention in (module.attention, compiled):
                close(attention(*arrays, sinks=sinks, z=z), expected)


# ---- the drop-ins


FLOAT, BOOLEAN = Scoring(bias="f32"), Scoring(bias="u8")


@pytest.mark.parametrize("shape", [(21, 37), (2, 1, 21, 37), (1, 4, 1, 37), (2, 4, 21, 37), (21, 1)])
@pytest.mark.parametrize("kind", ["float", "bool"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sdpa_serves_masks(
    kind: str, shape: Any, compiled: bool, load: Any, torch: Any, driver: Driver
) -> None:
    module = load(Scoring(), FLOAT, BOOLEAN)
    q, k, v = tensors(torch, Q, K, K)
    (mask,) = tensors(torch, shape)
    mask[..., 0] = 1.0  # each row sees a key
    mask = mask > -1 if kind == "bool" else torch.where(mask < -1.5, -torch.inf, mask)
    sdpa = torch.compile(module.sdpa, backend="aot_eager", fullgraph=True) if compiled else module.sdpa
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    with computing(driver, problem_of(BOOLEAN if kind == "bool" else FLOAT)) as card:
        found = sdpa(q, k, v, mask, enable_gqa=True)
    close(found, expected.double().numpy())
    assert len(card.values) == 1


def test_sdpa_passes_the_rest_to_torch(load: Any, torch: Any, driver: Driver) -> None:
    module = load(FLOAT)
    q, k, v = tensors(torch, Q, Q, Q)
    masks = (None, torch.zeros(21, 21, dtype=torch.bool).fill_(True), torch.zeros(21, 21, requires_grad=True))
    for mask in masks:
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        close(module.sdpa(q, k, v, mask), expected.detach().numpy())
    with pytest.raises(RuntimeError):
        module.sdpa(q, k, v, torch.zeros(20, 21))
    both = {"attn_mask": torch.zeros(21, 21), "is_causal": True}
    try:
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **both)
    except RuntimeError as refused:  # by versions before 2.13
        with pytest.raises(RuntimeError, match=re.escape(str(refused))):
            module.sdpa(q, k, v, **both)
    else:
        close(module.sdpa(q, k, v, **both), expected.numpy())
    assert not driver.launches()


# ---- Hugging Face


@pytest.fixture(scope="module")
def transformers(torch: Any) -> Any:
    return pytest.importorskip("transformers", reason="needs transformers")


def model_of(transformers: Any, kind: str, **others: Any) -> Any:
    sizes = {
        "hidden_size": 4 * D,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": D,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 99,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, **others)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def logits(model: Any, torch: Any, name: str, words: Any, **others: Any) -> Any:
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(words, **others).logits


def test_a_sliding_window_needs_no_mask(load: Any, torch: Any, transformers: Any, driver: Driver) -> None:
    scoring = Scoring(window=(7, 0))
    module = load(scoring)
    module.register_transformers("windows")
    torch.manual_seed(0)
    model = model_of(transformers, "Mistral", sliding_window=8)
    words = torch.randint(1, 99, (2, 20))
    expected = logits(model, torch, "sdpa", words)
    with computing(driver, problem_of(scoring)) as card:
        found = logits(model, torch, "windows", words)
        close(found, expected.double().numpy(), 1e-4)
        assert [each["window_left"] for each in card.values] == [7, 7]
        short = words[:, :5]  # a window of all keys is none
        close(
            logits(model, torch, "windows", short), logits(model, torch, "sdpa", short).double().numpy(), 1e-4
        )
        model.set_attn_implementation("windows")
        longer = model.generate(words, max_new_tokens=3, do_sample=False)
    assert len(card.values) > 4
    model.set_attn_implementation("sdpa")
    assert torch.equal(longer, model.generate(words, max_new_tokens=3, do_sample=False))


def test_padding_is_a_boolean_mask(load: Any, torch: Any, transformers: Any, driver: Driver) -> None:
    module = load(Scoring(), BOOLEAN, Scoring(window=(7, 0)))
    module.register_transformers("masks")
    torch.manual_seed(0)
    model = model_of(transformers, "Mistral", sliding_window=8)
    words, padded = torch.randint(1, 99, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    padded[0, :5] = 0
    expected = logits(model, torch, "sdpa", words, attention_mask=padded)
    with computing(driver, problem_of(BOOLEAN)) as card:
        found = logits(model, torch, "masks", words, attention_mask=padded)
    close(found[padded.bool()], expected[padded.bool()].double().numpy(), 1e-4)
    assert len(card.values) == 2


def test_soft_caps_and_sinks_are_computed(load: Any, torch: Any, transformers: Any, driver: Driver) -> None:
    scoring = Scoring(window=(7, 0), softcap=2.0)
    load(scoring).register_transformers("capped")
    torch.manual_seed(0)
    model = model_of(
        transformers, "Gemma2", sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=D
    )
    words = torch.randint(1, 99, (2, 20))
    expected = logits(model, torch, "eager", words)
    with computing(driver, problem_of(scoring)) as card:
        found = logits(model, torch, "capped", words)
    close(found, expected.double().numpy(), 1e-4)
    # One layer slides, the other sees all.
    assert [each["window_left"] for each in card.values] == [7, -1]


def test_layers_with_sinks(load: Any, torch: Any, transformers: Any, driver: Driver) -> None:
    scoring = Scoring(sinks=True)
    load(scoring).register_transformers("sunk")
    attend = transformers.AttentionInterface()["sunk"]
    q, k, v = tensors(torch, Q, K, K)
    sinks = torch.randn(4, dtype=torch.bfloat16)
    layer = torch.nn.Module()
    with computing(driver, problem_of(scoring)), torch.no_grad():
        o, _ = attend(layer, q, k, v, None, s_aux=sinks, is_causal=False)
    values = {"sinks": sinks.double().numpy()}
    close(o.transpose(1, 2), wanted(scoring, [x.numpy() for x in (q, k, v)], values).o)
    with pytest.raises(ValueError, match="no kernel here serves the attention sinks"):
        attend(layer, q, k, v, torch.ones(21, 37, dtype=torch.bool), s_aux=sinks)
