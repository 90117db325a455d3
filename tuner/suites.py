"""Named workloads by suite: what `flashgen bench` times, and what is worth tuning for.

`report` are the cases of an optimisation report of float32 kernels, `gpt2` GPT-2 in training, `fp32` float32
by head dim, `llm` bfloat16 at 16k tokens by head dim, length and mask, `eight` the longer of these in eight
bits, `odd` what libraries serve less well (Stable Diffusion, vision transformers, ragged lengths), `decode`
one query row per sequence against a long cache, of grouped heads or in float32, `masks` windows, soft caps
and all else that changes scores or hides keys. What serves many users at once is in `few`, `paged`, `varlen`
and `mla`: see `flashgen.tuner.serving_suites`; gradients are in `backward`: see
`flashgen.tuner.training_suites`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from ..gen.problem import EIGHT, ITEM_BYTES, PRECISIONS, Problem
from ..gen.scoring.asked import BIAS_DTYPES, BOOLEAN, Scoring
from .serving_suites import SERVING_SUITES
from .training_suites import TRAINING_SUITES
from .workload import RELATIVE_BIAS, Suite, Workload, workload

#: Tokens of a batch, and columns of all heads, whatever the length and the head dim.
LLM_TOKENS, LLM_WIDTH = 16384, 2048


def _llm(dtype: str, lengths: Sequence[int], precision: str = "auto") -> tuple[Workload, ...]:
    return tuple(
        workload(
            f"{dtype}-d{head_dim}-{seqlen}{'c' if causal else ''}",
            dtype,
            LLM_TOKENS // seqlen,
            LLM_WIDTH // head_dim,
            seqlen,
            head_dim,
            causal,
            precision=precision,
        )
        for head_dim in (64, 128, 256)
        for seqlen in lengths
        for causal in (False, True)
    )


def _fp32() -> tuple[Workload, ...]:
    by_head_dim = tuple(
        workload(f"f32-d{head_dim}-4096{'c' if causal else ''}", "f32", 4, 16, 4096, head_dim, causal)
        for head_dim in (32, 40, 64, 80, 96, 128, 160, 256)
        for causal in (False, True)
        if not causal or head_dim in (64, 128)
    )
    return (*by_head_dim, workload("f32-vit-197", "f32", 64, 12, 197, 64))


#: A row's own pixel and eight around it in each direction, of images of 64 by 64.
NEIGHBOURS = "abs(q // 64 - k // 64) <= 8 and abs(q % 64 - k % 64) <= 8"


def _masks() -> tuple[Workload, ...]:
    """Windows as libraries count them: of 128 keys, a row's own and 127 before it."""

    def window(keys: int) -> dict[str, Any]:
        return {"window": (keys - 1, 0)}

    return (
        workload("window128-d64-16384c", "bf16", 1, 32, 16384, 64, True, **window(128)),
        workload("window128-d128-16384c", "bf16", 1, 16, 16384, 128, True, **window(128)),
        workload("window1024-d128-16384c", "bf16", 1, 16, 16384, 128, True, **window(1024)),
        workload("window4096-d128-8192c", "bf16", 1, 16, 8192, 128, True, **window(4096)),
        workload("window1024-d256-8192c", "bf16", 1, 8, 8192, 256, True, **window(1024)),
        workload("softcap30-d128-8192c", "bf16", 2, 16, 8192, 128, True, softcap=30.0),
        workload("softcap50-d256-8192c", "bf16", 2, 8, 8192, 256, True, softcap=50.0),
        workload("alibi-d64-8192c", "bf16", 2, 32, 8192, 64, True, alibi=True),
        workload("alibi-d128-8192c", "bf16", 2, 16, 8192, 128, True, alibi=True),
        workload("relbias-d128-8192c", "bf16", 2, 16, 8192, 128, True, score=RELATIVE_BIAS),
        workload("document16-d128-16384c", "bf16", 1, 16, 16384, 128, True, documents=16),
        workload("sink-d64-8192c-gqa4-windowNone", "bf16", 2, (32, 8), 8192, 64, True, sinks=True),
        workload(
            *("sink-d64-8192c-gqa4-window128", "bf16", 2, (32, 8), 8192, 64, True), **window(128), sinks=True
        ),
        workload("addmask-d128-4096", "bf16", 4, 16, 4096, 128, bias="bf16"),
        workload("boolmask-d64-4096", "bf16", 4, 32, 4096, 64, bias="u8"),
        workload("chunk1024-d128-16384c", "bf16", 1, 16, 16384, 128, True, chunk=1024),
        workload("prefix1024-d128-8192c", "bf16", 2, 16, 8192, 128, True, prefix=1024),
        workload("lengths-d128-4096", "bf16", 4, 16, 4096, 128, lengths=True),
        workload("dilation2-d64-8192c", "bf16", 2, 32, 8192, 64, True, **window(1024), dilation=2),
        workload("image64x64-d64", "bf16", 4, 32, 4096, 64, mask=NEIGHBOURS),
        workload("window1024-f16-d128-16384c", "f16", 1, 16, 16384, 128, True, **window(1024)),
        workload("softcap30-f16-d128-8192c", "f16", 2, 16, 8192, 128, True, softcap=30.0),
        workload("addmask-f16-d64-4096", "f16", 4, 32, 4096, 64, bias="f16"),
        workload("window1024-f32-d64-4096c", "f32", 4, 16, 4096, 64, True, **window(1024)),
        workload("softcap30-f32-d64-4096c", "f32", 4, 16, 4096, 64, True, softcap=30.0),
        workload("alibi-f32-d64-4096c", "f32", 4, 16, 4096, 64, True, alibi=True),
        workload("addmask-f32-d64-4096", "f32", 4, 16, 4096, 64, bias="f32"),
        workload("window4096-gqa4-8192c", "bf16", 2, (32, 8), 8192, 128, True, **window(4096)),
        workload("gemma-d256-8192c", "bf16", 2, (8, 4), 8192, 256, True, **window(4096), softcap=50.0),
        workload("dec-window4096-128k-b1", "bf16", 1, (32, 8), (1, 131072), 128, **window(4096)),
        workload("dec-4k-b1", "bf16", 1, (32, 8), (1, 4096), 128),
    )


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "report",
            "float32, the report's cases",
            (
                workload("t10", "f32", 10, 1, 2048, 64),
                workload("t11", "f32", 13600, 1, 128, 32),
                workload("t22", "f32", 500, 1, 2048, 64),
                workload("t29", "f32", 4, 1, 32768, 32),
                workload("t30", "f32", 2, 1, 32768, 64),
            ),
        ),
        Suite("gpt2", "float32, GPT-2", (workload("gpt2", "f32", 8, 12, 1024, 64, True),)),
        Suite("fp32", "float32 by head dim", _fp32()),
        Suite(
            "llm",
            "bfloat16, 16384 tokens, 2048 columns of heads",
            _llm("bf16", (512, 1024, 2048, 4096, 8192, 16384)),
        ),
        Suite(
            "eight",
            "eight bits beside sixteen, 16384 tokens, 2048 columns of heads",
            _llm("e4m3", (2048, 4096, 8192, 16384), EIGHT),
        ),
        Suite(
            "odd",
            "other head dims, ragged and short sequences",
            (
                workload("sd-d40-4096", "f16", 4, 8, 4096, 40),
                workload("sd-d80-1024", "f16", 8, 8, 1024, 80),
                workload("sd-d160-256", "f16", 16, 8, 256, 160),
                workload("d72-2048", "bf16", 8, 16, 2048, 72),
                workload("d96-2048", "bf16", 8, 16, 2048, 96),
                workload("d112-2048", "bf16", 8, 16, 2048, 112),
                workload("d192-2048c", "bf16", 4, 16, 2048, 192, True),
                workload("vit-197", "bf16", 128, 12, 197, 64),
                workload("ragged-1000x777", "bf16", 16, 16, (1000, 777), 128),
                workload("swin-49-d32", "f16", 4096, 4, 49, 32),
                workload("f16-d128-8192", "f16", 2, 16, 8192, 128),
                workload("gqa-8192c", "bf16", 2, (32, 8), 8192, 128, True),
                workload("cross-333x4096", "bf16", 8, 16, (333, 4096), 128),
                # Few heads of one sequence, whose rows do not fill a card.
                workload("b1-h8-512", "bf16", 1, 8, 512, 128),
                workload("b1-h8-512c", "bf16", 1, 8, 512, 128, True),
                workload("b1-h8-1024", "bf16", 1, 8, 1024, 128),
                workload("b1-h8-1024c", "bf16", 1, 8, 1024, 128, True),
                workload("b1-h8-2048", "bf16", 1, 8, 2048, 128),
                workload("b1-h8-2048c", "bf16", 1, 8, 2048, 128, True),
                workload("b1-h8-d64-1024", "bf16", 1, 8, 1024, 64),
            ),
        ),
        Suite(
            "decode",
            "one query row against a long cache",
            (
                workload("dec-2k-b64", "bf16", 64, (32, 8), (1, 2048), 128),
                workload("dec-8k", "bf16", 32, (32, 8), (1, 8192), 128),
                workload("dec-8k-b1", "bf16", 1, (32, 8), (1, 8192), 128),
                workload("dec-32k-b4", "bf16", 4, (32, 8), (1, 32768), 128),
                workload("dec-128k-b1", "bf16", 1, (32, 8), (1, 131072), 128),
                workload("dec-8k-h64", "bf16", 8, (64, 8), (1, 8192), 128),
                workload("dec-8k-d64", "bf16", 16, (32, 8), (1, 8192), 64),
                workload("dec-8k-d256", "bf16", 16, (16, 8), (1, 8192), 256),
                workload("dec-8k-f32", "f32", 16, (32, 8), (1, 8192), 128),
                workload("dec-8k-f32-d64", "f32", 16, 16, (1, 8192), 64),
                workload("dec-128k-f32-b1", "f32", 1, (32, 8), (1, 131072), 128),
            ),
        ),
        Suite("masks", "windows, soft caps, biases, documents", _masks()),
        *SERVING_SUITES,
        *TRAINING_SUITES,
    )
}


