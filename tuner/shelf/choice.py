"""Which of the known kernels serves a request.

The order of choice, which `find` documents to the user as well:

1. Data type, precision, head dims and, whatever their numbers, masks and changes of scores (a causal mask
   apart) must agree, and the family where one is asked for. A kernel tuned for
   automatic precision serves that alone: what is asked for by name is what was tuned by that name.
2. Measured kernels come before predicted ones.
3. Another compute capability's kernel is not used. Of cards of the same one, those come last that have no
   preset: the cost model cannot tell what their times say of the card.
4. Where sizes were asked for, what was tuned here for just these on the card, under the same mask (one row
   sees all keys, whatever the mask), else the kernel that should take the least time on them: by the cost
   model, and by how far that was from what was measured of each. What was shipped for just these or, where
   nothing was for the card, tuned on another, is only left for what should be clearly faster. Those of which
   the model says nothing come last, the nearest in query rows, keys that each sees and heads over the batch
   first.
5. Where none were asked for, a kernel tuned on the card before one of another, then under the same mask
   before one tuned under the other (a kernel serves both), then the last that was tuned here; of the shipped
   ones, the nearest to the default sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, log2
from typing import Any

from ...gen.lengths import lengths_words
from ...gen.limits import PRESETS, DeviceLimits, preset_of
from ...gen.problem import Problem
from ...gen.scoring.words import scoring_words
from ...gen.variant import Variant
from ..cards.slug import same_card
from ..search.nearness import masks_differ, numbers_distance, scores_differ, shape_distance
from .expected import Errors, of_sibling, order_of
from .library import Entry, is_shipped


@dataclass(frozen=True)
class Match:
    """The kernel chosen for a request and a sentence that says how; ``exact``: tuned for just that."""

    entry: Entry
    how: str
    exact: bool


def last_tuned(known: Sequence[Entry]) -> Match | None:
    """Returns the kernel tuned last; a measured one of the same card and problem before a prediction."""
    if not known:
        return None
    last = max(known, key=lambda e: e.kernel.tuned_at)
    if last.predicted:
        for entry in known:
            if (
                not entry.predicted
                and entry.kernel.problem == last.kernel.problem
                and same_card(entry.slug, last.slug)
            ):
                last = entry
    return Match(last, f"the last tuned: {_words(last)}", exact=True)


def just_this(
    known: Iterable[Entry], variant: Variant, problem: Problem, limits: DeviceLimits
) -> Match | None:
    """Returns what was tuned of that very variant for that very problem on the card, or None: measured first,
    then the last."""
    same = [
        entry
        for entry in known
        if entry.kernel.variant == variant
        and entry.kernel.problem == problem
        and (same_card(entry.slug, limits.slug) or _is_preset(entry, limits))
    ]
    if not same:
        return None
    entry = max(same, key=lambda e: (not e.predicted, e.kernel.tuned_at))
    return Match(entry, f"the variant asked for, as it was tuned: {_words(entry)}", exact=True)


def _is_preset(entry: Entry, limits: DeviceLimits) -> bool:
    """Whether a card's name, as its driver writes it, means the preset."""
    name = preset_of(entry.kernel.device)
    return name is not None and PRESETS[name].slug == limits.slug


def find(
    known: Iterable[Entry],
    problem: Problem,
    limits: DeviceLimits,
    *,
    family: type[Variant] | None = None,
    any_shape: bool = False,
) -> Match | None:
    """Returns the best known kernel for ``problem`` on the card, chosen as the module's text says, or None.

    ``any_shape``: batch, heads and lengths were not asked for; those of ``problem`` are the default ones.
    """
    usable = [
        entry
        for entry in known
        if entry.kernel.problem.stem == problem.stem
        and (family is None or type(entry.kernel.variant) is family)
        and (same_card(entry.slug, limits.slug) or entry.kernel.arch == limits.arch)
    ]
    if not usable:
        return None

    def by_numbers(entry: Entry) -> tuple[Any, ...]:
        tuned = entry.kernel.problem
        shipped = is_shipped(entry)
        distance = (shape_distance if shipped else numbers_distance)(tuned, problem)
        return (*_kind(entry, limits), masks_differ(tuned, problem), shipped, distance)

    rank = by_numbers if any_shape else _by_time(usable, problem, limits)
    ranks = {entry: rank(entry) for entry in usable}
    least = min(ranks.values())
    last = max((e for e in usable if ranks[e] == least), key=lambda e: e.kernel.tuned_at)
    # Of several families, or runs with parameters held, that tuned for the very same: the fastest.
    same = [e for e in usable if (e.slug, e.kernel.problem) == (last.slug, last.kernel.problem)]
    entry = min(same, key=lambda e: (e.kernel.measurement.median_us, e is not last))
    predicted, other_card = _kind(entry, limits)
    other_mask = masks_differ(entry.kernel.problem, problem)
    distance = shape_distance(entry.kernel.problem, problem)
    remarks = []
    if other_card:
        remarks.append(f"tuned on another card of sm_{limits.arch}, {entry.kernel.device}")
    if other_mask:
        remarks.append(f"tuned {'with' if entry.kernel.problem.causal else 'without'} the causal mask")
    if distance and not any_shape:
        remarks.append(f"tuned for {shape_words(entry.kernel.problem)}, asked for {shape_words(problem)}")
    elif entry.kernel.problem.scoring != problem.scoring:
        theirs, ours = (scoring_words(p.scoring) for p in (entry.kernel.problem, problem))
        remarks.append(f"tuned for {theirs}, asked for {ours}")
    how = _words(entry)
    if remarks:
        is_overtaken = any(_is_for(each, problem, limits) for each in usable) and not any_shape
        of_its_own = (
            "what was tuned for just this should be far slower"
            if is_overtaken
            else "nothing was tuned for just this"
        )
        how = f"{of_its_own}; the best match is {how} ({'; '.join(remarks)})"
    elif predicted:
        how = f"{how}; nothing was measured for it"
    return Match(entry, how, exact=not remarks)


