"""Which kernels an accuracy survey looks at: one of each family, type and precision that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...gen.families import FAMILIES
from ...gen.kernel import Kernel
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Value, Variant
from ..cards.device import Device
from ..cards.emulated import PREFIX
from ..cards.names import resolve
from ..errors import NotServed, UsageError
from ..predict.prior import prior_of
from ..predict.space_survey import survey_space

#: The emulated card on which each family is looked at where none is named.
HOME_CARDS = {"simt": "gtx-1080", "ladder": "gtx-1080", "mma": "a100", "wgmma": "h200"}
#: Precisions that a family of these has under another name already.
_SYNONYMS: dict[tuple[str, ...], set[str]] = {("auto", "ieee"): {"auto"}}
#: A kernel is chosen for problems of this length, and tried on a few rows.
SEQLEN = 1024


@dataclass(frozen=True)
class Wanted:
    """What a survey is to look at: empty stands for all there is; ``held`` are parameters of one family."""

    device: str | None = None
    families: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    masks: tuple[bool, ...] = (False, True)
    head_dim: int = 32
    held: Mapping[str, Value] | None = None


@dataclass(frozen=True)
class Subject:
    """A kernel to look at, and the card that it runs on."""

    kernel: Kernel
    device: Device

    @property
    def family(self) -> str:
        return self.kernel.variant.family

    @property
    def arithmetic(self) -> str:
        """The class as asked for: the precision of float32, the type of others."""
        problem = self.kernel.problem
        return problem.precision if problem.dtype == "f32" else problem.dtype

    @property
    def mask(self) -> str:
        return "causal" if self.kernel.problem.causal else "full"

    @property
    def name(self) -> str:
        return f"{self.arithmetic} {self.family}"


def subjects(wanted: Wanted) -> Iterator[Subject]:
    """Yields the kernels, those of a family and class together.

    Raises:
        NotServed: no family computes what is wanted on that card.
        FlashgenError: the card is not there, or a tool is missing.
    """
    found = False
    for name, family in FAMILIES.items():
        if wanted.families and name not in wanted.families:
            continue
        device = resolve(wanted.device or PREFIX + HOME_CARDS[name])
        for problem in _problems(family, wanted):
            variant = _chosen(family, problem, device, wanted.held or {})
            if variant is None:
                continue
            found = True
            for causal in wanted.masks:
                yield Subject(render(variant, replace(problem, causal=causal), device.limits), device)
    if not found:
        raise NotServed(
            "no kernel family computes that; choose another --family, --dtype, --precision or card"
        )


def _problems(family: type[Variant], wanted: Wanted) -> Iterator[Problem]:
    for dtype, precisions in family.serves.precisions.items():
        # A precision is float32's: named alone, it leaves other types out.
        dtypes = wanted.dtypes or (("f32",) if wanted.precisions else ())
        if dtypes and dtype not in dtypes:
            continue
        for precision in precisions:
            # By multiply-adds, auto is another name of ieee.
            if precision not in (wanted.precisions or set(precisions) - _SYNONYMS.get(precisions, set())):
                continue
            yield Problem(
                dtype=dtype,
                precision=precision,
                batch=1,
                num_q_heads=2,
                num_kv_heads=1,
                seqlen_q=SEQLEN,
                seqlen_k=SEQLEN,
                head_dim=wanted.head_dim,
            )


def _chosen(
    family: type[Variant], problem: Problem, device: Device, held: Mapping[str, Value]
) -> Variant | None:
    """The variant predicted fastest, or the one that is held whole; None where none is legal."""
    limits = device.limits
    survey = survey_space(family, problem, limits, held, prior_of(problem, limits), count=1)
    if survey.survivors:
        return survey.survivors[0].variant
    if survey.verdict is not None and not survey.verdict.legal:
        raise UsageError(f"--set: {survey.verdict.rule}: {survey.verdict.reason}")
    return None


def order_of(precision_or_dtype: Sequence[str]) -> list[str]:
    """Returns classes in the order in which tables tell of them."""
    known = ["ieee", "auto", "3xf16", "3xtf32", "tf32", "f16", "bf16", "e4m3"]
    return sorted(precision_or_dtype, key=known.index)
