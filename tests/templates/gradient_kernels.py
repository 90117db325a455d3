"""Kernels forwards and backwards for the stand-in driver: launches read what was packed, as kernels do, and
are computed in float64, or by the kernels themselves on an emulated card."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.gen.arguments import struct_of
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_module
from flashgen.gen.handover.query_sums import postprocess_launch
from flashgen.gen.handover.statistics import statistics_launch, statistics_regions
from flashgen.gen.handover.workspace import Workspace
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import QUERIES_ROLE
from flashgen.gen.launch import Launch as GridOf
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.buffer_gradients import BufferGradient, buffer_gradients
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate import gradients as in_float64

from tests.support.modules import import_path
from tests.support.stand_in_driver import Driver, make_kernel
from tests.templates.scored_kernels import DTYPES, LAUNCHED, Card, _read


def forward_kernel(**problem: Any) -> Kernel:
    return make_kernel(GridOf(128, 4096, 64), "// forward\n", **problem)


def backward_kernel(**problem: Any) -> Kernel:
    """A kernel of three launches, as all families of gradients have."""
    made = make_kernel(GridOf(64, 2048, 16, of_keys=True), "// backward\n", backward=True, **problem)
    queries = GridOf(96, 1024, 32, role=QUERIES_ROLE)
    of_buffers = (each.launch for each in buffer_gradients(made.problem.scores))
    launches = (statistics_launch(packed=False), queries, *made.launches, *of_buffers)
    return replace(made, launches=launches, workspace=Workspace(statistics_regions()))


def unordered(kernel: Kernel) -> Kernel:
    """Returns the same as one whose blocks add to memory as they come along."""
    statistics, _, main = kernel.launches
    return replace(kernel, launches=(statistics, main, postprocess_launch()))


def load(
    path: Path, *kernels: Kernel, name: str = "best", for_good: bool = False, device: str = "H200"
) -> Any:
    """The module of kernels."""
    if len(kernels) == 1:
        text = emit_module(kernels[0], device=device)
    else:
        text = emit_many([Made(kernel, device, None) for kernel in kernels], name=name, command=())
    (path / f"{name}.py").write_text(text)
    return import_path(path / f"{name}.py", for_good=for_good)


class Gradients(Card):
    """What launches of the backward pass read and computed."""

    def launch(self, address: int, causal: int) -> None:
        struct = struct_of(self.problem)
        packed = struct.unpack(ctypes.string_at(address, struct.num_bytes))
        scores = Problem(**{**self._fields(), "causal": bool(causal)}).scores
        values = self.read(scores, packed)
        arrays = {each.name: self._of(packed, each.name) for each in self.problem.operation.arrays}
        rows = int(packed["batch"]) * int(packed["num_q_heads"]) * int(packed["seqlen_q"])
        assert rows == 0 or packed["workspace"] % 16 == 0 < packed["workspace"]
        # Which a kernel fills: what is not there, shows.
        _read(int(packed["workspace"]), (2, -(-rows // 64) * 64), (-(-rows // 64) * 64, 1), np.float32)[
            ...
        ] = 0
        q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
        found = in_float64.gradients(
            q,
            k,
            v,
            dout,
            scale=packed["scale"],
            scores=scores,
            values=values,
            dlse=arrays["dlse"] if packed["dlse"] else None,
        )
        assert arrays["o"].shape == dout.shape and np.isfinite(arrays["o"].astype(np.float32)).all()
        assert not np.isnan(arrays["lse"]).any()
        for name, each in found.items():
            if name in arrays:
                arrays[name][...] = each.value
        for of in buffer_gradients(scores):
            if packed[of.name]:
                self._fill(of, packed, found[of.name])

    def _fill(self, of: BufferGradient, packed: dict[str, Any], found: in_float64.Gradient) -> None:
        """Writes a gradient as kernels do: sums over what is repeated, whose strides are 0."""
        steps = [int(packed[name]) for name in of.strides]
        lengths = [1 if step == 0 else n for step, n in zip(steps, found.value.shape, strict=False)]
        shape = (*lengths, found.value.shape[-1])
        _read(int(packed[of.name]), shape, (*steps, 1), np.float32)[...] = found.summed_to(shape).value

    def _of(self, packed: dict[str, float], name: str) -> np.ndarray:
        array = self.problem.operation.array(name)
        shape = tuple(int(packed[each]) for each in ("batch", array.heads, array.rows))
        if not array.columns:
            strides = (shape[1] * shape[2], shape[2], 1)
            return _read(int(packed[name]), shape, strides, np.float32) if packed[name] else np.zeros(shape)
        shape = (*shape, getattr(self.problem, array.columns))
        strides = (*(int(packed[f"{name}_stride_{each}"]) for each in ("batch", "head", "row")), 1)
        return _read(int(packed[name]), shape, strides, DTYPES[self.problem.dtype])


class Emulated:
    """What a kernel's own source computes, on an emulated card."""

    def __init__(self, kernel: Kernel, card: SimDevice) -> None:
        self.values: list[Any] = []
        self.entries = {}
        for causal in (False, True):
            built = card.toolchain().build(kernel.with_mask(causal))
            card.open()
            library = ctypes.cdll.LoadLibrary(str(built.artifact))
            library.emulation_configure(ctypes.byref(card.open()._config()))
            self.entries[causal] = library[kernel.entry]

    def launch(self, address: int, causal: int) -> None:
        self.values.append(address)
        assert self.entries[bool(causal)](ctypes.c_void_p(address), None) == 0


@contextmanager
def computing(driver: Driver, *kernels: Kernel, card: SimDevice | None = None) -> Iterator[Sequence[Any]]:
    """The last launch of each kernel computes all that its launches do."""
    if card is not None:
        cards: list[Any] = [Emulated(kernel, card) for kernel in kernels]
    else:
        cards = [(Gradients if each.problem.backward else Card)(each.problem) for each in kernels]
    by_name = {kernel.symbol: card for kernel, card in zip(kernels, cards, strict=True)}

    def launched(address: int, causal: int) -> None:
        name = driver.library.fake_launched_name().decode()
        if name in by_name:
            by_name[name].launch(address, causal)

    callback = LAUNCHED(launched)
    driver.library.fake_on_launch(callback)
    try:
        yield cards
    finally:
        driver.library.fake_on_launch(None)
