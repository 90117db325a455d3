"""The Hopper family: products by warpgroups (wgmma), copies by the tensor memory engine (TMA).

One warpgroup copies and gives most of its registers to the others, of which each computes 64 rows of ``br``.
Tiles of keys come from the last to the first through rings of buffers in shared memory, so that those with a
mask come first. Two schedules keep the tensor cores busy beside softmax: ``overlapped`` starts the next
scores before these outputs and makes weights while both are multiplied (Shah et al. 2024,
"FlashAttention-3", section 3.2); ``chained`` lets the next scores follow these outputs and leaves the rest to
the other warpgroup. The blocks of a ``cluster``, with neighbouring query tiles of one head or the same rows
of heads that share keys, walk the same keys: each copies a share of every tile of K and V to all, which
divides what they ask of L2.

Scores of e4m3 are products of eight bits, at twice the rate. Its values come as they are and are turned into
f16, exactly, by the warps that have nothing to copy: wgmma reads no eight bits by rows of keys, and weights
in f16 lose nothing worth mention, where in e4m3 they would keep four bits.

float32 comes as it is too, and is split in its place into two f16 numbers each, by the same warps (Q by the
warpgroups that own it); three of the four products count, as in the class ``3xf16`` of family mma. Every
eight rows have a unit of their own, a power of two that brings them into the range of f16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...launch import Launch, TensorMap
from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...shared_memory.tiles import wasted
from ...variant import Variant, param, rule
from ..arithmetic import EXP2_CUBIC, TOP_EXPONENT, WEIGHT_EXPONENT

#: Threads of a warpgroup, and rows of its products.
GROUP, GROUP_ROWS = 128, 64
#: Rows of float32 that share a unit, as many as are swizzled alike, and warps that split them: of those that
#: copy, all but one.
UNIT_ROWS, SPLITTERS = 8, 3
#: Bytes of a row of a chunk of shared memory, swizzled whole, and its columns of 16 bits.
CHUNK_BYTES, CHUNK = 128, 64
#: Where chunks must start, and so what shared memory is measured in.
ALIGNMENT = 1024
BARRIER_BYTES = 8
#: What a thread of the copying warpgroup keeps: the least that there is.
COPYING_REGISTERS = 24
#: The same where it also turns values into f16, and tiles of these that wait for it in shared memory.
CONVERTING_REGISTERS, RAW_STAGES = 56, 2
#: The same where it splits float32: with 56 it spills.
SPLITTING_REGISTERS = 72
#: Threads that do either: of the warps that copy nothing.
CONVERTERS = WARP * SPLITTERS
#: Loads of sixteen values that each of these has under way at once.
CONVERTED_TOGETHER = 4
#: What one may have of those that others gave up, and what makes that needless.
MAX_COMPUTING_REGISTERS, ENOUGH_REGISTERS = 240, 248
#: What ptxas wants for one product beside its sums, of the registers that a launch gives.
REGISTERS_BESIDE_SUMS = 30
#: Keys per tile of float32 beyond which its products are serialized for want of registers.
MANY_KEYS = 128
#: Keys per tile that are few for a long sequence, and tiles of keys that make copies of Q negligible.
SMALL_TILE, MANY_TILES = 64, 32
#: A cluster loses too much where a block waits for more than this share of its neighbour's time.
WAITING_SHARE = 1 / 8
FREE, PRODUCTS, EXPONENTIALS = "free", "products", "exponentials"
OVERLAPPED, CHAINED = "overlapped", "chained"
ROWS, HEADS, TILES = "rows", "heads", "tiles"
#: Rows of shared memory within which swizzles are alike: shares of a tile are of whole ones.
SWIZZLED_ROWS = 8


@dataclass(frozen=True)
class Wgmma(Variant):
    """Attention by wgmma and TMA."""

    family: ClassVar[str] = "wgmma"
    template: ClassVar[str] = "families/wgmma/main.cu.jinja"
    arch_suffix: ClassVar[str] = "a"

    br: int = param(128, 64, 192, 256, doc="query rows per tile, 64 for each warpgroup that computes")
    bc: int = param(128, 64, 80, 96, 112, 144, 160, 176, 192, 208, 224, 256, 16, 32, 48, doc="keys per tile")
    persistent: bool = param(True, False, doc="blocks stay for several tiles")
    q_stages: int = param(1, 2, doc="Q tiles in shared memory: 2 bring the next one early")
    o_apart: bool = param(
        False, True, doc="outputs leave by room of their own, beside which the next Q comes", implied=True
    )
    p_in_shared: bool = param(
        False, True, doc="weights pass by shared memory, which relieves registers", implied=True
    )
    k_stages: int = param(2, 1, 3, 4, doc="K tiles in shared memory")
    v_stages: int = param(2, 1, 3, 4, doc="V tiles in shared memory")
    schedule: str = param(OVERLAPPED, CHAINED, doc="the next scores: before these outputs, or behind them")
    q_in_registers: bool = param(False, True, doc="keep Q in registers, which relieves shared memory")
    order_of_groups: str = param(
        FREE, PRODUCTS, EXPONENTIALS, doc="what warpgroups do in turns: nothing, products, exponentials"
    )
    rescale: str = param(
        "lazy", "always", doc="when outputs follow the running maximum: once it grew, or always"
    )
    poly_exp: int = param(0, 4, 8, doc="one exponential in so many is a polynomial, 0 none")
    section: int = param(1, 0, 2, 4, 8, 16, doc="heads whose tiles start together by length, 0 all of them")
    min_blocks: int = param(1, 2, 3, 4, doc="blocks per SM")
    cluster_over: str = param(
        ROWS, HEADS, doc="what a cluster takes: neighbouring tiles, or heads that share keys", implied=True
    )
    cluster: int = param(1, 2, 4, doc="blocks that share each copy of K and V", implied=True)
    tail: int = param(0, 16, doc="keys of a narrow last tile, where no more are left", implied=True)
    split_by: str = param(
        ROWS,
        TILES,
        doc="what a warp that splits float32 takes: a third of the rows, or of the tiles",
        implied=True,
    )

    def template_for(self, problem: Problem) -> str:
        if _has_parts(problem):
            return "families/wgmma/split_f32.cu.jinja"
        return "families/wgmma/fp8.cu.jinja" if problem.has_scales else self.template

    # -- what the parameters imply -----------------------------------------------------------------------

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.br // GROUP_ROWS

    def threads(self) -> int:
        return GROUP * (1 + self.consumers)

    def rows_per_block(self) -> int:
        return self.br

    def heads_per_cluster(self) -> int:
        return self.cluster if self.cluster_over == HEADS else 1

    def tiles_per_cluster(self) -> int:
        """Neighbouring ones of one head."""
        return self.cluster // self.heads_per_cluster()

    def access_width(self, problem: Problem) -> int:
        """As many elements as the engine's strides are multiples of: 16 bytes."""
        return 16 // ITEM_BYTES[problem.dtype]

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        d, dv = _qk_chunks(problem), _chunks(problem.head_dim_v)
        kv_chunks = self.k_stages * d + self.v_stages * dv
        barriers = self.q_stages * (self.consumers + 1) + 2 * (self.k_stages + self.v_stages)
        if _has_parts(problem):
            units = ITEM_BYTES["f32"] * self.bc // UNIT_ROWS
            tiles = 2 * CHUNK_BYTES * (self.br * self.q_stages * d + self.bc * kv_chunks)
            tiles += units * (self.k_stages + self.v_stages)
            barriers += self.k_stages + self.v_stages
        else:
            row_chunks = self.q_stages * d + dv if self.o_apart else self.q_stages * max(d, dv)
            row_chunks += _chunks(self.bc) if self.p_in_shared else 0
            tiles = CHUNK_BYTES * (self.br * row_chunks + self.bc * kv_chunks)
        if problem.has_scales:
            chunks, columns = _raw_chunks(problem)
            tiles += RAW_STAGES * chunks * columns * self.bc
            barriers += 2 * RAW_STAGES
        return _whole(tiles + BARRIER_BYTES * barriers, ALIGNMENT)

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        """What a launch gives each thread before the warpgroups share them out."""
        allowed = limits.registers_per_sm // (self.threads() * self.min_blocks) // 8 * 8
        return min(allowed, limits.max_registers_per_thread)

    def computing_registers(self, problem: Problem, limits: DeviceLimits) -> int:
        """Per thread of a warpgroup that computes, once the copying one has given up its own."""
        given = self.registers(problem, limits)
        if given >= ENOUGH_REGISTERS:
            return ENOUGH_REGISTERS  # nothing to gain
        spare = given * (1 + self.consumers) - _copying_registers(problem)
        return min(MAX_COMPUTING_REGISTERS, spare // self.consumers // 8 * 8)

    def needed_registers(self, problem: Problem) -> int:
        """With fewer a warpgroup that computes spills: outputs, scores, weights and the rest."""
        steps = -(-problem.head_dim // 16)
        queries = 4 * steps if self.q_in_registers else 0
        # Of a single K tile the compiler keeps the descriptors of all steps at hand.
        descriptors = 24 if self.k_stages == 1 and steps > 8 else 0
        # In shared memory, a register for each of the four places within a chunk's rows.
        weights = 4 if self.p_in_shared else self.bc // 4
        outputs = problem.head_dim_v // 2
        if _has_parts(problem):
            # Weights have two, and a tile's outputs are summed apart.
            weights, outputs = 2 * weights, 2 * outputs
        # Scores and weights of few keys leave room for less.
        rest = 16 if _has_parts(problem) and self.bc <= MANY_KEYS else 28
        rest += queries + descriptors + (4 if self.poly_exp else 0)
        return outputs + self.bc // 2 + weights + rest

    def launch(self, problem: Problem, limits: DeviceLimits) -> Launch:
        columns = CHUNK_BYTES // ITEM_BYTES[problem.dtype]
        values = TensorMap("v", self.bc // self.cluster, columns if _has_parts(problem) else CHUNK)
        if problem.has_scales:
            values = TensorMap("v", self.bc, _raw_chunks(problem)[1], swizzle=16)
        # Of float32 each thread writes what it has.
        outputs = () if _has_parts(problem) else (TensorMap("o", GROUP_ROWS),)
        return Launch(
            self.threads(),
            self.smem_bytes(problem, limits),
            self.br,
            tensor_maps=(
                TensorMap("q", GROUP_ROWS, columns),
                TensorMap("k", self.bc // self.cluster, columns),
                values,
                *outputs,
            ),
            max_blocks=limits.blocks_at_once(self.min_blocks, self.cluster) if self.persistent else None,
            cluster=self.tiles_per_cluster(),
            heads_per_cluster=self.heads_per_cluster(),
        )

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        given = self.registers(problem, limits)
        shares = given < ENOUGH_REGISTERS
        return {
            "consumers": self.consumers,
            "top_exponent": TOP_EXPONENT,
            "weight_exponent": WEIGHT_EXPONENT,
            "d_chunks": _qk_chunks(problem),
            "dv_chunks": _chunks(problem.head_dim_v),
            "value_tiles": problem.head_dim_v // 8,
            "registers_of_copying": _copying_registers(problem) if shares else 0,
            "registers_of_computing": self.computing_registers(problem, limits) if shares else 0,
            "poly": EXP2_CUBIC,
            "raw_stages": RAW_STAGES,
            "raw_columns": _raw_chunks(problem)[1],
            "converters": CONVERTERS,
            "converted_together": CONVERTED_TOGETHER,
        }

    # -- limits: what cannot run -----------------------------------------------------------------------

    @rule("arithmetic", after="br")
    def _warpgroups_multiply(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if limits.arch != 90:
            return f"warpgroups multiply on sm_90 alone, this is {limits.sm}"
        if problem.precision not in ("auto", "3xf16"):
            return (
                f"family wgmma multiplies float32 in parts of f16, precision {problem.precision} is asked for"
            )
        return None

    @rule("alignment", after="br")
    def _rows_suit_the_copy_engine(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for dim in (problem.head_dim, problem.head_dim_v):
            if dim * ITEM_BYTES[problem.dtype] % 16:
                return f"rows of {dim} elements are not multiples of 16 bytes, as the copy engine needs"
        if problem.head_dim_v % 8:
            return f"{problem.head_dim_v} columns of values are not a multiple of 8, as products need"
        return None

    @rule("combination", after="cluster")
    def _eight_bits_are_plain(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for name in ("p_in_shared", "q_in_registers"):
            if problem.has_scales and getattr(self, name):
                return f"{name}=True: not made for {problem.dtype}, whose Q and weights differ in size"
        if problem.has_scales and self.cluster > 1:
            return f"cluster={self.cluster}: each block turns values of {problem.dtype} into f16 for itself"
        return None

    @rule("combination", after="split_by")
    def _what_is_split(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.split_by != ROWS and not _has_parts(problem):
            return f"split_by={self.split_by}: {problem.dtype} is not split"
        stages = min(self.k_stages, self.v_stages)
        if self.split_by == TILES and stages == 1:
            return f"split_by=tiles: with {stages} stage of K or V no other tile is there to split"
        return None

    @rule("combination", after="tail")
    def _parts_are_plain(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not _has_parts(problem):
            return None
        for name in ("o_apart", "p_in_shared", "q_in_registers", "poly_exp", "tail"):
            if value := getattr(self, name):
                return f"{name}={value}: not made for {problem.dtype} in parts"
        if self.cluster > 1:
            return f"cluster={self.cluster}: each block splits {problem.dtype} for itself"
        return None

    @rule("combination", after="cluster")
    def _clusters_are_of_several(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.cluster_over == HEADS and self.cluster == 1:
            return "cluster_over=heads: a cluster of one block shares keys with no other"
        return None

    @rule("combination", after="cluster")
    def _shares_are_swizzled_alike(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.bc % (SWIZZLED_ROWS * self.cluster):
            whole = f"whole groups of {SWIZZLED_ROWS}, in which rows are swizzled"
            return f"cluster={self.cluster}: bc={self.bc} keys are not as many shares of {whole}"
        return None

    @rule("combination", after="cluster")
    def _sections_are_of_clusters(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.section > 1 and self.section <= self.heads_per_cluster():
            return f"section={self.section}: a cluster takes {self.cluster} heads, which is section=1 too"
        return None

    @rule("shared memory", after="v_stages")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed = self.smem_bytes(problem, limits)
        if needed > limits.smem_per_block:
            return f"needs {needed} bytes, {limits.sm} allows {limits.smem_per_block}"
        return None

    @rule("combination", after="order_of_groups")
    def _groups_take_turns(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.consumers == 1 and self.order_of_groups != FREE:
            return f"order_of_groups={self.order_of_groups}: br={self.br} is one warpgroup's alone"
        return None

    @rule("combination", after="section")
    def _blocks_that_stay_have_an_order(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.persistent and self.section != 1:
            return f"section={self.section}: blocks that stay take a head's tiles in pairs of one length"
        return None

    @rule("combination", after="q_stages")
    def _queries_follow_each_other(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_stages > 1 and not self.persistent:
            return f"q_stages={self.q_stages}: a block that does not stay has no next tile"
        return None

    @rule("combination", after="o_apart")
    def _next_queries_come_beside_outputs(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.o_apart and not self.persistent:
            return "o_apart=True: a block that does not stay has no next tile to make room for"
        return None

    @rule("registers", after="min_blocks")
    def _products_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        """One instruction's sums must fit what the launch gives: ptxas knows nothing of shares there."""
        needed = max(self.bc, problem.head_dim_v) // 2 + REGISTERS_BESIDE_SUMS
        given = self.registers(problem, limits)
        if needed > given:
            return (
                f"{needed} for one product of {max(self.bc, problem.head_dim_v)} columns, a launch of "
                f"{self.min_blocks} blocks of {self.threads()} threads per SM gives {given}"
            )
        return None

    @rule("registers", after="min_blocks")
    def _copying_gives_some_up(self, problem: Problem, limits: DeviceLimits) -> str | None:
        given, kept = self.registers(problem, limits), _copying_registers(problem)
        if kept > given:
            return (
                f"the warpgroup that copies keeps {kept}, a launch of {self.min_blocks} blocks of "
                f"{self.threads()} threads per SM gives {given}"
            )
        return None

    @rule("registers", after="min_blocks")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed, allowed = self.needed_registers(problem), self.computing_registers(problem, limits)
        if needed > allowed:
            return (
                f"about {needed} per computing thread, {allowed} allowed with "
                f"{self.min_blocks} blocks of {self.threads()} threads per SM"
            )
        return None

    @rule("occupancy", after="min_blocks")
    def _promised_blocks_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        smem = self.smem_bytes(problem, limits)
        room = limits.blocks_per_sm(self.threads(), 0, smem)
        if self.min_blocks > room:
            return f"min_blocks={self.min_blocks}, but {smem} bytes of shared memory leave room for {room}"
        return None

    @rule("clusters", after="cluster")
    def _blocks_have_neighbours(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tiles_per_cluster() > 1 and problem.seqlen_q <= self.br:
            return (
                f"cluster={self.cluster}: {problem.seqlen_q} query rows are one tile of {self.br}, a "
                f"cluster takes {self.cluster} of one head"
            )
        return None

    @rule("combination", after="tail")
    def _tails_are_plain(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tail >= self.bc:
            return f"tail={self.tail}: no narrower than tiles of {self.bc}"
        if self.tail and (self.p_in_shared or problem.has_scales):
            what = "weights that pass by shared memory" if self.p_in_shared else problem.dtype
            return f"tail={self.tail}: not made for {what}"
        return None

    # -- advice: what runs, but never best ----------------------------------------------------------

    @rule("short sequence", after="br", advisory=True)
    def _rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("br", self.br, problem.seqlen_q)

    @rule("short sequence", after="bc", advisory=True)
    def _keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        # Of float32, tiles in parts are as large as those of twice the keys.
        shortest, least = problem.seqlen_k // 8, SMALL_TILE // (2 if _has_parts(problem) else 1)
        if self.bc < min(least, shortest):
            return f"bc={self.bc} is for short sequences, not for {problem.seqlen_k} keys"
        return wasted("bc", self.bc, problem.seqlen_k)

    @rule("Q stages", after="q_stages", advisory=True)
    def _next_queries_are_worth_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        tiles = self._key_tiles(problem)
        if self.q_stages > 1 and tiles > MANY_TILES:
            return f"q_stages={self.q_stages}: Q comes once for {tiles} tiles of keys"
        return None

    @rule("Q stages", after="o_apart", advisory=True)
    def _room_of_outputs_is_needed(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.o_apart and self.q_stages > 1:
            return f"o_apart=True: with q_stages={self.q_stages} the next Q comes early already"
        return None

    @rule("stages", after="v_stages", advisory=True)
    def _stages_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        tiles, stages = self._key_tiles(problem), f"k_stages={self.k_stages} v_stages={self.v_stages}"
        if self.k_stages > max(1, tiles):
            return f"{stages}, but {problem.seqlen_k} keys are {tiles} tiles of {self.bc}"
        as_many = replace(self, v_stages=self.k_stages).smem_bytes(problem, limits)
        if self.v_stages > self.k_stages or (
            self.v_stages < self.k_stages and as_many <= limits.smem_per_block
        ):
            return f"{stages}: V keeps its room as long as K, and {as_many} bytes for as many of both fit"
        if self.k_stages == 1 and tiles > 1:
            return f"{stages}: the next of {tiles} tiles could not arrive beside this one's products"
        return None

    @rule("rescaling", after="rescale", advisory=True)
    def _maximum_settles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.rescale == "always" and problem.seqlen_k > 4 * self.bc:
            return f"rescale=always: maxima seldom grow after {self.bc} of {problem.seqlen_k} keys"
        return None

    @rule("exponentials", after="poly_exp", advisory=True)
    def _exponentials_are_many(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.poly_exp and problem.head_dim + problem.head_dim_v > 2 * 96:
            return f"poly_exp={self.poly_exp}: with head dims of {problem.head_dim} the products take longer"
        return None

    @rule("tile order", after="section", advisory=True)
    def _sections_fill_l2(self, problem: Problem, limits: DeviceLimits) -> str | None:
        """The more heads together the better lengths even out, as long as L2 holds their K and V."""
        if self.section == 1:
            return None
        if not problem.causal:
            return f"section={self.section}: without a causal mask all tiles take as long"
        heads = problem.batch * problem.num_q_heads
        together = self.section or heads
        if together > heads:
            return f"section={self.section}, but there are {heads} heads"
        needed = self._kv_bytes(problem, together)
        if needed > limits.l2_bytes:
            return f"section={self.section}: {needed} bytes of K and V, L2 holds {limits.l2_bytes}"
        more = self.section and 2 * self.section in self._choices("section")
        if more and self._kv_bytes(problem, min(2 * together, heads)) <= limits.l2_bytes:
            return f"section={self.section}: L2 holds K and V of more heads"
        return None

    @rule("weights", after="min_blocks", advisory=True)
    def _weights_need_other_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.p_in_shared:
            return None
        needed = replace(self, p_in_shared=False).needed_registers(problem)
        allowed = self.computing_registers(problem, limits)
        if needed <= allowed:
            return f"p_in_shared=True: registers hold the weights as well, about {needed} of {allowed}"
        return None

    @rule("clusters", after="cluster_over", advisory=True)
    def _heads_share_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.cluster_over == HEADS and problem.group == 1:
            return f"cluster_over=heads: {problem.num_q_heads} query heads have as many of keys"
        return None

    @rule("clusters", after="cluster", advisory=True)
    def _heads_fill_clusters(self, problem: Problem, limits: DeviceLimits) -> str | None:
        missing = -problem.group % self.heads_per_cluster()
        if missing > WAITING_SHARE * problem.group:
            return (
                f"cluster={self.cluster}: {problem.group} query heads share keys, {missing} of "
                f"{problem.group + missing} blocks have none"
            )
        return None

    @rule("clusters", after="cluster", advisory=True)
    def _neighbours_have_as_much_to_do(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tiles_per_cluster() == 1:
            return None
        if self.tiles_per_cluster() > 2:
            return f"cluster={self.cluster}: 2 neighbouring tiles gain 2 % at most, more wait for each other"
        tiles = -(-problem.seqlen_q // self.br)
        missing = -tiles % self.cluster
        if missing > WAITING_SHARE * tiles:
            rows = f"{problem.seqlen_q} query rows are {tiles} tiles of {self.br}"
            return f"cluster={self.cluster}: {rows}, beside the last a block has none"
        # The neighbour with later rows sees so many more keys.
        seen = problem.seqlen_k - problem.seqlen_q // 2
        if problem.causal and self.br / 2 > WAITING_SHARE * seen:
            return f"cluster={self.cluster}: neighbours see {self.br} keys apart, rows {seen} on average"
        return None

    @rule("short sequence", after="tail", advisory=True)
    def _tails_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        left, tiles = problem.seqlen_k % self.bc, self._key_tiles(problem)
        if self.tail and not 0 < left <= self.tail:
            return f"tail={self.tail}: the last of {tiles} tiles has {left or self.bc} keys"
        if self.tail and (tiles > MANY_TILES or problem.causal):
            few = "the last rows alone see it" if problem.causal else f"it is one of {tiles}"
            return f"tail={self.tail}: a narrow tile saves little where {few}"
        return None

    @staticmethod
    def _kv_bytes(problem: Problem, heads: int) -> int:
        """Of so many query heads."""
        row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES[problem.dtype]
        group = problem.num_q_heads // problem.num_kv_heads
        return -(-heads // group) * problem.seqlen_k * row_bytes

    def _key_tiles(self, problem: Problem) -> int:
        return -(-problem.seqlen_k // self.bc)


def _chunks(columns: int) -> int:
    """Of columns of 16 bits."""
    return -(-columns // CHUNK)


def _qk_chunks(problem: Problem) -> int:
    if _has_parts(problem):
        return _chunks(problem.head_dim)
    return -(-problem.head_dim * ITEM_BYTES[problem.dtype] // CHUNK_BYTES)


def _raw_chunks(problem: Problem) -> tuple[int, int]:
    """Chunks in which values of eight bits come, and the columns of each, not swizzled."""
    columns = min(problem.head_dim_v, CHUNK_BYTES)
    return -(-problem.head_dim_v // columns), columns


def _has_parts(problem: Problem) -> bool:
    """Whether factors are written as sums of two."""
    return problem.dtype == "f32"


def _copying_registers(problem: Problem) -> int:
    if _has_parts(problem):
        return SPLITTING_REGISTERS
    return CONVERTING_REGISTERS if problem.has_scales else COPYING_REGISTERS


def _whole(n: int, unit: int) -> int:
    return -(-n // unit) * unit
