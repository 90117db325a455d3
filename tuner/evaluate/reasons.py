"""Failures counted by reason: those that differ only in numbers are one, told with their range."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .outcome import Outcome

MAX_CHARS = 160
#: A number on its own or before a unit; digits inside a name (sm_61, f32) are part of the name.
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\w)")


def first_line(text: str) -> str:
    return text.strip().splitlines()[0][:MAX_CHARS] if text.strip() else ""


def count_reasons(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Counts outcomes by why they ended, the most frequent first: ``spilled: 8 to 290 bytes``."""
    return count_alike(
        f"{outcome.status}: {first_line(outcome.reason)}" if outcome.reason else str(outcome.status)
        for outcome in outcomes
    )


def count_alike(reasons: Iterable[str]) -> dict[str, int]:
    """Counts how often each reason occurs, those that differ only in numbers being one."""
    alike: dict[str, list[list[str]]] = {}
    for reason in reasons:
        alike.setdefault(NUMBER.sub("\0", reason), []).append(NUMBER.findall(reason))
    counted = {_told(pattern, numbers): len(numbers) for pattern, numbers in alike.items()}
    return dict(sorted(counted.items(), key=lambda each: -each[1]))


def _told(pattern: str, numbers: Sequence[Sequence[str]]) -> str:
    """The pattern with the range of the numbers at each of its gaps."""
    words = pattern.split("\0")
    told = words[0]
    for word, column in zip(words[1:], zip(*numbers, strict=True), strict=True):
        least, most = min(column, key=float), max(column, key=float)
        told += (least if float(least) == float(most) else f"{least} to {most}") + word
    return told
