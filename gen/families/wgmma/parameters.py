"""The parameters of a Hopper kernel, and the counts that follow from them alone."""

from __future__ import annotations

from dataclasses import dataclass

from ...handover.reach import FAR_KEYS, LEFT_OUT, WALKED
from ...limits import DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...scored_tiles.arrays import TileArray, met_by, tile_arrays
from ...scoring.values import first_rows_see_less, keys_in_reach
from ...variant import Variant, param

#: How many blocks may share the keys of a tile of rows by way of the workspace: so many that, of whatever
#: number of tiles, one of them makes about as many blocks as a card has multiprocessors.
SHARES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
#: Threads of a warpgroup, and rows of its products.
GROUP, GROUP_ROWS = 128, 64
#: Lanes that have sums of a row each.
PARTIAL_SUMS = 4
FREE, PRODUCTS, EXPONENTIALS = "free", "products", "exponentials"
OVERLAPPED, CHAINED = "overlapped", "chained"
F16, E4M3 = "f16", "e4m3"
ROWS, HEADS, TILES = "rows", "heads", "tiles"
IN_PLACE, IN_FRONT = "in_place", "in_front"
WHOLE, SHARED = "whole", "shared"
SEGMENTS = "segments"
ROUNDED, STRAIGHT = "rounded", "straight"
F32 = "f32"
#: The most columns of one product.
PRODUCT_COLUMNS = 256
#: Columns of products of values and weights that sum the weights: the fewest that there may be.
COLUMNS_OF_SUMS = 8
#: Keys of a segment: of values of one sign tensor cores cut off up to a twenty-fifth of their sum.
SEGMENT_KEYS = 2048
#: How hyperbolic tangents of scores are taken.
POLYNOMIAL, UNIT, MIXED, CUBIC, QUINTIC = "polynomial", "unit", "mixed", "cubic", "quintic"
SEPTIC, NONIC = "septic", "nonic"


