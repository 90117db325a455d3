"""FlexAttention by flashgen's calls, beside PyTorch's own where it is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flashgen.compat import flex_attention as ours

from tests.support import flex_functions
from tests.support.front_stand_in import StandIn

RNG = np.random.default_rng(5)
HEADS, ROWS, KEYS = 4, 20, 36
DOCUMENTS = np.sort(RNG.integers(0, 4, (2, KEYS))).astype(np.int32)


def arrays(
    rows: int = ROWS, keys: int = KEYS, kv_heads: int = HEADS, batch: int = 2, kv_batch: int = 0
) -> Any:
    shapes = ((batch, HEADS, rows), (kv_batch or batch, kv_heads, keys), (kv_batch or batch, kv_heads, keys))
    return [RNG.standard_normal((*shape, 8)).astype(np.float32) for shape in shapes]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < 5 + h


def plain(q: Any, k: Any, v: Any, seen: Any, score: Any = None) -> tuple[Any, Any]:
    scores = q @ np.repeat(k, q.shape[1] // k.shape[1], 1).swapaxes(2, 3) * 8**-0.5
    if score is not None:
        scores = score(scores, *np.ogrid[tuple(slice(0, n) for n in scores.shape)])
    scores = np.where(seen, scores, -np.inf)
    total = np.exp(scores).sum(-1)
    weights = np.exp(scores) / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        return weights @ np.repeat(v, q.shape[1] // v.shape[1], 1), np.log(total)


def test_a_mask_and_a_change_of_scores_become_functions_of_a_call(front: StandIn) -> None:
    q, k, v = arrays(kv_heads=2)
    mask = ours.create_block_mask(causal, None, None, ROWS, KEYS)

    def decaying(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - 0.1 * (h + 1) * abs(q_idx - kv_idx)

    o, aux = ours.flex_attention(
        *(q, k, v, decaying, mask), enable_gqa=True, return_aux=ours.AuxRequest(lse=True)
    )
    # Rows count from the first key, however many keys there are.
    wanted, lse = plain(q, k, v, np.tril(np.ones((ROWS, KEYS), bool)), decaying)
    np.testing.assert_allclose(o, wanted, atol=1e-6)
    np.testing.assert_allclose(aux.lse, lse, atol=1e-6)
    assert aux.max_scores is None and front.last["mask"] is causal and front.last["score"] is decaying


def test_what_is_returned_is_what_is_asked_for(front: StandIn) -> None:
    q, k, v = arrays()
    assert ours.flex_attention(q, k, v).shape == q.shape
    o, lse = ours.flex_attention(q, k, v, return_lse=True)
    assert o.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == np.float32
    assert ours.flex_attention(q, k, v, return_aux=ours.AuxRequest())[1] == (None, None)
    ours.flex_attention(q, k, v, scale=0.25, kernel_options={"BLOCK_M": 64})
    assert front.last == {"return_lse": False, "scale": 0.25}


def test_joined_masks_read_what_their_functions_captured(front: StandIn) -> None:
    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]

    q, k, v = arrays()
    joined = ours.or_masks(ours.and_masks(causal, document), ours.and_masks(near, ours.noop_mask))
    b, h, i, j = np.ogrid[:2, :HEADS, :ROWS, :KEYS]
    wanted = (causal(b, h, i, j) & document(b, h, i, j)) | near(b, h, i, j)
    assert (
        ours.create_mask(joined, 2, HEADS, ROWS, KEYS) == np.broadcast_to(wanted, (2, HEADS, ROWS, KEYS))
    ).all()
    o = ours.flex_attention(q, k, v, block_mask=ours.create_block_mask(joined, 2, HEADS, ROWS, KEYS))
    np.testing.assert_allclose(o, plain(q, k, v, wanted)[0], atol=1e-6)
    with pytest.raises(TypeError, match="masks are joined that are functions, at least one"):
        ours.or_masks()


def test_a_mask_tells_of_its_blocks() -> None:
    mask = ours.create_block_mask(near, None, 2, 40, 64, BLOCK_SIZE=(8, 16))
    assert mask.shape == (1, 2, 40, 64) and mask.seq_lengths == (40, 64) and mask.BLOCK_SIZE == (8, 16)
    seen = ours.create_mask(near, None, 2, 40, 64)
    blocks = np.asarray(seen).reshape(1, 2, 5, 8, 4, 16).any((3, 5))
    assert (mask.to_dense() == blocks).all() and mask.to("cuda") is mask
    assert mask.sparsity() == pytest.approx(100 * (1 - blocks.mean()))
    assert ours.create_block_mask(ours.noop_mask, 1, 1, 7, 9).sparsity() == 0
    with pytest.raises(NotImplementedError, match="slices of a BlockMask have no function"):
        mask[:, 0]


def test_a_mask_that_hides_nothing_is_none(front: StandIn) -> None:
    ours.flex_attention(*arrays(), block_mask=ours.create_block_mask(ours.noop_mask, None, None, ROWS, KEYS))
    assert "mask" not in front.last


def test_keys_of_one_batch_serve_the_masks_batch(front: StandIn) -> None:
    q, k, v = arrays(kv_batch=1)
    mask = ours.create_block_mask(causal, 2, None, ROWS, KEYS)
    o = ours.flex_attention(q, k, v, block_mask=mask)
    np.testing.assert_allclose(o, plain(q, k, v, np.tril(np.ones((ROWS, KEYS), bool)))[0], atol=1e-6)
    with pytest.raises(ValueError, match="query is a batch of 2, key of 1"):
        ours.flex_attention(q, k, v)


@pytest.mark.parametrize(
    ("given", "asked", "error", "told"),
    [
        ({"kv_heads": 2}, {}, ValueError, "query has 4 heads, key and value have 2: pass enable_gqa=True"),
        ({"kv_heads": 3}, {"enable_gqa": True}, ValueError, "query has 4 heads, key and value have 3; with"),
        ({}, {"return_lse": True, "return_aux": ours.AuxRequest()}, ValueError, "return_lse and return_aux"),
        ({}, {"return_aux": ours.AuxRequest(max_scores=True)}, ValueError, "return_aux asks for max_scores"),
        (
            {},
            {"block_mask": causal},
            TypeError,
            "block_mask is a builtins.function; pass what create_block_mask",
        ),
        (
            {},
            {"block_mask": ours.create_block_mask(causal, 1, 1, ROWS, ROWS)},
            ValueError,
            "block_mask is of 20 x 20 rows and keys, query and key have 20 x 36",
        ),
    ],
)
def test_what_is_refused_is_named(
    front: StandIn, given: dict[str, int], asked: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        ours.flex_attention(*arrays(**given), **asked)
    assert not front.asked


def test_four_axes_are_needed(front: StandIn) -> None:
    q, k, v = arrays()
    with pytest.raises(
        NotImplementedError, match=r"query \(4, 20, 8\).* must be \(batch, heads, seqlen, head"
    ):
        ours.flex_attention(q[0], k, v)


def test_a_mask_is_made_of_a_function_of_four() -> None:
    with pytest.raises(TypeError, match=r"it must be a function mask_mod\(b, h, q_idx, kv_idx\)"):
        ours.create_block_mask(lambda score, b, h, q, k: score, 1, 1, 4, 4)


def test_a_function_may_have_values_for_more_arguments(front: StandIn) -> None:
    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any, most: int = 3) -> Any:
        return abs(q_idx - kv_idx) < most

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by: float = 2.0) -> Any:
        return score * by

    mask = ours.create_block_mask(near, None, None, ROWS, KEYS)
    seen = abs(np.arange(ROWS)[:, None] - np.arange(KEYS)) < 3
    q, k, v = arrays()
    np.testing.assert_allclose(
        ours.flex_attention(q, k, v, scaled, mask),
        plain(q, k, v, seen, lambda score, *at: score * 2)[0],
        atol=1e-6,
    )
    assert (np.asarray(ours.create_mask(near, None, None, ROWS, KEYS))[0, 0] == seen).all()
    assert (np.asarray(ours.create_mask(scaled, None, None, 2, 3)) == 0).all()


# ---- beside PyTorch

FUNCTIONS = {
    "causal": (None, flex_functions.causal),
    "window": (None, flex_functions.sliding_window(7)),
    "dilated": (lambda score, b, h, q, k: 3.0 * (score / 3.0).tanh(), flex_functions.sliding_window(3)),
    "changed": (lambda score, b, h, q, k: score + 0.1 * (q - k) * (h + 1), None),
}


@pytest.mark.parametrize("made", ["ours", "theirs"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_pytorchs(front: StandIn, name: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    theirs = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs FlexAttention")
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    score, mask = FUNCTIONS[name]
    length = flex_functions.LENGTH
    q, k, v = (torch.from_numpy(x) for x in arrays(length, length, kv_heads=2))
    blocks = None if mask is None else theirs.create_block_mask(mask, 2, 4, length, length, device="cpu")
    wanted, of_rows = theirs.flex_attention(q, k, v, score, blocks, enable_gqa=True, return_lse=True)
    if made == "ours" and mask is not None:
        blocks = ours.create_block_mask(mask, 2, 4, length, length)
    torch_score = score
    if score is not None:  # the stand-in computes scores by numpy
        torch_score = lambda s, *at: np.asarray(score(torch.from_numpy(s), *map(torch.from_numpy, at)))  # noqa: E731
    o, lse = ours.flex_attention(q, k, v, torch_score, blocks, enable_gqa=True, return_lse=True)
    np.testing.assert_allclose(o, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, of_rows, atol=1e-5)


def test_blocks_of_pytorchs_masks_count_where_they_say_more_than_the_function(front: StandIn) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    theirs = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs FlexAttention")
    # Of 4 x 4 blocks of 16, each row of blocks sees its own and the first; the second is seen whole.
    counts = torch.full((1, 1, 4), 2, dtype=torch.int32)
    columns = torch.tensor([[0, 3, 9, 9], [0, 1, 9, 9], [0, 2, 9, 9], [0, 3, 9, 9]], dtype=torch.int32)[
        None, None
    ]
    whole = torch.tensor([[1, 9, 9, 9]] * 4, dtype=torch.int32)[None, None]
    ones = torch.ones((1, 1, 4), dtype=torch.int32)
    seen = np.zeros((4, 4), bool)
    for row in range(4):
        seen[row, columns[0, 0, row, :2]] = True
    spread = np.kron(seen, np.ones((16, 16))) > 0
    q, k, v = (torch.from_numpy(x) for x in arrays(64, 64))
    host = [x.numpy() for x in (q, k, v)]
    made = theirs.BlockMask.from_kv_blocks(
        counts, columns, BLOCK_SIZE=16, seq_lengths=(64, 64), compute_q_blocks=False
    )
    np.testing.assert_allclose(
        ours.flex_attention(q, k, v, block_mask=made), plain(*host, spread)[0], atol=1e-5
    )
    made = theirs.BlockMask.from_kv_blocks(
        *(counts, columns, ones, whole),
        BLOCK_SIZE=16,
        mask_mod=causal,
        seq_lengths=(64, 64),
        compute_q_blocks=False,
    )
    second = np.zeros((64, 64), bool)
    second[:, 16:32] = True
    wanted = (spread & np.tril(np.ones((64, 64), bool))) | second
    np.testing.assert_allclose(
        ours.flex_attention(q, k, v, block_mask=made), plain(*host, wanted)[0], atol=1e-5
    )
    first = front.last["mask"]
    ours.flex_attention(q, k, v, block_mask=made)
    assert front.last["mask"] is first, "made once"


def test_pytorch_makes_masks_of_flashgens_functions(front: StandIn) -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    theirs = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs FlexAttention")
    joined = ours.and_masks(causal, ours.noop_mask)
    for mask, sparsity in ((ours.noop_mask, 0), (joined, 37.5)):
        made = theirs.create_block_mask(mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
        assert made.sparsity() == sparsity
        ours.flex_attention(*arrays(64, 64), block_mask=made)
    assert "mask" not in front.asked[0] and front.last["mask"] is joined


def test_a_part_of_a_pytorch_mask_has_lost_its_function(front: StandIn) -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    theirs = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs FlexAttention")
    part = theirs.create_block_mask(causal, 2, 1, 256, 256, device="cpu")[0:1]
    with pytest.raises(RuntimeError, match="has lost its function"):
        ours.flex_attention(*arrays(256, 256, batch=1), block_mask=part)
