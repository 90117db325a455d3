"""Changes of scores as a thread makes them of many keys of a few rows: what these share is computed once.

What scores are multiplied by becomes a factor that is left to who takes their exponentials; and so does what
is added to all scores of a row and tile, a shift. What is affine in the key, as ALiBi is, then takes one
multiply-add for each score, a step times its column: in units of the factor, so that raw scores need not be
scaled for it; or none, where products of raw scores take a ramp along: steps and columns as further factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from ..expression import Apply, Constant, Expression, Kind, Load, Name, apply, folded, loads_of, replaced
from ..formula.affine import Affine, least_value
from ..problem import Problem
from ..scoring.scores import DIAGONAL, KEY, NUM_KEYS, NUM_ROWS, QUERY, ROW, SCORE, Bound
from .arrays import TileArray, taken_by, with_values
from .gathering import COLUMN, FIRST_KEY, RAW, SCORE_SCALE, gathered, is_positive, local, product
from .sliding import SlidingArray, sliding_arrays
from .tangents import IS_SMALL, LARGEST, SmallTangent, small_tangent
from .terms import Term, terms_of

#: The key at which an array is read and how far behind it, as an accessor takes them: so that the columns of
#: a thread share an address.
READ_KEY = local("read_key", nonnegative=True)
#: One by a change's factor: what is added to raw scores is in units of that.
UNIT = local("unit", Kind.FLOAT)
#: What a score rises by from one column to the next, in that unit; and what is added to all of a row's.
STEP, SHIFT = local("step", Kind.FLOAT), local("shift", Kind.FLOAT)
#: The first key of a tile, from which the columns of a ramp are counted.
TILE_KEY = local("tile_key", nonnegative=True)
#: What brings scores into powers of two.
LOG2E = Name("kLog2e", Kind.FLOAT)
#: Keys of a tile.
TILE_KEYS = Name("kBc", nonnegative=True)
_NONE = Constant(0.0)


@dataclass(frozen=True)
class TileExpression:
    """An expression of pairs over `FIRST_KEY`, `COLUMN`, `READ_KEY`, the names of pairs and the values of
    ``arrays`` whose tiles are at hand."""

    body: Expression
    arrays: tuple[TileArray, ...] = field(default=(), kw_only=True)

    def names_one_of(self, *words: str) -> bool:
        """Tells whether it needs any of some names, as C++ has them."""
        return _names_one_of(words, self.body)

    @property
    def reads_rows(self) -> bool:
        """Whether arrays are read at the row itself, which must be one that exists."""
        return reads_at(QUERY, self.body)

    @property
    def reads_keys(self) -> bool:
        """Whether arrays are read at the key itself, which must be one that exists."""
        return reads_at(KEY, self.body) or reads_at(READ_KEY, self.body)


@dataclass(frozen=True)
class Together:
    """Expressions that are computed in one place."""

    expressions: tuple[Expression, ...]

    def names_one_of(self, *words: str) -> bool:
        """Tells whether any needs one of some names, as C++ has them."""
        return _names_one_of(words, *self.expressions)

    @property
    def reads_rows(self) -> bool:
        """Whether arrays are read at the row itself, which must be one that exists."""
        return reads_at(QUERY, *self.expressions)


@dataclass(frozen=True)
class Bend(TileExpression):
    """What is added to the scores of a row that has the kink of an absolute value in a tile: where the value
    ``is_met`` is true."""

    is_met: Name


@dataclass(frozen=True)
class TileChange(TileExpression):
    """A change of scores as ``factor * body + shift``.

    ``factor`` is positive and the same for all keys: of a row if it names `SCORE_SCALE`, else of all rows.
    ``body`` is over `RAW`, and over what is computed once for a row and a tile: ``row_values``, each in terms
    of those before it, `SHIFT` among them if there is one; it chooses between forms of a ``tangent`` by
    `IS_SMALL`. It names the values of arrays that are ``sliding`` past the tile. Behind it each of ``bends``
    is added. With a ``ramp`` raw scores come with `STEP` times how far they are behind the tile's first key.
    """

    factor: Expression
    row_values: tuple[tuple[Name, Expression], ...] = ()
    bends: tuple[Bend, ...] = ()
    tangent: SmallTangent | None = None
    ramp: bool = False
    sliding: tuple[SlidingArray, ...] = ()

    def names_one_of(self, *words: str) -> bool:
        return _names_one_of(words, *self._of_scores)

    @property
    def has_factor(self) -> bool:
        """Whether the factor is not one."""
        return self.factor != Constant(1.0)

    @property
    def factor_has_scale(self) -> bool:
        """Whether scores are scaled by the factor."""
        return SCORE_SCALE.name in self.factor.names()

    @property
    def has_shift(self) -> bool:
        """Whether anything is added to all scores of a row and tile."""
        return any(name == SHIFT for name, _ in self.row_values)

    @property
    def changes_raw(self) -> bool:
        """Whether raw scores change before they are multiplied."""
        return self.body != RAW

    @property
    def acts(self) -> bool:
        """Whether more is done than multiplying by the factor."""
        return self.changes_raw or self.has_shift

    @property
    def steady_values(self) -> tuple[tuple[Name, Expression], ...]:
        """Those of the row's values that are the same for all tiles."""
        moving = {FIRST_KEY.name, TILE_KEY.name}
        found = []
        for name, value in self.row_values:
            if moving.isdisjoint(value.names()):
                found.append((name, value))
            else:
                moving.add(name.name)
        return tuple(found)

    @property
    def has_steady_step(self) -> bool:
        """Whether scores rise alike in all tiles."""
        return any(name == STEP for name, _ in self.steady_values)

    @property
    def tile_values(self) -> tuple[tuple[Name, Expression], ...]:
        """Those that are others for each tile."""
        steady = self.steady_values
        return tuple(each for each in self.row_values if each not in steady)

    @property
    def ramp_values(self) -> tuple[tuple[Name, Expression], ...]:
        """Those of `tile_values` that a ramp is made of."""
        return _needed_of(self.tile_values, {STEP.name}) if self.ramp else ()

    @property
    def change_values(self) -> tuple[tuple[Name, Expression], ...]:
        """Those that scores are changed by."""
        bends = (each for bend in self.bends for each in (bend.body, bend.is_met))
        asked = {SHIFT.name, *(name for each in (self.body, *bends) for name in each.names())}
        return _needed_of(self.tile_values, asked)

    @property
    def kept_values(self) -> tuple[Name, ...]:
        """The steady values that tiles ask for."""
        parts = (*self.of_ramp.expressions, *self.of_tiles.expressions)
        asked = {STEP.name, SHIFT.name, *(name for each in parts for name in each.names())}
        return tuple(name for name, _ in self.steady_values if name.name in asked)

    @property
    def of_rows(self) -> Together:
        """What can be computed once for all tiles."""
        return Together(tuple(value for _, value in self.steady_values))

    @property
    def of_ramp(self) -> Together:
        """What is computed for each tile before its products."""
        return Together(tuple(value for _, value in self.ramp_values))

    @property
    def of_tiles(self) -> Together:
        """What is computed for each tile, and for each score, behind them."""
        values = (value for _, value in self.change_values)
        bends = (each for bend in self.bends for each in (bend.body, bend.is_met))
        return Together((*values, *self._of_scores, *bends))

    @property
    def reads_rows(self) -> bool:
        """Whether arrays are read at the row itself, which must be one that exists."""
        return reads_at(QUERY, *self._parts)

    def needs(self, *words: str) -> bool:
        """Tells whether any part but the factor needs any of some names, as C++ has them."""
        return _names_one_of(words, *self._parts)

    @property
    def in_names_of_pairs(self) -> tuple[Expression, ...]:
        """What is computed over the score and the names of pairs, to be counted: columns are numbers, which
        cost nothing as floats, and arguments of tangents are small, which is looked for. What slides past a
        tile is counted by itself."""
        found = [self.body, *(value for _, value in (self.tile_values if self.ramp else self.row_values))]
        if self.tangent is not None:
            found.append(apply("max", RAW, LARGEST))
        return tuple(_in_names_of_pairs(each) for each in found)

    @property
    def _of_scores(self) -> tuple[Expression, ...]:
        """The body, and the elements that it names."""
        return self.body, *(each.load for each in self.sliding)

    @property
    def _parts(self) -> Iterator[Expression]:
        """All expressions but the factor."""
        yield from self._of_scores
        yield from (value for _, value in self.row_values)
        yield from (bend.body for bend in self.bends)


