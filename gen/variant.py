"""Variants: one point in a kernel family's space, and the rules that make it legal on a card.

A family is one frozen dataclass whose fields are made by `param`. Everything else that needs to know the
parameters (the search space, Optuna's distributions, names, JSON, ``--set``) reads the fields.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from .handover.last_turn import clear_launch
from .handover.plan import Plan
from .handover.reach import LEFT_OUT, reach_launches, reach_regions
from .handover.split_keys import a_warp_for_each_row, combine_launch, workspace_of_splits
from .handover.workspace import Workspace
from .launch import Launch, repeats_bits
from .layout import knows_page_size
from .limits import DeviceLimits
from .problem import Problem
from .scored_tiles.lists import TileLists, tile_lists
from .serves import Serves
from .work import Work, count_work

Value = int | str | bool
T = TypeVar("T")


class Illegal(ValueError):
    """A variant that cannot run; ``rule`` names which limit it breaks, the message both numbers."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(f"{rule}: {reason}")
        self.rule = rule
        self.reason = reason


def param(default: T, *others: T, doc: str, implied: bool = False) -> T:
    """Declares a tunable field: its default, the other values it may take, and what it means.

    ``implied``: a kernel's source names it only where it is not the default. A parameter that a family gains
    later so leaves the kernels there are, and what was measured of them, as they are.
    """
    metadata = {"choices": (default, *others), "doc": doc, "implied": implied}
    return field(default=default, metadata=metadata)  # type: ignore[return-value]


@dataclass(frozen=True)
class Parameter:
    """A tunable parameter as `param` declared it, with its name."""

    name: str
    choices: tuple[Value, ...]
    doc: str
    implied: bool = False

    @property
    def default(self) -> Value:
        return self.choices[0]

    def parse(self, text: str) -> Value:
        """Returns the choice written as ``text``; raises ValueError naming the choices."""
        for choice in self.choices:
            if text == str(choice) or (isinstance(choice, bool) and text.lower() == str(choice).lower()):
                return choice
        raise ValueError(
            f"{self.name}={text} is not a choice; choose from {', '.join(map(str, self.choices))}"
        )


#: What a rule waits for that reads no parameter.
FIRST_PARAMETER = ""

Verdict = Callable[["Any", Problem, DeviceLimits], str | None]


@dataclass(frozen=True)
class Rule:
    """A reason to leave variants out. It reads no parameter declared later than ``after``, so that one broken
    rule prunes every variant sharing the parameters up to there.

    A variant that breaks an ``advisory`` rule runs, but another one is sure to be as good: the search leaves
    it out unless the user holds the parameter named by ``waived_by``.
    """

    name: str
    after: str
    verdict: Verdict
    advisory: bool
    waived_by: str


def rule(
    name: str, *, after: str, advisory: bool = False, waived_by: str | None = None
) -> Callable[[Verdict], Verdict]:
    """Marks a method ``(self, problem, limits) -> reason or None`` as a rule of its family. Advice is
    ``waived_by`` the parameter that it waits for, unless it is about another's value."""

    def mark(method: Verdict) -> Verdict:
        method.rule = (name, after, advisory, waived_by or after)  # type: ignore[attr-defined]
        return method

    return mark


