"""What a family's kernels are, as sixteen hex digits: times measured of a family belong to its identity.

It is taken over what the compiler reads of a sample of the family's kernels, rendered: neither comments nor
white space nor the host's launcher, nor where the text came from. So a moved file or a better comment keeps
what was measured, another family's change too, and what alters a kernel of the sample does not. The sample is
written down, so that no rule that prunes variants has a say in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from .families import family_named
from .kernel import Kernel
from .limits import PRESETS
from .problem import Problem
from .render import render_unchecked
from .variant import Variant

#: By family, cases of a card and a problem, and of each some variants: together they have every value of
#: every parameter. tests/support/identity_sample.py draws it anew.
SAMPLE = Path(__file__).with_name("identity_sample.json")
#: By family, identities of earlier kernels that are the same machine code as today's: from before something
#: was renamed, proven by tests/support/machine_code.py. Trials of those are trials of today's kernels.
SAME_MACHINE_CODE: Mapping[str, tuple[str, ...]] = {
    "ladder": ("c53782d6377f6c3f",),
    # Before the samples had keys split over a workspace, and packed sequences and pages; the last: e4m3.
    "mma": ("3aaa0a2c55812199", "8e9a04fc6fa7869d"),
    "simt": ("9f5fd2bcb0fed7a5", "c10723c171fdbb23"),
    # Before packed rows were counted only where somebody asks how many there are.
    "wgmma": ("351ccfe8a0f28322",),
}
#: The identities that kernels of version 0.1.0 had, whose studies do not say so, by family.
IDENTITIES_OF_0_1_0: Mapping[str, str] = {
    "ladder": "c53782d6377f6c3f",
    "mma": "2d1b53d2b0771d99",
    "simt": "6a9cb1e1d86ebf09",
    "wgmma": "165e87e71f0c0447",
}
#: What the host alone compiles comes last.
HOST_PART = "#ifndef __CUDACC_RTC__\n"
#: A string or character, which is kept as it is; a comment, which is not; a directive, whose line's end
#: counts; a word or number; any other sign.
TOKENS = re.compile(
    r"""
    (?P<kept> "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' )
    | (?P<comment> //[^\n]* | /\*.*?\*/ )
    | (?P<directive> ^[ \t]*\# (?:[^\n\\/]|\\.|/(?![/*]))* )
    | (?P<word> \w+ )
    | (?P<sign> [^\s\w] )
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def identities(name: str, today: str | None = None) -> tuple[str, ...]:
    """Returns the identities of a family whose kernels are those of today, today's own first, which need not
    be found out where it is known."""
    return tuple(dict.fromkeys((today or identity(name), *SAME_MACHINE_CODE.get(name, ()))))


@cache
def identity(name: str) -> str:
    """Returns the identity of the family of that name: a fraction of a second the first time in a process.

    Raises LookupError for a family that has no sample.
    """
    digest = hashlib.sha256()
    for kernel in sample(name):
        digest.update(compiled_text(kernel.source).encode() + b"\0")
    return digest.hexdigest()[:16]


def sample(name: str) -> Iterator[Kernel]:
    """Yields the kernels that the identity of a family is taken over. Raises LookupError without a sample."""
    cases = json.loads(SAMPLE.read_text(encoding="utf-8"))
    if name not in cases:
        raise LookupError(f"family {name!r} has no sample; draw one: tests/support/identity_sample.py {name}")
    family: type[Variant] = family_named(name)
    for case in cases[name]:
        problem, limits = Problem(**case["problem"]), PRESETS[case["card"]]
        for settings in case["variants"]:
            variant = family(**family.parse(dict(each.split("=") for each in settings.split())))
            yield render_unchecked(variant, problem, limits)


def compiled_text(source: str) -> str:
    """Returns what a compiler of a card reads of a source: its tokens, one blank between them, and an end of
    the line behind each directive of the preprocessor."""
    device, host, _ = source.rpartition(HOST_PART)
    words: list[str] = []
    for token in TOKENS.finditer(device if host else source):
        match token.lastgroup:
            case "comment":
                continue
            case "directive":
                words += [*token[0].split(), "\n"]
            case _:
                words.append(token[0])
    return " ".join(words)
