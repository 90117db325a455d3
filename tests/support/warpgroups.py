"""What tests of Hopper's units share: tiles as the copy engine lays them out, and kernels of one's own.

Layouts are written from the PTX ISA's figures, by rows and pieces, apart from the emulation, which goes by
address bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.tuner.cards.device import Build
from flashgen.tuner.cards.emulated import SimDevice, SimRunner

#: With one core: tests are small, and run side by side.
CARD = preset("h200")
ROWS, STEP, GROUP = 64, 16, 128
SWIZZLES = (128, 64, 32)

# -- tiles in shared memory -----------------------------------------------------------------------------


def swizzled_piece(row: int, piece: int, swizzle: int) -> int:
    """Where in a row of ``swizzle`` bytes a piece of 16 goes: pieces turn every 128 bytes."""
    return piece ^ (row * swizzle // 128) % (swizzle // 16)


def tile_image(tile: np.ndarray, swizzle: int) -> np.ndarray:
    """A tile of 16-bit elements as bytes of shared memory: chunks of ``swizzle`` bytes by all rows, the last
    one filled up with zeros."""
    rows, columns = tile.shape
    chunks = -(-columns * 2 // swizzle)
    whole = np.zeros((rows, chunks * swizzle), np.uint8)
    whole[:, : columns * 2] = np.ascontiguousarray(tile).view(np.uint8)
    image = np.zeros((chunks, rows, swizzle // 16, 16), np.uint8)
    pieces = whole.reshape(rows, chunks, swizzle // 16, 16)
    for row in range(rows):
        for piece in range(swizzle // 16):
            image[:, row, swizzled_piece(row, piece, swizzle)] = pieces[row, :, piece]
    return image.reshape(-1)


def box_image(box: np.ndarray, swizzle: int) -> np.ndarray:
    """A box (any rank, rows innermost) as bytes of shared memory; ``swizzle`` 0 leaves pieces in place."""
    rows = np.ascontiguousarray(box).reshape(-1, box.shape[-1])
    if not swizzle:
        return rows.view(np.uint8).reshape(-1)
    return tile_image(rows.view(np.uint16), swizzle)


def descriptor(start: int, swizzle: int, chunk_bytes: int = 16, group_bytes: int | None = None) -> int:
    """A matrix descriptor: start, distance of chunks, distance of groups of eight rows, swizzle."""
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    group = 8 * swizzle if group_bytes is None else group_bytes
    return mode << 62 | group >> 4 << 32 | chunk_bytes >> 4 << 16 | start >> 4


def step_by_rows(step: int, rows: int, swizzle: int) -> int:
    """Bytes from a factor's start to its columns [16 * step, ...), where rows hold what is summed over."""
    per_chunk = swizzle // 32
    return step // per_chunk * rows * swizzle + step % per_chunk * 32


def step_by_columns(step: int, swizzle: int) -> int:
    """Bytes to its rows [16 * step, ...), where rows hold what is multiplied in parallel."""
    return step * STEP * swizzle


# -- registers of a warpgroup ---------------------------------------------------------------------------
# PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16".