def tile_predicate(
    predicate: Expression, along_keys: frozenset[str] = frozenset(), arrays: tuple[TileArray, ...] = ()
) -> TileExpression:
    """Returns what rows see as it is best computed for many keys of a row, tiles of ``arrays`` at hand."""
    return TileExpression(_with_read_keys(with_values(predicate, arrays), along_keys), arrays=arrays)


def scaled_change(change: Expression, *, approximate: bool = False) -> TileChange:
    """Returns a change of scores that come scaled, without a shift."""
    body, factor = _factored(gathered(change.with_names({SCORE.name: RAW})))
    body, tangent = _with_small_tangent(body, approximate=approximate)
    return TileChange(body, factor, tangent=tangent)


def tile_change(
    change: Expression,
    along_keys: frozenset[str] = frozenset(),
    ends: Sequence[Bound] = (),
    arrays: tuple[TileArray, ...] = (),
    *,
    approximate: bool = False,
    in_powers: bool = False,
    ramp: bool = False,
    small_tangents: bool = True,
    sliding: tuple[SlidingArray, ...] = (),
) -> TileChange:
    """Returns a change of scores as it is best computed for many keys of a row.

    Arrays ``along_keys`` are read so far behind a key; tiles of ``arrays`` are at hand, and elements of those
    that are ``sliding`` are named. Behind the ``ends`` of what rows see, scores may be anything.
    ``approximate``: functions are those of 16-bit types. ``in_powers``: the shift is one of powers of two.
    ``ramp``: with a ramp, if there can be one. ``small_tangents``: those of small arguments are taken by
    multiply-adds.
    """
    terms = terms_of(change.with_names({SCORE.name: apply("mul", RAW, SCORE_SCALE)}))
    of_score = [each for each in terms if RAW.name in each.varying.names()]
    scored, factor = _common_factor(of_score)
    unit = UNIT if factor != Constant(1.0) else Constant(1.0)
    affine = _AffineTerms(tuple(ends), TILE_KEY if ramp else FIRST_KEY, in_powers=in_powers)
    body = scored
    for term in terms:
        if term in of_score:
            continue
        if not affine.take(term, unit):
            body = body + apply("mul", gathered(term.varying), apply("mul", term.coefficient, unit))
    if ramp and (scored != RAW or affine.step == _NONE):
        return tile_change(
            change,
            along_keys,
            ends,
            arrays,
            approximate=approximate,
            in_powers=in_powers,
            small_tangents=small_tangents,
            sliding=sliding,
        )
    row_values = list(affine.row_values)
    if affine.step != _NONE:
        row_values.append((STEP, apply("mul", affine.step, unit)))
        if not ramp:
            body = body + STEP * apply("float", COLUMN)
    if affine.shift != _NONE:
        row_values.append((SHIFT, affine.shift))
    body, tangent = _with_small_tangent(body, approximate=approximate) if small_tangents else (body, None)
    body = _with_read_keys(with_values(body, arrays), along_keys)
    sliding = taken_by(body, sliding)
    return TileChange(
        with_values(body, sliding),
        factor,
        tuple(row_values),
        tuple(affine.bends),
        tangent,
        ramp,
        sliding,
        arrays=arrays,
    )


