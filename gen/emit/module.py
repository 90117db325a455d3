"""Tuned kernels as a Python module: thin beside the package, or standing alone with the runtime in it.

Both are deterministic: they say what was measured where, never when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any

from ..arguments import KEY_SCALE_AXES, KEY_SCALES
from ..handover.plan import Plan
from ..kernel import Kernel
from ..launch import KEYS, LISTS_ROLE, PLAN_ROLE, Launch
from ..layout import DENSE, PACKED
from ..problem import Problem
from ..render import environment
from ..scoring.asked import BOOLEAN
from ..scoring.buffer_gradients import buffer_gradients, scattered_arrays
from ..scoring.values import scalar_values
from .inline import heading, import_lines, inline_runtime
from .literals import packed_literal, source_literal, to_literal, value_literal
from .made import Made
from .numpy_text import changed_text, seen_text
from .offers import offer_of
from .options import scoring_options
from .words import (
    class_words,
    classes_words,
    figures,
    figures_of_many,
    listing,
    needs,
    regenerating,
    shell,
    summary,
    wrap,
)


def why_alone(problem: Problem) -> str | None:
    """Says why a problem's kernels make no module with others; None where they do."""
    if problem.has_key_scales:
        return f"{problem.name} takes scales of keys, as calls of others do not; make a module of it alone"
    if problem.latent:
        return f"{problem.name} takes no values, as calls of several kernels do; make a module of it alone"
    if problem.append is not None:
        return f"{problem.name} writes to caches, as calls of others do not; make a module of it alone"
    if problem.layout is DENSE:
        return None
    takes = "keys in pages" if problem.layout.is_paged else "packed sequences"
    return f"{problem.name} takes {takes}, as calls of several kernels do not; make a module of it alone"


def emit_module(
    kernel: Kernel,
    *,
    device: str,
    measurement: Mapping[str, Any] | None = None,
    build: Mapping[str, Any] | None = None,
    cubins: Mapping[bool, bytes] | None = None,
    name: str | None = None,
) -> str:
    """Returns a Python module around a kernel that stands alone: data, source and ``attention(q, k, v)``.

    ``device``, ``measurement`` and ``build`` are as in `Made`. ``cubins``, by mask, are carried along, for
    which its own cards need no compiler. ``name`` is the module's, by default the problem's.
    """
    made = Made(kernel, device, measurement, build)
    carried = {} if cubins is None else {(kernel.digest, causal): cubins[causal] for causal in cubins}
    return _render([made], thin=False, cubins=carried, **_told_of_one(made, name or kernel.problem.name))


def emit_thin_module(kernel: Kernel, *, device: str, measurement: Mapping[str, Any] | None = None) -> str:
    """Returns a Python module of a kernel's data: it takes the runtime from the package, and the source from
    the .cu file beside it. ``device`` and ``measurement`` are as in `Made`."""
    made = Made(kernel, device, measurement)
    return _render([made], thin=True, cubins={}, **_told_of_one(made, kernel.problem.name))


def emit_many(
    made: Sequence[Made],
    *,
    name: str,
    command: Sequence[str],
    cubins: Mapping[tuple[str, bool], bytes] | None = None,
) -> str:
    """Returns a module of several kernels, of which ``attention(q, k, v)`` calls the one tuned for the
    arrays' shapes, or the nearest.

    ``name`` is the module's, ``command`` what emits it again, a word and its value an entry. ``cubins``, by a
    kernel's digest and mask, are carried along.

    Raises:
        ValueError: there are fewer than two kernels, two of one problem, or two precisions of one dtype.
    """
    problems = [each.kernel.problem for each in made]
    _check_together(problems)
    cards = dict.fromkeys(f"{each.device} (sm_{each.kernel.arch})" for each in made)
    digests = dict.fromkeys(each.kernel.digest for each in made)
    return _render(
        made,
        thin=False,
        cubins=cubins or {},
        name=name,
        operator=f"attention_{len(made)}_{hashlib.sha256(''.join(digests).encode()).hexdigest()[:8]}",
        title=f"Flash attention for NVIDIA GPUs: {classes_words(made)}.",
        summary=wrap(
            f"{len(made)} kernels for {' and '.join(cards)}. Each serves any batch, number of heads, lengths "
            "and strides, grouped-query heads, and either mask; the one tuned for the nearest shape runs."
            + (_DIFFERENTIATES if any(problem.backward for problem in problems) else "")
        ),
        figures=wrap(figures_of_many(made)),
        listing=listing(made),
        regenerate=shell([f"flashgen emit {name}.py", *command]),
    )