@dataclass(frozen=True)
class Parameters(Variant):
    """The parameters of a kernel of producer and consumer warpgroups, and the counts that follow from
    them."""

    pack_heads: bool = param(
        False, True, doc="query heads that share keys fill one tile's rows together", implied=True
    )
    br: int = param(128, 64, 192, 256, doc="query rows per tile, 64 for each warpgroup that computes")
    splits: int = param(
        1, 2, 3, 4, 6, 8, 16, doc="blocks of a cluster that share the keys of a tile of rows", implied=True
    )
    workspace_splits: int = param(
        1, *SHARES, doc="blocks of no cluster that do so by way of the workspace", implied=True
    )
    split: str = param(
        IN_PLACE,
        IN_FRONT,
        doc="who splits float32: the blocks that read it, or launches in front of them",
        implied=True,
    )
    bc: int = param(128, 64, 80, 96, 112, 144, 160, 176, 192, 208, 224, 256, 16, 32, 48, doc="keys per tile")
    persistent: bool = param(True, False, doc="blocks stay for several tiles")
    last_turn: str = param(
        WHOLE,
        SHARED,
        doc="tiles left for fewer blocks than stay: one takes each, or all share their keys evenly",
        implied=True,
    )
    q_stages: int = param(1, 2, doc="Q tiles in shared memory: 2 bring the next one early")
    o_apart: bool = param(
        False, True, doc="outputs leave by room of their own, beside which the next Q comes", implied=True
    )
    p_in_shared: bool = param(
        False, True, doc="weights pass by shared memory, which relieves registers", implied=True
    )
    weights: str = param(
        F16,
        E4M3,
        doc="what weights are, and values as products read them, of inputs of eight bits",
        implied=True,
    )
    values: str = param(
        IN_PLACE,
        IN_FRONT,
        doc="who turns values of eight bits into what products read: the blocks, or a launch in front",
        implied=True,
    )
    powers: str = param(
        ROUNDED,
        STRAIGHT,
        doc="powers of two as weights of eight bits: rounded, or straight lines from one to the next",
        implied=True,
    )
    score_type: str = param(
        F32,
        F16,
        doc="what products leave scores in, of which weights are made by straight lines",
        implied=True,
    )
    promotion: str = param(
        TILES,
        SEGMENTS,
        doc="whose outputs of eight bits the tensor cores sum: a tile's, or those of 2048 keys",
        implied=True,
    )
    bias_stages: int = param(
        0,
        1,
        2,
        3,
        4,
        doc="tiles of biases and masks that the copy engine brings, 0: each warp brings its own",
        implied=True,
    )
    bias_heads: int = param(
        1,
        2,
        4,
        doc="neighbouring heads, a block of a cluster each, that share each copy of biases",
        implied=True,
    )
    seen_bits: bool = param(
        False,
        True,
        doc="what a mask hides of single keys comes as bits, left with the lists of tiles",
        implied=True,
    )
    far_keys: str = param(WALKED, LEFT_OUT, doc=FAR_KEYS, implied=True)
    copiers: int = param(1, 2, 4, doc="warps that copy a tile's pieces of pages", implied=True)
    k_stages: int = param(2, 1, 3, 4, doc="K tiles in shared memory")
    v_stages: int = param(2, 1, 3, 4, doc="V tiles in shared memory")
    summed_columns: int = param(
        0,
        64,
        128,
        doc="columns of outputs that a tile's products are summed for at a time, 0 all",
        implied=True,
    )
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
    tangent: str = param(
        POLYNOMIAL,
        UNIT,
        MIXED,
        CUBIC,
        QUINTIC,
        SEPTIC,
        NONIC,
        doc="tangents of small scores: polynomials, special functions, by turns, or within exponents",
        implied=True,
    )

    @property
    def consumers(self) -> int:
        """The warpgroups of a block that compute, beside the producer."""
        return self.br // GROUP_ROWS

    def threads(self) -> int:
        return GROUP * (1 + self.consumers)

    def rows_per_block(self) -> int:
        return self.br

    def has_small_weights(self) -> bool:
        """Tells whether weights are of eight bits, so that products want values transposed."""
        return self.weights == E4M3

    @property
    def turns_values_in_front(self) -> bool:
        """Whether a launch in front leaves values as products read them, which blocks copy as they lie."""
        return self.values == IN_FRONT

    @property
    def sums_by_products(self) -> bool:
        """Whether weights are summed by products with ones, as they are after they were rounded."""
        return self.powers == STRAIGHT

    @property
    def pairs_scores(self) -> bool:
        """Whether scores are pairs of f16, a register each."""
        return self.score_type == F16

    def score_registers(self) -> int:
        """Returns the registers of a thread's scores of a tile."""
        return self.bc // (4 if self.pairs_scores else 2)

    def value_columns(self, problem: Problem) -> int:
        """Returns the columns of products of weights: outputs, and sums of weights behind them."""
        return problem.head_dim_v + (COLUMNS_OF_SUMS if self.sums_by_products else 0)

    def keeps_sums(self) -> bool:
        """Whether sums of several tiles' outputs wait in memory for the others."""
        return self.promotion == SEGMENTS

    def kept_floats(self, problem: Problem) -> int:
        """Returns the words of sums that a block leaves for itself: of each thread's two rows outputs of 16
        bits, in eights, and as much of maxima."""
        return self.consumers * GROUP * 4 * (problem.head_dim_v // 16 + 1)

    @property
    def splits_in_front(self) -> bool:
        """Whether launches in front leave float32 in parts, which blocks copy as they lie."""
        return self.split == IN_FRONT

    def packs_heads(self) -> bool:
        return self.pack_heads

    def heads_together(self) -> int:
        return self.bias_heads

    def reads_seen_bits(self) -> bool:
        return self.seen_bits

    def met_arrays(self, problem: Problem) -> tuple[TileArray, ...]:
        """Returns the arrays of which scores meet tiles: those of masks that come as bits are none."""
        arrays = tile_arrays(problem.scores)
        return met_by(problem.scores.change, arrays) if self.seen_bits else arrays

    def blocks_per_tile(self) -> int:
        return self.splits

    def key_shares(self) -> int:
        return self.splits * self.workspace_splits

    def splits_by_workspace(self) -> int:
        return self.workspace_splits

    def wanted_blocks(self, limits: DeviceLimits) -> int:
        return limits.num_sms * self.min_blocks

    def shares_last_turn(self) -> bool:
        return self.last_turn == SHARED

    def handed_floats(self, problem: Problem) -> int:
        """Returns the floats that a warpgroup hands on: of each thread its outputs, two maxima and sums."""
        return GROUP * (problem.head_dim_v // 2 + 4)

    def tiles_of_item(self, problem: Problem) -> int:
        """Returns how many tiles of rows blocks that stay take as one: two where later rows see more keys."""
        return 2 if first_rows_see_less(problem) else 1

    def items(self, problem: Problem) -> int:
        """Returns how many of these there are of all heads; the one in the middle of a head may be alone."""
        tiles = -(-self.query_rows(problem) // self.br)
        return problem.batch * self.heads_apart(problem) * -(-tiles // self.tiles_of_item(problem))

    def partial_floats(self, problem: Problem) -> int:
        """Returns the floats of a partial result: of each row outputs, sums of four lanes, the maximum."""
        return self.br * (self.partial_stride(problem) + PARTIAL_SUMS + 1)

    def writes_rows(self, problem: Problem) -> bool:
        """Tells whether a block may write its rows itself; else it always leaves them to be put together."""
        return self.splits == 1 and (self.workspace_splits == 1 or problem.layout.is_packed)

    def query_rows(self, problem: Problem) -> int:
        """Returns the query rows that fill tiles one by one: of a head, or of all that share keys."""
        return problem.seqlen_q * (problem.group if self.pack_heads else 1)

    def heads_apart(self, problem: Problem) -> int:
        """Returns the heads whose rows fill tiles apart: of queries, or of keys where those of queries that
        share one are packed."""
        return problem.num_kv_heads if self.pack_heads else problem.num_q_heads

    def partial_stride(self, problem: Problem) -> int:
        """Returns the floats between rows of what some of the keys make of them: eight banks, as a warp
        stores eight columns of each of four rows."""
        return problem.head_dim_v + (8 - problem.head_dim_v) % 32

    def heads_per_cluster(self) -> int:
        return self.cluster if self.cluster_over == HEADS else 1

    def tiles_per_cluster(self) -> int:
        """Returns how many neighbouring query tiles of one head the blocks of a cluster take."""
        return self.cluster // self.heads_per_cluster()

    def keys_walked(self, problem: Problem) -> int:
        """Returns the keys that a block, or cluster, walks at most: what one of its rows sees, and what later
        ones do."""
        rows = self.br * self.tiles_per_cluster()
        rows = -(-rows // problem.group) if self.pack_heads else rows
        moved = min(rows, problem.seqlen_q) - 1
        return min(problem.seqlen_k, keys_in_reach(problem) + moved)

    def key_tiles(self, problem: Problem) -> int:
        """Returns how many tiles the keys are that a block walks."""
        return -(-self.keys_walked(problem) // self.bc)

    def access_width(self, problem: Problem) -> int:
        """Returns as many elements as the copy engine's strides are multiples of: 16 bytes."""
        return 16 // ITEM_BYTES[problem.dtype]


def is_split(problem: Problem) -> bool:
    """Tells whether each factor of the products is written as the sum of two f16, as float32 is."""
    return problem.dtype == "f32"
