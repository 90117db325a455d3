"""The cards here, the presets and the toolchain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...gen.limits import KIB, PRESETS, DeviceLimits
from ..cards.cuda import CudaDevice
from ..cards.names import Tool
from .words import widen


def show_devices(console: Console, cards: Sequence[CudaDevice], trouble: str, tools: Sequence[Tool]) -> None:
    """Prints the cards here, the presets and the tools, and what is missing."""
    widen(console)
    if cards:
        console.print(cards_table("cards", {card.spec: card.limits for card in cards}))
        console.print(f"driver {cards[0].driver}", highlight=False)
    else:
        console.print(f"no card: {trouble}", markup=False, highlight=False, soft_wrap=True)
    console.print(cards_table("presets (--device sim:NAME emulates one)", PRESETS))
    console.print(tools_table(tools))


def tools_table(tools: Sequence[Tool]) -> Table:
    """Lists tools with where they were found, or how to get them."""
    table = Table(title="tools")
    table.add_column("tool")
    table.add_column("found, or how to get it", overflow="fold")
    table.add_column("needed for", overflow="fold")
    for tool in tools:
        text = escape(tool.found) if tool.found else f"[red]missing[/red]: {escape(tool.missing)}"
        table.add_row(tool.name, text, escape(tool.needed_for))
    return table


def cards_table(title: str, cards: Mapping[str, DeviceLimits]) -> Table:
    """Lists cards by name with the figures that matter most."""
    table = Table(title=title)
    table.add_column("device", no_wrap=True)
    table.add_column("card")
    for heading in ("sm", "SMs", "KiB/block", "MHz", "GB/s", "fp32 TFLOP/s"):
        table.add_column(heading, justify="right")
    for spec, card in cards.items():
        table.add_row(
            spec,
            escape(card.name),
            str(card.arch),
            str(card.num_sms),
            f"{card.smem_per_block / KIB:g}",
            str(card.clock_mhz),
            str(card.dram_gbps),
            f"{card.fp32_tflops:.1f}",
        )
    return table