#: What `Problem.name` writes.
_NAME = re.compile(
    r"(?P<dtype>[a-z0-9]+?)(_(?P<precision>{precisions}))?_d(?P<d>\d+)(v(?P<dv>\d+))?(?P<backward>_backward)?"
    r"(?P<asked>(_(window|chunk|prefix|lengths|documents|dilation|tree|softcap|alibi|bias|sinks)[a-z0-9]*)*)"
    r"(?P<causal>_causal)?"
    r"(_b(?P<batch>\d+))?(_h(?P<heads>\d+))?(_kv(?P<kv>\d+))?(_n(?P<n>\d+))?(_m(?P<m>\d+))?".format(
        precisions="|".join(dict.fromkeys(name for names in PRECISIONS.values() for name in names))
    )
)
#: What `Scoring.values` writes of each of its fields.
_FORMS = {
    "window": re.compile(r"window(all|\d+)x(all|\d+)(?:x(\d+))?"),
    **{name: re.compile(rf"{name}(\d+)") for name in ("chunk", "prefix", "documents", "dilation")},
    "softcap": re.compile(r"softcap(\d+(?:p\d+)?(?:em?\d+)?)"),
    "bias": re.compile(f"bias({'|'.join((*BIAS_DTYPES, BOOLEAN))})"),
    **{name: re.compile(name) for name in ("lengths", "tree", "alibi", "sinks")},
}


