"""PyTorch's attention by flashgen's calls, beside PyTorch's own where it is installed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashgen.compat import replacing_sdpa, scaled_dot_product_attention, using
from flashgen.tuner.compat.added_masks import within_reach
from flashgen.tuner.front import notice

from tests.support.front_stand_in import StandIn

RNG = np.random.default_rng(3)
E, EV = 8, 6


def arrays(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None) -> list[Any]:
    v = (*k, EV) if v is None else (*v, EV)
    return [RNG.standard_normal(shape).astype(np.float32) for shape in ((*q, E), (*k, E), v)]


def masked(shape: tuple[int, ...]) -> Any:
    mask = RNG.random(shape) < 0.5
    mask[..., 0, :] = False  # a row that sees nothing
    return mask


#: Shapes of query, key and value without their last axis, and what else a call says.
CALLS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": (arrays((2, 3, 5), (2, 3, 7)), {}),
    "scaled": (arrays((2, 3, 5), (2, 3, 7)), {"scale": -0.5}),
    "not scaled at all": (arrays((2, 3, 5), (2, 3, 7)), {"scale": 0.0}),
    "causal, fewer rows": (arrays((2, 3, 4), (2, 3, 7)), {"is_causal": True}),
    "causal, one row": (arrays((2, 3, 1), (2, 3, 7)), {"is_causal": True}),
    "causal, as many": (arrays((2, 3, 5), (2, 3, 5)), {"is_causal": True}),
    "causal, more rows": (arrays((2, 3, 7), (2, 3, 4)), {"is_causal": True}),
    "heads that share": (arrays((2, 6, 5), (2, 3, 7)), {"enable_gqa": True}),
    "heads that share, others of values": (arrays((2, 6, 5), (2, 3, 7), (2, 2, 7)), {"enable_gqa": True}),
    "heads that share, one of values": (arrays((2, 4, 5), (2, 2, 7), (2, 1, 7)), {"enable_gqa": True}),
    "one head of keys": (arrays((2, 6, 5), (2, 1, 7)), {}),
    "one head of keys, causal": (arrays((2, 6, 5), (2, 1, 7)), {"is_causal": True}),
    "one head of keys, many of values": (arrays((2, 6, 5), (2, 1, 7), (2, 6, 7)), {}),
    "one head of queries": (arrays((2, 1, 5), (2, 4, 7)), {}),
    "one batch of keys": (arrays((3, 2, 5), (1, 2, 7)), {}),
    "two axes": (arrays((5,), (7,)), {}),
    "two axes of queries": (arrays((5,), (3, 7)), {}),
    "three axes": (arrays((3, 5), (3, 7)), {}),
    "three axes, a mask": (arrays((3, 5), (3, 7)), {"attn_mask": masked((3, 5, 7))}),
    "five axes": (arrays((2, 3, 4, 5), (2, 1, 4, 7)), {}),
    "five axes, a mask": (arrays((2, 3, 4, 5), (2, 3, 4, 7)), {"attn_mask": masked((3, 1, 5, 7))}),
    "five axes, a mask of all": (arrays((2, 3, 4, 5), (2, 3, 4, 7)), {"attn_mask": masked((1, 1, 4, 5, 7))}),
    "a mask of pairs": (arrays((2, 3, 5), (2, 3, 7)), {"attn_mask": masked((5, 7))}),
    "a mask of keys": (arrays((2, 3, 5), (2, 3, 7)), {"attn_mask": RNG.random((2, 1, 1, 7)) < 0.7}),
    "a bias": (
        arrays((2, 3, 5), (2, 3, 7)),
        {"attn_mask": RNG.standard_normal((3, 5, 7)).astype(np.float32)},
    ),
    "no keys": (arrays((2, 3, 5), (2, 3, 0)), {}),
    "no keys, five axes, a mask": (
        arrays((2, 1, 3, 5), (2, 1, 3, 0)),
        {"attn_mask": masked((2, 1, 1, 5, 0))},
    ),
    "no rows": (arrays((2, 3, 0), (2, 3, 5)), {}),
    "no batch": (arrays((0, 3, 4), (0, 3, 5)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_pytorchs(front: StandIn, name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    given, told = CALLS[name]
    tensors = [torch.from_numpy(x) for x in given]
    told = {key: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for key, x in told.items()}
    wanted = torch.nn.functional.scaled_dot_product_attention(*tensors, **told)
    found = scaled_dot_product_attention(*tensors, **told)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert bool(front.asked) == (0 not in wanted.shape and given[1].size > 0)


@pytest.mark.parametrize("name", CALLS)
def test_numpy_arrays_are_taken_alike(front: StandIn, name: str) -> None:
    """With each array repeated to its whole shape, and each mask written out, the result is the same."""
    (q, k, v), told = CALLS[name]
    found = scaled_dot_product_attention(q, k, v, **told)
    rank = max(x.ndim for x in (q, k, v))
    q, k, v = (x.reshape((1,) * (max(rank, 3) - x.ndim) + x.shape) for x in (q, k, v))
    if told.get("enable_gqa"):
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    rows, keys = q.shape[-2], k.shape[-2]
    scores = np.einsum("...ie,...je->...ij", q, k) * told.get("scale", E**-0.5)
    if told.get("is_causal"):
        scores = np.where(np.tril(np.ones((rows, keys), bool)), scores, -np.inf)
    mask = told.get("attn_mask")
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    highest = scores.max(-1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    wanted = np.einsum("...ij,...jf->...if", weights / np.where(total > 0, total, 1), v)
    assert found.shape == wanted.shape[-rank:]
    np.testing.assert_allclose(found, wanted.reshape(found.shape), atol=1e-5)


def test_what_has_nothing_to_compute_has_gradients(front: StandIn) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    for shapes in (((2, 3, 5), (2, 3, 0)), ((2, 3, 0), (2, 3, 5))):
        tensors = [torch.from_numpy(x).requires_grad_() for x in arrays(*shapes)]
        scaled_dot_product_attention(*tensors).sum().backward()
        assert all(x.grad.shape == x.shape and bool((x.grad == 0).all()) for x in tensors)
    assert not front.asked


def test_what_is_asked_is_what_kernels_do_best(front: StandIn) -> None:
    scaled_dot_product_attention(*arrays((2, 3, 4), (2, 3, 7)), is_causal=True)
    assert front.last == {"causal": True}  # of as many keys as rows
    scaled_dot_product_attention(*arrays((2, 3, 7), (2, 3, 4)), is_causal=True)
    assert front.last == {"window": (-1, 3)}
    scaled_dot_product_attention(*arrays((2, 3, 7), (2, 3, 4)))
    assert front.last == {}


@pytest.mark.parametrize(
    ("shapes", "asked", "told"),
    [
        (
            ((2, 4, 5), (2, 2, 7)),
            {},
            "query has 4 heads, key 2 and value 2, which do not broadcast: pass enable",
        ),
        (
            ((2, 4, 5), (2, 3, 7)),
            {"enable_gqa": True},
            "query has 4 heads, key 3 and value 3; with enable_gqa",
        ),
        (
            ((2, 4, 5), (3, 4, 7)),
            {},
            r"leading axes do not broadcast: query \(2,\), key \(3,\), value \(3,\)",
        ),
        (
            ((2, 4, 5), (2, 4, 7)),
            {"attn_mask": np.ones((5, 6))},
            r"attn_mask has the shape \(5, 6\); it must br",
        ),
        (((), (7,)), {}, r"query has the shape \(8,\); it must be"),
        (
            ((2, 4, 5), (2, 4, 7)),
            {"attn_mask": masked((5, 7)), "is_causal": True},
            "attn_mask and is_causal=True",
        ),
        (
            ((2, 4, 5), (2, 4, 7)),
            {"dropout_p": 0.5},
            "dropout_p is 0.5, which PyTorch alone serves, and query",
        ),
    ],
)
def test_what_is_refused_is_named(front: StandIn, shapes: Any, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        scaled_dot_product_attention(*arrays(*shapes), **asked)
    assert not front.asked


def test_pytorchs_own_causal_masks(front: StandIn) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    for rows, keys in ((4, 7), (5, 5), (7, 4)):
        q, k, v = (torch.from_numpy(x) for x in arrays((2, 3, rows), (2, 3, keys)))
        upper = scaled_dot_product_attention(q, k, v, causal_upper_left(rows, keys))
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        np.testing.assert_allclose(upper, wanted, atol=1e-5)
        last = scaled_dot_product_attention(q, k, v, causal_lower_right(rows, keys))
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
        np.testing.assert_allclose(last, wanted, atol=1e-5)
        assert front.last == {"causal": True}
        with pytest.raises(ValueError, match="attn_mask and is_causal=True"):
            scaled_dot_product_attention(q, k, v, causal_lower_right(rows, keys), is_causal=True)


def test_what_no_kernel_serves_pytorch_computes_and_stderr_says_so_once(
    front: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    monkeypatch.setattr(notice, "_SAID", set())
    q, k, v = (torch.from_numpy(x) for x in arrays((2, 3, 5), (2, 3, 5)))
    for _ in range(2):
        assert scaled_dot_product_attention(q, k, v, dropout_p=0.5).shape == (2, 3, 5, EV)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "that no kernel serves: dropout_p is 0.5" in said
    assert not front.asked

    def refuse(*arrays: Any, **asked: Any) -> Any:
        raise TypeError("q is float64")

    monkeypatch.setattr(front, "attention", refuse, raising=False)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert bool((scaled_dot_product_attention(q, k, v, is_causal=True) == wanted).all())
    assert "that no kernel serves: q is float64" in capsys.readouterr().err
    with pytest.raises(TypeError, match="q is float64"):
        scaled_dot_product_attention(*(x.numpy() for x in (q, k, v)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_least_numbers_hide_nothing_by_themselves(front: StandIn, dtype: Any) -> None:
    """Kernels would make them infinite; only what is -inf is hidden."""
    mask = np.array([[0.5, -np.inf], [ml_dtypes.finfo(dtype).min, -np.inf]]).astype(dtype)
    scaled_dot_product_attention(*arrays((1, 1, 2), (1, 1, 2)), attn_mask=mask)
    told = front.last["attn_mask"]
    assert told.dtype == dtype and told[0, 0] == 0.5 and (told[:, 1] == -np.inf).all()
    assert -1.1e30 < float(told[1, 0]) < -6e4 and (mask[1, 0] == told[1, 0]) == (dtype is np.float16)


def test_masks_that_layers_share_are_looked_at_once(front: StandIn) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    mask = torch.full((2, 2), torch.finfo(torch.float32).min)
    made = within_reach(mask)
    assert within_reach(mask) is made and bool((made == -1e30).all())
    mask[0, 0] = -torch.inf
    assert within_reach(mask)[0, 0] == -torch.inf and within_reach(mask)[0, 1] == made[0, 1]
    truths = mask > 0
    assert within_reach(truths) is truths


def test_masks_made_without_any_thought_of_gradients_are_served(front: StandIn) -> None:
    """Under inference_mode tensors do not tell when they are changed: such a mask is looked at each time."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    with torch.inference_mode():
        q, k, v = (torch.from_numpy(x).clone() for x in arrays((1, 2, 3), (1, 2, 4)))
        mask = torch.zeros(3, 4)
        for hidden in (0, 1):
            mask[:, hidden] = -torch.inf
            wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
            np.testing.assert_allclose(scaled_dot_product_attention(q, k, v, mask), wanted, atol=1e-5)
        assert len(front.asked) == 2


