"""How long kernels of several launches should take, as those of gradients: one after the other, or the last
one beside the end of another."""

from __future__ import annotations

from dataclasses import replace

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.work import LaunchesWork, LaunchWork
from .block_model import COEFFICIENTS, TENSOR_COEFFICIENTS, Coefficients, idle_us, predict_blocks
from .prediction import Prediction, next_launch_us

#: What both kinds of gradients take otherwise than `TENSOR_COEFFICIENTS`: they were fitted with what L2 has
#: to write back as a part of a launch.
_GRADIENTS = replace(
    TENSOR_COEFFICIENTS,
    hiding=4.5,
    memory_hiding=3.5,
    global_latency=930.0,
    barrier_latency=600.0,
    block_start=850.0,
    dram_efficiency=0.91,
    left_in_l2=0.0,
    out_of_step=1.0,
    launch_us=12.0,
)
#: For gradients by warps' products: they wait at barriers for each other's weights, and less for products.
#: Fitted to sixteen problems on an H200.
GRADIENT_COEFFICIENTS = replace(
    _GRADIENTS,
    overlap=2.9,
    hiding=1.9,
    idle_warp=0.1,
    product_slots=5.9,
    l2_bytes_per_cycle=38.0,
    barrier_latency=105.0,
)
#: For gradients by warpgroups' products: one block at a time, whose start and end nothing hides. Fitted to
#: nineteen problems on an H200.
GROUP_GRADIENT_COEFFICIENTS = replace(
    _GRADIENTS,
    overlap=2.0,
    idle_warp=0.35,
    product_slots=1.0,
    l2_bytes_per_cycle=55.0,
    block_start=4600.0,
    starts_hide=False,
)


def predict_launches(
    work: LaunchesWork,
    problem: Problem,
    limits: DeviceLimits,
    resident: int,
    coefficients: Coefficients | None = None,
) -> Prediction:
    """Returns the time of launches one after the other, whose limiter is that of the longest parts together.
    One that begins beside another fills what that leaves idle at its end, and starts meanwhile.

    ``resident`` blocks per SM are those of the main launch, as the prediction tells them; how many of the
    others' there are follows from what they take.
    """
    coefficients = coefficients or _in_use(work)
    found = [_predict(each, problem, limits, coefficients) for each in work.launches]
    others_us = work.moved_bytes / (1e3 * limits.dram_gbps * coefficients.dram_efficiency)
    names = dict.fromkeys(name for each in found for name in each.parts_us)
    parts = {name: sum(each.parts_us.get(name, 0.0) for each in found) for name in names}
    parts["device memory"] += others_us
    # Each launch was predicted as if it stood alone.
    following = next_launch_us(limits)
    apart = (len(found) - 1) * (following - coefficients.launch_us) + work.others * following
    if work.last_beside:
        idle = _idle_us(work.launches[-2], limits, coefficients)
        apart -= following + min(idle, found[-1].median_us - coefficients.launch_us)
    main = max(found, key=lambda each: each.median_us)
    return Prediction(
        median_us=sum(each.median_us for each in found) + others_us + apart,
        limiter=max(parts, key=lambda name: parts[name]),
        parts_us=parts,
        blocks_per_sm=resident,
        waves=main.waves,
    )


def _in_use(work: LaunchesWork) -> Coefficients:
    if work.by_warpgroups:
        return GROUP_GRADIENT_COEFFICIENTS
    products = any(each.work.per_warp_tile.products for each in work.launches)
    return GRADIENT_COEFFICIENTS if products else COEFFICIENTS


def _predict(
    launch: LaunchWork, problem: Problem, limits: DeviceLimits, coefficients: Coefficients
) -> Prediction:
    """The time of one launch, of which at least one block runs at a time."""
    return predict_blocks(launch.work, problem, limits, _resident(launch, limits), coefficients)


def _idle_us(launch: LaunchWork, limits: DeviceLimits, coefficients: Coefficients) -> float:
    return idle_us(launch.work, limits, _resident(launch, limits), coefficients)


def _resident(launch: LaunchWork, limits: DeviceLimits) -> int:
    registers = min(launch.registers, limits.max_registers_per_thread)
    return max(1, limits.blocks_per_sm(launch.threads, registers, launch.smem_bytes))