def workload_named(text: str) -> Workload:
    """Returns the problem of a name like a tuned kernel's: ``bf16_d128_causal_b2_h32_kv8_n8192``, parts in
    this order, any but the first two left out for their defaults. Windows and the like stand before
    ``_causal``: ``_window127x0_softcap30``; names do not say expressions.

    Raises:
        ValueError: it is none; the message says how one looks.
    """
    found = _NAME.fullmatch(text)
    asked = None if found is None else _asked(found["asked"].split("_")[1:])
    if found is None or asked is None or found["dtype"] not in ITEM_BYTES:
        raise ValueError(
            f"shape {text!r} is not of the form dtype_dHEADDIM[_causal][_bBATCH][_hHEADS][_kvHEADS][_nLENGTH]"
            "[_mKEYS], as in bf16_d128_causal_b2_h32_kv8_n8192, or bf16_d64_window127x0_causal"
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
        scoring=asked,
        backward=found["backward"] is not None,
    )
    return Workload(problem.name, problem)


def _asked(parts: Sequence[str]) -> Scoring | None:
    """What a name's parts ask of masks and scores; None where one is none."""
    asked: dict[str, Any] = {}
    for part in parts:
        found = next(((name, m) for name, form in _FORMS.items() if (m := form.fullmatch(part))), None)
        if found is None:
            return None
        name, match = found
        if name == "window":
            asked[name] = tuple(-1 if side == "all" else int(side) for side in match.groups()[:2])
            asked["always"] = int(match[3] or 0)
        elif name == "softcap":
            asked[name] = float(match[1].replace("p", ".").replace("m", "-"))
        elif match.groups():
            asked[name] = match[1] if name == "bias" else int(match[1])
        else:
            asked[name] = True
    return Scoring(**asked)


def row_named(text: str) -> Workload:
    """Returns the workload of that name, of whichever suite has it.

    Raises:
        ValueError: none has; the message says which name is near.
    """
    rows = {each.name: each for suite in SUITES.values() for each in suite.workloads}
    if text not in rows:
        near = get_close_matches(text, rows, n=1) or ["bf16-d64-2048c"]
        raise ValueError(f"no suite has a row {text!r}; rows are named as in {near[0]!r}")
    return rows[text]


def workloads(names: Sequence[str]) -> list[Workload]:
    """Returns the workloads of those suites in their order.

    Raises:
        KeyError: there is no such suite.
    """
    return [workload for name in names for workload in SUITES[name].workloads]
