"""What a user would pick instead: calls on torch tensors of PyTorch's attention with each backend forced, of
FlexAttention, of the unfused form, and of other libraries where they are installed.

Nothing here imports torch by itself: its module is handed in, in a process that has a card to spare.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from ...gen.problem import Problem

#: torch's name of a dtype.
TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
#: Bytes that the unfused form holds at once for each pair of a query and a key: scores, weights, copies.
UNFUSED_BYTES_PER_PAIR = 16
#: The part of the free memory that one contender may take.
MEMORY_SHARE = 0.8

Call = Callable[[], Any]


class Unserved(Exception):
    """A contender does not compute that problem, or not here; the message says why."""


@dataclass(frozen=True)
class Inputs:
    """q, k and v on torch's current card, shaped (batch, heads, seqlen, head_dim)."""

    torch: Any
    problem: Problem
    q: Any
    k: Any
    v: Any

    @classmethod
    def draw(cls, torch: Any, problem: Problem, distribution: str = "normal") -> Inputs:
        """Draws the inputs of a problem, standard ``normal`` or ``uniform`` in ±3, as float32, and rounds
        them to its type."""

        def random(heads: int, length: int, columns: int) -> Any:
            shape = (problem.batch, heads, length, columns)
            if distribution == "uniform":
                drawn = 6 * torch.rand(*shape, device="cuda") - 3
            else:
                drawn = torch.randn(*shape, device="cuda")
            return drawn if problem.dtype == "f32" else drawn.to(getattr(torch, TORCH_DTYPES[problem.dtype]))

        p = problem
        return cls(
            torch,
            problem,
            random(p.num_q_heads, p.seqlen_q, p.head_dim),
            random(p.num_kv_heads, p.seqlen_k, p.head_dim),
            random(p.num_kv_heads, p.seqlen_k, p.head_dim_v),
        )

    @property
    def grouped(self) -> bool:
        return self.problem.num_kv_heads != self.problem.num_q_heads

    def first(self, length: int) -> Inputs:
        """Returns the inputs with their first ``length`` queries and keys alone, for problems that have as
        many of both."""
        parts = (x[:, :, :length].contiguous() for x in (self.q, self.k, self.v))
        return Inputs(self.torch, self.problem, *parts)


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

    def missing(self) -> str:
        """Returns why the contender cannot run here; empty where it can."""
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return ""

    def call(self, inputs: Inputs) -> Call:
        """Returns the call that computes attention of the inputs. Raises `Unserved`, also where it would need
        too much memory, or whatever the library raises."""
        if reason := self.missing():
            raise Unserved(reason)
        p = inputs.problem
        needed = self.bytes_per_pair * p.batch * p.num_q_heads * p.seqlen_q * p.seqlen_k
        if needed:
            allowed = MEMORY_SHARE * inputs.torch.cuda.mem_get_info()[0]
            if needed > allowed:
                raise Unserved(f"would need about {needed / 1e9:.0f} GB, {allowed / 1e9:.0f} GB are allowed")
        return self.make(inputs)


# -- PyTorch -------------------------------------------------------------------------------------------------


def unserved(problem: Problem) -> str:
    """Returns why PyTorch does not compute that problem, whatever the backend; empty where it does."""
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        return (
            f"PyTorch aligns the causal mask top-left, which differs for {problem.seqlen_q} queries and "
            f"{problem.seqlen_k} keys"
        )
    return ""