#: What modules with kernels for gradients say of themselves.
_DIFFERENTIATES = " Some are of the backward pass: gradients of what the others compute are theirs."


def _check_together(problems: Sequence[Problem]) -> None:
    """Raises ValueError for problems whose kernels make no module of several."""
    alone = next(filter(None, map(why_alone, problems)), None)
    if alone is not None and not _is_packed_pair(problems):
        raise ValueError(alone)
    names = [problem.name for problem in problems]
    if len(names) < 2:
        raise ValueError(f"a module of several kernels was asked for with {len(names)}")
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise ValueError(f"two kernels were tuned for {', '.join(twice)}; give one of each")
    for one, other in combinations(problems, 2):
        if (
            one.backward == other.backward
            and one.scoring.stem != other.scoring.stem
            and _called_as(one) == _called_as(other)
        ):
            raise ValueError(
                f"calls for {one.name} and {other.name} are told by the same arguments; make a module of each"
            )
    scaled = [problem.name for problem in problems if problem.has_scales]
    if scaled:
        raise ValueError(
            f"{scaled[0]} takes scales, which calls of several kernels do not; make a module of it alone"
        )
    for dtype, backward in dict.fromkeys((problem.dtype, problem.backward) for problem in problems):
        alike = (each for each in problems if (each.dtype, each.backward) == (dtype, backward))
        precisions = {problem.precision for problem in alike}
        if len(precisions) > 1:
            raise ValueError(
                f"a call does not say which precision of {dtype} it wants, and there are kernels of "
                f"{', '.join(sorted(precisions))}; make a module of each"
            )


def _is_packed_pair(problems: Sequence[Problem]) -> bool:
    """Whether these are packed sequences and the gradients of the same attention."""
    if len(problems) != 2 or problems[0].backward == problems[1].backward:
        return False
    told = {(p.layout, p.dtype, p.kv_dtype, p.head_dim, p.head_dim_v, p.scoring.stem) for p in problems}
    return len(told) == 1 and problems[0].layout is PACKED


def _called_as(problem: Problem) -> tuple[object, ...]:
    """What a call names, and the types of its arrays, by which kernels for it are found."""
    named = {
        each for each in problem.scoring.to_dict() if each not in ("mask", "score", "buffers", "scalars")
    }
    return (frozenset(named), frozenset((each.name, each.dtype) for each in problem.scores.buffers))


def _told_of_one(made: Made, name: str) -> dict[str, str]:
    """What the template is told of a module with one kernel, as `emit_many` tells it of several."""
    kernel = made.kernel
    return {
        "name": name,
        "operator": f"{kernel.entry}_{kernel.digest[:8]}",
        "title": f"Flash attention for NVIDIA GPUs: {class_words(kernel.problem)}.",
        "summary": wrap(summary(kernel, made.device)),
        "figures": wrap(figures(made)),
        "listing": "",
        "regenerate": regenerating(made, f"{name}.py"),
    }