def _needed_of(
    values: Sequence[tuple[Name, Expression]], asked: set[str]
) -> tuple[tuple[Name, Expression], ...]:
    """Those of some values, each in terms of those before it, that some names need."""
    found = []
    for name, value in reversed(values):
        if name.name in asked:
            found.append((name, value))
            asked |= value.names()
    return tuple(reversed(found))


def _names_one_of(words: Sequence[str], *expressions: Expression) -> bool:
    names = {name for word in words for name in (word, local(word).name)}
    return any(not names.isdisjoint(each.names()) for each in expressions)


def _times(number: int, value: Expression) -> Expression:
    return -value if number == -1 else value * float(number)


@lru_cache(maxsize=256)
def changed_tile(
    problem: Problem, arrays: tuple[TileArray, ...] = (), *, slides: bool = False
) -> TileChange | None:
    """Returns a problem's change of scores as tensor cores' threads make it, tiles of ``arrays`` at hand;
    None: there is none. ``slides``: values of arrays that slide past a tile are named."""
    change = _asked_change(problem, arrays, slides=slides)
    return change and change(ends=problem.scores.ends)


@lru_cache(maxsize=256)
def steady_change(
    problem: Problem,
    arrays: tuple[TileArray, ...] = (),
    *,
    ramp: bool = False,
    small_tangents: bool = True,
    slides: bool = False,
) -> TileChange | None:
    """Returns a problem's change of scores for kernels that compute once what is the same for all tiles of a
    row: shifts are of powers of two. ``ramp``: products may take one along, if a row's step is such.
    ``small_tangents``: those of small arguments are taken by multiply-adds. ``slides``: values of arrays that
    slide past a tile are named."""
    change = _asked_change(problem, arrays, slides=slides)
    if change is None:
        return None
    change, scores = partial(change, in_powers=True, small_tangents=small_tangents), problem.scores
    # Of steps that turn from tile to tile a ramp is no less work. It is right all the same in a build that
    # turns the flags.
    return change(ends=scores.ends, ramp=ramp and change(ends=scores.held_ends, ramp=True).has_steady_step)


