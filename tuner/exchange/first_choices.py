"""How good the cost model's first choice is, by times of a card: what it costs to try nothing.

    python -m flashgen.tuner.exchange.first_choices TABLE...

prints a table in Markdown: of each family and operation how well predictions rank what was measured, and the
regret, which is the time of the variant that is predicted to be fastest over that of the fastest. With
`--each` every problem has a line. `--winners FOLDER` adds the tuned kernels that the folder holds for these
problems, and leaves out problems of which it holds none. Kernels whose text has changed since they were timed
take no part, unless `--superseded` asks for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...gen.problem import Problem
from ..predict.prior import prior_of
from ..predict.rank_correlation import spearman
from ..shelf import library
from .measured_tables import Measured, read, with_winner

#: Predictions that are nearer to each other than this part are equal: whichever is taken, by chance.
TIE = 1e-4
#: Named in the place of a family where variants of several were timed.
SEVERAL = "any"


@dataclass(frozen=True)
class Judged:
    """What predictions of one problem's variants, of a family or of several, are worth."""

    family: str
    problem: Problem
    variants: int
    correlation: float | None
    """Spearman's, of ranks."""
    regret: float
    """The measured time of the first choice over the best, at least 1; of equal predictions the slowest."""
    place: int
    """Where the fastest stands in the ranking, from 1."""

    @property
    def operation(self) -> str:
        return operation(self.problem)


@dataclass(frozen=True)
class Summary:
    """Judgements of a family's problems of one operation together."""

    family: str
    operation: str
    problems: int
    variants: int
    correlation: float | None
    """The mean."""
    regret: float
    """The geometric mean."""
    worst: float


def operation(problem: Problem) -> str:
    """Returns what is asked of a kernel, in a few words."""
    words = ["float32"] if problem.dtype == "f32" else []
    if problem.backward:
        return " ".join([*words, "gradients"])
    if problem.latent:
        words.append("latent")
    elif problem.has_few_queries:
        words.append("few rows")
    if problem.kv_dtype:
        words.append(f"{problem.kv_dtype} keys")
    words += ["packed"] * problem.layout.is_packed + ["paged"] * problem.layout.is_paged
    if not problem.scoring.is_plain:
        words.append("scores")
    if not problem.has_few_queries and not problem.latent:
        words.append("causal" if problem.causal else "dense")
    return " ".join(words)


def judged(measured: Measured) -> list[Judged]:
    """Returns what predictions are worth on one problem: of each family of which several variants were timed,
    and of all together where there is more than one."""
    prior = prior_of(measured.problem, measured.limits)
    predicted = np.array([prior(variant) for variant in measured.variants])
    families = np.array([variant.family for variant in measured.variants])
    found = [(name, families == name) for name in sorted(set(families.tolist()))]
    if len(found) > 1:
        found.append((SEVERAL, np.ones(len(families), dtype=bool)))
    return [
        _judged(name, measured.problem, measured.us[among], predicted[among])
        for name, among in found
        if among.sum() > 1
    ]


def _judged(family: str, problem: Problem, us: np.ndarray, predicted: np.ndarray) -> Judged:
    chosen = us[predicted <= predicted.min() * (1 + TIE)].max()
    place = int((predicted < predicted[us.argmin()]).sum()) + 1
    return Judged(family, problem, len(us), spearman(us, predicted), float(chosen / us.min()), place)


def summaries(judgements: Iterable[Judged]) -> list[Summary]:
    """Returns judgements put together by family and operation, in the order of their names."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for each in judgements:
        groups.setdefault((each.family, each.operation), []).append(each)
    return [_summary(*key, groups[key]) for key in sorted(groups)]


def _summary(family: str, operation: str, group: Sequence[Judged]) -> Summary:
    known = [each.correlation for each in group if each.correlation is not None]
    return Summary(
        family=family,
        operation=operation,
        problems=len(group),
        variants=sum(each.variants for each in group),
        correlation=float(np.mean(known)) if known else None,
        regret=mean_regret(group),
        worst=max(each.regret for each in group),
    )


def mean_regret(group: Iterable[Judged]) -> float:
    """Returns the geometric mean of regrets."""
    return float(np.exp(np.mean([np.log(each.regret) for each in group])))


def markdown(found: Iterable[Summary]) -> str:
    """Returns summaries as a table in Markdown."""
    lines = [
        "| family | operation | problems | kernels | rank correlation | regret | worst |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for each in found:
        correlation = "" if each.correlation is None else f"{each.correlation:.2f}"
        lines.append(
            f"| `{each.family}` | {each.operation} | {each.problems} | {each.variants} | {correlation} | "
            f"{each.regret - 1:.1%} | {each.worst - 1:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--each", action="store_true", help="a line for each problem")
    parser.add_argument("--winners", type=Path, help="a folder of tuned kernels, as out")
    parser.add_argument(
        "--superseded", action="store_true", help="kernels, too, whose text has changed since they were timed"
    )
    arguments = parser.parse_args()
    tables = [each for path in arguments.tables for each in read(path, superseded=arguments.superseded)]
    if arguments.winners:
        winners = library.entries([arguments.winners])
        tuned = {entry.kernel.problem for entry in winners}
        tables = [with_winner(measured, winners) for measured in tables if measured.problem in tuned]
    found = [each for measured in tables for each in judged(measured)]
    if not found:
        parser.error(
            "nothing to compare: the tables have no problem of two kernels, or the folder none of them"
        )
    if arguments.each:
        for each in sorted(found, key=lambda each: -each.regret):
            ranks = "" if each.correlation is None else f"{each.correlation:.2f}"
            place = f"{each.place:3} of {each.variants:4}"
            print(f"{each.regret:.3f} {ranks:5} {place} {each.family} {each.problem.name}")
    print(markdown(summaries(found)))
    alone = [each for each in found if each.family != SEVERAL]
    worst = max(each.regret for each in alone)
    print(f"\n{len(alone)} problems: regret {mean_regret(alone) - 1:.1%}, worst {worst - 1:.1%}")


if __name__ == "__main__":
    main()
