"""What a benchmark times: its workloads, the kernel that serves each, and who is timed beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...gen.emit.module import emit_module
from ...gen.families.ladder.family import STEPS, steps
from ...gen.layout import DENSE
from ...gen.limits import DeviceLimits
from ...gen.render import render
from ...gen.variant import Illegal
from ..cards.device import Device
from ..front.candidates import makes_same_bits
from ..predict.peak import peak_of
from ..shelf import choice, library
from ..suites import SUITES, Workload
from .contenders import CONTENDERS, LADDER, LADDER_TURN, SAME_BITS_TURN
from .figures import OURS, OURS_16_BITS, OURS_SAME_BITS, Row, row_of
from .own_module import chosen_module, module_of
from .sixteen_bits import in_16_bits
from .unserved import Unserved

#: Milliseconds of launches for one workload's turns, after warming up.
BUDGET_MS = 400.0
#: Longest that one contender may take for its first call, compiling included; of gradients times its
#: patience.
CONTENDER_S = 90.0
LADDER_SUITE = "report"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to time where. ``contenders``: their names, None for all; ``minutes``: after which nothing more is
    begun; ``errors_alone``: errors on inputs of two kinds instead of times."""

    device: Device
    workloads: tuple[Workload, ...]
    out: Path = Path("out")
    contenders: tuple[str, ...] | None = None
    minutes: float | None = None
    errors_alone: bool = False
    jobs: int = 1
    budget_ms: float = BUDGET_MS
    contender_s: float = CONTENDER_S


@dataclass
class Plan:
    """The rows under way, and what the serving process needs to know of each."""

    rows: list[Row]
    modules: list[str | None]
    contenders: list[dict[str, int]]
    steps: list[dict[str, str]]
    """The modules of other kernels of flashgen's that are contenders: the report's steps, gradients of the
    same bits every run, and outputs of sixteen bits beside those of eight."""
    cubins: dict[str, dict[str, str]] = field(default_factory=dict)
    """The files of what was compiled ahead, by module and by mask ("True", "False")."""
    skip: dict[int, dict[str, str]] = field(default_factory=dict)

    def leave_out(self, index: int, name: str, reason: str) -> None:
        self.skip.setdefault(index, {})[name] = reason

    def tasks(self, errors_alone: bool) -> list[tuple[int, int]]:
        """Returns what is to be timed as pairs of turn and row: the cheap contenders of all rows first."""
        indices = range(len(self.rows))
        if errors_alone:
            seen: dict[str, int] = {}
            for i in indices:
                module = self.modules[i]
                # Their inputs are of sequences of one length, and what is computed are outputs.
                problem = self.rows[i].problem
                if module is not None and problem.layout is DENSE and not problem.backward:
                    seen.setdefault(module, i)
            return [(0, i) for i in seen.values()]
        last = max((turn for row in self.contenders for turn in row.values()), default=0)
        return [
            (turn, i)
            for turn in range(last + 1)
            for i in indices
            if not turn or turn in self.contenders[i].values()
        ]


def contender_names() -> list[str]:
    """Returns the names of all contenders there are, flashgen's own last: gradients of the same bits every
    run, outputs of sixteen bits, and the report's steps."""
    return [*CONTENDERS, OURS_SAME_BITS, OURS_16_BITS, *(LADDER + name for name in STEPS)]


def make_plan(options: BenchOptions, folder: Path) -> Plan:
    """Plans a row for each workload with the kernel that serves it, the best of those for others where none
    was tuned for just that."""
    limits = options.device.limits
    known = [e for e in library.entries(library.folders(options.out)) if not e.predicted]
    plan = Plan([], [], [], [])
    for index, workload in enumerate(options.workloads):
        row, module = row_of(workload), None
        match = choice.find(known, workload.problem, limits)
        if match is None:
            plan.leave_out(
                index, OURS, f"no kernel is known for {workload.problem.stem}; `flashgen tune` makes one"
            )
        else:
            path = module_of(match.entry)
            module = str(path.resolve())
            if not path.exists():
                module = None
                plan.leave_out(index, OURS, f"{path} is missing")
            kernel = match.entry.kernel
            deterministic = kernel.problem.backward and makes_same_bits(
                kernel.variant, kernel.problem, limits
            )
            row = replace(
                row,
                kernel=kernel.problem.name,
                family=kernel.variant.family,
                exact=kernel.problem == workload.problem,
                how=match.how,
                deterministic=deterministic,
            )
        if peak := peak_of(workload.problem, limits):
            row = replace(row, peak_tflops=peak.tflops, peak_mhz=peak.clock_mhz)
        plan.rows.append(row)
        plan.modules.append(module)
        plan.contenders.append(_contenders(workload, options.contenders))
        plan.steps.append(_steps(plan, index, limits, folder))
        if match is not None:
            _add_own(plan, index, known, options, folder)
    return plan


def _add_own(
    plan: Plan,
    index: int,
    known: Sequence[library.Entry],
    options: BenchOptions,
    folder: Path,
) -> None:
    """Plans flashgen's own beside the kernel that serves: gradients of the same bits every run beside those
    that may differ, and outputs of sixteen bits beside those of eight."""
    row, repeating = plan.rows[index], plan.rows[index].problem.backward
    if repeating and not row.deterministic:
        name, turn = OURS_SAME_BITS, SAME_BITS_TURN
    elif row.problem.has_scales:
        name, turn = OURS_16_BITS, 0
    else:
        return
    if options.contenders is not None and name not in options.contenders:
        return
    plan.contenders[index][name] = turn
    problem, limits = in_16_bits(row.problem), options.device.limits
    try:
        path = chosen_module(known, problem, limits, folder, repeating=repeating)
    except Unserved as why:
        plan.leave_out(index, name, str(why))
    else:
        plan.steps[index][name] = str(path.resolve())


def _contenders(workload: Workload, wanted: Sequence[str] | None) -> dict[str, int]:
    """The turns of the contenders for a workload: all of its dtype, beside eight bits those of bfloat16, and
    the ladder on the report's cases.
    Those of other layouts alone are left out where sequences are of one length, and elsewhere say why they do
    not serve."""
    problem = in_16_bits(workload.problem)
    found = {c.name: c.turn for c in CONTENDERS.values() if c.may_serve(problem)}
    if SUITES[LADDER_SUITE].problems.get(workload.name) == workload.problem:
        found |= {LADDER + name: LADDER_TURN for name in STEPS}
    return {name: turn for name, turn in found.items() if wanted is None or name in wanted}


def _steps(plan: Plan, index: int, limits: DeviceLimits, folder: Path) -> dict[str, str]:
    """The report's steps as modules in ``folder``, by contender."""
    problem, found = plan.rows[index].problem, {}
    if not any(name.startswith(LADDER) for name in plan.contenders[index]):
        return {}
    for step, variant in steps(problem.head_dim).items():
        name = LADDER + step
        if name not in plan.contenders[index]:
            continue
        path = folder / f"{name.replace('-', '_').replace('.', '_')}_{problem.stem}.py"
        try:
            if not path.exists():
                path.write_text(
                    emit_module(render(variant, problem, limits), device=limits.name), encoding="utf-8"
                )
        except Illegal as error:
            plan.leave_out(index, name, str(error))
            continue
        found[name] = str(path)
    return found