def _asked_change(
    problem: Problem, arrays: tuple[TileArray, ...], *, slides: bool
) -> partial[TileChange] | None:
    """`tile_change` of what a problem asks of its scores; None: no change."""
    scores = problem.scores
    if scores.change is None:
        return None
    return partial(
        tile_change,
        scores.change,
        scores.along_keys,
        arrays=arrays,
        approximate=problem.dtype != "f32",
        sliding=sliding_arrays(scores) if slides else (),
    )


def reads_at(name: Name, *expressions: Expression) -> bool:
    """Tells whether expressions take elements of arrays at ``name`` itself."""
    return any(name in load.indices for load in loads_of(*expressions))


class _AffineTerms:
    """The terms of a change that its body is relieved of: their shares in the shift and in the step.

    Columns are counted from the key ``origin``. ``in_powers``: the shift is one of powers of two.
    """

    def __init__(self, ends: Sequence[Bound], origin: Name, *, in_powers: bool) -> None:
        self.ends, self.origin, self.in_powers = ends, origin, in_powers
        self.shift: Expression = _NONE
        self.step: Expression = _NONE
        self.row_values: list[tuple[Name, Expression]] = []
        self.bends: list[Bend] = []

    def take(self, term: Term, unit: Expression) -> bool:
        """Adds a term if it can be had so, and returns whether it is."""
        if not term.varies:
            self.shift = self.shift + self._lifted(term.coefficient)
            return True
        if term.distance is None:
            return False
        distance, is_absolute = term.distance
        if is_absolute and distance.times > 0:
            distance = -distance
        first = self._named("ahead", distance.at(self.origin))
        coefficient = self._bent(distance, first, term, unit) if is_absolute else term.coefficient
        self.shift = self.shift + self._lifted(coefficient) * apply("float", first)
        self.step = self.step + _times(distance.times, coefficient)
        return True

    def _lifted(self, coefficient: Expression) -> Expression:
        """A coefficient of the shift, if need be by the name of one of powers of two."""
        if not self.in_powers:
            return coefficient
        lifted = apply("mul", LOG2E, coefficient)
        return lifted if isinstance(coefficient, Constant) else self._named("rise", lifted)

    def _bent(self, distance: Affine, first: Expression, term: Term, unit: Expression) -> Expression:
        """What an absolute value is multiplied by instead of itself: its sign is what it is at the thread's
        first key, and of a positive one another behind the row's place, if any key there is seen."""
        coefficient, falls = term.coefficient, -distance.times
        if not isinstance(coefficient, Constant):
            coefficient = self._named("slope", coefficient)
        ends = list(_ends_before_negative(distance, self.ends))
        is_met = apply("and", apply("ge", first, 0), apply("lt", first, falls * TILE_KEYS))
        is_positive_first = apply("ge", first, 0)
        for end in ends:
            is_met = apply("and", apply("not", end), is_met)
            is_positive_first = apply("or", end, is_positive_first)
        if is_met != Constant(False):
            if self.origin != FIRST_KEY:
                first = self._named("before", distance.at(FIRST_KEY))
            beyond = apply("float", falls * COLUMN) - apply("float", first)
            bend = apply("mul", 2.0 * coefficient, unit) * apply("max", beyond, 0.0)
            self.bends.append(Bend(bend, self._named("bends", is_met)))
        return self._named("turned", apply("where", is_positive_first, coefficient, -coefficient))

    def _named(self, name: str, value: Expression) -> Name:
        """A row's value, by a name that no other has."""
        number = sum(known.name.rstrip("0123456789") == f"_{name}" for known, _ in self.row_values)
        found = local(f"{name}{number + 1 if number else ''}", value.kind)
        self.row_values.append((found, value))
        return found


