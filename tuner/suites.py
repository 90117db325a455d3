"""Named workloads by suite: what `flashgen bench` times, and what is worth tuning for.

`report` are the cases of an optimisation report of float32 kernels, `gpt2` GPT-2 in training, `fp32` float32
by head dim, `llm` bfloat16 at 16k tokens by head dim, length and mask, `odd` what libraries serve less well
(Stable Diffusion, vision transformers, ragged lengths), `decode` one query row per sequence against a long
cache of grouped heads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..gen.problem import ITEM_BYTES, PRECISIONS, Problem


@dataclass(frozen=True)
class Workload:
    """A problem by the name that tables and plots give it."""

    name: str
    problem: Problem


@dataclass(frozen=True)
class Suite:
    """Workloads that are shown together; their names are unique over all suites."""

    name: str
    title: str
    workloads: tuple[Workload, ...]

    @property
    def problems(self) -> dict[str, Problem]:
        """The problems by their workloads' names."""
        return {workload.name: workload.problem for workload in self.workloads}


def _workload(
    name: str,
    dtype: str,
    batch: int,
    heads: int | tuple[int, int],
    seqlen: int | tuple[int, int],
    head_dim: int,
    causal: bool = False,
) -> Workload:
    """``heads``: of queries, and of keys where fewer; ``seqlen``: of queries, and of keys where another."""
    num_q_heads, num_kv_heads = (heads, heads) if isinstance(heads, int) else heads
    seqlen_q, seqlen_k = (seqlen, seqlen) if isinstance(seqlen, int) else seqlen
    problem = Problem(
        dtype=dtype,
        batch=batch,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        causal=causal,
    )
    return Workload(name, problem)


#: Tokens of a batch, and columns of all heads, whatever the length and the head dim.
LLM_TOKENS, LLM_WIDTH = 16384, 2048


def _llm() -> tuple[Workload, ...]:
    return tuple(
        _workload(
            f"bf16-d{head_dim}-{seqlen}{'c' if causal else ''}",
            "bf16",
            LLM_TOKENS // seqlen,
            LLM_WIDTH // head_dim,
            seqlen,
            head_dim,
            causal,
        )
        for head_dim in (64, 128, 256)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
        for causal in (False, True)
    )


def _fp32() -> tuple[Workload, ...]:
    by_head_dim = tuple(
        _workload(f"f32-d{head_dim}-4096{'c' if causal else ''}", "f32", 4, 16, 4096, head_dim, causal)
        for head_dim in (32, 40, 64, 80, 96, 128, 160, 256)
        for causal in (False, True)
        if not causal or head_dim in (64, 128)
    )
    return (*by_head_dim, _workload("f32-vit-197", "f32", 64, 12, 197, 64))


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "report",
            "float32, the report's cases",
            (
                _workload("t10", "f32", 10, 1, 2048, 64),
                _workload("t11", "f32", 13600, 1, 128, 32),
                _workload("t22", "f32", 500, 1, 2048, 64),
                _workload("t29", "f32", 4, 1, 32768, 32),
                _workload("t30", "f32", 2, 1, 32768, 64),
            ),
        ),
        Suite("gpt2", "float32, GPT-2", (_workload("gpt2", "f32", 8, 12, 1024, 64, True),)),
        Suite("fp32", "float32 by head dim", _fp32()),
        Suite("llm", "bfloat16, 16384 tokens, 2048 columns of heads", _llm()),
        Suite(
            "odd",
            "other head dims, ragged and short sequences",
            (
                _workload("sd-d40-4096", "f16", 4, 8, 4096, 40),
                _workload("sd-d80-1024", "f16", 8, 8, 1024, 80),
                _workload("sd-d160-256", "f16", 16, 8, 256, 160),
                _workload("d72-2048", "bf16", 8, 16, 2048, 72),
                _workload("d96-2048", "bf16", 8, 16, 2048, 96),
                _workload("d112-2048", "bf16", 8, 16, 2048, 112),
                _workload("d192-2048c", "bf16", 4, 16, 2048, 192, True),
                _workload("vit-197", "bf16", 128, 12, 197, 64),
                _workload("ragged-1000x777", "bf16", 16, 16, (1000, 777), 128),
                _workload("swin-49-d32", "f16", 4096, 4, 49, 32),
                _workload("f16-d128-8192", "f16", 2, 16, 8192, 128),
                _workload("gqa-8192c", "bf16", 2, (32, 8), 8192, 128, True),
            ),
        ),
        Suite(
            "decode",
            "one query row against a long cache",
            (
                _workload("dec-2k-b64", "bf16", 64, (32, 8), (1, 2048), 128),
                _workload("dec-8k", "bf16", 32, (32, 8), (1, 8192), 128),
                _workload("dec-8k-b1", "bf16", 1, (32, 8), (1, 8192), 128),
                _workload("dec-32k-b4", "bf16", 4, (32, 8), (1, 32768), 128),
                _workload("dec-128k-b1", "bf16", 1, (32, 8), (1, 131072), 128),
                _workload("dec-8k-h64", "bf16", 8, (64, 8), (1, 8192), 128),
                _workload("dec-8k-d64", "bf16", 16, (32, 8), (1, 8192), 64),
                _workload("dec-8k-d256", "bf16", 16, (16, 8), (1, 8192), 256),
            ),
        ),
    )
}


#: What `Problem.name` writes.
_NAME = re.compile(
    r"(?P<dtype>[a-z0-9]+?)(_(?P<precision>{precisions}))?_d(?P<d>\d+)(v(?P<dv>\d+))?(?P<causal>_causal)?"
    r"(_b(?P<batch>\d+))?(_h(?P<heads>\d+))?(_kv(?P<kv>\d+))?(_n(?P<n>\d+))?(_m(?P<m>\d+))?".format(
        precisions="|".join(dict.fromkeys(name for names in PRECISIONS.values() for name in names))
    )
)


def workload_named(text: str) -> Workload:
    """Returns the problem of a name like a tuned kernel's: ``bf16_d128_causal_b2_h32_kv8_n8192``, parts in
    this order, any but the first two left out for their defaults.

    Raises:
        ValueError: it is none; the message says how one looks.
    """
    found = _NAME.fullmatch(text)
    if found is None or found["dtype"] not in ITEM_BYTES:
        raise ValueError(
            f"shape {text!r} is not of the form dtype_dHEADDIM[_causal][_bBATCH][_hHEADS][_kvHEADS][_nLENGTH]"
            "[_mKEYS], as in bf16_d128_causal_b2_h32_kv8_n8192"
        )
    default = Problem()
    heads = int(found["heads"] or default.num_q_heads)
    seqlen = int(found["n"] or default.seqlen_q)
    problem = Problem(
        dtype=found["dtype"],
        precision=found["precision"] or default.precision,
        batch=int(found["batch"] or default.batch),
        num_q_heads=heads,
        num_kv_heads=int(found["kv"] or heads),
        seqlen_q=seqlen,
        seqlen_k=int(found["m"] or seqlen),
        head_dim=int(found["d"]),
        head_dim_v=int(found["dv"] or 0),
        causal=found["causal"] is not None,
    )
    return Workload(problem.name, problem)


def workloads(names: Sequence[str]) -> list[Workload]:
    """Returns the workloads of those suites in their order.

    Raises:
        KeyError: there is no such suite.
    """
    return [workload for name in names for workload in SUITES[name].workloads]