def _render(
    made: Sequence[Made], *, thin: bool, cubins: Mapping[tuple[str, bool], bytes], **told: str
) -> str:
    several = len(made) > 1
    forward = [each for each in made if not each.kernel.problem.backward]
    made = [*forward, *(each for each in made if each.kernel.problem.backward)]
    differentiable = 0 < len(forward) < len(made)
    problems = [each.kernel.problem for each in made]
    has_scales, scored = problems[0].has_scales, any(map(_reads_more, problems))
    # Kernels that read the same are told by one list of arguments, those that see and change the same by one
    # text.
    kinds = {_kind(each.kernel): each.kernel for each in made}
    scorings = {problem.scoring.stem: problem for problem in problems}
    kernels = {_source_key(each): each.kernel for each in made}
    offer = offer_of(problems[0], scored=scored, differentiable=differentiable)
    imports, code = _imports_and_code(made, thin, scored)
    functions = offer.functions
    if problems[0].layout is DENSE and any(problem.scoring.documents for problem in problems):
        functions = (*functions, "document_bounds")
    data = ["KERNELS"] if forward else []
    data += ["GRADIENTS"] if len(forward) < len(made) else []
    data += ["SOURCES"] if several else ["DEVICE", "MEASUREMENT", "PROBLEM", "SOURCE", "VARIANT"]
    classes = [] if thin else ["Choice", "Launch", "TensorMap", "Tuned"]
    classes += ["Buffer", "Scored"] if scored and not thin else []
    values = [_values(each, alone=len(kinds) == 1, one_scoring=len(scorings) == 1) for each in made]
    lists = any(each.kernel.has_tile_lists for each in made)
    classes += ["TileLists"] if lists else []
    classes += ["SequencePlan"] if problems[0].layout.is_packed else []
    return (
        environment()
        .get_template("module/module.py.jinja")
        .render(
            several=several,
            thin=thin,
            has_scales=has_scales,
            has_key_scales=problems[0].has_key_scales,
            imports=imports,
            code=code,
            exported=[*sorted(data), *sorted(classes), *sorted(functions)],
            functions=functions,
            scored=scored,
            packed=problems[0].layout.is_packed,
            paged=problems[0].layout.is_paged,
            latent=problems[0].latent,
            appends=problems[0].append is not None,
            offer=offer,
            differentiable=differentiable,
            backward=not forward,
            tables={
                name: kernels
                for name, kernels in (
                    ("KERNELS", values[: len(forward)]),
                    ("GRADIENTS", values[len(forward) :]),
                )
                if kernels
            },
            calls=_calls(problems),
            wanted=value_literal(_wanted(problems)),
            kernels_heading=heading("kernels" if several else "the kernel"),
            kinds=[
                {
                    "key": kind if len(kinds) > 1 else "",
                    "arguments": [(field.name, field.code) for field in kernel.arguments.fields],
                }
                for kind, kernel in kinds.items()
            ],
            scorings=[
                {
                    "key": stem if len(scorings) > 1 else "",
                    "seen": seen_text(problem),
                    "changed": changed_text(problem),
                }
                for stem, problem in scorings.items()
                if _reads_more(problem)
            ],
            sources={} if thin else {key: source_literal(kernel.source) for key, kernel in kernels.items()},
            cubins={
                key: {causal: packed_literal(cubins[kernel.digest, causal]) for causal in (False, True)}
                for key, kernel in kernels.items()
            }
            if cubins
            else {},
            embedded=" and ".join(dict.fromkeys(each.kernel.sm for each in made)),
            needs=needs(made, embedded=bool(cubins), thin=thin),
            **told,
        )
    )


def _kind(kernel: Kernel) -> str:
    """What kernels have in common that are told the same and read the same, as part of a name."""
    if kernel.problem.backward:
        return "_gradients" + kernel.problem.scoring.stem
    return kernel.problem.scoring.stem + ("_workspace" if kernel.workspace else "")


def _reads_more(problem: Problem) -> bool:
    """Whether kernels read more than q, k and v: for masks and changes of scores, or scales of keys."""
    return not problem.scoring.is_plain or problem.has_key_scales


def _has_buffers(problem: Problem) -> bool:
    return bool(problem.scores.buffers) or problem.has_key_scales


def _key_scales() -> dict[str, str]:
    """What the template is told of scales of keys and values."""
    axes = tuple((axis,) for axis in KEY_SCALE_AXES)
    return {name: value_literal(("f32", axes, True)) for name in KEY_SCALES}


def _imports_and_code(made: Sequence[Made], thin: bool, scored: bool) -> tuple[str, str]:
    """What the module imports, and what of the runtime is in it."""
    if not thin:
        problem = made[0].kernel.problem
        runtime = inline_runtime(
            scored=scored,
            layout=problem.layout,
            latent=problem.latent,
            appends=problem.append is not None,
            gradients=any(each.kernel.problem.backward for each in made),
        )
        return import_lines(runtime.imports), runtime.code.rstrip("\n")
    maps = ", TensorMap" if any(launch.tensor_maps for launch in made[0].kernel.launches) else ""
    runtime_names = f"Attention, Launch{maps}, Tuned, run_module"
    if made[0].kernel.problem.layout is not DENSE or made[0].kernel.problem.append is not None:
        return _sequence_imports(made[0], maps, scored), ""
    if made[0].kernel.problem.latent:
        bound = offer_of(made[0].kernel.problem).bound
        runtime_names = runtime_names.replace("Attention, ", "")
        return (
            "import sys\nfrom pathlib import Path\n\n"
            + f"from flashgen.templates.runtime import {runtime_names}\n"
            + f"from flashgen.templates.runtime.latent_keys import {bound}",
            "",
        )
    if made[0].kernel.problem.backward and not scored:
        return (
            "import sys\nfrom pathlib import Path\n\n"
            f"from flashgen.templates.runtime import Launch{maps}, Tuned\n"
            "from flashgen.templates.runtime.gradient_program import run_gradients_module\n"
            "from flashgen.templates.runtime.gradients import Gradients",
            "",
        )
    if not scored:
        return (
            "import sys\nfrom pathlib import Path\n\n"
            + f"from flashgen.templates.runtime import {runtime_names}",
            "",
        )
    buffers = "Buffer, " if _has_buffers(made[0].kernel.problem) else ""
    lists = ", TileLists" if made[0].kernel.has_tile_lists else ""
    of = "scored_gradients" if made[0].kernel.problem.backward else "scored_attention"
    program = "scored_gradient_program" if made[0].kernel.problem.backward else "scored_program"
    offer = offer_of(made[0].kernel.problem, scored=True)
    return (
        "import sys\nfrom pathlib import Path\nfrom typing import Any\n\nimport numpy as np\n"
        f"from flashgen.templates.runtime import Launch, Tuned{maps}\n"
        f"from flashgen.templates.runtime.{of} import {offer.bound}\n"
        f"from flashgen.templates.runtime.{program} import {offer.program}\n"
        f"from flashgen.templates.runtime.scored_values import {buffers}Scored{lists}",
        "",
    )


