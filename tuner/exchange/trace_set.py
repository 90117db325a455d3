"""Tuned kernels as a FlashInfer Trace data set: a folder of definitions, solutions, workloads and traces.

Solutions are the modules that `flashgen emit` writes, with a function ``run`` of the definition's names. Of a
kernel that was measured there is a trace of its own workload, where what was timed is what the definition
asks for. What flashgen does not measure stands as the schema has it where nothing is known.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...gen.problem import Problem
from ..errors import FlashgenError
from ..evaluate.outcome import TunedKernel
from ..files import write_bytes
from ..shelf import library
from ..shelf.choice import Match
from ..shelf.emitting import emit_tuned
from .trace_definitions import (
    definition_name,
    definition_of,
    offsets_of,
    op_type_of,
    why_undefined,
    workload_of,
)

#: The name of the format on the command line, and who solutions are by.
FLASHINFER_TRACE, AUTHOR = "flashinfer-trace", "flashgen"
#: The folder of workloads' arrays, as the data set has it.
_ARRAYS = "blob/workloads"
#: Uniform identifiers of workloads are made of their problems' names under this one.
_WORKLOADS = uuid.uuid5(uuid.NAMESPACE_URL, "flashgen/flashinfer-trace/workloads")
_MODULE_END = '\nif __name__ == "__main__":\n'
_DENSE_RUN = '''
def run(q, k, v, sm_scale):
    """Computes what the definition asks for."""
    return attention(q, k, v, causal={causal}, scale=sm_scale)

'''
_RAGGED_RUN = '''
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    """Computes what the definition asks for. No sequence is longer than all together, so that no length is
    read back from the card."""
    output, lse = attention_varlen(
        *(q, k, v, qo_indptr, kv_indptr),
        max_seqlen_q=q.shape[0],
        max_seqlen_k=k.shape[0],
        causal={causal},
        scale=sm_scale,
        return_lse=True,
    )
    return output, lse.T * 1.4426950408889634  # to the base 2

'''
_LOG = (
    "Timed by `flashgen tune`: the median of {times} calls by CUDA events, the L2 cache flushed before each, "
    "{spread}. Compared with float64 on other inputs of its own: extra.head_error is the largest ‖o - exact‖ "
    "over ‖exact‖ of a head. Elementwise errors were not measured, and neither was the reference's time: the "
    "former are NaN, reference_latency_ms and speedup_factor stand at the schema's default, 0."
)


@dataclass(frozen=True)
class Written:
    """How many files of what were written, and why how many kernels were left out."""

    definitions: int
    solutions: int
    workloads: int
    traces: int
    left_out: Mapping[str, int]


def write_trace_set(
    folder: Path,
    known: Iterable[library.Entry],
    text_of: Callable[[library.Entry], str] | None = None,
) -> Written:
    """Writes the kernels that are ``known`` as a data set that flashinfer-bench reads, into that folder.

    ``text_of`` returns the module of a kernel; None: as `flashgen emit` writes it. Of several kernels for the
    same problem on a card the fastest is taken. Files of the same names are written over.

    Raises:
        FlashgenError: none of the kernels has a definition, or the folder cannot be written.
    """
    entries, left_out = _exported(known)
    if not entries:
        told = "; ".join(f"{count} because {why}" for why, count in left_out.items())
        raise FlashgenError(
            f"no kernel that was asked for can be told in {FLASHINFER_TRACE}: {told or 'there is none'}; "
            "tune one of dense arrays or packed sequences in f32, f16 or bf16"
        )
    files: dict[str, bytes] = {}
    workloads: dict[str, dict[str, Any]] = {}
    traces: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        problem = entry.kernel.problem
        definition, op_type = definition_name(problem), op_type_of(problem)
        files[f"definitions/{op_type}/{definition}.json"] = _document(definition_of(problem))
        solution = solution_of(entry.kernel, (text_of or _module_text)(entry))
        place = f"solutions/{AUTHOR}/{op_type}/{definition}/{solution['name']}.json"
        files[place] = _document(solution)
        named = str(uuid.uuid5(_WORKLOADS, problem.name))
        arrays_at = f"{_ARRAYS}/{op_type}/{definition}/{named}.safetensors"
        if offsets := offsets_of(problem):
            files[arrays_at] = safetensors(offsets)
        workload = workload_of(problem, named, arrays_at)
        workloads.setdefault(f"workloads/{op_type}/{definition}.jsonl", {})[named] = {
            "definition": definition,
            "workload": workload,
            "solution": None,
            "evaluation": None,
        }
        if is_timed_as_defined(entry.kernel):
            traces.setdefault(f"traces/{AUTHOR}/{op_type}/{definition}.jsonl", []).append(
                {
                    "definition": definition,
                    "workload": workload,
                    "solution": solution["name"],
                    "evaluation": evaluation_of(entry.kernel),
                }
            )
    files |= {place: _lines(each.values()) for place, each in workloads.items()}
    files |= {place: _lines(each) for place, each in traces.items()}
    try:
        for place, text in files.items():
            write_bytes(folder / place, text)
    except OSError as error:
        raise FlashgenError(
            f"{folder} cannot be written: {error.strerror or error}; free some space or name another folder"
        ) from error
    return Written(
        definitions=sum(place.startswith("definitions/") for place in files),
        solutions=sum(place.startswith("solutions/") for place in files),
        workloads=sum(map(len, workloads.values())),
        traces=sum(map(len, traces.values())),
        left_out=left_out,
    )


def solution_of(kernel: TunedKernel, module: str) -> dict[str, Any]:
    """Returns a kernel as a solution in Python: its ``module`` with a function of the definition's names."""
    problem, hardware = kernel.problem, hardware_of(kernel.device)
    name = f"flashgen_{problem.name}_{hardware.lower()}"
    wrapper = (_RAGGED_RUN if problem.layout.is_packed else _DENSE_RUN).format(causal=problem.causal)
    head, end, tail = module.rpartition(_MODULE_END)
    text = f"{head}\n{wrapper}{end}{tail}"
    return {
        "name": name,
        "definition": definition_name(problem),
        "author": AUTHOR,
        "description": f"CUDA C++ by flashgen {kernel.flashgen}, family {kernel.variant.family}: "
        f"{kernel.variant.name}.",
        "spec": {
            "language": "python",
            "target_hardware": [hardware],
            "entry_point": "main.py::run",
            "dependencies": ["torch", "numpy"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": text}],
    }


def is_timed_as_defined(kernel: TunedKernel) -> bool:
    """Tells whether a kernel was measured, and on just what its definition asks for: not so where that has a
    log-sum-exp, without which kernels are timed."""
    return not kernel.measurement.predicted and not kernel.problem.layout.is_packed


def evaluation_of(kernel: TunedKernel) -> dict[str, Any]:
    """Returns what is known of a measured kernel, as the evaluation of a trace."""
    measured = kernel.measurement
    spread = f"whose interquartile range is {measured.spread:.1%} of it"
    spread += f" (times are doubtful: {measured.busy})" if measured.busy else ""
    return {
        "status": "PASSED",
        "environment": {
            "hardware": hardware_of(kernel.device),
            "libs": {"flashgen": kernel.flashgen, "cuda": kernel.toolkit, "driver": kernel.driver},
        },
        "timestamp": kernel.tuned_at,
        "log": _LOG.format(times=len(measured.times_us), spread=spread),
        "correctness": {
            "max_relative_error": "NaN",
            "max_absolute_error": "NaN",
            "extra": {"head_error": measured.error},
        },
        "performance": {
            "latency_ms": measured.median_us / 1000,
            "reference_latency_ms": 0.0,
            "speedup_factor": 0.0,
        },
    }


def hardware_of(device: str) -> str:
    """Returns a card's name as the schema writes them: ``NVIDIA_H200``."""
    name = re.sub(r"\W+", "_", device).strip("_")
    return name if name.upper().startswith("NVIDIA") else f"NVIDIA_{name}"


def safetensors(arrays: Mapping[str, Sequence[int]]) -> bytes:
    """Returns one-dimensional arrays of 32-bit integers as a file of the safetensors format: the length of a
    header in JSON, that header, and the numbers of one array behind the other, all little-endian."""
    header: dict[str, Any] = {}
    ends = list(itertools.accumulate(4 * len(each) for each in arrays.values()))
    for (name, each), end in zip(arrays.items(), ends, strict=True):
        header[name] = {"dtype": "I32", "shape": [len(each)], "data_offsets": [end - 4 * len(each), end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = b"".join(struct.pack(f"<{len(each)}i", *each) for each in arrays.values())
    return struct.pack("<Q", len(text)) + text + numbers


def _exported(known: Iterable[library.Entry]) -> tuple[list[library.Entry], dict[str, int]]:
    """The fastest kernel of each problem and card that has a definition, and why how many have none."""
    best: dict[tuple[str, Problem], library.Entry] = {}
    left_out: dict[str, int] = {}
    for entry in known:
        problem = entry.kernel.problem
        if why := why_undefined(problem):
            left_out[why] = left_out.get(why, 0) + 1
            continue
        key = (hardware_of(entry.kernel.device), problem)
        if key not in best or _rank(entry) < _rank(best[key]):
            best[key] = entry
    return list(best.values()), left_out


def _rank(entry: library.Entry) -> tuple[bool, float]:
    return entry.predicted, entry.kernel.measurement.median_us


def _module_text(entry: library.Entry) -> str:
    return emit_tuned(Match(entry, "exported", exact=True), Path("main.py")).text


def _document(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _lines(values: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(each, ensure_ascii=False, allow_nan=False) + "\n" for each in values).encode()
