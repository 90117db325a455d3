"""Emitted modules of kernels of keys in pages, without a GPU.

The driver is the stand-in of `test_module`; a launch computes in float64 what the problem asks of each
sequence, of the caches, tables and lengths that its arguments lead to.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.arguments import describe_maps, make_arguments, struct_of
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module, emit_thin_module
from flashgen.gen.handover.plan import Plan
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch as GridOf
from flashgen.gen.launch import TensorMap
from flashgen.gen.layout import knows_page_size
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.evaluate import reference
from flashgen.tuner.shelf.module_text import read_module

from tests.support.formatting import assert_ruff_is_content
from tests.support.modules import import_path
from tests.support.stand_in_driver import D, Driver, Jax, Tensor, Wide, host
from tests.templates import scored_kernels
from tests.templates.scored_kernels import LAUNCHED, _read

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

#: Keys of the sequences, two of which share a page, and the pages of a cache whose first nobody has.
K_LENGTHS, PAGE_SIZE, NUM_PAGES, MAX_PAGES = (37, 12, 5, 0), 8, 9, 6
TABLE = np.array([[3, 7, 1, 8, 2, -9], [3, 5, 0, 0, 0, 0], [6, 99, 0, 0, 0, 0], [0] * 6], np.int32)
#: Rows of each where all have as many, and of packed queries.
ROWS, Q_LENGTHS = 5, (21, 1, 0, 7)
HEADS, KV_HEADS, BATCH = 4, 2, 4


def kernel_of(varlen: str = "", maps: tuple[TensorMap, ...] = (), **problem: Any) -> Kernel:
    usual = {"head_dim": D, "batch": BATCH, "seqlen_q": 21, "seqlen_k": 37, "page_size": PAGE_SIZE}
    wanted = Problem(**{**usual, "varlen": varlen, **problem})
    main = GridOf(64, 4096, 32, packed=bool(varlen), tensor_maps=maps)
    launches = (Plan(main).launch, main) if varlen else (main,)
    return Kernel(wanted, Wide(), 90, "// by hand\n", f"attention_{wanted.stem}", launches)


def load(path: Path, varlen: str = "", **problem: Any) -> Any:
    (path / "best.py").write_text(emit_module(kernel_of(varlen, **problem), device="H200", name="best"))
    return import_path(path / "best.py")


class Card:
    """What launches were told, and what they computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.told: list[dict[str, float]] = []

    def launch(self, address: int, causal: int) -> None:
        struct = struct_of(self.problem)
        told = struct.unpack(ctypes.string_at(address, struct.num_bytes))
        self.told.append(told)
        problem, packed = replace(self.problem, causal=bool(causal)), self.problem.layout.is_packed
        batch, most = int(told["batch"]), int(told["seqlen_k"])
        table = _read(
            int(told["page_table"]),
            (batch, int(told["max_pages"])),
            (int(told["page_table_stride"]), 1),
            np.int32,
        )
        used = self._ints(told["seqused_k"], batch, most)
        starts = self._ints(told["cu_seqlens_q"], batch + 1, 0) if packed else None
        q, o = (self._queries(told, name) for name in "qo")
        caches = [self._cache(told, name) for name in ("k" if problem.latent else "kv")]
        caches += [caches[0][..., : problem.head_dim_v]] * problem.latent
        lse = self._lse(told)
        values = scored_kernels.Card(problem).read(problem.scores, told)
        by_batch = {each.name for each in problem.scores.buffers if "batch" in each.axes[0]}
        for i in range(batch):
            keys = np.arange(min(max(int(used[i]), 0), most))
            pages = np.clip(table[i, keys // int(told["page_size"])], 0, int(told["num_pages"]) - 1)
            k, v = (each[pages, :, keys % int(told["page_size"])].swapaxes(0, 1)[None] for each in caches)
            part = (slice(starts[i], starts[i + 1]),) if starts is not None else (i,)
            rows = q[part] if packed else q[i].swapaxes(0, 1)
            if not len(rows):
                continue
            own = {name: x[i : i + 1] if name in by_batch else x for name, x in values.items()}
            found = reference.attention(
                rows.swapaxes(0, 1)[None], k, v, scale=told["scale"], scores=problem.scores, values=own
            )
            o[part] = found.o[0].swapaxes(0, 1) if packed else found.o[0]
            if lse is not None and packed:
                lse[:, part[0]] = found.lse[0]
            elif lse is not None:
                lse[i] = found.lse[0]

    def _ints(self, address: float, count: int, otherwise: int) -> np.ndarray:
        return _read(int(address), (count,), (1,), np.int32) if address else np.full(count, otherwise)

    def _queries(self, told: dict[str, float], name: str) -> np.ndarray:
        head, row = (int(told[f"{name}_stride_{axis}"]) for axis in ("head", "row"))
        heads, columns = int(told["num_q_heads"]), D if name == "q" else self.problem.head_dim_v
        if self.problem.layout.is_packed:
            return _read(int(told[name]), (int(told["total_q"]), heads, columns), (row, head, 1), np.float32)
        shape = (int(told["batch"]), heads, int(told["seqlen_q"]), columns)
        return _read(int(told[name]), shape, (int(told[f"{name}_stride_batch"]), head, row, 1), np.float32)

    def _cache(self, told: dict[str, float], name: str) -> np.ndarray:
        shape = (int(told["num_pages"]), int(told["num_kv_heads"]), int(told["page_size"]), D)
        strides = (*(int(told[f"{name}_stride_{axis}"]) for axis in ("page", "head", "row")), 1)
        return _read(int(told[name]), shape, strides, np.float32)

    def _lse(self, told: dict[str, float]) -> np.ndarray | None:
        if not told["lse"]:
            return None
        heads, packed = int(told["num_q_heads"]), self.problem.layout.is_packed
        shape = (
            (heads, int(told["total_q"])) if packed else (int(told["batch"]), heads, int(told["seqlen_q"]))
        )
        strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        return _read(int(told["lse"]), shape, strides, np.float32)


@contextmanager
def computing(driver: Driver, problem: Problem) -> Iterator[Card]:
    card = Card(problem)
    callback = LAUNCHED(card.launch)
    driver.library.fake_on_launch(callback)
    try:
        yield card
    finally:
        driver.library.fake_on_launch(None)


def offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def caches() -> list[np.ndarray]:
    """Of (pages, page_size, kv_heads, head_dim)."""
    return [host(NUM_PAGES, PAGE_SIZE, KV_HEADS, D, seed=seed) for seed in (1, 2)]


def queries(varlen: str = "") -> np.ndarray:
    """Of (batch, heads, rows, head_dim), or (all rows, heads, head_dim)."""
    return host(sum(Q_LENGTHS), HEADS, D) if varlen else host(BATCH, HEADS, ROWS, D)


def used() -> np.ndarray:
    return np.array(K_LENGTHS, np.int32)


def said(varlen: str = "") -> dict[str, Any]:
    return {"cu_seqlens_q": offsets(Q_LENGTHS), "max_seqlen_q": 21} if varlen else {}


def wanted(
    problem: Problem, q: np.ndarray, causal: bool = False, scale: float = D**-0.5
) -> tuple[np.ndarray, np.ndarray]:
    """What each sequence comes to by itself, and its log-sum-exp, laid out as of such queries."""
    packed = q.ndim == 3
    o = np.zeros_like(q)
    lse = np.zeros((HEADS, len(q)) if packed else (BATCH, HEADS, ROWS), np.float32)
    values = {each.name: problem.scoring.softcap for each in problem.scores.scalars}
    cached = [each.swapaxes(1, 2) for each in caches()]
    starts = offsets(Q_LENGTHS)
    for i, length in enumerate(K_LENGTHS):
        pages = TABLE[i, : -(-length // PAGE_SIZE)]
        k, v = (each[pages].swapaxes(0, 1).reshape(KV_HEADS, -1, D)[None, :, :length] for each in cached)
        rows = slice(starts[i], starts[i + 1])
        part = q[rows].swapaxes(0, 1)[None] if packed else q[i : i + 1]
        if not part.shape[2]:
            continue
        scores = replace(problem, causal=causal).scores
        found = reference.attention(part, k, v, scale=scale, scores=scores, values=values)
        if packed:
            o[rows], lse[:, rows] = found.o[0].swapaxes(0, 1), found.lse[0]
        else:
            o[i], lse[i] = found.o[0], found.lse[0]
    return o, lse


def close(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("varlen", ["", "same"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(softcap=2.0)])
def test_numpy_arrays(driver: Driver, tmp_path: Path, scoring: Scoring, causal: bool, varlen: str) -> None:
    module, q = load(tmp_path, varlen, scoring=scoring), queries(varlen)
    problem = kernel_of(varlen, scoring=scoring).problem
    told = {**said(varlen), **({} if scoring.is_plain else {"softcap": 2.0})}
    with computing(driver, problem):
        o, lse = module.attention_paged(q, *caches(), TABLE, used(), causal=causal, return_lse=True, **told)
    expected = wanted(problem, q, causal)
    close(o, expected[0])
    close(lse, expected[1])
    assert driver.library.fake_num_allocated() == 0


SLOPES, ENDS = np.array([0.5, 0.1, 2.0, 0.0], np.float32), np.array([[20], [7], [3], [1]], np.int32)


@pytest.mark.parametrize("varlen", ["", "same"])
@pytest.mark.parametrize(
    ("scoring", "passed", "read"),
    [
        (Scoring(bias="f32"), {"bias": np.full((1, 1), 0.5, np.float32)}, {"bias": np.full((1,) * 4, 0.5)}),
        (Scoring(alibi=True), {"alibi_slopes": SLOPES}, {"slopes": SLOPES[None]}),
        (Scoring(mask="k < end[b, h]"), {"end": ENDS}, {"end": ENDS.repeat(HEADS, 1)}),
    ],
    ids=["bias", "alibi", "expression"],
)
def test_numpy_arrays_that_scores_read(
    driver: Driver, tmp_path: Path, scoring: Scoring, passed: Any, read: Any, varlen: str
) -> None:
    """Those of fewer entries than there are heads, rows or keys, too."""
    module, q = load(tmp_path, varlen, scoring=scoring), queries(varlen)
    problem = kernel_of(varlen, scoring=scoring).problem
    with computing(driver, problem):
        o = module.attention_paged(q, *caches(), TABLE, used(), **said(varlen), **passed)
    starts = offsets(Q_LENGTHS)
    for i, length in enumerate(K_LENGTHS):
        pages = TABLE[i, : -(-length // PAGE_SIZE)]
        k, v = (x[pages].transpose(2, 0, 1, 3).reshape(1, KV_HEADS, -1, D)[:, :, :length] for x in caches())
        rows = q[starts[i] : starts[i + 1]].swapaxes(0, 1)[None] if varlen else q[i : i + 1]
        shape = (1, HEADS, rows.shape[2], length)
        values = {name: x[i : i + 1] if len(x) == BATCH else x for name, x in read.items()}
        values = {name: np.broadcast_to(x, shape) if x.ndim == 4 else x for name, x in values.items()}
        found = reference.attention(rows, k, v, scale=D**-0.5, scores=problem.scores, values=values).o[0]
        close(o[starts[i] : starts[i + 1]].swapaxes(0, 1) if varlen else o[i], found)


@pytest.mark.parametrize("varlen", ["", "same"])
def test_what_kernels_are_told(driver: Driver, tmp_path: Path, torch: Any, varlen: str) -> None:
    """Caches with heads first, views of one array, a table with gaps between its rows."""
    module, q = load(tmp_path, varlen), queries(varlen)
    both = driver.own(np.stack([each.swapaxes(1, 2) for each in caches()], 1))
    gaps = driver.own(np.full((BATCH, MAX_PAGES + 3), 12345, np.int32))
    gaps[:, :MAX_PAGES] = TABLE
    told = {
        name: Tensor(driver.own(x)) if isinstance(x, np.ndarray) else x for name, x in said(varlen).items()
    }
    tensors = [Tensor(each) for each in (driver.own(q), both[:, 0], both[:, 1], gaps[:, :MAX_PAGES])]
    lengths = Tensor(driver.own(used()))
    with computing(driver, kernel_of(varlen).problem) as card:
        o, lse = module.attention_paged(
            *tensors, lengths, **told, kv_layout="HND", max_seqlen_k=40, scale=0.3, return_lse=True
        )
    expected = wanted(kernel_of().problem, q, scale=0.3)
    close(o.host, expected[0])
    close(lse.host, expected[1])
    told = card.told[-1]
    sizes = ("batch", "seqlen_k", "num_pages", "page_size", "max_pages", "page_table_stride")
    assert [told[name] for name in sizes] == [BATCH, 40, NUM_PAGES, PAGE_SIZE, MAX_PAGES, MAX_PAGES + 3]
    assert (
        told["k_stride_page"] == 2 * KV_HEADS * PAGE_SIZE * D
        and told["v"] - told["k"] == 2 * told["k_stride_page"]
    )
    assert len(driver.launches()) == (2 if varlen else 1)


@pytest.mark.parametrize("varlen", ["", "same"])
def test_maps_clip_pages_where_sequences_end(driver: Driver, tmp_path: Path, torch: Any, varlen: str) -> None:
    """They are those that the emulated card and the tuner's make; pages are of the kernel's size alone."""
    maps = tuple(TensorMap(name, 8, D, 128, 256) for name in "qkvo")
    kernel = kernel_of(varlen, maps, head_dim=D)
    module, q = load(tmp_path, varlen, maps=maps), queries(varlen)
    told = {
        name: Tensor(driver.own(x)) if isinstance(x, np.ndarray) else x for name, x in said(varlen).items()
    }
    given = [Tensor(driver.own(x)) for x in (q, *caches(), TABLE, used())]
    if varlen:
        told["plan"] = module.SequencePlan()
    with computing(driver, kernel.problem) as card:
        if varlen:
            module.attention_paged(*given, **told)
        driver.library.fake_maps(4)  # of the main launch alone, as the plan stands
        module.attention_paged(*given, **told)
    main, values = driver.launches()[-1], card.told[-1]
    problem, layout = kernel.problem, kernel.problem.layout
    strided = problem.operation.strided
    arguments = make_arguments(
        problem,
        {each.name: int(values[each.name]) for each in strided},
        {
            each.name: (0, 0, *(int(values[f"{each.name}_stride_{a}"]) for a in layout.axes_of(each.rows)))[
                -3:
            ]
            for each in strided
        },
        scale=1.0,
        sizes={name: int(values[name]) for name in layout.sizes},
    )
    for made, each in zip(main.maps, describe_maps(kernel.launch, problem, arguments), strict=True):
        sizes, strides = (*made.sizes, made.outer_size), (*made.stride_bytes, made.outer_stride_bytes)
        rank = len(each.sizes)
        assert (made.address, sizes[:rank], strides[: rank - 1]) == (each.address, each.sizes, each.strides)
        assert rank == (5 if each.array in "kv" or varlen else 4) and sizes[rank:] in ((), (0,))
    with pytest.raises(ValueError, match=r"pages of 4 keys, and .* takes pages of 8"):
        others = [Tensor(driver.own(x.reshape(18, 4, KV_HEADS, D))) for x in caches()]
        module.attention_paged(given[0], *others, *given[3:], **told)


def test_lengths_may_be_left_out(driver: Driver, tmp_path: Path, torch: Any) -> None:
    """Then all sequences have as many keys as a row of the table has room for, or as they are told."""
    module = load(tmp_path)
    table = np.arange(8, dtype=np.int32).reshape(4, 2)
    given = [Tensor(driver.own(x)) for x in (queries(), *caches(), table)]
    with computing(driver, kernel_of().problem) as card:
        whole = module.attention_paged(*given)
        part = module.attention_paged(*given, max_seqlen_k=9)
    assert [told["seqlen_k"] for told in card.told] == [16, 9]
    assert all(told["seqused_k"] == 0 for told in card.told)
    assert not np.allclose(whole.host, part.host)


def test_queries_by_rows(driver: Driver, tmp_path: Path) -> None:
    q = queries()
    module = load(tmp_path)
    with computing(driver, kernel_of().problem):
        o, lse = module.attention_paged(
            np.ascontiguousarray(q.swapaxes(1, 2)), *caches(), TABLE, used(), layout="bshd", return_lse=True
        )
    expected = wanted(kernel_of().problem, q)
    close(o.swapaxes(1, 2), expected[0])
    close(lse, expected[1])


def test_arrays_of_other_libraries(driver: Driver, tmp_path: Path, cupy: Any) -> None:
    module, q = load(tmp_path), queries()
    given = (q, *caches(), TABLE, used())
    placed = [cupy.ndarray(driver.own(x)) for x in given]
    with computing(driver, kernel_of().problem):
        close(module.attention_paged(*placed).host, wanted(kernel_of().problem, q)[0])

    class Shaped(Jax):
        shape = property(lambda self: self.host.shape)

    cupy.from_dlpack = lambda array: cupy.ndarray(driver.own(array.host)) if isinstance(array, Jax) else array
    with computing(driver, kernel_of().problem):
        close(module.attention_paged(*(Shaped(x) for x in given)).host, wanted(kernel_of().problem, q)[0])


def test_beside_a_stream_nothing_is_made(driver: Driver, tmp_path: Path, torch: Any) -> None:
    module, q = load(tmp_path, "same"), queries("same")
    given = [Tensor(driver.own(x)) for x in (q, *caches(), TABLE, used())]
    told = {"cu_seqlens_q": Tensor(driver.own(offsets(Q_LENGTHS))), "max_seqlen_q": 21}
    out, plan = Tensor(driver.own(np.zeros_like(q))), module.SequencePlan()
    with computing(driver, kernel_of("same").problem) as card:
        with pytest.raises(ValueError, match="no memory is made for the plan of 4 sequences"):
            module.attention_paged(*given, **told, out=out, stream=7)
        module.attention_paged(*given, **told, plan=plan, out=out)
        memory = plan.memory
        module.attention_paged(*given, **told, plan=plan, out=out, stream=7)
        plan.forget()
        module.attention_paged(*given, **told, plan=plan, out=out, stream=7)
        assert plan.memory is memory
    assert [each["plan_made"] for each in card.told] == [0, 0, 1, 0, 0]
    close(out.host, wanted(kernel_of().problem, q)[0])


def test_caches_are_never_copied(driver: Driver, tmp_path: Path, torch: Any) -> None:
    """What the kernel cannot step by is refused, as a cache is too large to be laid out anew."""
    module = load(tmp_path)
    odd = driver.own(np.zeros((NUM_PAGES, PAGE_SIZE, KV_HEADS, D + 1), np.float32))[..., :D]
    given = [
        Tensor(driver.own(queries())),
        Tensor(odd),
        Tensor(odd),
        *(Tensor(driver.own(x)) for x in (TABLE, used())),
    ]
    with pytest.raises(ValueError, match=r"k starts at address .* strides that are multiples of 4"):
        module.attention_paged(*given)
    assert not driver.launches()


_SOME = caches()
_WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"page_table": TABLE[:3]}, ValueError, "page_table of 3, seqused_k of 4"),
    ({"page_table": TABLE[0]}, ValueError, r"has the shape \(6,\), but must be \(batch, max_pages\)"),
    ({"page_table": TABLE.astype(np.int64)}, TypeError, "page_table is int64, and kernels read int32: pass"),
    (
        {"page_table": TABLE + 2},
        ValueError,
        r"page 9 at sequence 0, place 1, .* cache has 9 pages: .* 0\.\.8",
    ),
    ({"page_table": TABLE - 2}, ValueError, "has page -1 at sequence 0, place 2"),
    (
        {"page_table": TABLE[:, :4]},
        ValueError,
        "is 37 at sequence 0, and there is room for 32 keys, in 4 pages",
    ),
    ({"seqused_k": [37, -1, 5, 0]}, ValueError, r"seqused_k is -1 at sequence 1, .* 0\.\.48"),
    ({"max_seqlen_k": 36}, ValueError, "seqused_k is 37 at sequence 0, and there is room for 36 keys"),
    (
        {"max_seqlen_k": 49},
        ValueError,
        "max_seqlen_k is 49, and page_table has room for 48 keys, 6 pages of 8",
    ),
    ({"max_seqlen_k": 3.0}, TypeError, "max_seqlen_k is a builtins.float; pass an int"),
    ({"q": queries()[:3]}, ValueError, "q has the batch 3, page_table lists the pages of 4 sequences"),
    ({"q": queries()[0]}, ValueError, "q has 3 dimensions"),
    ({"k_cache": _SOME[0][0]}, ValueError, r"3 dimensions.* \(pages, page_size, kv_heads, head_dim\)"),
    ({"v_cache": _SOME[1][:4]}, ValueError, r"kv_heads, page_size\): \(9, 2, 8\) and \(4, 2, 8\)"),
    ({"v_cache": _SOME[1].astype(np.float16)}, TypeError, "v is float16, not float32"),
    ({name: _SOME[0][:, :, [0, 1, 1]] for name in ("k_cache", "v_cache")}, ValueError, "must divide q's"),
    (
        dict.fromkeys(("k_cache", "v_cache"), _SOME[0][:0]),
        ValueError,
        "page_table has page 3 at sequence 0",
    ),
    ({"kv_layout": "NDH"}, ValueError, "kv_layout is 'NDH'; choose 'NHD' or 'HND'"),
    (
        {"cu_seqlens_q": offsets(Q_LENGTHS)},
        TypeError,
        "cu_seqlens_q= tells of packed queries, and .* a batch",
    ),
    ({"max_seqlen_q": 5}, TypeError, "max_seqlen_q= tells of packed queries"),
    ({"window": (3, 0)}, TypeError, "window= is nothing that this kernel reads"),
]


def test_what_a_call_may_not_say(driver: Driver, tmp_path: Path) -> None:
    module, (k_cache, v_cache) = load(tmp_path), caches()
    usual = {"q": queries(), "k_cache": k_cache, "v_cache": v_cache, "page_table": TABLE, "seqused_k": used()}
    for change, error, message in _WRONG:
        told = usual | {
            name: np.asarray(value, np.int32) if isinstance(value, list) else value
            for name, value in change.items()
        }
        with pytest.raises(error, match=message):
            module.attention_paged(**told)
        assert not driver.launches() and driver.library.fake_num_allocated() == 0


def test_packed_queries_are_told_of(driver: Driver, tmp_path: Path) -> None:
    module, q = load(tmp_path, "same"), queries("same")
    given = (q, *caches(), TABLE, used())
    with pytest.raises(
        TypeError, match=r"cu_seqlens_q= is missing: .* takes packed queries and keys in pages"
    ):
        module.attention_paged(*given)
    with pytest.raises(TypeError, match="max_seqlen_q= is missing"):
        module.attention_paged(*given, cu_seqlens_q=offsets(Q_LENGTHS))
    falls = np.array([0, 21, 20, 28, 29], np.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q falls from 21 to 20 at sequence 1"):
        module.attention_paged(*given, cu_seqlens_q=falls, max_seqlen_q=21)
    with pytest.raises(ValueError, match=r"q has 4 .*; 3 are needed"):
        module.attention_paged(queries(), *given[1:], **said("same"))
    assert not driver.launches()


def test_pages_of_another_size(driver: Driver, tmp_path: Path) -> None:
    """A kernel that knows its pages' size refuses others; one that does not takes any."""

    given = (queries(), *(x.reshape(18, 4, KV_HEADS, D) for x in caches()))
    table = (2 * TABLE[:, :, None].clip(0, 8) + np.arange(2, dtype=np.int32)).reshape(BATCH, -1)
    for bc, known in ((4, True), (3, False)):
        text = emit_module(replace(kernel_of(), variant=Wide(bc=bc)), device="H200", name="best")
        (tmp_path / f"best_{bc}.py").write_text(text)
        module = import_path(tmp_path / f"best_{bc}.py")
        assert knows_page_size(PAGE_SIZE, bc) == known
        with computing(driver, kernel_of().problem):
            if known:
                with pytest.raises(
                    ValueError, match=r"pages of 4 keys, and .* takes pages of 8: .*--page-size 4"
                ):
                    module.attention_paged(*given, table, used())
            else:
                close(
                    module.attention_paged(*given, table, used()), wanted(kernel_of().problem, queries())[0]
                )


def test_as_flash_attn_has_it_with_a_cache(driver: Driver, tmp_path: Path, torch: Any) -> None:
    q = queries()
    given = [Tensor(driver.own(x)) for x in (np.ascontiguousarray(q.swapaxes(1, 2)), *caches())]
    told = {"block_table": Tensor(driver.own(TABLE)), "cache_seqlens": Tensor(driver.own(used()))}
    problem = kernel_of(scoring=Scoring(softcap=2.0)).problem
    module = load(tmp_path, scoring=Scoring(softcap=2.0))
    attend = module.flash_attn_with_kvcache
    with computing(driver, problem) as card:
        out, lse = attend(
            *given, **told, softmax_scale=0.2, causal=True, softcap=2.0, return_softmax_lse=True
        )
        close(out.host.swapaxes(1, 2), wanted(problem, q, True, 0.2)[0])
        close(lse.host, wanted(problem, q, True, 0.2)[1])
        attend(*given, **{**told, "cache_seqlens": 7}, softcap=2.0)
        assert (card.told[-1]["seqlen_k"], card.told[-1]["seqused_k"]) == (7, 0)
    new = Tensor(driver.own(host(BATCH, 1, KV_HEADS, D)))
    with pytest.raises(
        ValueError, match=r"k= asks for new keys .* write them into their pages first.* k=, v= out"
    ):
        attend(*given, new, new, **told, softcap=2.0)
    with pytest.raises(ValueError, match=r"rotary_cos= asks for new keys"):
        attend(*given, rotary_cos=new, **told, softcap=2.0)
    with pytest.raises(ValueError, match="cache_batch_idx= is of caches without pages"):
        attend(*given, cache_batch_idx=told["cache_seqlens"], **told, softcap=2.0)
    with pytest.raises(ValueError, match="q has the batch 4, and the caches have 9 slots"):
        attend(*given, cache_seqlens=told["cache_seqlens"], softcap=2.0)
    with pytest.raises(ValueError, match="num_splits is -1"):
        attend(*given, **told, num_splits=-1)


@pytest.mark.parametrize("chosen", [None, np.array([4, 1, 0, 3], np.int64)])
def test_slots_of_a_dense_cache_are_pages(driver: Driver, tmp_path: Path, chosen: np.ndarray | None) -> None:
    """As flash-attn has it without a block_table: each sequence has a slot, or that which is named."""
    module, problem = load(tmp_path), kernel_of().problem
    q = host(BATCH, ROWS, HEADS, D)
    slots = BATCH if chosen is None else 6
    k, v = (host(slots, 5 * PAGE_SIZE, KV_HEADS, D, seed=seed) for seed in (1, 2))
    of = np.arange(BATCH) if chosen is None else chosen
    with computing(driver, problem) as card:
        out = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=used(), cache_batch_idx=chosen)
        assert [card.told[0][name] for name in ("max_pages", "num_pages")] == [5, 5 * slots]
    for at, length in enumerate(K_LENGTHS):
        keys, values = (each[of[at], :length].swapaxes(0, 1)[None] for each in (k, v))
        found = reference.attention(
            q[at].swapaxes(0, 1)[None], keys, values, scale=D**-0.5, scores=problem.scores
        )
        close(out[at].swapaxes(0, 1), found.o[0])
    attend = functools.partial(module.flash_attn_with_kvcache, q, cache_seqlens=used(), cache_batch_idx=of)
    with pytest.raises(ValueError, match=r"slots have room for 39 keys, and .* takes pages of 8: make room"):
        attend(k[:, 1:], v[:, 1:])
    with pytest.raises(ValueError, match=r"k_cache has gaps between its slots, .*: pass a block_table="):
        attend(k[:, 8:], v[:, 8:])
    with pytest.raises(ValueError, match="k_cache has 3 dimensions"):
        attend(k[0], v[0])


def test_as_flash_attn_has_it_with_packed_queries(driver: Driver, tmp_path: Path, torch: Any) -> None:
    q, module = queries("same"), load(tmp_path, "same")
    q_starts, k_starts = offsets(Q_LENGTHS), offsets(K_LENGTHS)
    given = [Tensor(driver.own(x)) for x in (q, *caches(), q_starts)]
    keys, table = Tensor(driver.own(used())), Tensor(driver.own(TABLE))
    attend = module.flash_attn_varlen_func
    with computing(driver, kernel_of("same").problem):
        told = {"block_table": table, "seqused_k": keys, "return_attn_probs": True}
        out, lse, _ = attend(*given, None, 21, 48, 0.0, 0.2, True, **told)
    expected = wanted(kernel_of().problem, q, True, 0.2)
    close(out.host, expected[0])
    close(lse.host, expected[1])
    with pytest.raises(ValueError, match="both count keys: pass one of them"):
        attend(*given, Tensor(driver.own(k_starts)), 21, 48, **told)
    with pytest.raises(ValueError, match="block_table= is missing"):
        attend(*given, None, 21, 48)


def test_which_kernel_serves(driver: Driver, tmp_path: Path) -> None:
    module = load(tmp_path)
    assert "the only kernel here" in str(module.explain(queries(), *caches()))
    with pytest.raises(ValueError, match="head dim 16"):
        module.explain(queries()[..., :16], *caches())


@pytest.mark.parametrize(("varlen", "scoring"), [("", Scoring()), ("same", Scoring(softcap=2.0))])
def test_it_checks_itself_when_it_is_run(
    driver: Driver, tmp_path: Path, capsys: Any, varlen: str, scoring: Scoring
) -> None:
    few: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "batch": 2, "seqlen_q": 3}
    module = load(tmp_path, varlen, scoring=scoring, **few)
    with computing(driver, kernel_of(varlen, scoring=scoring).problem):
        assert module.run_paged_module(module._bound, module.__doc__) == 0
    assert ": correct" in capsys.readouterr().out


@pytest.mark.parametrize("varlen", ["", "same"])
def test_a_module_is_read_back(tmp_path: Path, varlen: str) -> None:
    kernel = kernel_of(varlen)
    text = emit_module(kernel, device="H200", name="best")
    ((read, device, _),) = read_module(tmp_path / "best.py", text)
    assert (read.problem, read.launches, device) == (kernel.problem, kernel.launches, "H200")
    made = [Made(kernel, "H200", None), Made(kernel_of(varlen, causal=True), "H200", None)]
    with pytest.raises(ValueError, match="takes keys in pages, as calls of several kernels do not"):
        emit_many(made, name="both", command=())
    assert "paged_attention import PagedAttention" in emit_thin_module(kernel, device="H200")


@pytest.mark.thorough
@pytest.mark.parametrize("varlen", ["", "same"])
def test_a_module_is_clean_and_typed(tmp_path: Path, varlen: str) -> None:
    text = emit_module(kernel_of(varlen, scoring=Scoring(softcap=2.0)), device="H200", name="best")
    (tmp_path / "best.py").write_text(text)
    assert_ruff_is_content(tmp_path / "best.py")
    mypy = shutil.which("mypy", path=str(Path(sys.executable).parent)) or shutil.which("mypy")
    if mypy is None:
        pytest.skip("mypy is not installed")
    command = [mypy, "--strict", "--no-error-summary", "best.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