def _ends_before_negative(distance: Affine, ends: Sequence[Bound]) -> Iterator[Expression]:
    """The flags of bounds before which a distance, which falls with the key, is never negative; true for one
    that always holds."""
    places = {ROW.name: QUERY, DIAGONAL.name: NUM_KEYS - NUM_ROWS}
    for end in ends:
        if least_value(distance.at(end.key.with_names(places) - 1)) >= 0:
            yield Name(end.flag, Kind.BOOL) if end.flag else Constant(True)


def _common_factor(terms: Sequence[Term]) -> tuple[Expression, Expression]:
    """The terms of the score itself as one body times a factor that is positive and the same for all keys."""
    if len(terms) == 1:
        (term,) = terms
        if not term.negative and all(map(is_positive, term.factors)):
            body, own = _factored(gathered(term.varying))
            return body, product([*term.factors, own] if own != Constant(1.0) else term.factors)
    total: Expression = _NONE
    for term in terms:
        total = total + gathered(apply("mul", term.varying, term.coefficient))
    return total, Constant(1.0)


def _factored(body: Expression) -> tuple[Expression, Expression]:
    """A gathered expression, and apart from it the factor that its keys share, if that is positive."""
    if isinstance(body, Apply) and body.function == "mul":
        rest, factor = body.operands
        if is_positive(factor):
            return rest, factor
    return body, Constant(1.0)


def _with_small_tangent(body: Expression, *, approximate: bool) -> tuple[Expression, SmallTangent | None]:
    """A body that chooses between the forms of its tangent, and that, if it takes one."""
    tangent = small_tangent(body, approximate=approximate)
    return (body, None) if tangent is None else (replaced(body, {tangent.written: tangent.either}), tangent)


def _with_read_keys(expression: Expression, along_keys: frozenset[str]) -> Expression:
    """Returns ``expression`` with arrays read at `READ_KEY` where they are at the key in the last axis."""

    def rebuilt(node: Expression, operands: list[Expression]) -> Expression:
        if isinstance(node, Load) and node.buffer in along_keys and operands[-1] == KEY:
            operands = [*operands[:-1], READ_KEY]
        return node.with_operands(operands)

    return folded(expression, rebuilt)


def _in_names_of_pairs(expression: Expression) -> Expression:
    expression = expression.with_names({IS_SMALL.name: Constant(True)})
    column = replaced(expression, {apply("float", COLUMN): Name(KEY.name, Kind.FLOAT)})
    return column.with_names({RAW.name: SCORE, COLUMN.name: KEY, READ_KEY.name: KEY})
