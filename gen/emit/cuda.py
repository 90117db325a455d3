"""A kernel as a .cu file: its source, with its figures told in the header and its facts in the last line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ..families import family_named
from ..kernel import Kernel
from ..launch import MAIN_ROLE, Launch, TensorMap
from ..problem import Problem
from ..scoring.words import scoring_words
from .made import Made
from .words import WIDTH, building, figures, regenerating, wrap

#: What the line begins with that tells a machine all about the kernel.
FACTS = "// flashgen: "


def emit_cuda(
    kernel: Kernel,
    *,
    device: str,
    measurement: Mapping[str, Any] | None = None,
    build: Mapping[str, Any] | None = None,
    stem: str | None = None,
) -> str:
    """Returns the kernel's source with its figures in the header comment and, last, its facts as JSON.

    ``device``, ``measurement`` and ``build`` are as in `Made`. ``stem`` is the file's name without ``.cu``,
    by default the problem's.
    """
    made, source = Made(kernel, device, measurement, build), kernel.source
    told = _told(made, f"{stem or kernel.problem.name}.cu")
    # Behind the header, which ends with the first line that is no comment.
    header = re.match(r"(?://.*\n)*", source)
    start = header.end() if header is not None else 0
    facts = {**_facts(made), "digest": kernel.digest, "figures": [start, len(told)]}
    return f"{source[:start]}{told}{source[start:]}{FACTS}{json.dumps(facts)}\n"


def _told(made: Made, file: str) -> str:
    """What the header tells of figures, and which commands build the file and make it again."""
    scoring = made.kernel.problem.scoring
    features = [] if scoring.is_plain else [wrap(f"Tuned with {scoring_words(scoring)}.", WIDTH - 3)]
    paragraphs = [
        *features,
        wrap(figures(made), WIDTH - 3),
        f"Build:\n\n{building(made.kernel, file)}",
        f"Regenerate:\n\n{regenerating(made, file, WIDTH - 3)}",
    ]
    lines = "\n\n".join(["", *paragraphs]).removeprefix("\n").split("\n")
    return "".join(f"// {line}".rstrip() + "\n" for line in lines)


def read_cuda(text: str) -> tuple[Kernel, str]:
    """Returns the kernel that `emit_cuda` wrote, with the whole text as its source, and the card it is for.

    Raises:
        KeyError, TypeError, ValueError: the text has no line of facts, or not those of this flashgen.
    """
    facts, _ = _split(text)
    launches = [
        Launch(**{**launch, "tensor_maps": tuple(TensorMap(**each) for each in launch["tensor_maps"])})
        for launch in facts["launches"]
    ]
    problem = Problem.from_dict(facts["problem"])
    variant = family_named(facts["family"]).from_dict(facts["variant"])
    main = next(each for each in launches if each.role == MAIN_ROLE)
    workspace = variant.workspace_of(problem, main)
    kernel = Kernel(problem, variant, facts["arch"], text, facts["entry"], tuple(launches), workspace)
    return kernel, facts["device"]


def as_rendered(kernel: Kernel) -> Kernel:
    """Returns a kernel that `read_cuda` read with its source as it was rendered, without figures and facts.

    A source that was edited since stays as it is. Raises ValueError as `read_cuda`.
    """
    facts, source = _split(kernel.source)
    start, length = facts["figures"]
    rendered = replace(kernel, source=source[:start] + source[start + length :])
    return rendered if rendered.digest == facts["digest"] else kernel


def _split(text: str) -> tuple[dict[str, Any], str]:
    """The facts of a .cu file's text, and what stands before them."""
    source, marker, rest = text.partition(f"\n{FACTS}")
    if not marker:
        raise ValueError(f"it has no line that begins with {FACTS.strip()!r}")
    return json.loads(rest.partition("\n")[0]), f"{source}\n"


def _facts(made: Made) -> dict[str, Any]:
    kernel = made.kernel
    return {
        "problem": kernel.problem.to_dict(),
        "family": kernel.variant.family,
        "variant": kernel.variant.to_dict(),
        "device": made.device,
        "arch": kernel.arch,
        "entry": kernel.entry,
        "launches": [_launch_facts(each) for each in kernel.launches],
    }


def _launch_facts(launch: Launch) -> dict[str, Any]:
    """A launch's fields; without those that few have, where it has not."""
    rare = (
        "alike_batches",
        "alike_heads",
        "packed",
        "rotates",
        "of_keys",
        "workspace_splits",
        "wanted_blocks",
        "shares_turn",
        "keys_per_block",
        "makes",
        "dependent",
        "heads_together",
    )
    usual = asdict(Launch(-1, -1, None))
    return {name: value for name, value in asdict(launch).items() if value != usual[name] or name not in rare}