def _sequence_imports(made: Made, maps: str, scored: bool) -> str:
    """What a thin module of packed sequences, of keys in pages, or of caches that grow imports."""
    offer, layout = offer_of(made.kernel.problem), made.kernel.problem.layout
    backward = made.kernel.problem.backward
    latent = made.kernel.problem.latent
    kind = "paged" if layout.is_paged else "packed" if layout.is_packed else "cache"
    part = f"{kind}_gradients" if backward else f"{'latent' if latent else kind}_attention"
    program = f"{kind}_gradient_program" if backward else f"{kind}_program"
    values = ["Buffer"] if _has_buffers(made.kernel.problem) else []
    values += ["Scored"] if scored else []
    values += ["TileLists"] if made.kernel.has_tile_lists else []
    lines = ["import sys", "from pathlib import Path"]
    lines += ["from typing import Any", "", "import numpy as np"] if scored else [""]
    lines += [
        f"from flashgen.templates.runtime import Launch, Tuned{maps}",
        f"from flashgen.templates.runtime.{part} import {offer.bound}",
        f"from flashgen.templates.runtime.{program} import {offer.program}",
    ]
    lines += ["from flashgen.templates.runtime.packed_values import SequencePlan"] * layout.is_packed
    lines += [f"from flashgen.templates.runtime.scored_values import {', '.join(values)}"] if values else []
    return "\n".join(lines)


def _calls(problems: Sequence[Problem]) -> list[str]:
    """What a call is told beside arrays for each kind of masks and changes of scores."""
    told: dict[str, None] = {}
    offer = offer_of(problems[0])
    for problem in problems:
        scoring, values = problem.scoring, scalar_values(problem.scoring)
        words = [f"window=({values['window_left']}, {values['window_right']})"] if scoring.window else []
        words += [f"always={scoring.always}"] if scoring.always else []
        words += [
            f"{each}={values[each]:g}" for each in ("chunk", "dilation", "softcap") if getattr(scoring, each)
        ]
        words += [
            f"{each}={each}" for each in ("prefix", "lengths", "documents", "tree") if getattr(scoring, each)
        ]
        words += ["alibi_slopes=slopes"] if scoring.alibi else []
        words += ["bias=mask" if scoring.bias == BOOLEAN else "bias=bias"] if scoring.bias else []
        words += ["sinks=sinks"] if scoring.sinks else []
        own = [*_own_buffers(problem), *(KEY_SCALES if problem.has_key_scales else ())]
        words += [f"{each}={each}" for each in own]
        words += [f"{name}={value!r}" for name, value in scoring.scalars]
        if words:
            told[f"{offer.functions[0]}({offer.usual}, {', '.join(words)})"] = None
    return list(told)


def _wanted(problems: Sequence[Problem]) -> list[str]:
    """The arrays that kernels take gradients of beside q, k and v, as calls name them."""
    made = (buffer_gradients(each.scores) for each in problems if each.backward)
    names = dict.fromkeys(each.buffer.name for one in made for each in one)
    return ["alibi_slopes" if name == "slopes" else name for name in names]


def _own_buffers(problem: Problem) -> list[str]:
    """The arrays of a problem's expressions."""
    scoring = problem.scoring
    by_name = {
        "prefix": scoring.prefix,
        "lengths": scoring.lengths,
        "document_begin": scoring.documents,
        "document_end": scoring.documents,
        "tree": scoring.tree,
        "slopes": scoring.alibi,
        "bias": scoring.bias,
        "sinks": scoring.sinks,
    }
    return [each.name for each in problem.scores.buffers if not by_name.get(each.name)]


