"""Problems as FlashInfer-Bench defines them: axes, inputs, outputs and a reference, and calls of a size.

The schema is FlashInfer Trace as flashinfer-bench 0.1.2 reads it (flashinfer_bench/data and
docs/flashinfer-trace of github.com/flashinfer-ai/flashinfer-bench). Packed sequences are its
``gqa_ragged``, by the names, axes and outputs of the definitions that its data set has; for attention of
sequences of one length it has none, and ``gqa_dense`` is flashgen's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ...gen.problem import Problem

#: The version of flashinfer-bench whose schema is written.
SCHEMA = "flashinfer-bench 0.1.2"
#: What the schema calls types. Names of definitions tell of others than bfloat16.
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_DTYPE_SUFFIXES = {"f32": "_fp32", "f16": "_fp16", "bf16": ""}

_DENSE_REFERENCE = """\
{imports}import torch


@torch.no_grad()
def run(q, k, v, sm_scale):
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * sm_scale
{mask}    return (torch.softmax(scores, dim=-1) @ v).to(q.dtype)
"""
_DENSE_MASK = """\
    rows, keys = scores.shape[2:]
    place = torch.arange(rows, device=q.device)[:, None] + keys - rows
    hidden = torch.arange(keys, device=q.device)[None] > place
    scores = scores.masked_fill(hidden, -math.inf)
"""
_RAGGED_REFERENCE = """\
import math

import torch


@torch.no_grad()
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    output = q.new_zeros((*q.shape[:2], v.shape[2]))
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    starts, first_keys = qo_indptr.tolist(), kv_indptr.tolist()
    for start, end, first, last in zip(starts, starts[1:], first_keys, first_keys[1:]):
        rows, keys = end - start, last - first
        if rows == 0 or keys == 0:
            continue
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k[first:last]) * sm_scale
{mask}        weights = torch.softmax(scores, dim=-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, v[first:last]).to(q.dtype)
        lse[start:end] = torch.logsumexp(scores, dim=-1).transpose(0, 1) / math.log(2)
    return output, lse
"""
_RAGGED_MASK = """\
        place = torch.arange(rows, device=q.device)[:, None] + keys - rows
        hidden = torch.arange(keys, device=q.device)[None] > place
        scores = scores.masked_fill(hidden, -math.inf)
