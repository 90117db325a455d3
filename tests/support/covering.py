"""Small samples of a large space: any two values that can stand together do so somewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any

from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.variant import Illegal, Variant

from tests.support.choices import LegalChoices, Order, problem_of

#: Legal assignments with a pair of values among which the best is taken, and how often one of their values is
#: chosen by chance.
CANDIDATES, BY_CHANCE = 20, 0.1
#: Choices after which no further assignment with a pair is looked for.
MAX_CHOICES = 2000
#: Variants that `draw` tries for all that it is asked for, and without finding any: of some spaces one in
#: thousands is legal, of others one in millions.
MIN_TRIES, BLIND_TRIES = 3000, 1000

#: Head dims of keys and values: odd, narrow, between powers of two, of two widths.
HEAD_DIMS = (
    (1, 1),
    (7, 7),
    (8, 8),
    (16, 16),
    (33, 33),
    (36, 36),
    (40, 40),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (160, 160),
    (256, 256),
    (192, 128),
    (40, 64),
    (64, 40),
    (16, 8),
)
#: For kernels of warpgroups: of one chunk of 64 columns and of several, whole and not, with a last step of 8,
#: values wider and narrower than keys.
WGMMA_HEAD_DIMS = (
    (8, 8),
    (24, 24),
    (40, 40),
    (64, 64),
    (72, 72),
    (96, 96),
    (128, 128),
    (136, 136),
    (256, 256),
    (192, 128),
    (64, 136),
)
#: What pairs with the number formats alone: what is theirs or leaves results alone, and the number of warps;
#: how keys are shared has tests of its own. Warpgroups take keys in steps of sixteen, whatever the rest.
LOOSE = {"br", "dims", "min_blocks", "splits", "key_warps", "parts", "poly_exp", "evict_first"}
WGMMA_LOOSE = LOOSE | {"bc"}
#: Dtype and precision: 16 bits, float32 in two parts of either kind, and rounded.
NUMBERS = (("f16", "auto"), ("bf16", "auto"), ("f32", "3xtf32"), ("f32", "3xf16"), ("f32", "tf32"))
TURING_NUMBERS = (NUMBERS[0], NUMBERS[3])
WGMMA_NUMBERS = NUMBERS[:2]
#: Less than a step, rows that no step divides, one chunk, several of each kind.
E4M3_HEAD_DIMS = ((16, 16), (48, 80), (64, 64), (96, 208), (192, 32))
#: What kernels have whose float32 no launches in front split: those that do have a cover of their own.
SPLIT_IN_PLACE: dict[str, Any] = {"split": "in_place", "summed_columns": 0}
#: And where no scores are asked for, whose arrays and bits have tests of their own.
UNSCORED: dict[str, Any] = {"bias_stages": 0, "bias_heads": 1, "seen_bits": False}
#: Where values are not of eight bits; and of dense arrays, which have no pieces of pages to share.
UNTURNED: dict[str, Any] = {
    "values": "in_place",
    "powers": "rounded",
    "score_type": "f32",
    "promotion": "tiles",
}
WITHOUT_PAGES: dict[str, Any] = {"copiers": 1}
#: Where no more tiles are than a card has multiprocessors: turns have tests of their own.
WHOLE_TURNS: dict[str, Any] = {"last_turn": "whole"}
#: What no legal `Wgmma` of 16 bits with plain scores has otherwise: hardly one of a million has all of it.
OF_16_BITS: dict[str, Any] = {"weights": "f16", "tangent": "polynomial", "split_by": "rows"}
OF_16_BITS |= {**UNSCORED, **SPLIT_IN_PLACE, **UNTURNED, **WITHOUT_PAGES, **WHOLE_TURNS}
#: The same of float32 in parts that blocks split themselves.
OF_PARTS: dict[str, Any] = dict.fromkeys(("o_apart", "p_in_shared", "q_in_registers", "pack_heads"), False)
OF_PARTS |= {"poly_exp": 0, "tail": 0, "splits": 1, "cluster": 1, "cluster_over": "rows", "weights": "f16"}
OF_PARTS |= {"tangent": "polynomial", **UNSCORED, **SPLIT_IN_PLACE, **UNTURNED}
OF_PARTS |= {**WITHOUT_PAGES, **WHOLE_TURNS}
#: By warps, in multiples of eight: less than a step, half a step, whole ones, several of each kind.
MMA_E4M3_HEAD_DIMS = ((8, 8), (16, 24), (48, 80), (64, 64), (72, 40), (128, 128), (96, 208), (192, 32))
#: Of float32 in parts: less than a step, chunks of both kinds, split together, apart and read twice.
PARTS_HEAD_DIMS = ((8, 8), (40, 40), (64, 64), (72, 40), (96, 96), (128, 128), (64, 128), (160, 160))
#: Of those that launches in front split: rows of half pieces too, and chunks summed together and apart.
IN_FRONT_HEAD_DIMS = ((8, 8), (36, 24), (64, 64), (72, 40), (128, 128), (64, 160), (192, 96), (256, 256))


class Uncovered:
    """The pairs of values that stand together in nothing chosen so far.

    A set of values is an integer with a bit for each value of each factor.
    """

    def __init__(self, values: Sequence[Sequence[Any]], tied: Callable[[int, int], bool]) -> None:
        starts = list(accumulate(map(len, values), initial=0))
        self._bits = [
            [1 << start + x for x in range(len(of_it))] for start, of_it in zip(starts, values, strict=False)
        ]
        places = range(len(values))
        partners = [sum(sum(self._bits[b]) for b in places if b != a and tied(a, b)) for a in places]
        self._of = [[together] * len(of_it) for together, of_it in zip(partners, values, strict=True)]

    def __contains__(self, pair: Mapping[int, int]) -> bool:
        (a, x), (b, y) = pair.items()
        return bool(self._of[a][x] & self._bits[b][y])

    def pairs(self) -> list[dict[int, int]]:
        every = [(a, x) for a, of_it in enumerate(self._bits) for x in range(len(of_it))]
        both = (dict(pair) for pair in combinations(every, 2) if pair[0][0] != pair[1][0])
        return [pair for pair in both if pair in self]

    def set_of(self, chosen: Iterable[tuple[int, int]]) -> int:
        return sum(self._bits[place][x] for place, x in chosen)

    def count(self, place: int, among: int) -> list[int]:
        """Of each value of a factor, the pairs with a value of a set."""
        return [(partners & among).bit_count() for partners in self._of[place]]

    def count_all(self, chosen: Sequence[int]) -> int:
        among = self.set_of(enumerate(chosen))
        return sum((self._of[place][x] & among).bit_count() for place, x in enumerate(chosen)) // 2

    def cover(self, chosen: Sequence[int]) -> None:
        among = self.set_of(enumerate(chosen))
        for place, x in enumerate(chosen):
            self._of[place][x] &= ~among


def pairwise(legal: LegalChoices, tied: Callable[[str, str], bool], rng: random.Random) -> list[list[int]]:
    """Legal assignments that between them take all pairs of values that stand together in one.

    Only pairs of ``tied`` factors count. Greedy, by chance, the same for the same seed.
    """
    uncovered = Uncovered(legal.values, lambda a, b: tied(legal.names[a], legal.names[b]))
    wanted = uncovered.pairs()
    rng.shuffle(wanted)
    chosen: list[list[int]] = []

    def most_first(asked: Mapping[int, int]) -> Order:
        """Of what is uncovered with the values that are asked for or chosen, most; by chance now and then."""

        def order(place: int, before: Sequence[int]) -> Sequence[int]:
            by_chance = legal.by_chance(place, before)
            if rng.random() < BY_CHANCE:
                return by_chance
            known = {**asked, **dict(enumerate(before[:place]))}
            counts = uncovered.count(place, uncovered.set_of(known.items()))
            return sorted(by_chance, key=lambda x: -counts[x])

        return order

    for pair in wanted:
        if pair not in uncovered or legal.is_impossible(pair):
            continue
        candidates: list[list[int]] = []
        last = legal.num_choices + MAX_CHOICES
        while len(candidates) < CANDIDATES and (legal.num_choices < last or not candidates):
            if (found := legal.find(pair, most_first(pair))) is None:
                break
            candidates.append(found)
        if candidates:
            chosen.append(max(candidates, key=uncovered.count_all))
            uncovered.cover(chosen[-1])
    return chosen


def serves(precision: str, head_dim: int, head_dim_v: int) -> bool:
    """Whether `Mma` has kernels for those head dims: tiles are split into parts of f16 by eight columns."""
    return precision != "3xf16" or head_dim % 8 == head_dim_v % 8 == 0


def parts_of(precision: str) -> str:
    """What `Mma.parts` must be."""
    return "f16" if precision == "3xf16" else "tf32"


def held_by(dtype: str, precision: str) -> dict[str, Any]:
    """What no legal `Mma` has otherwise: by chance one in thousands is legal of float32 in parts of f16."""
    held: dict[str, Any] = {"parts": parts_of(precision)}
    if dtype == "f32":
        held["poly_exp"] = 0
    if precision != "3xtf32":
        held["q_whole"] = False
    return held


@dataclass(frozen=True)
class Setting:
    """A variant, and what it is to be tried on."""

    variant: Variant
    problem: Problem
    limits: DeviceLimits

    @property
    def name(self) -> str:
        problem = self.problem.stem + ("_causal" if self.problem.causal else "")
        return f"{problem} on {self.limits.name}: {self.variant.name}"


def traits(setting: Setting) -> set[tuple[str, Any]]:
    """Each value that a setting has of something the cover varies."""
    problem = setting.problem
    found: set[tuple[str, Any]] = {
        ("numbers", (problem.dtype, problem.precision)),
        ("dims", (problem.head_dim, problem.head_dim_v)),
        ("causal", problem.causal),
        ("limits", setting.limits.name),
    }
    return found | set(setting.variant.to_dict().items())


def each_value(settings: Sequence[Setting], count: int) -> list[Setting]:
    """At least ``count`` of the settings, more only to keep every value that one of them has."""
    unseen = set().union(*map(traits, settings))
    left, chosen = list(settings), []
    while left and (unseen or len(chosen) < count):
        best = max(left, key=lambda setting: len(unseen & traits(setting)))
        left.remove(best)
        chosen.append(best)
        unseen -= traits(best)
    return chosen


def draw(
    family: type[Variant],
    problem: Problem,
    limits: DeviceLimits,
    count: int,
    rng: random.Random,
    held: Mapping[str, Any] | None = None,
) -> list[Variant]:
    """Legal variants by chance, up to ``count``, fewer where few are legal; ``held`` ones have that value.

    Where blind tries find none, values are chosen where rules look, as for covers.
    """
    choices = {p.name: p.choices for p in family.parameters()} | {n: (x,) for n, x in (held or {}).items()}
    found: dict[Variant, None] = {}
    for tried in range(MIN_TRIES + 100 * count):
        if len(found) == count or (not found and tried == BLIND_TRIES):
            break
        variant = family.with_values({name: rng.choice(of_it) for name, of_it in choices.items()})
        try:
            variant.check(problem, limits)
        except Illegal:
            continue
        found[variant] = None
    return list(found or search(family, problem, limits, count, rng, choices))


def search(
    family: type[Variant],
    problem: Problem,
    limits: DeviceLimits,
    count: int,
    rng: random.Random,
    choices: Mapping[str, Sequence[Any]],
) -> dict[Variant, None]:
    """What `draw` does where one variant in thousands is legal."""
    factors: dict[str, Sequence[Any]] = {
        "numbers": [(problem.dtype, problem.precision)],
        "dims": [(problem.head_dim, problem.head_dim_v)],
        "causal": [problem.causal],
        "limits": [limits],
        **choices,
    }
    legal = LegalChoices(family, factors, rng, problem)
    found: dict[Variant, None] = {}
    for _ in range(2 * count):
        chosen = legal.find({}, legal.by_chance) if len(found) < count else None
        if chosen is None:
            break
        values = legal.assignment(chosen)
        variant = family.with_values({name: values[name] for name in choices})
        variant.check(problem, limits)
        found[variant] = None
    return found


def cover(
    family: type[Variant],
    cards: Sequence[DeviceLimits],
    numbers: Sequence[tuple[str, str]],
    head_dims: Sequence[tuple[int, int]],
    *,
    loose: Container[str],
    held: Mapping[str, Any] | None = None,
    without: Container[tuple[str, Any]] = (),
    seed: int = 0,
) -> list[Setting]:
    """Kernels of a family with every two values of its parameters, the number formats, the mask and the
    cards. What is ``loose`` meets every format, no more. ``held`` parameters can have no other value, and
    kernels are ``without`` some values; to find that out would take longer than all the rest."""
    factors = {"numbers": numbers, "dims": head_dims, "causal": (False, True), "limits": cards} | {
        p.name: (held[p.name],)
        if held and p.name in held
        else tuple(choice for choice in p.choices if (p.name, choice) not in without)
        for p in family.parameters()
    }

    def tied(first: str, second: str) -> bool:
        return "numbers" in (first, second) or not (first in loose or second in loose)

    rng = random.Random(seed)
    legal = LegalChoices(family, factors, rng)
    settings = []
    for chosen in pairwise(legal, tied, rng):
        values = legal.assignment(chosen)
        variant = family(**{p.name: values[p.name] for p in family.parameters()})
        setting = Setting(variant, problem_of(values), values["limits"])
        variant.check(setting.problem, setting.limits)
        settings.append(setting)
    return settings


def mma_settings(cards: Sequence[DeviceLimits], seed: int = 0) -> list[Setting]:
    """Head dims, what bounds registers but leaves the code alone, and shares of keys meet every format."""
    return cover(Mma, cards, NUMBERS, HEAD_DIMS, loose=LOOSE, seed=seed)


def wgmma_settings(cards: Sequence[DeviceLimits], seed: int = 0) -> list[Setting]:
    """As `mma_settings`, for kernels of warpgroups; none for a card without them."""
    held = {"weights": "f16", **UNSCORED, **SPLIT_IN_PLACE, **UNTURNED, **WITHOUT_PAGES, **WHOLE_TURNS}
    return cover(Wgmma, cards, WGMMA_NUMBERS, WGMMA_HEAD_DIMS, loose=WGMMA_LOOSE, held=held, seed=seed)


def e4m3_settings(cards: Sequence[DeviceLimits], seed: int = 0) -> list[Setting]:
    """As `wgmma_settings`, of eight bits."""
    held = {"p_in_shared": False, "cluster_over": "rows", "cluster": 1, "tail": 0}
    held |= {"pack_heads": False, "splits": 1, "weights": "f16", "powers": "rounded", "score_type": "f32"}
    held |= {"promotion": "tiles", **UNSCORED, **SPLIT_IN_PLACE, **WITHOUT_PAGES, **WHOLE_TURNS}
    return cover(Wgmma, cards, [("e4m3", "auto")], E4M3_HEAD_DIMS, loose=WGMMA_LOOSE, held=held, seed=seed)


def mma_e4m3_settings(cards: Sequence[DeviceLimits], seed: int = 0) -> list[Setting]:
    """As `mma_settings`, of eight bits."""
    held = {"parts": "tf32", "q_whole": False, "d_steps": "exact"}
    numbers = [("e4m3", "auto")]
    return cover(Mma, cards, numbers, MMA_E4M3_HEAD_DIMS, loose=LOOSE, held=held, seed=seed)


def parts_settings(cards: Sequence[DeviceLimits], seed: int = 0) -> list[Setting]:
    """As `wgmma_settings`, of float32 in parts, which changes nothing about the order of tiles."""
    held = {"o_apart": False, "p_in_shared": False, "q_in_registers": False, "poly_exp": 0, "tail": 0}
    held |= {"cluster_over": "rows", "cluster": 1, "pack_heads": False, "splits": 1, "weights": "f16"}
    held |= {**UNSCORED, **SPLIT_IN_PLACE, **UNTURNED, **WITHOUT_PAGES, **WHOLE_TURNS}
    # Weights of more keys, in two parts, fit no registers.
    without = {("bc", 224), ("bc", 256)}
    numbers, loose = [("f32", "3xf16")], WGMMA_LOOSE | {"section"}
    return cover(Wgmma, cards, numbers, PARTS_HEAD_DIMS, loose=loose, held=held, without=without, seed=seed)
