"""Kernels made at run time, as the runtime of emitted modules knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from ...gen.arguments import KEY_SCALE_AXES, KEY_SCALES, struct_of
from ...gen.emit.module import counted_by, counts_keys
from ...gen.emit.options import scoring_options
from ...gen.handover.plan import Plan
from ...gen.kernel import Kernel
from ...gen.launch import LISTS_ROLE, PLAN_ROLE
from ...gen.launch import Launch as GridOf
from ...gen.problem import Problem
from ...gen.scoring.buffer_gradients import buffer_gradients, scattered_arrays
from ...gen.scoring.values import scalar_values
from ...templates.runtime import Launch, TensorMap, Tuned
from ...templates.runtime.scored_values import Buffer, Scored

#: What a grid is counted by that a call does not tell apart: each query brings a new row.
_GRID_OF_NEW = {"seqlen_new": "seqlen_q", "total_new": "total_q"}
#: What entries make of themselves once, and who makes calls reads.
_KEPT = ("named", "keywords", "called", "required", "reads", "numbers", "integers", "exact")
_LAUNCH_FIELDS = {field.name for field in fields(Launch)}


def entry_of(kernel: Kernel, card: str, measurement: Mapping[str, Any] | None = None) -> Tuned:
    """Returns a rendered kernel as an entry of a runtime's table, which carries nothing compiled yet.

    ``card`` is the name of the card, ``measurement`` what is known of its speed there.
    """
    problem, variant = kernel.problem, kernel.variant
    regions = kernel.workspace.regions if kernel.workspace else ()
    names, plan = counted_by(kernel), Plan.of_launches(kernel.launches)
    return _made(
        problem,
        variant={"family": variant.family, **variant.to_dict()},
        device={"name": card, "arch": kernel.arch},
        measurement=dict(measurement or {}),
        vector=variant.access_width(problem),
        key_vector=variant.key_access_width(problem) if problem.has_key_scales else 0,
        launches=tuple(_launch_of(kernel, each, names) for each in kernel.launches),
        oldest_arch=kernel.oldest_arch,
        only_arch=kernel.arch if variant.arch_suffix else None,
        arch_suffix=variant.arch_suffix,
        workspace=tuple(_counting(each.floats, names) for each in regions),
        plan_ints=None if plan is None else _counting(plan.ints, names),
        counts_keys=counts_keys(kernel),
        deterministic=kernel.is_deterministic,
        source=kernel.source,
    )


def outline_of(problem: Problem) -> Tuned:
    """Returns what all kernels of a problem have in common as an entry: what they are told and read. It
    cannot be launched."""
    launch = Launch(
        symbol=f"attention_{problem.stem}_kernel",
        threads=0,
        smem_bytes=0,
        arguments=_fields(struct_of(problem)),
        count=lambda *counted: 0,
    )
    more = buffer_gradients(problem.scores) if problem.backward else ()
    launches = (launch, *(replace(launch, makes=each.name) for each in more))
    made = _made(problem, variant={}, device={}, measurement={}, vector=1, launches=launches, source="")
    for name in _KEPT if isinstance(made, Scored) else ():
        getattr(made, name)  # torch.compile reads what is there, and makes none of it
    return made


def _made(problem: Problem, **facts: Any) -> Tuned:
    common = {"name": problem.name, "problem": problem.to_dict(), "tolerance": problem.tolerance, **facts}
    if problem.scoring.is_plain and not problem.has_key_scales:
        return Tuned(**common)
    scores, numbers = problem.scores, scalar_values(problem.scoring)
    buffers = {
        each.name: Buffer(each.dtype, tuple(tuple(sorted(axis)) for axis in each.axes))
        for each in scores.buffers
    }
    if problem.has_key_scales:
        axes = tuple((axis,) for axis in KEY_SCALE_AXES)
        buffers |= {name: Buffer("f32", axes, any_step=True) for name in KEY_SCALES}
    return Scored(
        **common,
        asked=" ".join(scoring_options(problem.scoring)),
        scalars={each.name: numbers[each.name] for each in scores.scalars},
        buffers=buffers,
        sees=scores.visible,
        change=scores.changed,
        scattered=scattered_arrays(scores) if problem.backward else (),
    )


def _launch_of(kernel: Kernel, launch: GridOf, names: tuple[str, ...]) -> Launch:
    told = {name: getattr(launch, name) for name in _LAUNCH_FIELDS if hasattr(launch, name)}
    lists = kernel.tile_lists if launch.role == LISTS_ROLE else None
    return Launch(
        **{
            **told,
            "symbol": kernel.symbol_of(launch),
            "arguments": _fields(kernel.arguments),
            "count": _counting(launch.blocks, names),
            "plans": launch.role == PLAN_ROLE,
            "lists": lists.keys if lists is not None else 0,
            "list_words": lists.words if lists is not None else 0,
            "list_batch_strides": lists.batch_strides if lists is not None else (),
            "list_head_strides": lists.head_strides if lists is not None else (),
            "maps": tuple(
                TensorMap(each.array, each.rows, each.columns, each.swizzle, each.l2_promotion)
                for each in launch.tensor_maps
            ),
        }
    )


def _fields(struct: Any) -> tuple[tuple[str, str], ...]:
    return tuple((each.name, each.code) for each in struct.fields)


def _counting(words: Any, names: tuple[str, ...]) -> Callable[..., int]:
    """A count as a function of the sizes of those names."""

    def count(*counted: int) -> int:
        sizes = dict(zip(names, counted, strict=True))
        sizes |= {new: sizes[told] for new, told in _GRID_OF_NEW.items() if told in sizes}
        return int(words.value(sizes))

    return count
