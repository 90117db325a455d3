"""What a card allows and how fast it is: read from the live device, or a named preset."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .columns import least

KIB = 1024
WARP = 32
#: From a request to device memory until its answer when all ask: bytes under way make up the bandwidth.
MEMORY_LATENCY_NS = 1000
#: Blocks of a cluster that all cards with clusters form (CUDA C++ Programming Guide, thread block clusters).
PORTABLE_CLUSTER = 8
#: Part of a card's room for blocks that clusters of more than two find: they lie within one of its parts,
#: whose multiprocessors they do not divide. Of four blocks, 30 run at once on an H200's 132 multiprocessors.
CLUSTER_ROOM = 0.91


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """Limits and rates of one GPU. Sizes in bytes, clock in MHz, bandwidth in GB/s (read plus written).

    ``arch`` is the compute capability times ten. ``smem_per_block`` is the opt-in maximum.
    """

    name: str
    arch: int
    num_sms: int
    smem_per_block: int
    smem_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    l2_bytes: int
    clock_mhz: int
    dram_gbps: int
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255
    max_threads_per_block: int = 1024

    @property
    def slug(self) -> str:
        """The name as a folder: ``nvidia_h200``."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")

    @property
    def sm(self) -> str:
        return f"sm_{self.arch}"

    @property
    def has_async_copy(self) -> bool:
        """cp.async, global to shared memory without registers: from Ampere on."""
        return self.arch >= 80

    @property
    def max_cluster(self) -> int:
        """Blocks of a cluster: from Hopper on; data-center cards form larger ones where they are asked to."""
        if self.arch < 90:
            return 1
        return 2 * PORTABLE_CLUSTER if self.arch in (90, 100) else PORTABLE_CLUSTER

    def blocks_at_once(self, per_sm: int, cluster: int) -> int:
        """Returns how many blocks run at once, ``per_sm`` on each multiprocessor, in whole clusters and at
        least one. The two of the smallest cluster share what multiprocessors are made in pairs of."""
        slots = self.num_sms * per_sm
        room = slots if cluster <= 2 else CLUSTER_ROOM * slots
        return max(1, int(room / cluster)) * cluster

    @property
    def smem_reserved_per_block(self) -> int:
        """Shared memory the driver keeps in each block (CUDA C++ Programming Guide, compute capabilities)."""
        return KIB if self.arch >= 80 else 0

    @property
    def fp32_lanes_per_sm(self) -> int:
        """FFMAs per SM and clock (CUDA C++ Programming Guide, arithmetic instructions table)."""
        return 64 if self.arch in (60, 70, 72, 75, 80) else 128

    @property
    def mma_flops_per_sm(self) -> float:
        """Operations per SM and clock of mma.sync on 16-bit numbers with float32 sums; half of it on TF32.

        From the vendor's architecture white papers, which give GeForce cards half of what others of their
        generation have; on Hopper, where mma.sync reaches two thirds of wgmma, as measured on an H200.
        """
        rates = {75: 1024, 80: 2048, 86: 1024, 89: 1024, 90: 2690, 100: 2690, 120: 1024}
        geforce = re.search(r"RTX [2-5]0\d0", self.name) is not None
        return rates.get(self.arch, 1024) / (2 if geforce else 1)

    @property
    def tensor_tflops(self) -> float:
        """Peak of the tensor cores on 16-bit numbers with float32 sums, by whichever instruction, as data
        sheets give it: for data-center cards from Hopper on at a lower clock than multiply-adds run at."""
        per_sm = {90: 4096, 100: 8192}.get(self.arch, self.mma_flops_per_sm)
        return 1e-6 * self.num_sms * per_sm * self.tensor_clock_mhz

    @property
    def tensor_clock_mhz(self) -> int:
        """The clock that data sheets give the tensor cores' peak at."""
        return min({90: 1830, 100: 1855}.get(self.arch, self.clock_mhz), self.clock_mhz)

    @property
    def fp32_tflops(self) -> float:
        """Peak of FFMA alone."""
        return 2e-6 * self.num_sms * self.fp32_lanes_per_sm * self.clock_mhz

    def blocks_per_sm(self, threads: int, registers: int, smem_bytes: int) -> int:
        """Returns how many blocks are resident on one SM given each one's threads, registers per thread and
        shared memory."""
        warps = -(-threads // WARP)
        # Registers are handed out by the warp, 256 at a time; a warp lives in one of four partitions.
        registers_per_warp = -(-max(registers, 1) * WARP // 256) * 256
        warps_by_registers = self.registers_per_sm // 4 // registers_per_warp * 4
        smem_per_block = smem_bytes + self.smem_reserved_per_block
        return least(
            self.max_blocks_per_sm,
            self.max_threads_per_sm // (warps * WARP),
            warps_by_registers // warps,
            self.smem_per_sm // smem_per_block if smem_per_block else self.max_blocks_per_sm,
        )

    def lacks_shared_memory(self, smem_bytes: int) -> str | None:
        """Says why a block cannot have so many bytes of shared memory; None where it can."""
        if smem_bytes > self.smem_per_block:
            return f"needs {smem_bytes} bytes, {self.sm} allows {self.smem_per_block}"
        return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceLimits:
        """Returns the limits that `to_dict` wrote. Raises TypeError or ValueError for anything else."""
        limits = cls(**data)
        for field in fields(cls):
            value = getattr(limits, field.name)
            if field.name == "name" and not (isinstance(value, str) and value.isprintable()):
                raise ValueError(f"the card's name is {value!r}, not one line of printable characters")
            if field.name != "name" and not (type(value) is int and 0 < value < 2**40):
                raise ValueError(f"the card's {field.name} is {value!r}, not a whole number from 1")
        return limits


def _card(
    name: str,
    arch: int,
    num_sms: int,
    smem_kib: tuple[int, int],
    residency: tuple[int, int],
    l2_kib: int,
    clock_mhz: int,
    dram_gbps: int,
) -> DeviceLimits:
    """``smem_kib``: per block and per SM; ``residency``: threads and blocks per SM."""
    return DeviceLimits(
        name=name,
        arch=arch,
        num_sms=num_sms,
        smem_per_block=smem_kib[0] * KIB,
        smem_per_sm=smem_kib[1] * KIB,
        max_threads_per_sm=residency[0],
        max_blocks_per_sm=residency[1],
        l2_bytes=l2_kib * KIB,
        clock_mhz=clock_mhz,
        dram_gbps=dram_gbps,
    )


#: Boost clocks and memory bandwidths as the vendor's data sheets give them.
PRESETS: dict[str, DeviceLimits] = {
    "p100": _card("Tesla P100", 60, 56, (48, 64), (2048, 32), 4096, 1480, 732),
    "gtx-1060": _card("GTX 1060", 61, 10, (48, 96), (2048, 32), 1536, 1708, 192),
    "gtx-1080": _card("GTX 1080", 61, 20, (48, 96), (2048, 32), 2048, 1733, 320),
    "gtx-1080-ti": _card("GTX 1080 Ti", 61, 28, (48, 96), (2048, 32), 2816, 1582, 484),
    "v100": _card("Tesla V100", 70, 80, (96, 96), (2048, 32), 6144, 1530, 900),
    "t4": _card("Tesla T4", 75, 40, (64, 64), (1024, 16), 4096, 1590, 320),
    "rtx-2080-ti": _card("RTX 2080 Ti", 75, 68, (64, 64), (1024, 16), 5632, 1545, 616),
    "a100": _card("A100 SXM4 80GB", 80, 108, (163, 164), (2048, 32), 40960, 1410, 2039),
    "a10": _card("A10", 86, 72, (99, 100), (1536, 16), 6144, 1695, 600),
    "rtx-3090": _card("RTX 3090", 86, 82, (99, 100), (1536, 16), 6144, 1695, 936),
    "l4": _card("L4", 89, 58, (99, 100), (1536, 24), 49152, 2040, 300),
    "l40s": _card("L40S", 89, 142, (99, 100), (1536, 24), 98304, 2520, 864),
    "rtx-4090": _card("RTX 4090", 89, 128, (99, 100), (1536, 24), 73728, 2520, 1008),
    "h100": _card("H100 SXM5", 90, 132, (227, 228), (2048, 32), 51200, 1980, 3350),
    "h200": _card("H200", 90, 132, (227, 228), (2048, 32), 61440, 1980, 4800),
    "b200": _card("B200", 100, 148, (227, 228), (2048, 32), 129024, 1965, 8000),
    "rtx-5090": _card("RTX 5090", 120, 170, (99, 100), (1536, 24), 98304, 2407, 1792),
}


def preset_of(device: str) -> str | None:
    """Returns the name of the preset that a driver's name of a card means: ``h200`` for ``NVIDIA H200``; None
    where there is none."""
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    known = [name for name in PRESETS if words.issuperset(name.split("-"))]
    return max(known, key=lambda name: name.count("-"), default=None)


def preset(name: str) -> DeviceLimits:
    """Returns the card called ``name``; raises ValueError with the nearest name and how to list them."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(PRESETS)}"
        raise ValueError(f"unknown preset {name!r}; {hint}")
    return PRESETS[name]
