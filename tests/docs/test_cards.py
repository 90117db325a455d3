"""Which cards kernels were run on, and which were only ever emulated: as docs/kernels.md tells it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import PRESETS, preset_of
from flashgen.gen.operation import BACKWARD
from flashgen.gen.problem import Problem
from flashgen.gen.variant import Illegal, Variant
from flashgen.tuner.bench import figures
from flashgen.tuner.shelf import library

from tests.support import ROOT
from tests.support.covering import Setting, held_by
from tests.support.depth import sampled
from tests.support.emulated import check, needs_compiler
from tests.support.markdown import replaced

PAGE = ROOT / "docs" / "kernels.md"
ARCHS = sorted({card.arch for card in PRESETS.values()})
#: Small head dims, and those of families for which at small ones hardly a variant is legal.
HEAD_DIM, OTHER_HEAD_DIMS = 16, {"wgmma": 64}
MOST_DRAWS = 20_000


def held(family: str, dtype: str) -> dict[str, Any]:
    """Values without which hardly a variant is legal: of `mma` on old cards float32 as parts of f16 and one
    buffer of keys, of float32's gradients on Hopper what parts ask for."""
    if family == "wgmma-backward" and dtype == "f32":
        return {"dq_path": "bulk", "ds_stages": 1}
    if family != "mma":
        return {}
    precision = "3xf16" if dtype == "f32" else "auto"
    return held_by(dtype, precision) | {"stages": 1, "bc": 16, "rows_per_warp": 16}


def drawn(family: type[Variant], held: dict[str, Any]) -> Iterator[Variant]:
    """The default variant but for what is held, then some by chance."""
    yield family(**held)
    rng = random.Random(1)
    choices = {p.name: p.choices for p in family.parameters()} | {n: (x,) for n, x in held.items()}
    for _ in range(MOST_DRAWS):
        yield family(**{name: rng.choice(of_it) for name, of_it in choices.items()})


@cache
def example(family: str, dtype: str, arch: int) -> Setting | None:
    """A small kernel of a family on an architecture's first preset; None where the family does not run
    there."""
    klass, limits = FAMILIES[family], next(card for card in PRESETS.values() if card.arch == arch)
    if klass.serves.archs and arch not in klass.serves.archs:
        return None
    asked: dict[str, Any] = {"head_dim": OTHER_HEAD_DIMS.get(family, HEAD_DIM)}
    if family == "latent":
        asked = {"head_dim": 576, "head_dim_v": 512, "num_q_heads": 16, "num_kv_heads": 1, "latent": True}
    problem = Problem(dtype=dtype, backward=BACKWARD in klass.serves.operations, **asked)
    for variant in drawn(klass, held(family, dtype)):
        try:
            variant.check(problem, limits)
        except Illegal as why:
            if "tensor cores multiply" in why.reason and "from sm_" in why.reason:
                return None
            continue
        return Setting(variant, problem, limits)
    raise AssertionError(f"no legal variant of {family}, {dtype} was drawn for sm_{arch}")


def run_on() -> set[str]:
    """The presets of the cards whose times are committed: of shipped kernels, and of benchmark runs."""
    entries = library.entries([library.shipped_folder()])
    measured = {each.kernel.device for each in entries if not each.predicted}
    measured |= {figures.read(path).device for path in (ROOT / "out").glob("bench_*.json")}
    return {name for device in measured if (name := preset_of(device))}


def cards_table() -> str:
    """A row for each architecture that there is a preset of."""
    rows = ["| architecture | run on | only ever emulated | families |", "|---|---|---|---|"]
    for arch in ARCHS:
        served = []
        for family, klass in FAMILIES.items():
            dtypes = [dtype for dtype in klass.serves.precisions if example(family, dtype, arch)]
            if dtypes:
                some = f" ({', '.join(dtypes)})" if len(dtypes) < len(klass.serves.precisions) else ""
                served.append(f"`{family}`{some}")
        there = [name for name, card in PRESETS.items() if card.arch == arch]
        seen, unseen = (
            ", ".join(f"`{name}`" for name in there if (name in run_on()) == it) for it in (True, False)
        )
        rows.append(f"| sm_{arch} | {seen or 'none'} | {unseen or 'none'} | {', '.join(served)} |")
    return "\n".join(rows)


def test_the_page_says_which_cards_were_run_on(request: pytest.FixtureRequest) -> None:
    """Mended by ``pytest tests/docs/test_cards.py --update-golden``."""
    text = PAGE.read_text(encoding="utf-8")
    made = replaced(text, "cards", "presets", cards_table())
    if request.config.getoption("--update-golden"):
        PAGE.write_text(made, encoding="utf-8")
    else:
        assert made == text
    assert run_on() == {"h100", "h200"}, "say of it in README.md and docs/comparison.md too"


SERVED = [
    (family, dtype, arch)
    for arch in ARCHS
    for family, klass in FAMILIES.items()
    for dtype in klass.serves.precisions
    if not klass.serves.archs or arch in klass.serves.archs
]


@needs_compiler
@pytest.mark.parametrize(("family", "dtype", "arch"), sampled(SERVED, 6))
def test_what_is_told_to_be_emulated_is(family: str, dtype: str, arch: int) -> None:
    setting = example(family, dtype, arch)
    if setting is None:
        first = 89 if dtype == "e4m3" else 80
        assert arch < first, "tensor cores from Ampere on serve all families that are not one card's"
        return
    check(setting, seed=0)
