"""PyTorch's times as the child process that takes them sends them, taken in this one."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import Pipe

from flashgen.gen.problem import Problem
from flashgen.tuner.bench import peers
from flashgen.tuner.bench.peers import PeerTime


def served(problems: Sequence[Problem], budget_ms: float) -> list[PeerTime]:
    """What the child process would send, taken from it in this one."""
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send(peers._Request(tuple(problems), 0, budget_ms))
        peers.serve(theirs)
        return list(iter(ours.recv, None))