def _is_for(entry: Entry, problem: Problem, limits: DeviceLimits) -> bool:
    """Whether an entry was tuned for just a problem on just the card."""
    tuned = entry.kernel.problem
    alike = not masks_differ(tuned, problem) and not shape_distance(tuned, problem)
    return alike and tuned.scoring == problem.scoring and same_card(entry.slug, limits.slug)


def _kind(entry: Entry, limits: DeviceLimits) -> tuple[bool, bool]:
    """Whether an entry was predicted, and whether it is of another card."""
    return entry.predicted, not same_card(entry.slug, limits.slug)


def _by_time(
    known: Sequence[Entry], problem: Problem, limits: DeviceLimits
) -> Callable[[Entry], tuple[Any, ...]]:
    """Returns the order of kernels for sizes that were asked for; of one variant, tuned for several, the
    nearest tells the time."""
    errors = Errors(known, limits)

    def away(entry: Entry) -> tuple[bool, float, bool]:
        tuned = entry.kernel.problem
        return masks_differ(tuned, problem), shape_distance(tuned, problem), _kind(entry, limits)[1]

    def kind(entry: Entry) -> tuple[bool, bool]:
        predicted, other_card = _kind(entry, limits)
        return predicted, other_card and not of_sibling(entry, limits)

    def kernel(entry: Entry) -> tuple[Any, ...]:
        return (*kind(entry), entry.kernel.variant)

    nearest = {kernel(each): each for each in sorted(known, key=away, reverse=True)}
    expected = {made: errors.expect(each, problem) for made, each in nearest.items()}
    has_own = any(_is_for(each, problem, limits) and not each.predicted for each in known)

    def rank(entry: Entry) -> tuple[Any, ...]:
        told = expected[kernel(entry)]
        other_mask, distance, other_card = away(entry)
        exact = not (other_mask or distance or (other_card and has_own))
        return (*kind(entry), *order_of(told.us if told else inf, entry, limits, exact=exact), *away(entry))

    return rank


def nearest_variants(
    known: Iterable[Entry],
    problem: Problem,
    limits: DeviceLimits,
    family: type[Variant],
    count: int = 2,
) -> list[Variant]:
    """Returns winners worth trying first: of family and dtype, nearest in architecture, head dims, precision,
    masks, changes of scores, latent values, layout, pages and types of keys, and then as `find` has it in
    rows, mask and shape."""

    def rank(entry: Entry) -> tuple[Any, ...]:
        tuned = entry.kernel.problem
        return (
            abs(entry.kernel.arch - limits.arch),
            abs(log2(tuned.head_dim / problem.head_dim)) + abs(log2(tuned.head_dim_v / problem.head_dim_v)),
            tuned.precision != problem.precision,
            scores_differ(tuned, problem),
            tuned.latent != problem.latent,
            tuned.backward != problem.backward,
            tuned.layout is not problem.layout,
            tuned.append != problem.append,
            tuned.kv_dtype != problem.kv_dtype,
            tuned.page_size != problem.page_size,
            entry.predicted,
            tuned.has_few_queries != problem.has_few_queries,
            masks_differ(tuned, problem),
            shape_distance(tuned, problem),
            # What is best is rather a matter of the shape than of which card of an architecture it is.
            not same_card(entry.slug, limits.slug),
        )

    same = [e for e in known if type(e.kernel.variant) is family and e.kernel.problem.dtype == problem.dtype]
    chosen = dict.fromkeys(e.kernel.variant for e in sorted(same, key=rank))
    return list(chosen)[:count]


def shape_words(problem: Problem) -> str:
    heads = str(problem.num_q_heads)
    if problem.num_kv_heads != problem.num_q_heads:
        heads += f"/{problem.num_kv_heads}"
    lengths = str(problem.seqlen_q)
    if problem.seqlen_k != problem.seqlen_q:
        lengths += f"x{problem.seqlen_k}"
    lengths += f" packed ({lengths_words(problem.varlen)})" if problem.varlen else ""
    lengths += f" in pages of {problem.page_size}" if problem.page_size else ""
    lengths += f", {problem.append.words}" if problem.append is not None else ""
    asked = scoring_words(problem.scoring)
    return f"batch {problem.batch}, heads {heads}, seqlen {lengths}{asked and f', {asked}'}"


def _words(entry: Entry) -> str:
    kind = "predicted" if entry.predicted else "measured"
    return f"{entry.kernel.problem.name} for {entry.kernel.device}, {kind}"