@dataclass(frozen=True)
class Variant:
    """The base of all families' variants. A subclass adds `param` fields, `rule` methods, a template and the
    properties of its resource use."""

    family: ClassVar[str] = ""
    template: ClassVar[str] = ""
    #: "a" for instructions of one architecture alone, as in sm_90a.
    arch_suffix: ClassVar[str] = ""
    #: What the family computes on which cards, whatever its parameters.
    serves: ClassVar[Serves]

    def template_for(self, problem: Problem) -> str:
        """Returns the path below ``templates/`` of the template that emits this variant for a problem."""
        return self.template

    def threads(self) -> int:
        """Returns the number of threads in a block."""
        raise NotImplementedError

    def rows_per_block(self) -> int | None:
        """Returns how many query rows one block covers, None for all rows of a head."""
        raise NotImplementedError

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        """Returns the exact bytes of shared memory per block; the emitted source static_asserts the same
        number."""
        raise NotImplementedError

    def access_width(self, problem: Problem) -> int:
        """Returns how many elements one access of global memory moves: pointers and strides must be multiples
        of it."""
        raise NotImplementedError

    def key_access_width(self, problem: Problem) -> int:
        """Returns the same of keys and values, which may be of a type of their own."""
        return self.access_width(problem)

    def heads_per_block(self) -> int:
        """Returns how many query heads, of all batches in one row, one block serves."""
        return 1

    def packs_heads(self) -> bool:
        """Tells whether a tile's rows are those of all query heads that share keys."""
        return False

    def heads_per_cluster(self) -> int:
        """Returns how many query heads that share keys the blocks of a cluster take, one each."""
        return 1

    def heads_together(self) -> int:
        """Returns how many neighbouring heads they take, one each, whoever's keys these have."""
        return 1

    def blocks_per_tile(self) -> int:
        """Returns how many blocks of one cluster share a tile's keys."""
        return 1

    def key_shares(self) -> int:
        """Returns how many shares the keys of a tile are split into, whose results are put together."""
        return self.blocks_per_tile()

    def splits_by_workspace(self) -> int:
        """Returns how many blocks of no cluster share a tile's keys by way of the workspace; of packed
        sequences, how many at most."""
        return 1

    def shares_last_turn(self) -> bool:
        """Tells whether blocks that stay share the keys of the tiles that are left for fewer of them."""
        return False

    def wanted_blocks(self, limits: DeviceLimits) -> int:
        """Returns how many blocks fill a card, over which the keys of packed sequences are split."""
        return limits.num_sms

    def partial_floats(self, problem: Problem) -> int:
        """Returns how many 32-bit words a block leaves in the workspace where blocks share keys by that."""
        raise NotImplementedError

    def left_bytes(self, problem: Problem) -> float:
        """Returns how many bytes a block leaves of the rows that there are; 0 where it shares no keys so."""
        if self.splits_by_workspace() == 1:
            return 0.0
        rows = problem.seqlen_q * (problem.group if self.packs_heads() else 1)
        return 4.0 * self.partial_floats(problem) * min(1.0, rows / (self.rows_per_block() or rows))

    @property
    def unordered(self) -> bool:
        """Whether blocks of one launch add to what that turns into outputs as they come along."""
        return False

    def repeats_bits(self, launches: Iterable[Launch]) -> bool:
        """Tells whether its kernel, of those launches, makes the same bits every run."""
        return repeats_bits(launches) and not self.unordered

    def with_same_bits(self, problem: Problem) -> Self:
        """Returns the nearest variant whose kernel of a problem makes the same bits every run, as far as
        parameters tell: by default this one."""
        return self

    def oldest_arch(self, problem: Problem, arch: int) -> int | None:
        """Returns the first compute capability, times ten, with the instructions of what is rendered of a
        problem for ``arch``; None where any card has them."""
        return None

    def knows_page_size(self, problem: Problem) -> bool:
        """Tells whether what is rendered for a problem takes pages of the problem's size alone: by default,
        where tiles are of whole pages or pages of whole tiles."""
        return knows_page_size(problem.page_size, int(getattr(self, "bc", 0)))

    def float32_products(self, problem: Problem) -> str:
        """Returns how tensor cores multiply float32: ``tf32``, ``3xtf32``, ``3xf16``; empty: they do not."""
        return ""

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        """Returns the estimated 32-bit registers per thread."""
        raise NotImplementedError

    def work(self, problem: Problem, limits: DeviceLimits) -> Work:
        """Returns what the kernel makes a card do, from which its time is predicted."""
        return count_work(self, problem, limits)

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        """Returns what the template needs beyond the parameters, the problem and the limits."""
        return {}

    def launch(self, problem: Problem, limits: DeviceLimits) -> Launch:
        """Returns how the kernel's main function is launched: the one that makes the products."""
        return Launch(
            self.threads(),
            self.smem_bytes(problem, limits),
            self.rows_per_block(),
            self.heads_per_block(),
            pack_heads=self.packs_heads(),
            splits=self.blocks_per_tile(),
            packed=problem.layout.is_packed,
            workspace_splits=self.splits_by_workspace(),
            wanted_blocks=self.wanted_by_plan(problem, limits),
        )

    def wanted_by_plan(self, problem: Problem, limits: DeviceLimits) -> int:
        """Returns over how many blocks a plan of packed sequences splits their keys; 0 where none does."""
        by_plan = problem.layout.is_packed and self.splits_by_workspace() > 1
        return self.wanted_blocks(limits) if by_plan else 0

    def launches(self, problem: Problem, limits: DeviceLimits) -> tuple[Launch, ...]:
        """Returns all launches of the kernel in their order, `launch` among them."""
        plan, lists = self.plan(problem, limits), self.tile_lists(problem, limits)
        before = [each.launch for each in (plan, lists) if each is not None]
        main = self.launch(problem, limits)
        if problem.append is not None:
            before.insert(0, problem.append.launch(main))
        if main.shares_turn:
            before.append(clear_launch(main))
        behind = (
            [combine_launch(main, self.combine_threads(problem, main))] if main.workspace_splits > 1 else []
        )
        return (*before, *self.launches_in_front(problem), main, *behind)

    def combine_threads(self, problem: Problem, main: Launch) -> int:
        """Returns the threads of a block that puts together what those of the main launch leave."""
        return a_warp_for_each_row(main)

    def launches_in_front(self, problem: Problem) -> tuple[Launch, ...]:
        """Returns the launches, in their order, that leave in the workspace what the main one reads."""
        return reach_launches() if self.leaves_far_keys_out else ()

    @property
    def leaves_far_keys_out(self) -> bool:
        """Whether launches in front find how far from their places rows look."""
        return getattr(self, "far_keys", "") == LEFT_OUT

    def plan(self, problem: Problem, limits: DeviceLimits) -> Plan | None:
        """Returns the plan of which block takes what; None where a block's number says it."""
        return Plan(self.launch(problem, limits)) if problem.layout.is_packed else None

    def workspace(self, problem: Problem, limits: DeviceLimits) -> Workspace | None:
        """Returns the memory that launches leave things for each other in; None where there is no need."""
        return self.workspace_of(problem, self.launch(problem, limits))

    def workspace_of(self, problem: Problem, main: Launch) -> Workspace | None:
        """Returns the same of a kernel with such a main launch."""
        if self.leaves_far_keys_out:
            return Workspace(reach_regions())
        if main.workspace_splits == 1:
            return None
        return workspace_of_splits(main, self.partial_floats(problem))

    def tile_lists(self, problem: Problem, limits: DeviceLimits) -> TileLists | None:
        """Returns which lists of tiles of keys the kernel walks; None where it walks all between bounds."""
        return self.lists_of(problem, self.launch(problem, limits))

    def lists_of(self, problem: Problem, main: Launch) -> TileLists | None:
        """Returns the same of a kernel with such a main launch."""
        keys = int(getattr(self, "bc", 0))
        return tile_lists(problem.scores, main, keys, bits=self.reads_seen_bits()) if keys else None

    def reads_seen_bits(self) -> bool:
        """Tells whether what rows see of single keys is there with the lists."""
        return False

    @rule("arithmetic", after=FIRST_PARAMETER)
    def _family_serves(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return self.serves.why_not(self.family, problem, limits)

    def check(self, problem: Problem, limits: DeviceLimits) -> None:
        """Raises `Illegal` for the first rule this variant breaks on that problem and card."""
        for each in self.rules():
            reason = None if each.advisory else each.verdict(self, problem, limits)
            if reason is not None:
                raise Illegal(each.name, reason)

    def advice(self, problem: Problem, limits: DeviceLimits) -> str | None:
        """Says why the search leaves this legal variant out; None where it does not."""
        for each in self.rules():
            reason = each.verdict(self, problem, limits) if each.advisory else None
            if reason is not None:
                return f"{each.name}: {reason}"
        return None

    @classmethod
    @cache
    def parameters(cls) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(f.name, f.metadata["choices"], f.metadata["doc"], f.metadata["implied"])
            for f in fields(cls)
            if f.default is not MISSING and "choices" in f.metadata
        )

    @classmethod
    @cache
    def rules(cls) -> tuple[Rule, ...]:
        """Returns the family's rules in the order of the parameters that they wait for."""
        order = {p.name: i for i, p in enumerate(cls.parameters())}
        found: dict[str, Rule] = {}
        for klass in reversed(cls.__mro__):
            for attribute, method in vars(klass).items():
                if hasattr(method, "rule"):
                    name, after, advisory, waived_by = method.rule
                    after = next(iter(order)) if after == FIRST_PARAMETER else after
                    found[attribute] = Rule(name, after, method, advisory, waived_by)
        return tuple(sorted(found.values(), key=lambda r: order[r.after]))

    @classmethod
    def _choices(cls, name: str) -> tuple[Any, ...]:
        return next(p.choices for p in cls.parameters() if p.name == name)

    @classmethod
    @cache
    def _by_name(cls) -> tuple[dict[str, Parameter], dict[str, dict[str, Value]]]:
        """The parameters by name, and the choices of each by how they are written."""
        known = {p.name: p for p in cls.parameters()}
        return known, {name: {str(c): p.parse(str(c)) for c in p.choices} for name, p in known.items()}

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> dict[str, Value]:
        """Returns the typed values of textual ``name=value`` settings; raises ValueError with the nearest
        name."""
        known, by_text = cls._by_name()
        parsed: dict[str, Value] = {}
        for name, text in settings.items():
            if name in known and text in by_text[name]:
                parsed[name] = by_text[name][text]
                continue
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
                raise ValueError(f"family {cls.family!r} has no parameter {name!r}; {hint}")
            parsed[name] = known[name].parse(text)
        return parsed

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the variant ``to_dict`` wrote, with every name and value checked against the space."""
        _, by_text = cls._by_name()
        if data.keys() == by_text.keys():
            # Thousands at a time when a study is read.
            with contextlib.suppress(KeyError):
                return cls.with_values({name: known[str(data[name])] for name, known in by_text.items()})
        parsed = cls.parse({k: str(v) for k, v in data.items()})
        return cls.with_values({p.name: parsed.get(p.name, p.default) for p in cls.parameters()})

    @classmethod
    def with_values(cls, values: Mapping[str, Value]) -> Self:
        """Returns the variant with these values, which must be a choice of every parameter: what spaces are
        walked by, since a frozen class's constructor takes ten times as long."""
        made = object.__new__(cls)
        made.__dict__.update(values)
        return made

    def changed(self, **values: Value) -> Self:
        """Returns the same variant but for these values, which must be choices of theirs. What rules compare
        with: it reads none of the other parameters, as `dataclasses.replace` would."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.update(values)
        return made

    def to_dict(self) -> dict[str, Value]:
        # Values are plain: `asdict` would copy each deeply, twenty times as slowly.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def named_parameters(self) -> tuple[Parameter, ...]:
        """Returns the parameters that a kernel's source names: implied ones last, and none of these that has
        its default."""
        named = (p for p in self.parameters() if not (p.implied and getattr(self, p.name) == p.default))
        return tuple(sorted(named, key=lambda p: p.implied))

    @property
    def name(self) -> str:
        """The family and every parameter's value: ``simt br=64 bc=64 ...``."""
        return " ".join([self.family, *(f"{k}={v}" for k, v in self.to_dict().items())])
