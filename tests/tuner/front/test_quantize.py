"""`flashgen.quantize`: what rounding to eight bits loses, and what is done about it."""

from __future__ import annotations

from typing import Any

import flashgen
import ml_dtypes
import numpy as np
import pytest
from flashgen.tuner.front.quantize import LARGEST, MOST_HALVINGS, WANTED_SCALE, rotation

from tests.support.host_tensors import real_torch


def drawn(d: int = 64, rows: int = 24, keys: int = 512, outliers: float = 0.0) -> list[np.ndarray]:
    """q, k and v of four heads, two of keys; one number in a thousand is far larger."""
    rng = np.random.default_rng(d)
    shapes = (1, 4, rows, d), (1, 2, keys, d), (1, 2, keys, d)
    numbers = [rng.standard_normal(shape) for shape in shapes]
    numbers = [x + outliers * rng.standard_normal(x.shape) * (rng.random(x.shape) < 1e-3) for x in numbers]
    return [x.astype(np.float32) for x in numbers]


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    k, v = (x.astype(np.float64).repeat(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def lost(arrays: list[np.ndarray], **how: bool) -> float:
    """How far attention of the rounded arrays is from that of the arrays, over its own size."""
    made = flashgen.quantize(*arrays, **how)
    meant = [x.astype(np.float64) * scale for x, scale in zip(made[:3], made.scales, strict=True)]
    wanted = attended(*arrays)
    return float(np.linalg.norm(attended(*meant) - wanted) / np.linalg.norm(wanted))


def test_the_largest_number_of_each_array_is_the_types_but_for_powers_of_two() -> None:
    arrays = drawn()
    made = flashgen.quantize(*arrays)
    for x, rounded, scale, halvings in zip(arrays, made[:3], made.scales, (4, 5, 0), strict=True):
        assert rounded.dtype == ml_dtypes.float8_e4m3fn and rounded.shape == x.shape
        assert np.abs(rounded.astype(np.float32)).max() == LARGEST / 2**halvings
        assert np.abs(rounded.astype(np.float32) * scale - x).max() <= np.abs(x).max() / 2**4
    zeros = flashgen.quantize(*(0 * x for x in arrays))
    assert zeros.scales == (1.0, 1.0, 1.0) and not any(x.astype(np.float32).any() for x in zeros[:3])


@pytest.mark.parametrize("size", [0.05, 0.5, 1.0, 8.0, 80.0])
@pytest.mark.parametrize("d", [64, 256])
def test_scores_of_what_was_rounded_fit_f16(d: int, size: float) -> None:
    q, k, v = drawn(d)
    made = flashgen.quantize(size * q, k / 2, v)
    of_q, of_k, _ = made.scales
    halved = [np.log2(LARGEST / np.abs(x.astype(np.float32)).max()) for x in (made.q, made.k)]
    assert 0 <= halved[0] <= halved[1] <= halved[0] + 1 and halved[1] <= MOST_HALVINGS
    scale = of_q * of_k * np.log2(np.e) / np.sqrt(d)
    if halved[1] < MOST_HALVINGS:
        # So much, and no power of two more than that.
        assert scale >= WANTED_SCALE and (halved[1] == 0 or scale < 2 * WANTED_SCALE)
    # Nothing is lost thus but of what is next to nothing.
    of_all = [each / 2**h for each, h in zip(made.scales, (*halved, 0), strict=True)]
    largest = flashgen.quantize(size * q, k / 2, v, scales=of_all)
    for x, y, h in zip(made[:2], largest[:2], halved, strict=True):
        assert (x.astype(np.float32) * 2**h == y.astype(np.float32)).mean() > 0.99


@pytest.mark.parametrize("d", [1, 24, 64, 80, 128])
def test_rotations_leave_products_as_they_are(d: int) -> None:
    turn = rotation(d).astype(np.float64)
    assert np.abs(turn @ turn.T - np.eye(d)).max() < 1e-6
    block = d & -d
    # A number is spread over as many columns as a power of two divides, evenly.
    assert ((turn != 0).sum(axis=1) == block).all() and np.allclose(np.abs(turn[turn != 0]), block**-0.5)


def test_rotating_makes_little_of_outliers_and_smoothing_of_means() -> None:
    uneven = drawn(outliers=10.0)
    assert lost(uneven, rotate=True) < 0.8 * lost(uneven)
    q, k, v = drawn()
    means = np.random.default_rng(1).standard_normal((1, 2, 1, 64))
    around = [q, (k + 8 * means).astype(np.float32), v]
    assert lost(around, smooth=True) < 0.5 * lost(around)
    assert lost(around, smooth=True, rotate=True) < 0.5 * lost(around)
    # Neither costs where there is nothing to gain.
    plain = [q, k, v]
    for how in ({"rotate": True}, {"smooth": True}):
        assert lost(plain, **how) < 1.25 * lost(plain)


def test_rows_before_heads() -> None:
    arrays = drawn()
    made = flashgen.quantize(*arrays, smooth=True, rotate=True)
    swapped = flashgen.quantize(*(x.swapaxes(1, 2) for x in arrays), smooth=True, rotate=True, layout="bshd")
    assert swapped.scales == pytest.approx(made.scales)
    for x, y in zip(made[:3], swapped[:3], strict=True):
        wide = [each.astype(np.float32) for each in (x, y.swapaxes(1, 2))]
        assert np.abs(wide[0] - wide[1]).max() <= 32  # sums in another order may round to a neighbour
        assert (wide[0] == wide[1]).mean() > 0.999


def test_known_scales_cut_off_what_is_beyond() -> None:
    arrays = drawn()
    made = flashgen.quantize(*arrays, scales=(1e-3, 1.0, 1.0))
    assert made.scales == (1e-3, 1.0, 1.0)
    assert (np.abs(made.q.astype(np.float32)) == LARGEST).mean() > 0.4


def test_attention_of_eight_bits_on_an_emulated_card() -> None:
    arrays = drawn(rows=5, keys=70, outliers=10.0)
    eight = flashgen.quantize(*arrays, rotate=True)
    o = flashgen.attention(*eight[:3], scales=eight.scales, device="sim:h200")
    meant = [x.astype(np.float64) * scale for x, scale in zip(eight[:3], eight.scales, strict=True)]
    assert np.abs(o.astype(np.float64) - attended(*meant)).max() < 2e-2


@pytest.mark.parametrize(("rows", "keys", "window"), [(128, 128, None), (5, 300, (20, 20))])
def test_weights_of_eight_bits_are_of_calls_that_ask_for_them(
    rows: int, keys: int, window: tuple[int, int] | None
) -> None:
    arrays = drawn(rows=rows, keys=keys)
    eight = flashgen.quantize(*arrays)
    told = {"scales": eight.scales, "window": window, "device": "sim:h200"}
    usual, fast = (flashgen.attention(*eight[:3], precision=each, **told) for each in ("auto", "eight"))
    assert not np.array_equal(usual, fast)
    distance = np.linalg.norm(fast.astype(np.float64) - usual.astype(np.float64))
    assert distance < 9e-2 * np.linalg.norm(usual.astype(np.float64))


def test_a_precision_that_no_call_has_is_refused() -> None:
    eight = flashgen.quantize(*drawn())
    with pytest.raises(ValueError, match="precision is 'tf32'; pass 'eight', or leave it out"):
        flashgen.attention(*eight[:3], scales=eight.scales, precision="tf32", device="sim:h200")
    with pytest.raises(ValueError, match="precision='eight' is for float8_e4m3fn with scales="):
        flashgen.attention(*drawn(), precision="eight", device="sim:h200")


def test_what_does_not_go_together_is_told() -> None:
    q, k, v = drawn()
    with pytest.raises(TypeError, match=r"k is a .*Rows; torch, numpy and JAX have numbers of float8_e4m3fn"):
        flashgen.quantize(q, Rows(k), v)
    with pytest.raises(ValueError, match="q has head dim 64 and k 32: they must agree"):
        flashgen.quantize(q, k[..., :32], v)
    with pytest.raises(ValueError, match=r"v has 3 dimensions, \(2, 512, 64\); 4 are needed"):
        flashgen.quantize(q, k, v[0])
    with pytest.raises(ValueError, match="k has numbers that are not finite"):
        flashgen.quantize(q, np.where(k > 2, np.float32("inf"), k), v)
    with pytest.raises(ValueError, match=r"scales are \(1, 0, 1\): pass three positive numbers"):
        flashgen.quantize(q, k, v, scales=(1, 0, 1))
    with pytest.raises(ValueError, match="layout"):
        flashgen.quantize(q, k, v, layout="sbhd")


class Rows(list):
    """What has a shape and is no array."""

    def __init__(self, x: np.ndarray) -> None:
        super().__init__(x)
        self.shape = x.shape


def test_tensors_are_rounded_as_arrays_are() -> None:
    torch: Any = real_torch()
    arrays = drawn(outliers=10.0)
    wanted = flashgen.quantize(*arrays, smooth=True, rotate=True)
    made = flashgen.quantize(*map(torch.from_numpy, arrays), smooth=True, rotate=True)
    assert made.q.dtype is torch.float8_e4m3fn and made.scales == pytest.approx(wanted.scales)
    for x, y in zip(made[:3], wanted[:3], strict=True):
        assert (x.float().numpy() == y.astype(np.float32)).mean() > 0.999