"""


def why_undefined(problem: Problem) -> str | None:
    """Says why a problem has no definition here; None where it has one."""
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} has scales that no definition here takes"
    layout = problem.layout
    reasons = {
        "gradients are defined nowhere": problem.backward,
        "masks and changes of scores are written into no reference": not problem.scoring.is_plain,
        "caches are told by other indices there": layout.is_paged or problem.append is not None,
        "latent attention is not written out": bool(problem.latent),
        "keys of another type have scales that no definition here takes": bool(problem.kv_dtype),
        "rows that see no key have no log-sum-exp and no mean there": _has_empty_rows(problem),
    }
    return next((told for told, holds in reasons.items() if holds), None)


def _has_empty_rows(problem: Problem) -> bool:
    """Whether rows see no key in a call as the problem says: scores of all -inf have no softmax there."""
    return problem.causal and any(rows > keys for rows, keys in problem.lengths.pairs)


def op_type_of(problem: Problem) -> str:
    """Returns the kind of operation that the definition is of."""
    return "gqa_ragged" if problem.layout.is_packed else "gqa_dense"


def definition_name(problem: Problem) -> str:
    """Returns the name of a problem's definition, which is of no length: that of flashinfer-bench's data set
    where it has one."""
    stem = "gqa_ragged_prefill" if problem.layout.is_packed else "gqa_dense"
    mask = "_causal" if problem.causal else ""
    values = "" if problem.head_dim_v == problem.head_dim else f"_dv{problem.head_dim_v}"
    heads = f"_h{problem.num_q_heads}_kv{problem.num_kv_heads}"
    return f"{stem}{mask}{heads}_d{problem.head_dim}{values}{_DTYPE_SUFFIXES[problem.dtype]}"


def definition_of(problem: Problem) -> dict[str, Any]:
    """Returns a problem's definition. Raises ValueError where `why_undefined` says why there is none."""
    if why := why_undefined(problem):
        raise ValueError(f"{problem.name} has no definition: {why}")
    packed = problem.layout.is_packed
    of_values = "head_dim" if problem.head_dim_v == problem.head_dim else "head_dim_v"
    constants = {"num_qo_heads": problem.num_q_heads, "num_kv_heads": problem.num_kv_heads}
    constants |= {"head_dim": problem.head_dim, of_values: problem.head_dim_v}
    variable = ("len_indptr", "total_q", "total_kv") if packed else ("batch_size", "seqlen_q", "seqlen_kv")
    axes = {name: {"type": "const", "value": value} for name, value in constants.items()}
    axes |= {name: {"type": "var"} for name in variable}
    if packed:
        rows, keys = (["total_q", "num_qo_heads"], ["total_kv", "num_kv_heads"])
    else:
        rows = ["batch_size", "num_qo_heads", "seqlen_q"]
        keys = ["batch_size", "num_kv_heads", "seqlen_kv"]
    dtype, mask = (
        DTYPES[problem.dtype],
        "a causal mask, aligned to the last key" if problem.causal else "no mask",
    )
    inputs = {
        "q": {"shape": [*rows, "head_dim"], "dtype": dtype},
        "k": {"shape": [*keys, "head_dim"], "dtype": dtype},
        "v": {"shape": [*keys, of_values], "dtype": dtype},
    }
    if packed:
        inputs |= {name: {"shape": ["len_indptr"], "dtype": "int32"} for name in ("qo_indptr", "kv_indptr")}
    inputs["sm_scale"] = {"shape": None, "dtype": "float32"}
    outputs = {"output": {"shape": [*rows, of_values], "dtype": dtype}}
    if packed:
        told = "The log-sum-exp of scores, to the base 2."
        outputs["lse"] = {"shape": rows, "dtype": "float32", "description": told}
    reference, hidden = (_RAGGED_REFERENCE, _RAGGED_MASK) if packed else (_DENSE_REFERENCE, _DENSE_MASK)
    lengths = "of sequences one behind the other" if packed else "of sequences of one length"
    return {
        "name": definition_name(problem),
        "op_type": op_type_of(problem),
        "description": f"Grouped-query attention {lengths}, with {mask}.",
        "tags": ["stage:prefill"] if packed else [],
        "axes": axes,
        "constraints": (
            ["total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"] if packed else []
        ),
        "inputs": inputs,
        "outputs": outputs,
        "reference": reference.format(
            mask=hidden if problem.causal else "", imports="import math\n\n" if problem.causal else ""
        ),
    }


def offsets_of(problem: Problem) -> Mapping[str, list[int]]:
    """Returns where packed sequences begin that kernels are timed with, by the names of inputs; else none."""
    if not problem.layout.is_packed:
        return {}
    lengths = {"qo_indptr": problem.lengths.q, "kv_indptr": problem.lengths.k}
    return {name: [0, *itertools.accumulate(counts)] for name, counts in lengths.items()}


def workload_of(problem: Problem, uuid: str, offsets_at: str) -> dict[str, Any]:
    """Returns the call that a problem's kernels are timed with. ``offsets_at`` is the path of the file in
    which packed sequences' offsets are, from the folder that holds all."""
    inputs: dict[str, Any] = {name: {"type": "random"} for name in "qkv"}
    for name in offsets_of(problem):
        inputs[name] = {"type": "safetensors", "path": offsets_at, "tensor_key": name}
    inputs["sm_scale"] = {"type": "scalar", "value": problem.head_dim**-0.5}
    if problem.layout.is_packed:
        axes = {"len_indptr": problem.batch + 1, "total_q": problem.total_q, "total_kv": problem.total_k}
    else:
        axes = {"batch_size": problem.batch, "seqlen_q": problem.seqlen_q, "seqlen_kv": problem.seqlen_k}
    return {"uuid": uuid, "axes": axes, "inputs": inputs}
