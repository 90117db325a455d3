"""Small samples of a large space: any two values that can stand together do so somewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.variant import Illegal, Variant

Assignment = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
T = TypeVar("T")

#: Draws for one pair before it counts as impossible, and legal ones among which the best is taken.
MAX_DRAWS, MAX_CANDIDATES = 4500, 10
#: Every other draw keeps this share of a legal assignment with one of the values: some corners hold few.
KEPT = 0.7
#: Variants that `draw` tries for all that it is asked for, and for one: of some spaces one in thousands
#: is legal.
MIN_TRIES, MAX_TRIES = 3000, 200_000

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
#: By warps, in multiples of eight: less than a step, half a step, whole ones, several of each kind.
MMA_E4M3_HEAD_DIMS = ((8, 8), (16, 24), (48, 80), (64, 64), (72, 40), (128, 128), (96, 208), (192, 32))
#: Of float32 in parts: less than a step, chunks of both kinds, split together, apart and read twice.
PARTS_HEAD_DIMS = ((8, 8), (40, 40), (64, 64), (72, 40), (96, 96), (128, 128), (64, 128), (160, 160))
#: Of those that launches in front split: rows of half pieces too, and chunks summed together and apart.
IN_FRONT_HEAD_DIMS = ((8, 8), (36, 24), (64, 64), (72, 40), (128, 128), (64, 160), (192, 96), (256, 256))


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    legal: Callable[[Assignment], T | None],
    *,
    seed: int,
    tied: Callable[[str, str], bool] = lambda first, second: True,
) -> list[T]:
    """What ``legal`` makes of assignments that between them take all pairs of values it allows.

    Only pairs of ``tied`` factors count. Greedy, by chance, the same for the same seed.
    """
    rng = random.Random(seed)
    names = [pair for pair in combinations(factors, 2) if tied(*pair)]
    wanted = [((a, x), (b, y)) for a, b in names for x in factors[a] for y in factors[b]]
    rng.shuffle(wanted)
    uncovered = dict.fromkeys(wanted)
    chosen: list[T] = []
    known: list[Assignment] = []

    def draw(pair: Pair, near: Sequence[Sequence[Assignment]]) -> Assignment:
        # Of either value as often: what is rare may have but a few.
        base = rng.choice(rng.choice(near)) if near else {}
        assignment = dict(pair)
        for name, values in factors.items():
            if name not in assignment:
                keep = name in base and rng.random() < KEPT
                assignment[name] = base[name] if keep else rng.choice(values)
        return assignment

    def covered(assignment: Assignment) -> list[Pair]:
        pairs = (((a, assignment[a]), (b, assignment[b])) for a, b in names)
        return [pair for pair in pairs if pair in uncovered]

    for pair in wanted:
        if pair not in uncovered:
            continue
        candidates: list[tuple[int, Assignment, T]] = []
        alike = [found for name, value in pair if (found := [a for a in known if a[name] == value])]
        for turn in range(MAX_DRAWS):
            assignment = draw(pair, alike if turn % 2 else ())
            made = legal(assignment)
            if made is not None:
                candidates.append((len(covered(assignment)), assignment, made))
                if len(candidates) == MAX_CANDIDATES:
                    break
        if candidates:
            _, assignment, made = max(candidates, key=lambda each: each[0])
            for each in covered(assignment):
                del uncovered[each]
            known.append(assignment)
            chosen.append(made)
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
    """Legal variants by chance, up to ``count``, fewer where few are legal; ``held`` ones have that value."""
    choices = {p.name: p.choices for p in family.parameters()} | {n: (x,) for n, x in (held or {}).items()}
    found: dict[Variant, None] = {}
    for tried in range(MAX_TRIES):
        if len(found) == count or (found and tried >= MIN_TRIES + 100 * count):
            break
        variant = family(**{name: rng.choice(of_it) for name, of_it in choices.items()})
        try:
            variant.check(problem, limits)
        except Illegal:
            continue
        found[variant] = None
    return list(found)


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

    def legal(assignment: Assignment) -> Setting | None:
        (dtype, precision), (d, dv) = assignment["numbers"], assignment["dims"]
        problem = Problem(
            dtype=dtype, precision=precision, head_dim=d, head_dim_v=dv, causal=assignment["causal"]
        )
        variant = family(**{p.name: assignment[p.name] for p in family.parameters()})
        try:
            variant.check(problem, assignment["limits"])
        except Illegal:
            return None
        return Setting(variant, problem, assignment["limits"])

    def tied(first: str, second: str) -> bool:
        return "numbers" in (first, second) or not (first in loose or second in loose)

    return pairwise(factors, legal, seed=seed, tied=tied)


def mma_settings(cards: Sequence[DeviceLimits], seed: int = 0) -> list[Setting]:
    """Head dims, what bounds registers but leaves the code alone, and shares of keys meet every format."""
    return cover(Mma, cards, NUMBERS, HEAD_DIMS, loose=LOOSE, seed=seed)


def wgmma_settings(cards: Sequence[DeviceLimits], seed: int = 0) -> list[Setting]:
    """As `mma_settings`, for kernels of warpgroups; none for a card without them."""
    held = {"weights": "f16", "bias_stages": 0, "bias_heads": 1, "seen_bits": False, **SPLIT_IN_PLACE}
    return cover(Wgmma, cards, WGMMA_NUMBERS, WGMMA_HEAD_DIMS, loose=WGMMA_LOOSE, held=held, seed=seed)


def e4m3_settings(cards: Sequence[DeviceLimits], seed: int = 0) -> list[Setting]:
    """As `wgmma_settings`, of eight bits."""
    held = {"p_in_shared": False, "q_in_registers": False, "cluster_over": "rows", "cluster": 1, "tail": 0}
    held |= {
        "pack_heads": False,
        "splits": 1,
        "weights": "f16",
        "bias_stages": 0,
        "bias_heads": 1,
        "seen_bits": False,
    }
    held |= SPLIT_IN_PLACE
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
    held |= {"bias_stages": 0, "bias_heads": 1, "seen_bits": False, **SPLIT_IN_PLACE}
    # Weights of more keys, in two parts, fit no registers.
    without = {("bc", 224), ("bc", 256)}
    numbers, loose = [("f32", "3xf16")], WGMMA_LOOSE | {"section"}
    return cover(Wgmma, cards, numbers, PARTS_HEAD_DIMS, loose=loose, held=held, without=without, seed=seed)
