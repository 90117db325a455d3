"""A kernel is an ordered list of launches, whose blocks one expression counts for everybody."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.launch import Launch
from flashgen.gen.limits import PRESETS, DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate import reference

PROBLEM = Problem(batch=3, num_q_heads=6, num_kv_heads=2, seqlen_q=100, seqlen_k=70, head_dim=16)


@dataclass(frozen=True)
class Twice(Simt):
    """Launches its kernel twice, of which the second writes what the first has written."""

    def launches(self, problem: Problem, limits: DeviceLimits) -> tuple[Launch, ...]:
        return (self.launch(problem, limits),) * 2


def test_the_host_launcher_makes_all_launches() -> None:
    card = SimDevice("a100", PRESETS["a100"])
    kernel = render(Twice(br=16, bc=16, threads_per_block=32), PROBLEM, card.limits)
    assert len(kernel.launches) == 2 and kernel.launch == kernel.launches[0]
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((3, heads, n, 16), np.float32) for heads, n in ((6, 100), (2, 70), (2, 70))
    )
    found, _ = card.open().attend(card.toolchain().build(kernel), q, k, v, scale=0.25)
    np.testing.assert_allclose(found, reference.attention(q, k, v, scale=0.25).o, atol=1e-5)


LAUNCHES = [
    (Launch(128, 0, 16), 3 * 6 * 7),
    (Launch(128, 0, None), 3 * 6),
    (Launch(128, 0, 16, heads_per_block=4), 5 * 7),
    (Launch(128, 0, 16, pack_heads=True), 3 * 2 * 19),
    (Launch(128, 0, 16, pack_heads=True, splits=4), 3 * 2 * 19 * 4),
    (Launch(128, 0, 16, cluster=2), 3 * 6 * 8),
    (Launch(128, 0, 16, heads_per_cluster=2), 3 * 2 * 4 * 7),
    (Launch(128, 0, 16, max_blocks=20), 20),
]


@pytest.mark.parametrize(("launch", "blocks"), LAUNCHES)
def test_blocks_cover_all_rows_of_all_heads(launch: Launch, blocks: int) -> None:
    assert launch.grid(PROBLEM) == blocks
    sizes = {name: getattr(PROBLEM, name) for name in launch.sizes_of_grid}
    counted = eval(launch.blocks.python(), {}, sizes)
    assert counted == replace(launch, max_blocks=None).grid(PROBLEM)
