"""What kernels are timed on: arrays of a problem on a card, drawn once, and the arguments that name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...gen.append import ROTATED
from ...gen.arguments import Arguments, make_arguments
from ...gen.operation import FLOAT
from ...gen.problem import Problem
from ...gen.scoring.values import typical_values
from .appended import append_numbers, typical_new_arrays
from .dtypes import bits_dtype, numpy_dtype, unwritten_bits
from .guarded_memory import ALIGN_BYTES, span_of
from .key_scales import scale_strides, typical_scales
from .score_values import score_values, sizes_of
from .sequences import index_strides, typical_indices

#: Distinct random values in the tensors that are timed, repeated to their size.
POOL_ITEMS = 2**24 + 37


@dataclass(frozen=True)
class TimedTensors:
    """The arrays of one problem on the card, contiguous, and the arguments that name them."""

    problem: Problem
    memory: Any
    arguments: Arguments


def draw_tensors(cuda: Any, allocate: Callable[[int, str], Any], problem: Problem) -> TimedTensors:
    """Draws random normal inputs, a log-sum-exp as of such where it is one, poisoned outputs and what the
    problem's scores read.

    ``cuda`` is the driver's module, in whose context memory is, which ``allocate`` takes: so many bytes, for
    what. Raises what that raises.
    """
    arrays = [each for each in problem.operation.arrays if not each.is_optional]
    places, outputs_end = _placed((each.name, each.stored_bytes(problem)) for each in arrays)
    read = score_values(problem.scores, typical_values(problem), sizes_of(problem))
    indices, new, scales = typical_indices(problem), typical_new_arrays(problem), typical_scales(problem)
    beside: dict[str, np.ndarray] = {**read.arrays, **indices, **new, **scales}
    sizes = {name: span_of(array).nbytes for name, array in beside.items()}
    if problem.append is not None and problem.append.rotary:
        sizes[ROTATED] = problem.operation.array("q").num_bytes(problem)
    beside_at, total = _placed(sizes.items(), outputs_end)
    memory = allocate(total, f"{', '.join([*places, *read.arrays])} of {problem.name}")
    base = int(memory)

    inputs_bytes = min(places[each.name] for each in problem.operation.outputs if each.name in places)
    output = numpy_dtype(problem.output_dtype)
    for first, end, dtype in _runs_of_inputs(problem, places["k"], inputs_bytes):
        _fill_randomly(cuda, base + first, (end - first) // dtype.itemsize, dtype)
    for each in arrays:
        if each.element == FLOAT and not each.is_output:
            # As of normal inputs, so that weights are what they are after a forward pass.
            level = np.float32(math.log(problem.seqlen_k) + 0.5).view(np.uint32)
            cuda.memset_d32(base + places[each.name], int(level), each.num_bytes(problem) // 4)
    poison = np.full(4 // output.itemsize, unwritten_bits(output), bits_dtype(output)).view(np.uint32)[0]
    cuda.memset_d32(base + inputs_bytes, int(poison), (outputs_end - inputs_bytes) // 4)
    for name, array in beside.items():
        # As bits: the driver's interface knows no bfloat16.
        cuda.memcpy_htod(base + beside_at[name], span_of(array).view(bits_dtype(array.dtype)))

    def addresses(names: Iterable[str]) -> dict[str, int]:
        return {name: base + beside_at[name] for name in names}

    arguments = make_arguments(
        problem,
        {name: base + start for name, start in places.items()},
        {
            each.name: problem.layout.strides(each.stored_shape(problem), each.rows)
            for each in problem.operation.strided
        },
        scale=problem.head_dim**-0.5,
        scoring=read.arguments(addresses(read.arrays)),
        sequences={**addresses(indices), **index_strides(indices)},
        append={
            **append_numbers(problem, new),
            **addresses(name for name in (*new, ROTATED) if name in sizes),
        },
        key_scales={**addresses(scales), **scale_strides(scales)},
    )
    return TimedTensors(problem, memory, arguments)


def _placed(sizes: Iterable[tuple[str, int]], start: int = 0) -> tuple[Mapping[str, int], int]:
    """Where arrays of so many bytes begin, one behind the other and aligned, and where the last one ends."""
    places = {}
    for name, num_bytes in sizes:
        places[name] = start
        start += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return places, start


def _runs_of_inputs(problem: Problem, first_key: int, end: int) -> list[tuple[int, int, np.dtype]]:
    """The runs of inputs of one type, in bytes from the first input on: from where, to where, of which."""
    queries, keys = numpy_dtype(problem.dtype), numpy_dtype(problem.key_dtype)
    if queries == keys:
        return [(0, end, queries)]
    return [(0, first_key, queries), (first_key, end, keys)]


def _fill_randomly(cuda: Any, address: int, items: int, dtype: np.dtype) -> None:
    """Standard normal values: a pool drawn once, then copies of what is there already."""
    drawn = np.random.default_rng(0).standard_normal(min(items, POOL_ITEMS), dtype=np.float32)
    pool = drawn.astype(dtype)
    cuda.memcpy_htod(address, pool.view(bits_dtype(dtype)))
    done = len(pool)
    while done < items:
        # PyCUDA before 2022 takes the length as 32 bits.
        part = min(done, items - done, 2**28)
        cuda.memcpy_dtod(address + dtype.itemsize * done, address, dtype.itemsize * part)
        done += part
    cuda.Context.synchronize()