def _values(made: Made, *, alone: bool, one_scoring: bool) -> dict[str, Any]:
    """What the template asks of a kernel, whose arguments or scores may be those of all."""
    kernel, problem, variant = made.kernel, made.kernel.problem, made.kernel.variant
    carried = {key: value for key, value in (made.measurement or {}).items() if key != "times_us"}
    plan = Plan.of_launches(kernel.launches)
    return {
        "name": problem.name,
        "class": "Scored" if _reads_more(problem) else "Tuned",
        "kind": "" if alone else _kind(kernel),
        "scoring": "" if one_scoring else problem.scoring.stem,
        "asked": value_literal(" ".join(scoring_options(problem.scoring))),
        "scalars": to_literal(
            {each.name: scalar_values(problem.scoring)[each.name] for each in problem.scores.scalars}
        ),
        "buffers": {
            each.name: value_literal((each.dtype, tuple(tuple(sorted(axis)) for axis in each.axes)))
            for each in problem.scores.buffers
        }
        | (_key_scales() if problem.has_key_scales else {}),
        "problem": to_literal(problem.to_dict()),
        "variant": to_literal({"family": variant.family, **variant.to_dict()}),
        "device": to_literal({"name": made.device, "arch": kernel.arch}),
        "measurement": to_literal(carried),
        "vector": variant.access_width(problem),
        "key_vector": variant.key_access_width(problem) if problem.has_key_scales else 0,
        "counted": ", ".join(counted_by(kernel)),
        "counts_keys": counts_keys(kernel),
        "plan_ints": plan.ints.python(_GRID_OF_NEW) if plan is not None else "",
        "workspace": [each.floats.python(_GRID_OF_NEW) for each in kernel.workspace.regions]
        if kernel.workspace
        else [],
        "deterministic": kernel.is_deterministic,
        "scattered": value_literal(scattered_arrays(problem.scores) if problem.backward else ()),
        "launches": [
            {
                "symbol": kernel.symbol_of(each),
                "count": each.blocks.python(_GRID_OF_NEW),
                "numbers": _numbers(each)
                | ({"plans": True} if each.role == PLAN_ROLE else {})
                | (_lists(kernel) if each.role == LISTS_ROLE else {}),
                "maps": each.tensor_maps,
            }
            for each in kernel.launches
        ],
        "tolerance": problem.tolerance,
        "oldest_arch": kernel.oldest_arch,
        "arch": kernel.arch,
        "arch_suffix": variant.arch_suffix,
        "source": _source_key(made),
    }


def _lists(kernel: Kernel) -> dict[str, Any]:
    """What a module says of the launch that lists tiles of keys."""
    lists = kernel.tile_lists
    assert lists is not None
    told: dict[str, Any] = {"lists": lists.keys}
    if lists.words:
        told["list_words"] = lists.words
    for axis, strides in (("batch", lists.batch_strides), ("head", lists.head_strides)):
        if strides:
            told[f"list_{axis}_strides"] = value_literal(strides)
    return told


def counts_keys(kernel: Kernel) -> bool:
    """Tells whether a kernel that makes no gradients has launches whose blocks are counted by keys."""
    return not kernel.problem.backward and any(KEYS.name in each.sizes_of_grid for each in kernel.launches)


def counted_by(kernel: Kernel) -> tuple[str, ...]:
    """Returns the sizes by which a kernel's blocks are counted, as the runtime has them."""
    problem = kernel.problem
    packed, heads = problem.layout.is_packed, ("batch", "num_q_heads", "num_kv_heads")
    if problem.backward:
        return (*heads, "seqlen_q", "seqlen_k", *(("total_q", "total_k") if packed else ()))
    return (*heads, "total_q" if packed else "seqlen_q", *((KEYS.name,) if counts_keys(kernel) else ()))


#: Grids are as if there were a new row for each query: blocks that append take more where there are more.
_GRID_OF_NEW = {"seqlen_new": "seqlen_q", "total_new": "total_q"}
#: Of a launch's fields its maps, its role, which its function's name tells, and what the problem tells.
_TOLD_APART = ("tensor_maps", "role", "packed", "rotates", "of_keys", "keys_per_block")


def _numbers(launch: Launch) -> dict[str, Any]:
    """A launch's fields that are not as usual, but those `_TOLD_APART`."""
    usual = Launch(-1, -1, None)
    names = [field.name for field in fields(Launch) if field.name not in _TOLD_APART]
    told = {name: getattr(launch, name) for name in names if getattr(launch, name) != getattr(usual, name)}
    return {name: value_literal(value) for name, value in told.items()}


def _source_key(made: Made) -> str:
    return made.kernel.digest[:8]
