"""What is asked of masks and scores, in words."""

from __future__ import annotations

from collections.abc import Iterator

from .asked import BOOLEAN, Scoring


def scoring_words(scoring: Scoring) -> str:
    """Returns what is asked of masks and scores, with the numbers that it is tuned for: ``window of 127 keys
    before and 0 after, soft cap 30``; nothing where nothing is asked."""
    numbers = [f"{name} = {value:g}" for name, value in scoring.scalars]
    return ", ".join([told for _, told in _asked(scoring)] + numbers)


def feature_words(scoring: Scoring) -> str:
    """Returns what is asked of masks and scores whatever the numbers: ``window, soft cap``."""
    return ", ".join(feature for feature, _ in _asked(scoring))


def _asked(scoring: Scoring) -> Iterator[tuple[str, str]]:
    """What is asked, and the same with its numbers."""
    if scoring.window is not None:
        left, right = ("all" if side < 0 else f"{side}" for side in scoring.window)
        told = f"window of {left} keys before and {right} after"
        first = f" beside the first {scoring.always}" if scoring.always else ""
        yield "window beside first keys" if scoring.always else "window", told + first
    if scoring.chunk:
        yield "chunks", f"chunks of {scoring.chunk} keys"
    if scoring.prefix:
        yield "prefixes", f"prefixes of up to {scoring.prefix} keys"
    if scoring.lengths:
        yield "lengths of keys", "lengths of keys"
    if scoring.documents:
        yield "documents", f"{scoring.documents} documents"
    if scoring.dilation:
        yield "dilation", f"dilation {scoring.dilation}"
    if scoring.tree:
        yield "tree", "tree"
    if scoring.softcap:
        yield "soft cap", f"soft cap {scoring.softcap:g}"
    if scoring.alibi:
        yield "ALiBi", "ALiBi"
    if scoring.bias:
        bias = "boolean mask" if scoring.bias == BOOLEAN else f"bias of {scoring.bias}"
        yield bias, bias
    for name in ("mask", "score"):
        if text := getattr(scoring, name):
            yield f"{name} {text}", f"{name} {text}"
    if scoring.sinks:
        yield "sinks", "sinks"
