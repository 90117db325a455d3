"""What a user would pick instead: calls on torch tensors of PyTorch's attention with each backend forced, of
FlexAttention, of the unfused form, and of other libraries where they are installed.

Nothing here imports torch by itself: its module is handed in, in a process that has a card to spare.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from math import sqrt
from typing import Any

from ...gen.layout import DENSE, PACKED, PACKED_PAGED, PAGED, Layout
from ...gen.problem import Problem
from ...gen.scoring.asked import Scoring
from .differentiated import differentiated
from .figures import SAME_BITS
from .flash_attention import FEATURES_2, FEATURES_3, FEATURES_4, by_rows, flash_2, flash_3, flash_4, flash_mla
from .inputs import Inputs
from .torch_attention import flex, sdpa, unserved
from .torch_sequences import flex_packed, nested, varlen
from .unserved import Call, Unserved, check_memory

#: Bytes that the unfused form holds at once for each pair of a query and a key: scores, weights, copies.
UNFUSED_BYTES_PER_PAIR = 16
#: All that can be asked of masks and scores, and of it what a mask that is added to scores can say.
EVERYTHING = frozenset(each.name for each in fields(Scoring))
BY_SUMS = EVERYTHING - {"softcap", "sinks"}


@dataclass(frozen=True)
class Contender:
    """A way to compute attention that flashgen is held against. ``make`` returns the call on inputs and
    raises `Unserved`, or whatever its library raises; ``turn``: the cheap ones are timed first, on all
    workloads, before the dear ones get their turn."""

    name: str
    title: str
    make: Callable[[Inputs], Call]
    dtypes: tuple[str, ...] = ("f32", "f16", "bf16")
    turn: int = 0
    module: str = ""
    """The Python module that must be installed beside PyTorch; empty where none must."""
    bytes_per_pair: int = 0
    features: frozenset[str] = frozenset()
    """What it knows of `Scoring`, beside causal masks."""
    layouts: tuple[Layout, ...] = (DENSE,)
    trains: bool = False
    """Whether it has gradients, of sequences of one length."""
    gradients_alone: bool = False
    """Whether nothing but its gradients is timed."""
    rows_first: bool = False
    """Whether it takes rows before heads, of which gradients are taken where they lie."""
    trains_under: frozenset[str] = frozenset()
    """What of `Scoring` its gradients are timed under, one of it at least; where it is empty, always."""
    patience: float = 1.0
    """So many times as long as others its gradients may take for their first call."""

    def missing(self) -> str:
        """Returns why the contender cannot run here; empty where it can."""
        try:
            found = not self.module or importlib.util.find_spec(self.module) is not None
        except ImportError:  # of a package around it
            found = False
        return "" if found else f"{self.module} is not installed"

    def call(self, inputs: Inputs) -> Call:
        """Returns the call that computes attention of the inputs. Raises `Unserved`, also where it would need
        too much memory, or whatever the library raises."""
        if reason := self.missing():
            raise Unserved(reason)
        p = inputs.problem
        if p.backward and not self.trains:
            raise Unserved("has no gradients that are timed")
        if p.layout not in self.layouts and not p.backward:
            told = [LAYOUT_WORDS[each.name] for each in self.layouts]
            raise Unserved(f"takes {' or '.join(told)}, not {LAYOUT_WORDS[p.layout.name]}")
        if unknown := [name for name in p.scoring.to_dict() if name not in self.features]:
            raise Unserved(f"knows no {', '.join(unknown)}")
        if self.bytes_per_pair:
            needed = self.bytes_per_pair * p.batch * p.num_q_heads * p.seqlen_q * p.seqlen_k
            check_memory(inputs.torch, needed)
        if p.backward:
            return differentiated(self.make, inputs, rows_first=self.rows_first)
        return self.make(inputs)

    def may_serve(self, problem: Problem) -> bool:
        """Tells whether the contender is looked at for a problem: not, where it is for other types, for
        outputs alone, or for other layouts than sequences of one length."""
        if problem.dtype not in self.dtypes:
            return False
        if problem.backward:
            asked = problem.scoring.to_dict()
            return self.trains and (not self.trains_under or not self.trains_under.isdisjoint(asked))
        return not self.gradients_alone and (problem.layout is not DENSE or DENSE in self.layouts)


def _xformers(inputs: Inputs) -> Call:
    from xformers import ops  # pyright: ignore[reportMissingImports]

    if inputs.grouped:
        raise Unserved("xFormers wants as many heads of keys as of queries")
    if reason := unserved(inputs.problem):
        raise Unserved(reason)
    q, k, v = by_rows(inputs)
    bias = ops.LowerTriangularMask() if inputs.problem.causal else None
    return lambda: ops.memory_efficient_attention(q, k, v, attn_bias=bias).transpose(1, 2)


def _cupy(inputs: Inputs) -> Call:
    """The unfused form by CuPy."""
    import cupy  # pyright: ignore[reportMissingImports]

    p, torch = inputs.problem, inputs.torch
    if inputs.grouped:
        raise Unserved("not written for grouped heads")
    q, k, v = (cupy.from_dlpack(x) for x in (inputs.q, inputs.k, inputs.v))
    keys = k.swapaxes(2, 3)
    scale = q.dtype.type(1 / sqrt(p.head_dim))
    hidden = None
    if p.causal:
        hidden = ~cupy.tri(p.seqlen_q, p.seqlen_k, p.seqlen_k - p.seqlen_q, dtype=bool)
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def call() -> Any:
        with stream:
            scores = q @ keys
            scores *= scale
            if hidden is not None:
                cupy.putmask(scores, cupy.broadcast_to(hidden, scores.shape), -cupy.inf)
            scores -= scores.max(axis=3, keepdims=True)
            cupy.exp(scores, out=scores)
            scores /= scores.sum(axis=3, keepdims=True)
            return torch.from_dlpack(scores @ v)

    return call


def _backend(name: str, *, masked: bool = True) -> Callable[[Inputs], Call]:
    return lambda inputs: sdpa(inputs, name, masked=masked)


def _flex(inputs: Inputs) -> Call:
    return flex_packed(inputs) if inputs.problem.layout.is_packed else flex(inputs)


HALVES = ("f16", "bf16")
#: Its kernels of gradients take over a minute to compile, beside those of outputs.
FLEX_PATIENCE = 2.0
SERVING = (DENSE, PACKED, PAGED, PACKED_PAGED)
#: What sequences of each layout are called, where one is not served.
LAYOUT_WORDS = {
    DENSE.name: "sequences of one length",
    PACKED.name: "packed sequences",
    PAGED.name: "keys in pages",
    PACKED_PAGED.name: "packed queries on keys in pages",
}
_FASTEST: Mapping[str, Contender] = {
    each.name: each
    for each in (
        Contender(
            "flash",
            "PyTorch, FlashAttention-2",
            _backend("FLASH_ATTENTION", masked=False),
            HALVES,
            trains=True,
        ),
        Contender(
            "cudnn", "PyTorch, cuDNN", _backend("CUDNN_ATTENTION"), HALVES, features=BY_SUMS, trains=True
        ),
        Contender(
            "mem-eff",
            "PyTorch, memory-efficient",
            _backend("EFFICIENT_ATTENTION"),
            features=BY_SUMS,
            trains=True,
        ),
        Contender(
            *("fa3", "FlashAttention-3", flash_3, HALVES),
            module="flash_attn_interface",
            features=FEATURES_3,
            layouts=SERVING,
            trains=True,
            rows_first=True,
        ),
        Contender(
            *("fa2", "FlashAttention-2, by itself", flash_2, HALVES),
            module="flash_attn.flash_attn_interface",
            features=FEATURES_2,
            layouts=SERVING[1:],
            trains=True,
            rows_first=True,
        ),
        Contender(
            *("torch-varlen", "PyTorch, packed", varlen, HALVES),
            module="torch.nn.attention.varlen",
            features=frozenset({"documents"}),
            layouts=SERVING[1:],
            trains=True,
            # Else they are those of FlashAttention-2, which `flash` has.
            trains_under=frozenset({"documents"}),
            rows_first=True,
        ),
        Contender("flashmla", "FlashMLA", flash_mla, HALVES, module="flash_mla", layouts=(PAGED,)),
        Contender("nested", "PyTorch, jagged tensors", nested, layouts=(PACKED,)),
        Contender("xformers", "xFormers", _xformers, module="xformers"),
        Contender(
            "math",
            "PyTorch, unfused",
            _backend("MATH"),
            turn=1,
            bytes_per_pair=UNFUSED_BYTES_PER_PAIR,
            features=BY_SUMS,
            trains=True,
        ),
        Contender(
            "cupy",
            "CuPy, unfused",
            _cupy,
            ("f32", "f16"),
            turn=1,
            module="cupy",
            bytes_per_pair=UNFUSED_BYTES_PER_PAIR,
        ),
        # The first call of each shape compiles.
        Contender(
            *("fa4", "FlashAttention-4", flash_4, HALVES),
            turn=1,
            module="flash_attn.cute",
            features=FEATURES_4,
            layouts=SERVING,
            trains=True,
            rows_first=True,
        ),
        # Under plain masks others do without a minute of compiling for each row.
        Contender(
            *("flex", "FlexAttention", _flex),
            turn=2,
            features=EVERYTHING,
            layouts=(DENSE, PACKED),
            trains=True,
            trains_under=EVERYTHING,
            patience=FLEX_PATIENCE,
        ),
    )
}
#: The turn of gradients of the same bits every run: they stand beside each other, and one of them compiles.
SAME_BITS_TURN = 1


def _same_bits(of: Contender, make: Callable[..., Call]) -> Contender:
    """A contender's gradients that have the same bits every run, as its library's option asks for."""
    return replace(
        of,
        name=of.name + SAME_BITS,
        title=f"{of.title}, the same bits every run",
        make=partial(make, deterministic=True),
        turn=SAME_BITS_TURN,
        gradients_alone=True,
    )


CONTENDERS: Mapping[str, Contender] = {
    **_FASTEST,
    **{
        each.name: each
        for each in (_same_bits(_FASTEST["fa3"], flash_3), _same_bits(_FASTEST["fa4"], flash_4))
    },
}
#: The report's steps are contenders too, on its own cases: ``ladder-4.2.10``.
LADDER = "ladder-"
LADDER_TURN = 1
