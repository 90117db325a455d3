"""Which kernels a family makes: its identity stays where they stay, and changes with them alone.

Where a change alters kernels, the recorded identities tell: `pytest tests/gen/test_identity.py
--update-golden` writes them anew; what is to be done besides, the message of the failing test says.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from flashgen.gen import identity as identity_module
from flashgen.gen import render
from flashgen.gen.families import FAMILIES
from flashgen.gen.identity import (
    IDENTITIES_OF_0_1_0,
    SAME_MACHINE_CODE,
    SAMPLE,
    compiled_text,
    identities,
    identity,
    sample,
)

RECORDED = Path(__file__).with_name("identities.json")
#: What kernels have a choice of only where scores are changed, as in none of the sample.
OF_CHANGED_SCORES = {"tangent", "bias_stages", "bias_heads", "seen_bits", "far_keys"}
ADVICE = """kernels of family {family} changed: their identity is {now}, {recorded} is recorded.
- If they are other machine code, their times must be measured anew: write the new identity down with
  pytest {file} --update-golden
- If they are the same machine code, as after a renaming, and tests/support/machine_code.py proves it, add
  {recorded!r} to SAME_MACHINE_CODE[{family!r}] in gen/identity.py as well: older trials are found then."""


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_those_whose_identity_is_recorded(family: str, request: pytest.FixtureRequest) -> None:
    recorded = json.loads(RECORDED.read_text())
    if request.config.getoption("--update-golden"):
        recorded[family] = identity(family)
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    now, before = identity(family), recorded.get(family)
    file = Path(__file__).relative_to(Path(__file__).parents[2])
    assert now == before, ADVICE.format(family=family, now=now, recorded=before, file=file)


def test_identities_of_one_family_differ_from_another_and_from_earlier_ones() -> None:
    known = [each for family in FAMILIES for each in identities(family)]
    assert len(set(known)) == len(known)
    assert set(SAME_MACHINE_CODE) <= set(FAMILIES) and set(IDENTITIES_OF_0_1_0) <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sample_has_every_value_of_every_parameter(family: str) -> None:
    kernels = list(sample(family))
    missing = [
        f"{p.name}={choice}"
        for p in FAMILIES[family].parameters()
        for choice in p.choices
        if p.name not in OF_CHANGED_SCORES
        if all(getattr(kernel.variant, p.name) != choice for kernel in kernels)
    ]
    assert not missing, f"draw it anew: tests/support/identity_sample.py {family}"
    assert len(kernels) < 100, "an identity is to cost a fraction of a second"


def test_a_family_without_a_sample_says_how_to_draw_one() -> None:
    with pytest.raises(LookupError, match=r"identity_sample.py fft"):
        identity("fft")


@pytest.fixture
def templates(tmp_path, monkeypatch):
    """A copy of the templates, from which kernels are rendered; every change is to be followed by `anew`."""
    copy = shutil.copytree(render.TEMPLATES, tmp_path / "templates")
    monkeypatch.setattr(render, "TEMPLATES", copy)
    anew()
    yield copy
    anew()


def anew() -> None:
    render.environment.cache_clear()
    identity_module.identity.cache_clear()


def test_comments_and_white_space_change_no_identity(templates: Path) -> None:
    before = {family: identity(family) for family in FAMILIES}
    for path in templates.rglob("*.cu.jinja"):
        text = path.read_text()
        # Of a file that is imported for its macros, what stands outside of them goes nowhere.
        words = text.replace("  // ", "    // in other words: ").replace(";\n", ";  \n\n")
        path.write_text("{# What this is. #}\n// A line of comment.\n" + words + "/* An\nend. */\n")
    anew()
    assert {family: identity(family) for family in FAMILIES} == before


def test_a_moved_template_changes_no_identity(templates: Path, monkeypatch) -> None:
    simt = FAMILIES["simt"]
    before = identity("simt")
    (templates / "elsewhere").mkdir()
    (templates / simt.template).rename(templates / "elsewhere" / "simt.cu.jinja")
    monkeypatch.setattr(simt, "template", "elsewhere/simt.cu.jinja")
    anew()
    assert identity("simt") == before


def test_code_changes_the_identity_of_its_own_family_alone(templates: Path) -> None:
    before = {family: identity(family) for family in FAMILIES}
    path = templates / FAMILIES["simt"].template
    text = path.read_text()
    assert "fmaxf(" in text
    path.write_text(text.replace("fmaxf(", "fminf("))
    anew()
    changed = [family for family in FAMILIES if identity(family) != before[family]]
    assert changed == ["simt"]


def test_what_the_host_compiles_is_left_out() -> None:
    """The launcher's text may change without a kernel's; the rest of the source may not."""
    source = next(iter(sample("ladder"))).source
    device, host, launcher = source.rpartition(identity_module.HOST_PART)
    assert host and "cudaLaunchKernel" in launcher and "__global__" in device
    assert compiled_text(source) == compiled_text(device + host + "#endif\n") == compiled_text(device)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a = b;  // c", "a = b; /* d */", True),
        ("a  =\n  b ;", "a=b;", True),
        ('f("//a")', 'f("//b")', False),
        ('asm("a /* b */")', 'asm("a /* c */")', False),
        ("int ab;", "int a b;", False),
        ("#define A 1\nb", "#define A 1 b", False),
        ("#define A 1  // one\nb", "#define A 1\n  b", True),
        ("#define A \\\n  1\nb", "#define A \\\n 1 // one\nb", True),
        ("a = 'x';", "a = 'y';", False),
        ("a + b", "b + a", False),
    ],
)
def test_what_a_compiler_reads(one: str, other: str, same: bool) -> None:
    assert (compiled_text(one) == compiled_text(other)) is same


def test_the_sample_is_shipped() -> None:
    assert SAMPLE.is_file() and SAMPLE.parent == Path(identity_module.__file__).parent