def places_d(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns in D by thread and register."""
    thread, i = np.meshgrid(np.arange(GROUP), np.arange(columns // 2), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    return row, i // 4 * 8 + thread % 4 * 2 + i % 2


def pack_a(a: np.ndarray) -> np.ndarray:
    """Registers (thread, 4) of A, 64 by 16, from its elements' bits."""
    thread, i = np.meshgrid(np.arange(GROUP), np.arange(8), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    column = thread % 4 * 2 + i % 2 + i // 4 * 8
    return np.ascontiguousarray(a[row, column].astype(np.uint16)).view(np.uint32)


# -- kernels --------------------------------------------------------------------------------------------

FRAME = """
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

struct AttentionArgs {
  const unsigned* q;
  const unsigned* k;
  const unsigned* v;
  unsigned* o;
  float* lse;
  long long strides[12];
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;
};

struct TensorMaps { CUtensorMap %(maps)s; };

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
%(device)s
extern "C" __global__ void %(attributes)s __launch_bounds__(%(threads)d)
    tiny_kernel(const AttentionArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const int i = threadIdx.x, lane = i %% 32, warp = i / 32;
  const unsigned* in = args.k;
  const unsigned* accumulators = args.q;
  unsigned* out = args.o;
  const int count = args.seqlen_q;
  %(body)s
}

extern "C" int tiny(const AttentionArgs* args, cudaStream_t stream) {
  TensorMaps maps = {};
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult found;
  const char* name = "cuTensorMapEncodeTiled";
  cudaGetDriverEntryPointByVersion(name, &pointer, 12000, cudaEnableDefault, &found);
  if (found != cudaDriverEntryPointSuccess) return 99;
  const Encode encode = reinterpret_cast<Encode>(pointer);
  %(host)s
  cudaFuncSetAttribute(tiny_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, %(smem)d);
  void* parameters[] = {const_cast<AttentionArgs*>(args), &maps};
  return cudaLaunchKernel(tiny_kernel, dim3(%(blocks)d), dim3(%(threads)d), parameters, %(smem)d, stream);
}
"""


def emulated(
    body: str,
    *,
    host: str = "",
    device: str = "",
    maps: str = "load, store",
    blocks: int = 1,
    threads: int = GROUP,
    smem: int = 1024,
    cluster: int | None = None,
    sanitize: bool = False,
) -> Build:
    """A kernel of one's own for the emulated card: ``body`` reads words of ``in`` and ``accumulators`` and
    writes as many words to ``out`` as there are accumulators. ``host`` makes ``maps`` by ``encode``. So many
    blocks are a ``cluster``."""
    attributes = f"__cluster_dims__({cluster}, 1, 1)" if cluster else ""
    parts = {"body": body, "host": host, "device": device, "maps": maps, "blocks": blocks}
    parts |= {"threads": threads, "smem": smem, "attributes": attributes}
    launch = Launch(threads, smem, None)
    kernel = Kernel(Problem(head_dim=1), Simt(), CARD.arch, FRAME % parts, "tiny", (launch,))
    return SimDevice("h200", CARD, sanitize).toolchain().build(kernel)


def run(
    build: Build, words: np.ndarray, accumulators: np.ndarray, *, seed: int = 0, sanitize: bool = False
) -> np.ndarray:
    """What the kernel makes of them, as words."""

    def column(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array).reshape(-1).view(np.float32).reshape(1, 1, -1, 1)

    q, k = column(accumulators), column(words)
    o, _ = SimRunner(CARD, sanitize=sanitize, seed=seed).attend(build, q, k, k, scale=1.0)
    return o.reshape(-1).view(np.uint32)


# -- boxes ----------------------------------------------------------------------------------------------

#: Words in front of a kernel's input, for numbers that say what to do.
HEADER = 64

#: Encodes maps by the header: of the input behind it, and of the output.
BOX_HOST = (
    f"""
  constexpr int kHeader = {HEADER};
"""
    + """
  const unsigned* header = args->k;
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4], element_strides[4] = {1, 1, 1, 1};
  for (int d = 0; d < 4; ++d) {
    sizes[d] = header[2 + d] | static_cast<cuuint64_t>(header[16 + d]) << 32;
    box[d] = header[9 + d];
    if (d < 3) strides[d] = header[6 + d] | static_cast<cuuint64_t>(header[20 + d]) << 32;
  }
  element_strides[1] = header[24];
  const auto type = static_cast<CUtensorMapDataType>(header[0]);
  const auto swizzle = static_cast<CUtensorMapSwizzle>(header[13]);
  char* const bases[] = {(char*)(args->k + kHeader), (char*)args->o};
  CUtensorMap* const targets[] = {&maps.load, &maps.store};
  for (int m = 0; m < 2; ++m) {
    char* const target = reinterpret_cast<char*>(targets[m]) + header[25];
    const CUresult result =
        encode(reinterpret_cast<CUtensorMap*>(target), type, header[26], bases[m] + header[1], sizes, strides,
               box, element_strides, static_cast<CUtensorMapInterleave>(header[27]), swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, static_cast<CUtensorMapFloatOOBfill>(header[28]));
    if (result != CUDA_SUCCESS) return result;
  }
"""
)

TYPES = {"f16": (6, 2), "f32": (7, 4), "bf16": (9, 2)}


@dataclass(frozen=True)
class Boxes:
    """A map: ``sizes``, ``strides`` (bytes) and ``box`` as the driver takes them, innermost first."""

    sizes: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int = 128
    type: str = "f16"
    offset: int = 0
    element_stride: int = 1
    misalignment: int = 0
    rank: int = 4
    interleave: int = 0
    fill: int = 0

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * TYPES[self.type][1]

    def header(self, corner: Sequence[int] = (0, 0, 0, 0), place: int = 0) -> np.ndarray:
        words = np.zeros(HEADER, np.uint32)
        words[0], words[1] = TYPES[self.type][0] if self.type in TYPES else int(self.type), self.offset
        words[2:6], words[16:20] = [s % 2**32 for s in self.sizes], [s >> 32 for s in self.sizes]
        words[6:9], words[20:23] = [s % 2**32 for s in self.strides], [s >> 32 for s in self.strides]
        words[9:13] = self.box
        words[13] = {0: 0, 32: 1, 64: 2, 128: 3}.get(self.swizzle, self.swizzle)
        words[24:29] = self.element_stride, self.misalignment, self.rank, self.interleave, self.fill
        words[32:36] = np.array(corner, np.int32).view(np.uint32)
        words[36], words[37] = place, self.bytes
        return words

    def view(self, memory: np.ndarray) -> np.ndarray:
        """The array in ``memory`` (bytes), outermost dimension first."""
        _, size = TYPES[self.type]
        dtype = np.uint16 if size == 2 else np.uint32
        strides = (*self.strides[::-1], size)
        return np.ndarray(self.sizes[::-1], dtype, memory, self.offset, strides)

    def inside(self, corner: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the box at ``corner`` (innermost first) lies in the array: there, and in the box."""
        array, box = [], []
        for first, extent, size in zip(corner[::-1], self.box[::-1], self.sizes[::-1], strict=True):
            begin, end = min(max(first, 0), size), min(max(first + extent, 0), size)
            array.append(slice(begin, end))
            box.append(slice(begin - first, end - first) if end > begin else slice(0, 0))
        return tuple(array), tuple(box)

    def loaded(self, memory: np.ndarray, corner: Sequence[int]) -> np.ndarray:
        """The box at ``corner`` as bytes of shared memory."""
        array = self.view(memory)
        box = np.zeros(self.box[::-1], array.dtype)
        there, here = self.inside(corner)
        box[here] = array[there]
        return box_image(box, self.swizzle)

    def stored(self, memory: np.ndarray, corner: Sequence[int], box: np.ndarray) -> np.ndarray:
        """``memory`` once ``box`` has been stored."""
        memory = memory.copy()
        there, here = self.inside(corner)
        self.view(memory)[there] = box[here]
        return memory
