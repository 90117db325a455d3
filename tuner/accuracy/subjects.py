"""Which kernels an accuracy survey looks at: one of each family, type and precision that it serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...gen.families import FAMILIES
from ...gen.kernel import Kernel
from ...gen.operation import BACKWARD
from ...gen.problem import EIGHT, Problem
from ...gen.promise import PROMISES, class_of
from ...gen.render import render
from ...gen.variant import Illegal, Value, Variant
from ..asked_scoring import NOTHING_ASKED, AskedScoring
from ..cards.device import Device
from ..cards.emulated import PREFIX
from ..cards.names import resolve
from ..errors import FlashgenError, NotServed, UsageError
from ..predict.prior import prior_of
from ..predict.space_survey import survey_space

#: The emulated card on which each family is looked at where none is named.
HOME_CARDS = {
    "simt": "gtx-1080",
    "simt-backward": "gtx-1080",
    "ladder": "gtx-1080",
    "mma": "a100",
    "mma-backward": "a100",
    "wgmma": "h200",
    "wgmma-backward": "h200",
    "latent": "h200",
}
#: Where that has no instructions for eight bits, the one on which these are looked at.
HOME_CARDS_OF_EIGHT_BITS = {"mma": "l4"}
#: Precisions that a family of these has under another name already.
_SYNONYMS: dict[tuple[str, ...], set[str]] = {("auto", "ieee"): {"auto"}}
#: What is held of each family: tiles that an emulated card is quick with, several of them for a case's rows
#: and keys. Where nothing is legal with them, any will do.
SMALL_TILES: dict[str, dict[str, Value]] = {
    "simt": {"br": 32, "bc": 32},
    "mma": {"br": 64, "bc": 32, "rows_per_warp": 16, "splits": 1, "heads": 1, "key_warps": 1},
    "wgmma": {"br": 64, "bc": 64, "cluster": 1},
}
#: What is held of each class where a family has less accurate arithmetic for it: that very arithmetic.
WORST_OF_CLASS: dict[tuple[str, str], dict[str, Value]] = {("wgmma", EIGHT): {"weights": "e4m3"}}
#: Columns of latent values that a family may ask for multiples of, and of what keys have beside, as in models
#: with 512 and 64.
LATENT_COLUMNS, CHUNK = 128, 64
#: A kernel is chosen for problems of this length, and tried on a few rows.
SEQLEN = 1024


@dataclass(frozen=True)
class Wanted:
    """What a survey is to look at: empty stands for all there is; ``held`` are parameters of one family."""

    device: str | None = None
    families: tuple[type[Variant], ...] = ()
    dtypes: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    masks: tuple[bool, ...] = (False, True)
    head_dim: int = 32
    scoring: AskedScoring = NOTHING_ASKED
    held: Mapping[str, Value] = field(default_factory=dict)


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
        """The class as asked for: the precision of float32, or one that is named, or the type."""
        return class_of(self.kernel.problem)

    @property
    def mask(self) -> str:
        return "causal" if self.kernel.problem.causal else "full"

    @property
    def name(self) -> str:
        return f"{self.arithmetic} {self.family}"


def subjects(wanted: Wanted) -> Iterator[Subject]:
    """Yields the kernels, those of a family and class together; none of gradients, of which nothing is
    promised but what `flashgen.tuner.evaluate.differentiated` holds them to.

    Raises:
        NotServed: no family computes what is wanted on that card.
        FlashgenError: the card is not there, or a tool is missing.
    """
    found = False
    for name, family in FAMILIES.items():
        if (wanted.families and family not in wanted.families) or BACKWARD in family.serves.operations:
            continue
        for problem in _problems(family, wanted):
            device = resolve(wanted.device or PREFIX + _home_card(name, problem))
            variant = _chosen(family, problem, device, wanted.held)
            if variant is None:
                continue
            found = True
            for causal in wanted.masks:
                yield Subject(render(variant, replace(problem, causal=causal), device.limits), device)
    if not found:
        raise NotServed(
            "no kernel family computes that; choose another --family, --dtype, --precision or card"
        )


def subjects_of(
    variant: Variant, problem: Problem, device: str | None, masks: Iterable[bool]
) -> Iterator[Subject]:
    """Yields the kernel of one variant, under each mask. Raises FlashgenError where it does not run there."""
    card = resolve(device or PREFIX + _home_card(variant.family, problem))
    for causal in masks:
        masked = replace(problem, causal=causal)
        try:
            yield Subject(render(variant, masked, card.limits), card)
        except Illegal as error:
            raise FlashgenError(f"{variant.name} does not run on {card.limits.name}: {error}") from error


def _home_card(family: str, problem: Problem) -> str:
    of_eight_bits = HOME_CARDS_OF_EIGHT_BITS if problem.has_scales else {}
    return of_eight_bits.get(family, HOME_CARDS[family])


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
            problem = Problem(
                dtype=dtype,
                precision=precision,
                batch=1,
                num_q_heads=2,
                num_kv_heads=1,
                seqlen_q=SEQLEN,
                seqlen_k=SEQLEN,
                head_dim=wanted.head_dim,
                scoring=wanted.scoring.of(dtype),
            )
            yield problem if problem.operation in family.serves.operations else _as_latent(problem)


def _as_latent(problem: Problem) -> Problem:
    """The problem nearest to it of latent attention: values are whole parts of keys, which have more."""
    columns = -(-problem.head_dim // LATENT_COLUMNS) * LATENT_COLUMNS
    return replace(problem, latent=True, head_dim=columns + CHUNK, head_dim_v=columns)


def _chosen(
    family: type[Variant], problem: Problem, device: Device, held: Mapping[str, Value]
) -> Variant | None:
    """The variant predicted fastest of those with small tiles, or else of all; None where none is legal."""
    limits = device.limits
    for tiles in (SMALL_TILES.get(family.family, {}), {}):
        with_tiles = {**tiles, **WORST_OF_CLASS.get((family.family, problem.precision), {}), **held}
        survey = survey_space(family, problem, limits, with_tiles, prior_of(problem, limits), count=1)
        if survey.survivors:
            return survey.survivors[0].variant
    if survey.verdict is not None and held:
        raise UsageError(f"--set: {survey.verdict.rule}: {survey.verdict.reason}")
    return None


def order_of(classes: Iterable[str]) -> list[str]:
    """Returns classes in the order in which tables tell of them."""
    return sorted(classes, key=list(PROMISES).index)
