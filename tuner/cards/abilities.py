"""What flashgen can do on this machine: by what, or what is missing for it and how to get that."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from ..build.cache import cache_folder
from ..build.cache_size import cache_use
from ..build.compile import cuda_toolchain
from ..build.toolchain import find_host_compiler
from ..errors import FlashgenError
from ..extras import TUNING_MODULES, getting
from .cuda import CudaDevice

#: Of a card that is not here, the architecture that compilers are asked for.
USUAL_ARCH = 90
GET_TORCH = "`pip install torch`"


@dataclass(frozen=True)
class Ability:
    """Something flashgen does: by what it can be done here, else what is missing."""

    does: str
    by: str
    missing: str


def abilities(cards: list[CudaDevice], trouble: str) -> list[Ability]:
    """Returns what can be done here with such cards, of which there are none for the ``trouble`` given."""
    arch = cards[0].limits.arch if cards else USUAL_ARCH
    return [
        Ability("run kernels on a card", ", ".join(card.limits.name for card in cards), trouble),
        _ability(f"compile kernels for a card (sm_{arch})", lambda: cuda_toolchain(arch).version),
        _ability("emulate cards", lambda: find_host_compiler().version),
        _with_modules("search (`flashgen tune`)", sorted(TUNING_MODULES), getting("tune")),
        _with_modules("take PyTorch's tensors and gradients", ["torch"], GET_TORCH),
        _ability("keep what was built", _cache),
    ]


def _ability(does: str, find: Callable[[], str]) -> Ability:
    try:
        return Ability(does, find(), "")
    except FlashgenError as error:
        return Ability(does, "", str(error))


def _with_modules(does: str, modules: list[str], get: str) -> Ability:
    """Found without importing them, which takes long."""
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        return Ability(does, "", f"{', '.join(lacking)}: {get}")
    return Ability(does, ", ".join(modules), "")


def _cache() -> str:
    use = cache_use(cache_folder())
    return f"{use.folder}: {use.told}"
