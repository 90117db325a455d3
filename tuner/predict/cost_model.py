"""How long a variant should take on a card: predicted from counted work, to rank variants without the card.

Each kind of counted work has a model of its own; what they share is how a variant fits the card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...gen.families.wgmma.work import GroupWork
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ...gen.work import BlockWork, LaunchesWork, Work
from .block_model import Coefficients, predict_blocks
from .launches_model import predict_launches
from .prediction import Prediction
from .warpgroup_model import GroupCoefficients, predict_groups

#: Tells one cost model's predictions from another's: raised with any change that alters them. Trials of
#: emulated cards, whose times are predictions, are kept apart by it.
COST_MODEL = 12
#: By kind of work, the model that turns it into a time.
MODELS: Mapping[type[Work], Callable[..., Prediction]] = {
    BlockWork: predict_blocks,
    GroupWork: predict_groups,
    LaunchesWork: predict_launches,
}


def predict(
    variant: Variant,
    problem: Problem,
    limits: DeviceLimits,
    coefficients: Coefficients | GroupCoefficients | None = None,
) -> Prediction:
    """Returns the time of a variant on a problem, by the coefficients of its kind unless others are given.

    It is deterministic and takes some hundred microseconds.

    The variant must be legal on that card: a block that fits no SM raises ValueError.
    """
    launch = variant.launch(problem, limits)
    work = variant.work(problem, limits)
    registers = variant.registers(problem, limits) if work.registers is None else work.registers
    registers = min(registers, limits.max_registers_per_thread)
    resident = limits.blocks_per_sm(launch.threads, registers, launch.smem_bytes)
    if resident < 1:
        raise ValueError(f"{variant.name} does not fit an SM of {limits.name}")
    return predict_work(work, problem, limits, resident, coefficients)


def predict_work(
    work: Work,
    problem: Problem,
    limits: DeviceLimits,
    resident: int,
    coefficients: Coefficients | GroupCoefficients | None = None,
) -> Prediction:
    """Returns the time of counted work with ``resident`` blocks per SM; coefficients are of its model."""
    return MODELS[type(work)](work, problem, limits, resident, coefficients)