def refusal(error: Exception, told: Sequence[str]) -> str:
    """Returns why a backend refused. PyTorch says so in warnings, among others about the backends left
    out."""
    words = [text.partition(" (Triggered internally")[0] for text in told]
    causes = [text for text in words if not text.endswith("because:") and "runtime disabled" not in text]
    text = (causes[-1] if causes else str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def tried(make: Callable[[], Call]) -> tuple[Call | None, Any, str]:
    """Returns the call that ``make`` makes, what it returned when called once and an empty text; None, None
    and the reason where something refuses."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            call = make()
            return call, call(), ""
        except Unserved as reason:
            return None, None, str(reason)
        except Exception as error:  # whatever a library raises is a reason, not the end
            return None, None, refusal(error, [str(each.message) for each in told])


def sdpa(inputs: Inputs, backend: str | None) -> Call:
    """Returns a call of scaled_dot_product_attention, with one backend forced where it is named (SDPBackend's
    member). Raises `Unserved`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]
    from torch.nn.functional import (  # pyright: ignore[reportMissingImports]
        scaled_dot_product_attention,
    )

    if reason := unserved(inputs.problem):
        raise Unserved(reason)
    # PyTorch before 2.5 does not know the option; where heads are not grouped it is not needed.
    grouped = {"enable_gqa": True} if inputs.grouped else {}
    q, k, v, causal = inputs.q, inputs.k, inputs.v, inputs.problem.causal
    if backend is None:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped)
    forced = getattr(SDPBackend, backend, None)
    if forced is None:
        raise Unserved(f"this PyTorch has no {backend}")

    def call() -> Any:
        with sdpa_kernel(forced):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped)

    return call


def _flex(inputs: Inputs) -> Call:
    """FlexAttention, compiled for just this shape."""
    from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
        create_block_mask,
        flex_attention,
    )

    torch, p = inputs.torch, inputs.problem
    # A function compiled for many shapes meets a limit, behind which it runs uncompiled.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if p.causal:
        offset = p.seqlen_k - p.seqlen_q
        mask = create_block_mask(
            lambda b, h, row, key: row + offset >= key, None, None, p.seqlen_q, p.seqlen_k, device="cuda"
        )
    return lambda: compiled(inputs.q, inputs.k, inputs.v, block_mask=mask, enable_gqa=inputs.grouped)


# -- other libraries -----------------------------------------------------------------------------------------


def _by_rows(inputs: Inputs) -> list[Any]:
    """q, k, v as (batch, seqlen, heads, head_dim), the layout that these libraries are fastest with."""
    return [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)]


def _xformers(inputs: Inputs) -> Call:
    from xformers import ops  # pyright: ignore[reportMissingImports]

    if inputs.grouped:
        raise Unserved("xFormers wants as many heads of keys as of queries")
    if reason := unserved(inputs.problem):
        raise Unserved(reason)
    q, k, v = _by_rows(inputs)
    bias = ops.LowerTriangularMask() if inputs.problem.causal else None
    return lambda: ops.memory_efficient_attention(q, k, v, attn_bias=bias).transpose(1, 2)


def _flash_3(inputs: Inputs) -> Call:
    from flash_attn_interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    q, k, v = _by_rows(inputs)

    def call() -> Any:
        found = flash_attn_func(q, k, v, causal=inputs.problem.causal)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return call


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


def _backend(name: str) -> Callable[[Inputs], Call]:
    return lambda inputs: sdpa(inputs, name)


HALVES = ("f16", "bf16")
CONTENDERS: Mapping[str, Contender] = {
    each.name: each
    for each in (
        Contender("flash", "PyTorch, FlashAttention-2", _backend("FLASH_ATTENTION"), HALVES),
        Contender("cudnn", "PyTorch, cuDNN", _backend("CUDNN_ATTENTION"), HALVES),
        Contender("mem-eff", "PyTorch, memory-efficient", _backend("EFFICIENT_ATTENTION")),
        Contender("fa3", "FlashAttention-3", _flash_3, HALVES, module="flash_attn_interface"),
        Contender("xformers", "xFormers", _xformers, module="xformers"),
        Contender(
            "math", "PyTorch, unfused", _backend("MATH"), turn=1, bytes_per_pair=UNFUSED_BYTES_PER_PAIR
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
        Contender("flex", "FlexAttention", _flex, turn=2),
    )
}
#: The report's steps are contenders too, on its own cases: ``ladder-4.2.10``.
LADDER = "ladder-"
LADDER_TURN = 1
