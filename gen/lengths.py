"""How long the sequences of a packed batch are: what its kernels are tuned and timed with.

A text says it: ``same`` (all as long as may be), ``uniform:512-4096`` (each of both ends as likely as what
lies between), or ``list:512,300x4096`` (one by one; 300x4096 are 300 queries on 4096 keys). A sequence has as
many queries as keys, but for limits of either; ``uniform:1-16/uniform:512-4096`` draws them apart, queries
first. What is drawn is the same each time.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from random import Random

#: All sequences as long as the problem's lengths.
SAME = "same"
#: The longest a sequence may be, and how many there may be in a list.
MAX_LENGTH, MAX_LISTED = 2**31 - 1, 65536
_SEED = 23
_UNIFORM = re.compile(r"uniform:(\d{1,10})-(\d{1,10})")
_LISTED = re.compile(r"(\d{1,10})(?:x(\d{1,10}))?")
_FORMS = "same, uniform:LOW-HIGH, uniform:LOW-HIGH/uniform:LOW-HIGH (queries/keys) or list:N,N,QxK"


@dataclass(frozen=True)
class Lengths:
    """The queries and the keys of each sequence."""

    q: tuple[int, ...]
    k: tuple[int, ...]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Both of each sequence."""
        return tuple(zip(self.q, self.k, strict=True))


@lru_cache(maxsize=64)
def draw_lengths(text: str, batch: int, seqlen_q: int, seqlen_k: int) -> Lengths:
    """Returns the lengths of ``batch`` sequences that ``text`` describes, of at most ``seqlen_q`` queries and
    ``seqlen_k`` keys: the same each time. Raises ValueError for a text that is none, or does not suit these
    numbers."""
    if text.startswith("list:"):
        lengths = _listed(text)
        if len(lengths.q) != batch:
            raise ValueError(f"varlen lists {len(lengths.q)} sequences, batch is {batch}; make them one")
        for name, most, limit in (("q", max(lengths.q), seqlen_q), ("k", max(lengths.k), seqlen_k)):
            if most > limit:
                raise ValueError(
                    f"varlen has a sequence of {most}, seqlen_{name} is {limit}; give seqlen_{name} {most}"
                )
        return lengths
    parts = text.split("/")
    if len(parts) > 2:
        raise ValueError(f"varlen {text!r:.80} is none of {_FORMS}")
    limits = (max(seqlen_q, seqlen_k),) if len(parts) == 1 else (seqlen_q, seqlen_k)
    for part, limit in zip(parts, limits, strict=True):
        if part != SAME and (high := _bounds(part)[1]) > limit:
            raise ValueError(f"varlen {part} reaches {high}, but seqlen is {limit}; give seqlen {high}")
    rng = Random(_SEED)
    drawn = [_drawn(part, batch, limit, rng) for part, limit in zip(parts, limits, strict=True)]
    q = tuple(min(n, seqlen_q) for n in drawn[0])
    k = tuple(min(n, seqlen_k) for n in drawn[-1])
    return Lengths(q, k)


def listed_lengths(q: tuple[int, ...], k: tuple[int, ...]) -> str:
    """Returns the text of sequences one by one."""
    return "list:" + ",".join(f"{a}" if a == b else f"{a}x{b}" for a, b in zip(q, k, strict=True))


def most_lengths(text: str) -> tuple[int, int] | None:
    """Returns the most queries and keys that a text speaks of; None where it leaves that to the problem.
    Raises ValueError for a text that is none."""
    if text == SAME:
        return None
    if text.startswith("list:"):
        lengths = _listed(text)
        return max(1, *lengths.q), max(1, *lengths.k)
    highs = [_bounds(part)[1] if part != SAME else 0 for part in text.split("/")]
    if not all(highs):
        return None
    return highs[0], highs[-1]


def num_listed(text: str) -> int | None:
    """Returns how many sequences a text lists; None where it draws them."""
    return len(_listed(text).q) if text.startswith("list:") else None


def short_lengths(text: str) -> str:
    """Returns what a text says as part of an identifier: ``uniform512to4096``."""
    if text.startswith("list:"):
        return "list" + hashlib.sha256(text.encode()).hexdigest()[:6]
    return text.replace(":", "").replace("-", "to").replace("/", "_")


def lengths_words(text: str) -> str:
    """Returns what a text says in words, long lists cut."""
    if text == SAME:
        return "all sequences as long"
    if text.startswith("list:"):
        lengths = _listed(text)
        return f"{len(lengths.q)} sequences of {sum(lengths.q)} queries and {sum(lengths.k)} keys in all"
    parts = ["as long as may be" if part == SAME else _range_words(part) for part in text.split("/")]
    if len(parts) == 1:
        return f"lengths {parts[0]}"
    return f"queries {parts[0]}, keys {parts[1]}"


def parse_lengths(text: str) -> str:
    """Returns a user's text as problems have it; raises ValueError for one that is none."""
    text = text.replace(" ", "").lower()
    most_lengths(text)
    return text


def read_lengths(content: str, name: str) -> str:
    """Returns the text of the sequences that a file's ``content`` lists: a line each of one number, or of two
    (queries, keys), by blanks or commas; ``#`` begins a comment. Raises ValueError that names the line."""
    q, k = [], []
    for number, line in enumerate(content.splitlines(), 1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) > 2 or not all(re.fullmatch(r"\d{1,10}", word) for word in words):
            raise ValueError(
                f"{name}, line {number}: {line.strip()!r:.60} is no length, nor two (queries, keys)"
            )
        q.append(int(words[0]))
        k.append(int(words[-1]))
    if not q:
        raise ValueError(f"{name} lists no sequence; write a line of one or two numbers for each")
    text = listed_lengths(tuple(q), tuple(k))
    _listed(text)
    return text


def _range_words(part: str) -> str:
    low, high = _bounds(part)
    return f"uniform from {low} to {high}"


def _drawn(part: str, batch: int, longest: int, rng: Random) -> tuple[int, ...]:
    if part == SAME:
        return (longest,) * batch
    low, high = _bounds(part)
    # By the generator's own numbers, which stay the same from one Python to the next.
    return tuple(low + int(rng.random() * (high - low + 1)) for _ in range(batch))


def _bounds(part: str) -> tuple[int, int]:
    found = _UNIFORM.fullmatch(part)
    if found is None:
        raise ValueError(f"varlen {part!r:.80} is none of {_FORMS}")
    low, high = int(found[1]), int(found[2])
    if not low <= high <= MAX_LENGTH or high == 0:
        raise ValueError(f"varlen {part} must rise, from 0 or more to at most {MAX_LENGTH}")
    return low, high


@lru_cache(maxsize=64)
def _listed(text: str) -> Lengths:
    pairs = [_LISTED.fullmatch(each) for each in text.removeprefix("list:").split(",")]
    if len(pairs) > MAX_LISTED:
        raise ValueError(f"varlen lists {len(pairs)} sequences, at most {MAX_LISTED} are served")
    if not all(pairs):
        raise ValueError(f"varlen {text!r:.80} is none of {_FORMS}")
    q = tuple(int(each[1]) for each in pairs if each)
    k = tuple(int(each[2] or each[1]) for each in pairs if each)
    if max(*q, *k, 0) > MAX_LENGTH:
        raise ValueError(f"varlen has a sequence of {max(*q, *k)}, at most {MAX_LENGTH} are served")
    return Lengths(q, k)
