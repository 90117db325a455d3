"""The card that an emitted file is proved on, and whether the kernel can run there."""

from __future__ import annotations

import re

from ...gen.limits import PRESETS, DeviceLimits
from ...gen.variant import Illegal
from ..cards.device import Device
from ..cards.emulated import PREFIX
from ..cards.names import cards, resolve
from ..cards.slug import same_card
from ..errors import FlashgenError
from ..shelf.emitted_kernels import EmittedKernel


def check_fits(emitted: EmittedKernel, limits: DeviceLimits) -> None:
    needed = emitted.kernel.launch.smem_bytes
    if needed > limits.smem_per_block:
        raise FlashgenError(
            f"{emitted.path} needs {needed} bytes of shared memory per block, {limits.name} allows "
            f"{limits.smem_per_block}; it was made for {emitted.device}: choose such a card with --device"
        )
    try:
        emitted.kernel.variant.check(emitted.kernel.problem, limits)
    except Illegal as error:
        # Only what the card cannot compute at all: on another card than its own a kernel may break advice.
        if error.rule == "arithmetic":
            raise FlashgenError(
                f"{emitted.path} does not run on {limits.name}: {error.reason}; it was made for "
                f"{emitted.device}: choose such a card with --device"
            ) from error


def default_device(emitted: EmittedKernel) -> Device:
    found, _ = cards()
    if found:
        return found[0]
    slug = re.sub(r"[^a-z0-9]+", "_", emitted.device.lower()).strip("_")
    same = [name for name, card in PRESETS.items() if same_card(card.slug, slug)]
    alike = [name for name, card in PRESETS.items() if card.arch == emitted.kernel.arch]
    for name in same + alike:
        return resolve(PREFIX + name)
    raise FlashgenError(
        f"there is no CUDA card here, and {emitted.device} resembles no preset; name one with "
        "--device sim:<preset> (`flashgen devices` lists them)"
    )