def test_models_that_call_pytorchs_name_call_kernels(
    front: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within a block, of blocks within blocks too; what PyTorch must compute it does by its own function."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    functional = torch.nn.functional
    theirs, (q, k, v) = (
        functional.scaled_dot_product_attention,
        (torch.from_numpy(x) for x in arrays((2, 3, 5), (2, 3, 5))),
    )
    wanted, told = theirs(q, k, v, is_causal=True), {"query": q, "key": k, "value": v, "is_causal": True}
    monkeypatch.setattr(notice, "_SAID", set())
    with replacing_sdpa(), replacing_sdpa():
        found = functional.scaled_dot_product_attention(**told)
        assert len(front.asked) == 1 and front.last["causal"]
        assert functional.scaled_dot_product_attention(q, k, v, None, 0.5).shape == (2, 3, 5, EV)
        assert "that no kernel serves: dropout_p is 0.5" in capsys.readouterr().err
    assert functional.scaled_dot_product_attention is theirs and len(front.asked) == 1
    assert torch.allclose(found, wanted, atol=1e-5)
    with pytest.raises(RuntimeError, match="the model's"), replacing_sdpa():
        raise RuntimeError("the model's")
    assert functional.scaled_dot_product_attention is theirs


def test_flashgens_fallback_is_pytorchs_own() -> None:
    """What has no kernel on the host's memory comes to PyTorch once, not in a circle."""
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and __import__("torch")
    q = torch.randn(1, 2, 4, 300)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with replacing_sdpa(), using(fallback="torch"):
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, q, q), wanted)
