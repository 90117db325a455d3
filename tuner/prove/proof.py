"""Proving an emitted file again on this machine: `flashgen validate best.py` or ``best.cu``.

A module is imported and called through its ``attention()``, ``attention_varlen()``, ``gradients()`` or such;
a .cu file, and anything on an emulated card, is built from its source. Both masks go through the full suite
of `validate`, in a process of its own. That runs what the file holds as native code, and a module's Python
too, with the user's rights: nothing confines it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...gen.emit.offers import offer_of
from ...gen.kernel import Kernel
from ..cards.cuda import CudaDevice
from ..cards.device import Build, Device
from ..cards.emulated import SimDevice
from ..cards.names import resolve
from ..errors import FlashgenError
from ..evaluate.cases import Depth, cases
from ..evaluate.worker import DEADLINE_S, Worker
from ..request import with_lengths, with_pages
from ..shelf.emitted_kernels import EmittedKernel, read_emitted
from .module_device import ModuleDevice
from .sanitizers import sanitize_emulated, sanitize_on_card
from .target import check_fits, default_device

#: The full suite of a large tile takes an emulated card minutes.
EMULATED_DEADLINE_S = 4 * DEADLINE_S


@dataclass(frozen=True)
class Proof:
    """What was proved: on which device, how, with how many cases, and the largest per-head error by mask.

    ``adversarial`` of the cases are inputs on which errors are told apart by what the class promises.
    """

    file: str
    device: str
    how: str
    sanitized: bool
    cases: int
    errors: dict[str, float]
    bound: float
    adversarial: int = 0
    kernel: str = ""
    """The name of the kernel in a module of several, else empty."""

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"worst": self.worst}


def prove(path: Path, *, device: str | None = None, sanitize: bool = False, seed: int = 0) -> Proof:
    """Proves an emitted file of one kernel correct on ``device`` (`0`, `sim:gtx-1080`), under both masks.

    Without ``device``: this machine's first card, or else the file's own card emulated. ``sanitize`` runs a
    quick suite under AddressSanitizer (emulated) or compute-sanitizer (a card).

    Raises:
        FlashgenError: the file cannot be read or is none of flashgen's, the device or a tool is missing, or
            the kernel is wrong; then the message names the case.
    """
    return prove_emitted(read_emitted(path), device=device, sanitize=sanitize, seed=seed)


def prove_emitted(
    emitted: EmittedKernel,
    *,
    device: str | None = None,
    sanitize: bool = False,
    seed: int = 0,
    varlen: str | None = None,
    page_size: int | None = None,
    doing: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Proves a kernel that was read from an emitted file, as `prove` does a file's only one; ``doing`` hears
    what is done or waited for. ``varlen`` are the lengths of packed sequences at which it is tried beside the
    suite, by default those that it was tuned for; ``page_size`` is that of the pages. Raises UsageError for
    lengths and pages that are none of its."""
    path = emitted.path
    target = resolve(device) if device is not None else default_device(emitted)
    kernel = replace(emitted.kernel, arch=target.limits.arch)
    if varlen is not None:
        kernel = replace(kernel, problem=with_lengths(kernel.problem, varlen))
    if page_size is not None:
        known = kernel.variant.knows_page_size(kernel.problem)
        kernel = replace(kernel, problem=with_pages(kernel.problem, page_size, knows_page_size=known))
    check_fits(emitted, target.limits)
    depth: Depth = "quick" if sanitize else "full"
    errors: dict[str, float] = {}
    count = adversarial = 0
    for causal in (kernel.problem.causal, not kernel.problem.causal):
        masked = kernel.with_mask(causal)
        mask = "causal" if causal else "full"
        with _named(path, f"{emitted.name}, {mask}" if emitted.name else mask):
            said = f"{emitted.name}, {mask} mask" if emitted.name else f"{mask} mask"
            doing(f"{said}: building for {target.limits.name}")
            tell = functools.partial(_prefixed, doing, said)
            errors[mask], tried = _prove_mask(emitted, masked, target, sanitize, seed, tell)
        adversarial += tried
        rng = np.random.default_rng([seed, int(masked.digest, 16)])
        count += sum(1 for _ in cases(masked.variant, masked.problem, depth, rng))
    how = "compiled from its source"
    if isinstance(target, SimDevice):
        how = "emulated, from its source"
    elif emitted.is_module and not sanitize:
        how = f"through its {offer_of(kernel.problem).functions[0]}()"
    bound = kernel.problem.tolerance
    name = target.limits.name
    return Proof(str(path), name, how, sanitize, count, errors, bound, adversarial, emitted.name)


def _prefixed(doing: Callable[[str], None], prefix: str, text: str) -> None:
    doing(f"{prefix}: {text}")


def _prove_mask(
    emitted: EmittedKernel,
    kernel: Kernel,
    target: Device,
    sanitize: bool,
    seed: int,
    doing: Callable[[str], None],
) -> tuple[float, int]:
    """The largest error of the suite, and on how many adversarial cases the kernel keeps its promise."""
    if sanitize:
        if isinstance(target, SimDevice):
            return sanitize_emulated(kernel, target, seed), 0
        assert isinstance(target, CudaDevice)
        return sanitize_on_card(kernel, target, seed), 0
    device, deadline_s = target, EMULATED_DEADLINE_S if target.predicted else DEADLINE_S
    if isinstance(target, CudaDevice) and emitted.is_module:
        path = emitted.path.resolve()
        device = ModuleDevice(target, path, emitted.name)
        build = Build(kernel, path, registers=0, spill_bytes=0, seconds=0.0)
    else:
        build = target.toolchain().build(kernel)
    with Worker(device, seed=seed, deadline_s=deadline_s, doing=doing) as worker:
        return worker.validate_full(build, kernel.problem), worker.prove_promise(build, "all")


@contextlib.contextmanager
def _named(path: Path, mask: str) -> Iterator[None]:
    """Puts the file and the mask before what a failure says."""
    try:
        yield
    except FlashgenError as error:
        raise type(error)(f"{path}, {mask} mask: {error}") from error
