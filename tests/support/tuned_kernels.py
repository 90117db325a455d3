"""Tuned kernels with made-up measurements, and the entries of a library that hold them."""

from __future__ import annotations

from dataclasses import replace

from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.evaluate.outcome import Measurement, TunedKernel
from flashgen.tuner.shelf.library import Entry

LADDER = FAMILIES["ladder"]
H200 = replace(preset("h200"), name="NVIDIA H200")
H100 = replace(preset("h100"), name="NVIDIA H100 80GB HBM3")


def tuned(
    problem=None,
    limits=H200,
    *,
    predicted=False,
    tuned_at="2026-01-01T00:00:00+00:00",
    variant=None,
    us=100.0,
):
    problem = problem or Problem()
    variant = variant or LADDER()
    return TunedKernel(
        problem=problem,
        variant=variant,
        source=render(variant, problem, limits).source,
        measurement=Measurement(
            times_us=(us, us + 1, us + 2),
            median_us=us + 1,
            spread=0.01,
            tflops=problem.flops / us * 1e-6,
            registers=96,
            spill_bytes=0,
            smem_bytes=4096,
            occupancy=0.25,
            error=3e-7,
            predicted=predicted,
        ),
        device=limits.name,
        arch=limits.arch,
        driver="580",
        toolkit="nvcc 13.0.88",
        flashgen="0.1.0",
        seed=0,
        tuned_at=tuned_at,
    )


def entry(problem=None, limits=H200, *, predicted=False, **others) -> Entry:
    slug = ("sim_" if predicted else "") + limits.slug
    return Entry(tuned(problem, limits, predicted=predicted, **others), slug)
