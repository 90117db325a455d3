"""Emitted modules of kernels with masks and changes of scores, without a GPU.

What a call says reaches the kernel, and what it may not say is told.

The driver is the stand-in of `test_module`; a launch computes in float64 what the problem asks, of the arrays
and numbers that its arguments lead to.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.arguments import struct_of
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import Scores
from flashgen.gen.scoring.values import draw_values
from flashgen.tuner.evaluate import reference

from tests.support.depth import sampled
from tests.support.entered import functions_entered
from tests.support.stand_in_driver import PRIMARY, D, Driver, Jax, Tensor, host
from tests.templates.scored_kernels import (
    DTYPES,
    LAUNCHED,
    computing,
    load_scored,
    load_with_lists,
    problem_of,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

Q, K = (2, 4, 21, D), (2, 2, 37, D)
DILATED = Scoring(dilation=3)
SCORINGS = {
    "window": Scoring(window=(9, 2)),
    "window and first keys": Scoring(window=(5, 0), always=3),
    "chunk": Scoring(chunk=8),
    "prefix": Scoring(prefix=20),
    "lengths": Scoring(lengths=True),
    "documents": Scoring(documents=4),
    "dilation": Scoring(dilation=3),
    "tree": Scoring(tree=True),
    "softcap": Scoring(softcap=2.0),
    "alibi": Scoring(alibi=True),
    "bias": Scoring(bias="f32"),
    "bias of f16": Scoring(bias="f16"),
    "bias of bf16": Scoring(bias="bf16"),
    "boolean mask": Scoring(bias="u8"),
    "sinks": Scoring(sinks=True),
    "all": Scoring(window=(20, 3), lengths=True, softcap=3.0, alibi=True, bias="f32", sinks=True),
    "expressions": Scoring(
        mask="doc[b, q] == doc[b, k] or k < n",
        score="score * t + rel[h, k - q]",
        buffers=(("doc", "i16"),),
        scalars=(("n", 4), ("t", 0.5)),
    ),
}


def asked(scoring: Scoring, values: dict[str, Any]) -> dict[str, Any]:
    """What a call says to be computed with these values."""
    problem = problem_of(scoring)
    found = {}
    for each in problem.scores.buffers:
        found[each.name] = np.ascontiguousarray(values[each.name]).astype(
            bool if each.dtype == "u8" else DTYPES[each.dtype]
        )
    for name, keyword in (("slopes", "alibi_slopes"),):
        if name in found:
            found[keyword] = found.pop(name)
    if scoring.documents:
        found["documents"] = (found.pop("document_begin"), found.pop("document_end"))
    return found


def drawn(scoring: Scoring, q: Any = Q, k: Any = K) -> dict[str, Any]:
    problem = problem_of(
        scoring, batch=q[0], num_q_heads=q[1], num_kv_heads=k[1], seqlen_q=q[2], seqlen_k=k[2]
    )
    return dict(draw_values(scoring, problem.scores, problem, np.random.default_rng(3)))


def wanted(scoring: Scoring, arrays: Any, values: Any, causal: bool = False, scale: float = D**-0.5) -> Any:
    scores: Scores = problem_of(scoring, causal=causal).scores
    return reference.attention(*arrays, scale=scale, scores=scores, values=values)


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", sampled([False, True], 1))
@pytest.mark.parametrize("name", SCORINGS)
def test_what_is_said_reaches_the_kernel(name: str, causal: bool, driver: Driver, tmp_path: Path) -> None:
    scoring = SCORINGS[name]
    module = load_scored(tmp_path, scoring)
    arrays = [host(*shape, seed=i) for i, shape in enumerate((Q, K, K))]
    values = drawn(scoring)
    # As the kernel's type has them.
    for key, array in asked(scoring, values).items():
        if key in values and array.dtype.itemsize == 2:
            values[key] = array.astype(np.float64)
    with computing(driver, problem_of(scoring)) as card:
        o, lse = module.attention(*arrays, causal, return_lse=True, **asked(scoring, values))
    expected = wanted(scoring, arrays, values, causal)
    close(o, expected.o)
    close(lse, expected.lse)
    assert len(card.values) == 1 and driver.library.fake_num_allocated() == 0


# ---- what a call may say


@pytest.fixture
def arrays(driver: Driver) -> list[np.ndarray]:
    return [host(*shape, seed=i) for i, shape in enumerate((Q, K, K))]


def test_a_tree_has_a_bit_for_each_row(driver: Driver, tmp_path: Path, arrays: Any) -> None:
    module = load_scored(tmp_path, Scoring(tree=True))
    q, words = np.tile(arrays[0], (1, 1, 4, 1)), np.zeros((2, 84), np.int64)
    with pytest.raises(ValueError, match="64 rows by a bit each, but q has 84"):
        module.attention(q, *arrays[1:], tree=words)
    assert not driver.launches()


def test_numbers_change_without_a_compile(driver: Driver, tmp_path: Path, arrays: Any) -> None:
    module = load_scored(tmp_path, Scoring(window=(9, 2), softcap=2.0))
    with computing(driver, problem_of(Scoring(window=(9, 2), softcap=2.0))) as card:
        module.attention(*arrays)
        module.attention(*arrays, window=(3, None), softcap=5)
        module.attention(*arrays, window=(np.int64(-1), 0))
    told = [tuple(each[name] for name in ("window_left", "window_right", "softcap")) for each in card.values]
    assert told == [(9, 2, 2.0), (3, -1, 5.0), (-1, 0, 2.0)]
    assert len(driver.compiled) == 1


@pytest.mark.parametrize(
    ("shape", "strides_of"),
    [
        ((37,), lambda x: x),
        ((21, 1), lambda x: x),
        ((4, 1, 37), lambda x: x),
        ((2, 1, 21, 37), lambda x: x),
        ((2, 4, 37, 21), lambda x: x.swapaxes(2, 3)),
        ((2, 4, 21, 74), lambda x: x[..., ::2]),
        ((21, 37), lambda x: np.broadcast_to(x, (2, 4, 21, 37))),
    ],
)
def test_biases_are_broadcast(
    driver: Driver, tmp_path: Path, arrays: Any, shape: Any, strides_of: Any
) -> None:
    scoring = Scoring(bias="f32")
    bias = strides_of(host(*shape, seed=5))
    with computing(driver, problem_of(scoring)):
        o = load_scored(tmp_path, scoring).attention(*arrays, attn_mask=bias)
    close(o, wanted(scoring, arrays, {"bias": np.broadcast_to(bias, (2, 4, 21, 37))}).o)


def test_slopes_of_heads_alone_and_longer_arrays_of_expressions(
    driver: Driver, tmp_path: Path, arrays: Any
) -> None:
    slopes, scoring = np.linspace(0.1, 0.4, 4, dtype=np.float32), Scoring(alibi=True)
    with computing(driver, problem_of(scoring)):
        o = load_scored(tmp_path, scoring).attention(*arrays, alibi_slopes=slopes)
    close(o, wanted(scoring, arrays, {"slopes": np.broadcast_to(slopes, (2, 4))}).o)
    scoring = Scoring(score="score + c[k]")
    column = host(50, seed=4)
    with computing(driver, problem_of(scoring)):
        o = load_scored(tmp_path, scoring).attention(*arrays, c=column)
    close(o, wanted(scoring, arrays, {"c": column[:37]}).o)


def test_documents_are_searched_where_they_lie(driver: Driver, tmp_path: Path, arrays: Any) -> None:
    scoring = Scoring(documents=4)
    module = load_scored(tmp_path, scoring)
    ids = np.sort(np.random.default_rng(0).integers(0, 5, (2, 37)))
    same = ids[:, 16:, None] == ids[:, None, :]  # rows stand at the last of the keys
    first, last = same.argmax(2), 37 - same[..., ::-1].argmax(2)
    values = {"document_begin": first, "document_end": last}
    bounds = module.document_bounds(ids, 21)
    assert (bounds[0] == first).all() and (bounds[1] == last).all() and bounds[0].dtype == np.int32
    with computing(driver, problem_of(scoring)):
        for documents in (ids, bounds):
            close(
                module.attention(*arrays, documents=documents).astype(float),
                wanted(scoring, arrays, values).o,
            )
    with pytest.raises(ValueError, match=r"not sorted; .* mask 'doc\[b, q\] == doc\[b, k\]'"):
        module.attention(*arrays, documents=ids[:, ::-1])
    with pytest.raises(ValueError, match=r"documents have the shape \(2, 36\), but must be \(batch, 37\)"):
        module.attention(*arrays, documents=ids[:, 1:])


WINDOW, BIAS, OWN = (
    Scoring(window=(9, 2)),
    Scoring(bias="f16"),
    Scoring(mask="doc[b, q] == n", scalars=(("n", 4),)),
)


@pytest.mark.parametrize(
    ("scoring", "said", "error", "message"),
    [
        (
            WINDOW,
            {"softcap": 3},
            TypeError,
            r"softcap= is nothing that the kernels here read; they take window=",
        ),
        (WINDOW, {"window": 9}, TypeError, r"window is 9; pass \(left, right\)"),
        (WINDOW, {"window": (9, -2)}, ValueError, r"window is -2; it must lie in -1\.\.1073741824"),
        (WINDOW, {"window": (9.5, 1)}, TypeError, r"window is 9\.5; it must be an integer"),
        (Scoring(softcap=2.0), {"softcap": 0}, ValueError, r"softcap is 0; it must be positive"),
        (Scoring(softcap=2.0), {"softcap": "x"}, TypeError, r"softcap is 'x'; it must be a number"),
        (Scoring(chunk=8), {"chunk": 0}, ValueError, r"chunk is 0; it must lie in 1\.\."),
        (BIAS, {}, TypeError, r"bias= is missing: the kernels here read bias="),
        (
            BIAS,
            {"bias": np.zeros((21, 37))},
            TypeError,
            r"bias is float64, and .* reads float16: pass bias\.astype",
        ),
        (
            BIAS,
            {"bias": [1]},
            TypeError,
            r"q is a numpy.*, but bias a builtins\.list; pass arrays of one library",
        ),
        (
            BIAS,
            {"bias": np.zeros((21, 36), np.float16)},
            ValueError,
            r"bias has the shape \(21, 36\), but must be \(2, 4, 21, 37\) with batch 2, num_q_heads 4, "
            r"seqlen_q 21, seqlen_k 37, or broadcast",
        ),
        (BIAS, {"bias": 1, "attn_mask": 1}, TypeError, r"bias= and attn_mask= are two names of one argument"),
        (
            OWN,
            {"doc": np.zeros((2, 20), np.int32)},
            ValueError,
            r"doc has the shape \(2, 20\), but must be \(2, 21\)",
        ),
        (OWN, {"doc": np.zeros((2, 21), np.int64)}, TypeError, r"doc is int64, and .* reads int32"),
        (
            OWN,
            {"doc": np.zeros((2, 21), np.int32), "n": 2**31},
            ValueError,
            r"n is 2147483648; the kernel takes 32",
        ),
        (
            OWN,
            {"doc": np.zeros((2, 21), np.int32), "recompute": True},
            ValueError,
            r"recompute=True is PyTorch's",
        ),
    ],
)
def test_what_a_call_may_not_say(
    driver: Driver, tmp_path: Path, arrays: Any, scoring: Scoring, said: Any, error: Any, message: str
) -> None:
    module = load_scored(tmp_path, scoring)
    with pytest.raises(error, match=message):
        module.attention(*arrays, **said)
    assert not driver.launches() and driver.library.fake_num_allocated() == 0


# ---- other arrays


def test_dlpack_brings_what_masks_read_along(
    driver: Driver, tmp_path: Path, cupy: Any, arrays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = Scoring(documents=2, bias="f32")
    module = load_scored(tmp_path, scoring)
    monkeypatch.setattr(cupy, "from_dlpack", lambda array: cupy.ndarray(array.host), raising=False)
    bounds = module.document_bounds(np.sort(np.random.default_rng(0).integers(0, 3, (2, 37))), 21)
    bias = host(21, 37, seed=7)
    q, k, v, first, last, added = (Jax(driver.own(x)) for x in (*arrays, *bounds, bias))
    with computing(driver, problem_of(scoring)):
        o = module.attention(q, k, v, documents=(first, last), bias=added)
    values = {
        "document_begin": bounds[0],
        "document_end": bounds[1],
        "bias": np.broadcast_to(bias, (2, 4, 21, 37)),
    }
    assert isinstance(o, Jax)
    close(o.host, wanted(scoring, arrays, values).o)


def test_scales_of_eight_bits_stand_among_the_numbers(driver: Driver, tmp_path: Path) -> None:
    scoring = Scoring(window=(9, 2), softcap=2.0, sinks=True)
    module, struct = (
        load_scored(tmp_path, scoring, dtype="e4m3"),
        struct_of(problem_of(scoring, dtype="e4m3")),
    )
    launched: list[dict[str, float]] = []

    def keep(address: int, causal: int) -> None:
        launched.append(struct.unpack(ctypes.string_at(address, struct.num_bytes)))

    callback = LAUNCHED(keep)
    driver.library.fake_on_launch(callback)
    q, sinks = np.zeros((1, 2, 5, D), ml_dtypes.float8_e4m3fn), np.zeros(2, np.float32)
    module.attention(q, q, q, scales=(2.0, 3.0, 4.0), window=(7, 0), sinks=sinks)
    module.attention(q, q, q, sinks=sinks)
    driver.library.fake_on_launch(None)
    names = ("scale", "value_scale", "window_left", "window_right", "softcap")
    told = [[each[name] for name in names] for each in launched]
    assert told == [
        [pytest.approx(6 * D**-0.5), 4.0, 7, 0, 2.0],
        [pytest.approx(D**-0.5), 1.0, 9, 2, 2.0],
    ]


# ---- calls like one before


@pytest.fixture
def tensors(driver: Driver, torch: Any, arrays: Any) -> list[Tensor]:
    torch.grad = False
    driver.library.fake_push(PRIMARY)  # as torch leaves it
    return [Tensor(driver.own(x)) for x in arrays]


#: Kernels of some masks and changes of scores, what calls tell them, and the functions that a call like the
#: last enters on its way to what launches.
FEW: dict[str, tuple[Scoring, dict[str, Any], str]] = {
    "numbers": (
        Scoring(window=(9, 2), softcap=2.0),
        {"window": (4, 0)},
        "attention _either _named _served_by _key_of attend numbers",
    ),
    "an array": (
        Scoring(sinks=True),
        {},
        "attention _either _named _served_by _key_of _arrays_of _torch_of _is_pair _check_kinds _torch_of "
        "_sizes_of _shape_of _shape_of __init__ __init__ attend numbers values buffers _key_of_values "
        "_torch_of",
    ),
    "lists": (
        DILATED,
        {},
        "attention _either _named _served_by _key_of _arrays_of _torch_of _sizes_of _shape_of _shape_of "
        "__init__ __init__ attend numbers values buffers _key_of_values _lists_of _key_of_lists _torch_of "
        "_current_handle _is_captured key_of_lists find address _torch_of",
    ),
}


@pytest.mark.parametrize("name", FEW)
def test_a_call_like_the_last_enters_few_functions(
    name: str, driver: Driver, tmp_path: Path, tensors: Any
) -> None:
    """What a call costs its caller is mostly how many functions it enters: these, on every machine."""
    scoring, told, way = FEW[name]
    module = (load_with_lists if name == "lists" else load_scored)(tmp_path, scoring)
    read = {key: Tensor(driver.own(x)) for key, x in asked(scoring, drawn(scoring)).items()}

    def call() -> None:
        module.attention(*tensors, **told, **read)

    with computing(driver, problem_of(scoring)):
        call()
        call()  # of lists that are there, other launches are made
        entered = functions_entered(call, (module.__file__,))
    # Comprehensions are functions before Python 3.12.
    named = [each for each in entered if not each.startswith("<")]
    launching = ["_run", "_current_handle", "_launch", *["steps_for"] * (name == "lists"), "launched"]
    assert named == [*way.split(), *launching]


def test_calls_are_told_apart_by_all_that_kernels_read(
    driver: Driver, tmp_path: Path, torch: Any, tensors: Any
) -> None:
    scoring = Scoring(window=(9, 2), bias="f32", score="score * t + u[k] * w[q]", scalars=(("t", 0.5),))
    module, arrays = load_scored(tmp_path, scoring), [x.host for x in tensors]
    whole, row = host(2, 4, 21, 37, seed=4), host(37, seed=5)
    a, b, c = host(40, seed=6), host(40, seed=7), host(60, seed=8)
    told: list[dict[str, Any]] = [
        {"bias": whole, "u": a, "w": b},
        {"bias": whole, "u": b, "w": a},
        {"bias": row, "u": a, "w": b},
        {"bias": host(2, 4, 21, 37, seed=9), "u": a, "w": b},
        {"bias": np.broadcast_to(row, whole.shape), "u": a, "w": b},
        {"bias": host(2, 4, 37, 21, seed=4).swapaxes(2, 3), "u": a, "w": b},
        {"bias": whole, "u": c[::1], "w": c[:40]},
        {"bias": whole, "u": a, "w": b, "t": 2},
        {"bias": whole, "u": a, "w": b, "t": np.float32(0.25)},
        {"bias": whole, "u": a, "w": b, "t": np.float32(0.75)},
        {"bias": whole, "u": a, "w": b, "window": (3, None)},
        {"bias": whole, "u": a, "w": b, "window": (np.int64(5), 1)},
        {"bias": whole, "u": a, "w": b, "window": (np.int64(6), 1)},
    ]

    with computing(driver, problem_of(scoring)):
        for each in (*told, *told, *reversed(told)):
            left, right = each.get("window", (9, 2))
            values = {
                "window_left": left,
                "window_right": -1 if right is None else right,
                "t": float(each.get("t", 0.5)),
                "bias": np.broadcast_to(each["bias"], whole.shape),
                "u": each["u"][:37],
                "w": each["w"][:21],
            }
            given = {
                key: Tensor(driver.own(x)) if isinstance(x, np.ndarray) else x for key, x in each.items()
            }
            if given["bias"].stride()[-1] == 1:
                close(module.attention(*tensors, **given).host, wanted(scoring, arrays, values).o)
            else:
                with pytest.raises(ValueError, match="nothing is copied: pass a contiguous array"):
                    module.attention(*tensors, **given, stream=0)
    read = {key: Tensor(driver.own(x)) for key, x in told[0].items()}
    for wrong, message in (
        ({"window": (9.0, 2)}, "window is 9.0; it must be an integer"),
        ({"window": [9]}, r"window is \[9\]; pass \(left, right\)"),
        ({"t": "half"}, "t is 'half'; it must be a number"),
        (
            {"dilation": 2},
            "dilation= is nothing that the kernels here read; they take window=, bias=, u=, w=, t=",
        ),
        ({"u": Tensor(driver.own(host(40, seed=6, dtype=np.float16)))}, "u is float16"),
    ):
        with pytest.raises(TypeError, match=message):
            module.attention(*tensors, **{**read, **wrong})
    with pytest.raises(ValueError, match=r"window is -2; it must lie in -1"):
        module.attention(*tensors, **read, window=(-2, 0))
    with pytest.raises(ValueError, match=r"u has the shape \(36,\)"):
        module.attention(*tensors, **{**read, "u": Tensor(driver.own(host(36)))})
    with pytest.raises(ValueError, match="q is on device 0, bias on device 1"):
        module.attention(*tensors, **{**read, "bias": Tensor(driver.own(whole, 1), 1)})


# ---- lists of tiles


LISTED = Scoring(mask="doc[b, q] == doc[b, k]")
#: Named masks that read arrays.
MAKERS_OF_INTERVALS: dict[str, Any] = {"prefix": 20, "lengths": True, "documents": 4, "tree": True}


def test_lists_of_tiles_are_kept_as_long_as_the_caller_says(
    driver: Driver, tmp_path: Path, cupy: Any, arrays: Any
) -> None:
    module = load_with_lists(tmp_path, LISTED)
    doc = np.sort(np.random.default_rng(0).integers(0, 3, (2, 37))).astype(np.int32)
    q, k, v = (cupy.ndarray(driver.own(x), 1) for x in arrays)
    on_card, lists = cupy.ndarray(driver.own(doc), 1), module.TileLists()
    expected = wanted(LISTED, arrays, {"doc": doc}).o

    def launches(**others: Any) -> list[int]:
        """The threads of the blocks that a call launches."""
        before = len(driver.launches())
        close(module.attention(q, k, v, doc=on_card, **others).host, expected)
        return [each.threads for each in driver.launches()[before:]]

    with computing(driver, problem_of(LISTED)):
        assert launches() == launches() == [64, 128]
        assert launches(lists=lists) == [64, 128]
        memory = lists.memory
        assert launches(lists=lists) == launches(lists=lists, stream=1) == [128]
        # 3 lists of 8 rows, of two batches, of up to 3 tiles and their number.
        assert (
            lists.memory is memory
            and memory.host.shape == (2 * 3 * (1 + 3),)
            and memory.host.dtype == np.int32
        )
        module.attention(q, k, v, True, doc=on_card, lists=lists)
        assert len(driver.launches()) == 10 and lists.memory is not memory
        with pytest.raises(ValueError, match="beside stream= no memory is made for lists of tiles"):
            module.attention(q, k, v, doc=on_card, stream=1)
        driver.library.fake_fail_launch(2)
        with pytest.raises(RuntimeError, match="launching on stream"):
            module.attention(q, k, v, doc=on_card, lists=lists)
        driver.library.fake_fail_launch(0)
        assert launches(lists=lists) == [64, 128]
        close(module.attention(*arrays, doc=doc), expected)
    assert driver.library.fake_num_allocated() == 0


@pytest.fixture
def threads_of(driver: Driver) -> Any:
    """Says of how many threads the blocks are that a call launches: 64 of those that list tiles, then 128."""

    def found(call: Any) -> list[int]:
        before = len(driver.launches())
        call()
        return [each.threads for each in driver.launches()[before:]]

    return found


#: Calls whose lists follow from sizes and numbers: a kernel's masks and changes of scores, what is told in
#: each call, and another number.
BY_NUMBERS: dict[str, tuple[Scoring, dict[str, Any], dict[str, Any]]] = {
    "dilation": (DILATED, {"dilation": 2}, {"dilation": 5}),
    "expression": (Scoring(mask="(q - k) % n == 0", scalars=(("n", 4),)), {"n": 2}, {"n": 3}),
    "beside arrays of changes": (
        Scoring(dilation=3, alibi=True, sinks=True, bias="f32", score="score * t[h]"),
        {"dilation": 2},
        {"dilation": 3},
    ),
}


@pytest.mark.parametrize("name", BY_NUMBERS)
@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_lists_that_follow_from_numbers_are_made_once(
    kind: str, name: str, driver: Driver, tmp_path: Path, request: Any, arrays: Any, threads_of: Any
) -> None:
    scoring, told, others = BY_NUMBERS[name]
    module, library = load_with_lists(tmp_path, scoring), request.getfixturevalue(kind)
    values = drawn(scoring)

    def as_theirs(x: Any) -> Any:
        return Tensor(driver.own(x)) if kind == "torch" else library.ndarray(driver.own(x), library.current)

    if kind == "torch":
        library.grad = False
    read = {key: as_theirs(x) for key, x in asked(scoring, values).items()}
    q, k, v = map(as_theirs, arrays)

    def call(*given: Any, **numbers: Any) -> list[int]:
        return threads_of(lambda: module.attention(*(given or (q, k, v)), **{**told, **read, **numbers}))

    with computing(driver, problem_of(scoring)) as card:
        o = module.attention(q, k, v, **told, **read).host
        assert call() == call() == [128]
        again = module.attention(q, k, v, **told, **read).host
        assert len(set(card.list_addresses)) == 1 != card.list_addresses[0]
        expected = wanted(scoring, arrays, {**values, **(told if name == "expression" else {}), **told}).o
        close(o, expected)
        close(again, expected)
        assert (call(**others), call(**others), call()) == ([64, 128], [128], [128])
        assert (call(causal=True), call(causal=True), call()) == ([64, 128], [128], [128])
        few = [as_theirs(np.ascontiguousarray(each[:1])) for each in arrays]
        if name != "beside arrays of changes":
            assert (call(*few), call(*few), call()) == ([64, 128], [128], [128])
        # Those that the caller keeps are the caller's alone.
        lists = module.TileLists()
        assert (call(lists=lists), call(lists=lists)) == ([64, 128], [128])
        with pytest.raises(ValueError, match="beside stream= no memory is made for lists of tiles"):
            call(stream=0)


def test_lists_are_remembered_by_stream_and_not_of_graphs(
    driver: Driver, tmp_path: Path, torch: Any, arrays: Any, threads_of: Any
) -> None:
    module, torch.grad = load_with_lists(tmp_path, DILATED), False
    tensors = [Tensor(driver.own(x)) for x in arrays]

    def call(stream: int) -> list[int]:
        torch.current = stream
        return threads_of(lambda: module.attention(*tensors))

    with computing(driver, problem_of(DILATED)) as card:
        assert [call(stream) for stream in (5, 5, 0, 0)] == [[64, 128], [128]] * 2
        driver.library.fake_capture(5)
        assert [call(stream) for stream in (5, 5, 0)] == [[64, 128], [64, 128], [128]]
        # A graph's lists are its own, which no call reads that runs at once.
        of_graph = set(card.list_addresses[-5:-1])
        driver.library.fake_capture(7)
        assert [call(stream) for stream in (7, 5)] == [[64, 128], [128]]
        driver.library.fake_capture(-1)
        assert [call(stream) for stream in (7, 7)] == [[64, 128], [128]]
        assert len(of_graph) == 2
        assert card.list_addresses[0] not in of_graph
        # Handle 2 is another stream in each thread.
        assert [call(stream) for stream in (2, 2)] == [[64, 128]] * 2


def test_lists_of_a_call_that_failed_are_not_remembered(
    driver: Driver, tmp_path: Path, torch: Any, arrays: Any, threads_of: Any
) -> None:
    module, torch.grad = load_with_lists(tmp_path, DILATED), False
    tensors = [Tensor(driver.own(x)) for x in arrays]
    with computing(driver, problem_of(DILATED)):
        driver.library.fake_fail_launch(2)
        with pytest.raises(RuntimeError, match="launching on stream"):
            module.attention(*tensors)
        driver.library.fake_fail_launch(0)
        assert threads_of(lambda: module.attention(*tensors)) == [64, 128]
        assert threads_of(lambda: module.attention(*tensors)) == [128]


def test_what_is_remembered_of_lists_is_bounded(
    driver: Driver, tmp_path: Path, torch: Any, arrays: Any, threads_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, torch.grad = load_with_lists(tmp_path, DILATED), False
    tensors = [Tensor(driver.own(x)) for x in arrays]

    def made(*dilations: int) -> list[bool]:
        return [
            threads_of(lambda n=each: module.attention(*tensors, dilation=n)) == [64, 128]
            for each in dilations
        ]

    most = module._MOST_LISTS
    assert all(made(*range(1, most + 1))) and not any(made(*range(1, most + 1)))
    # The one that was read longest ago makes room.
    assert made(1, most + 1, 1, 2) == [False, True, False, True]
    assert len(module._LISTS._lists) == most
    # 3 lists of 8 rows, of up to 3 tiles and their number.
    monkeypatch.setattr(module, "_MOST_LIST_INTS", 3 * (1 + 3))
    assert made(50, 51, 51, 50) == [True, True, False, True]
    monkeypatch.setattr(module, "_MOST_LIST_INTS", 3 * (1 + 3) - 1)
    assert made(52, 52) == [True, True] and not module._LISTS._lists


@pytest.mark.parametrize(
    ("scoring", "stand"),
    [
        (DILATED, True),
        (Scoring(dilation=3, window=(9, 2), softcap=2.0), True),
        (Scoring(mask="(q - k) % n == 0", score="score * rel[h, k - q]", scalars=(("n", 4),)), True),
        (Scoring(mask="doc[b, q] == doc[b, k] or (q - k) % 4 == 0"), False),
        (
            Scoring(dilation=3, score="score * w[k]", mask="w[q] > 0.0 or q > k", buffers=(("w", "f32"),)),
            False,
        ),
        *((Scoring(dilation=3, **{name: value}), False) for name, value in MAKERS_OF_INTERVALS.items()),
        (Scoring(dilation=3, bias="f16"), True),
        (Scoring(bias="u8"), False),
    ],
)
def test_lists_stand_where_no_mask_reads_an_array(
    scoring: Scoring, stand: bool, driver: Driver, tmp_path: Path
) -> None:
    (tuned,) = load_scored(tmp_path, scoring).KERNELS
    assert tuned.lists_stand is stand


@pytest.mark.parametrize("layout", [{"varlen": "same"}, {"page_size": 16}])
def test_lists_of_sequences_follow_from_their_lengths(
    layout: dict[str, Any], driver: Driver, tmp_path: Path
) -> None:
    (tuned,) = load_scored(tmp_path, DILATED, **layout).KERNELS
    assert not tuned.lists_stand


# ---- as a program


@pytest.mark.parametrize("name", sampled(SCORINGS, 2))
def test_run_as_a_program_it_checks_itself(
    name: str, driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape: dict[str, Any] = {"batch": 1, "num_q_heads": 2, "num_kv_heads": 1, "seqlen_q": 64, "seqlen_k": 64}
    scoring = SCORINGS[name]
    module = load_scored(tmp_path, scoring, **shape)
    with computing(driver, problem_of(scoring, **shape)):
        assert module.run_scored_module(module._bound, module.__doc__) == 0, capsys.readouterr().out
    told = capsys.readouterr().out
    assert "Here, on Fake" in told and "TFLOP/s, error against float64" in told and "correct" in told
    assert module.run_scored_module(module._bound, module.__doc__) == 1  # plain attention in its place
    assert "WRONG" in capsys.readouterr().out


# ---- several kernels


def test_only_what_computes_just_what_is_named_serves(driver: Driver, tmp_path: Path, arrays: Any) -> None:
    kinds = (Scoring(), WINDOW, Scoring(window=(9, 2), sinks=True), BIAS, Scoring(bias="u8"))
    module = load_scored(tmp_path, *kinds, name="several")
    half, mask, sinks = np.zeros((21, 37), np.float16), np.ones((21, 37), bool), np.zeros(4, np.float32)

    def chosen(**named: Any) -> int:
        return module.explain(*arrays, **named).tuned.launches[0].threads // 32

    assert [
        chosen(),
        chosen(window=(3, 0)),
        chosen(window=(3, 0), sinks=sinks),
        chosen(bias=half),
        chosen(attn_mask=mask),
    ] == [1, 2, 3, 4, 5]
    message = r"no kernel here serves sinks= in these types; there are kernels for: nothing; window=; window="
    with pytest.raises(TypeError, match=message):
        module.attention(*arrays, sinks=sinks)
    with pytest.raises(TypeError, match=r"serves bias= in these types"):
        module.attention(*arrays, bias=half.astype(np.float32))
    with computing(driver, problem_of(WINDOW)):
        close(
            module.attention(*arrays, window=(9, 2)),
            wanted(WINDOW, arrays, {"window_left": 9, "window_right": 2}).o,
        )
    close(module.attention(*arrays), reference.attention(*arrays, scale=D**-0.5).o)
    module.use(module.KERNELS[1].name)
    assert chosen(window=(3, 0)) == 2
    module.use(None)


def test_the_nearest_in_numbers_serves(driver: Driver, tmp_path: Path, arrays: Any) -> None:
    narrow, wide = Scoring(window=(15, 0)), Scoring(window=(1023, 0))
    module = load_scored(tmp_path, narrow, wide, name="several")
    names = [each.name for each in module.KERNELS]
    assert module.explain(*arrays, window=(20, 0)).tuned.name == names[0]
    assert module.explain(*arrays, window=(500, 0)).tuned.name == names[1]
    assert module.explain(*arrays, window=(-1, 0)).tuned.name == names[1]
    with pytest.raises(TypeError, match=r"no kernel here serves nothing|window= is missing"):
        module.attention(*arrays)
    problem = module.KERNELS[0].problem
    shape = (problem["batch"], problem["num_q_heads"], problem["seqlen_q"], D)
    exact = [np.broadcast_to(np.float32(0), shape)] * 3
    assert module.explain(*exact, window=(15, 0)).exact
    assert not module.explain(*exact, window=(14, 0)).exact
    with pytest.raises(LookupError, match=r"nothing was tuned for just this.*but for window_left 15"):
        module.attention(*exact, window=(14, 0), strict=True)


def test_kernels_that_a_call_cannot_tell_apart_make_no_module(tmp_path: Path) -> None:
    one, other = Scoring(mask="doc[b, q] == doc[b, k]"), Scoring(mask="doc[b, q] > doc[b, k]")
    with pytest.raises(ValueError, match="are told by the same arguments; make a module of each"):
        load_scored(tmp_path, one, other)
