"""Proving an emitted file again on this machine: `flashgen validate best.py` or ``best.cu``.

A module is imported and called through its ``attention()``; a .cu file, and anything on an emulated card, is
built from its source. Both masks go through the full suite of `validate`, in a process of its own.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...gen.families import family_named
from ...gen.kernel import Kernel
from ...gen.limits import PRESETS, DeviceLimits
from ...gen.problem import PRECISIONS, Problem
from ...gen.variant import Illegal, Launch, TensorMap
from ..cards.cuda import CudaDevice, CudaRunner
from ..cards.device import Build, Device, Toolchain
from ..cards.dtypes import numpy_dtype, require_inputs
from ..cards.emulated import PREFIX, SimDevice, SimRunner
from ..cards.guarded_memory import FLOAT32, GuardedImage, contiguous_strides, output_strides
from ..cards.names import cards, resolve
from ..errors import FlashgenError, LaunchError, UsageError
from ..evaluate.cases import Depth, cases
from ..evaluate.validate import validate
from ..evaluate.worker import DEADLINE_S, Worker
from ..shelf.library import same_card

#: What compute-sanitizer looks for, tool by tool.
SANITIZER_TOOLS = {
    "memcheck": "out-of-bounds and misaligned accesses",
    "racecheck": "races in shared memory",
    "initcheck": "reads of memory nobody wrote",
    "synccheck": "barriers that threads miss",
}
SANITIZER_EXIT = 86
SANITIZER_TIMEOUT_S = 1800
#: The full suite of a large tile takes an emulated card minutes.
EMULATED_DEADLINE_S = 4 * DEADLINE_S


@dataclass(frozen=True)
class Emitted:
    """An emitted file as data: its kernel, under the mask it was tuned with, and the card it names."""

    path: Path
    kernel: Kernel
    device: str
    name: str = ""
    """What a module of several calls it."""

    @property
    def is_module(self) -> bool:
        return self.path.suffix == ".py"


@dataclass(frozen=True)
class Proof:
    """What was proved: on which device, how, with how many cases, and the largest per-head error by mask."""

    file: str
    device: str
    how: str
    sanitized: bool
    cases: int
    errors: dict[str, float]
    bound: float
    kernel: str = ""
    """Of several in one module, which."""

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"worst": self.worst}


def prove(path: Path, *, device: str | None = None, sanitize: bool = False, seed: int = 0) -> Proof:
    """Proves the file correct on ``device`` (`0`, `sim:gtx-1080`), under both masks.

    Without ``device``: this machine's first card, or else the file's own card emulated. ``sanitize`` runs a
    quick suite under AddressSanitizer (emulated) or compute-sanitizer (a card).

    Raises:
        FlashgenError: the file cannot be read or is none of flashgen's, the device or a tool is missing, or
            the kernel is wrong; then the message names the case.
    """
    return _prove(read_emitted(path), device, sanitize, seed)


def prove_each(
    path: Path, *, device: str | None = None, sanitize: bool = False, seed: int = 0
) -> Iterator[Proof]:
    """The same of every kernel of the file, of which a module may hold several, one after the other."""
    for emitted in read_each(path):
        yield _prove(emitted, device, sanitize, seed)


def _prove(emitted: Emitted, device: str | None, sanitize: bool, seed: int) -> Proof:
    path = emitted.path
    target = resolve(device) if device is not None else _default_device(emitted)
    kernel = replace(emitted.kernel, arch=target.limits.arch)
    _check_fits(emitted, target.limits)
    depth: Depth = "quick" if sanitize else "full"
    errors: dict[str, float] = {}
    count = 0
    for causal in (kernel.problem.causal, not kernel.problem.causal):
        masked = with_mask(kernel, causal)
        mask = "causal" if causal else "full"
        with _named(path, f"{emitted.name}, {mask}" if emitted.name else mask):
            errors[mask] = _prove_mask(emitted, masked, target, sanitize, seed)
        rng = np.random.default_rng([seed, int(masked.digest, 16)])
        count += sum(1 for _ in cases(masked.variant, masked.problem, depth, rng))
    how = "compiled from its source"
    if isinstance(target, SimDevice):
        how = "emulated, from its source"
    elif emitted.is_module and not sanitize:
        how = "through its attention()"
    bound = kernel.problem.tolerance
    return Proof(str(path), target.limits.name, how, sanitize, count, errors, bound, emitted.name)


def _prove_mask(emitted: Emitted, kernel: Kernel, target: Device, sanitize: bool, seed: int) -> float:
    if isinstance(target, SimDevice):
        if sanitize:
            return _sanitize_emulated(kernel, target, seed)
        with Worker(target, seed=seed, deadline_s=EMULATED_DEADLINE_S) as worker:
            return worker.validate_full(target.toolchain().build(kernel), kernel.problem)
    assert isinstance(target, CudaDevice)
    if sanitize:
        return _sanitize_on_card(kernel, target, seed)
    if emitted.is_module:
        build = Build(kernel, emitted.path.resolve(), registers=0, spill_bytes=0, seconds=0.0)
        with Worker(ModuleDevice(target, emitted.path.resolve(), emitted.name), seed=seed) as worker:
            return worker.validate_full(build, kernel.problem)
    with Worker(target, seed=seed) as worker:
        return worker.validate_full(target.toolchain().build(kernel), kernel.problem)


def with_mask(kernel: Kernel, causal: bool) -> Kernel:
    """The kernel under that mask, chosen as the compiler's -DFLASHGEN_CAUSAL would."""
    if causal == kernel.problem.causal:
        return kernel
    source = f"#define FLASHGEN_CAUSAL {int(causal)}\n{kernel.source}"
    return replace(kernel, problem=replace(kernel.problem, causal=causal), source=source)


@contextlib.contextmanager
def _named(path: Path, mask: str) -> Iterator[None]:
    """Puts the file and the mask before what a failure says."""
    try:
        yield
    except FlashgenError as error:
        raise type(error)(f"{path}, {mask} mask: {error}") from error


def _check_fits(emitted: Emitted, limits: DeviceLimits) -> None:
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


def _default_device(emitted: Emitted) -> Device:
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


# -- reading --------------------------------------------------------------------------------------------


def read_emitted(path: Path) -> Emitted:
    """The kernel of an emitted .py or .cu file, read as data: nothing of it is run.

    Raises:
        FlashgenError: it cannot be read, flashgen did not write it, or it holds several kernels.
    """
    found = read_each(path)
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise FlashgenError(f"{path} holds {len(found)} kernels ({names}); name a file of one")
    return found[0]


def read_each(path: Path) -> list[Emitted]:
    """The same of every kernel of the file, of which a module may hold several."""
    if path.suffix not in (".py", ".cu"):
        raise UsageError(f"{path} is neither a .py nor a .cu file; name one that `flashgen emit` wrote")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise FlashgenError(
            f"{path} cannot be read: {why}; name a file that `flashgen emit` wrote"
        ) from error
    try:
        if path.suffix == ".py":
            return [Emitted(path, *each) for each in _read_module(text)]
        return [Emitted(path, *_read_cuda(text))]
    except (KeyError, TypeError, ValueError, SyntaxError, AttributeError) as error:
        raise FlashgenError(
            f"{path} does not read as a kernel of this flashgen ({_why_unread(error)}); name a file that "
            "`flashgen emit` wrote, or emit it again"
        ) from error


def _why_unread(error: Exception) -> str:
    match error:
        case KeyError():
            return f"it has no {error.args[0]}"
        case SyntaxError():
            return f"line {error.lineno}: {error.msg}"
        case ValueError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"


def _read_module(text: str) -> list[tuple[Kernel, str, str]]:
    """Kernel, card and name of each; a module of one has no name for it."""
    constants: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign):
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        else:
            continue
        if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
            with contextlib.suppress(ValueError):
                constants[target.id] = _table(value) if target.id == "KERNELS" else ast.literal_eval(value)
    if "KERNELS" not in constants:
        return [(*_kernel_of(constants), "")]
    return [
        (*_kernel_of({**each, "SOURCE": constants["SOURCES"][each["SOURCE"]]}), each["NAME"])
        for each in constants["KERNELS"]
    ]


def _table(value: ast.expr) -> list[dict[str, Any]]:
    """The arguments of the calls in a tuple, by the names of the constants in a module of one kernel."""
    if not isinstance(value, ast.Tuple):
        raise ValueError("KERNELS is no tuple")
    return [
        {argument.arg.upper(): ast.literal_eval(argument.value) for argument in call.keywords if argument.arg}
        for call in value.elts
        if isinstance(call, ast.Call)
    ]


def _kernel_of(constants: Mapping[str, Any]) -> tuple[Kernel, str]:
    """The kernel that a module's constants describe, and the card it names."""
    parameters = dict(constants["VARIANT"])
    variant = family_named(parameters.pop("family")).from_dict(parameters)
    symbol = constants["SYMBOL"].decode()
    launch = Launch(
        constants["THREADS"],
        constants["SMEM_BYTES"],
        constants.get("ROWS_PER_BLOCK"),
        constants.get("HEADS_PER_BLOCK", 1),
        tuple(TensorMap(*each) for each in constants.get("MAPS", ())),
        constants.get("MAX_BLOCKS"),
        constants.get("CLUSTER", 1),
        constants.get("PACK_HEADS", False),
        constants.get("SPLITS", 1),
        constants.get("HEADS_PER_CLUSTER", 1),
    )
    kernel = Kernel(
        Problem.from_dict(constants["PROBLEM"]),
        variant,
        constants["DEVICE"]["arch"],
        constants["SOURCE"],
        symbol.removesuffix("_kernel"),
        symbol,
        launch,
    )
    return kernel, constants["DEVICE"]["name"]


def _read_cuda(text: str) -> tuple[Kernel, str]:
    """From the header comment and the constants; the sizes tuned for are not in the file."""

    def find(pattern: str, what: str) -> str:
        found = re.search(pattern, text, re.MULTILINE)
        if found is None:
            raise ValueError(f"it has no {what}")
        return found[1]

    # The command in the header that regenerates the file names every parameter that is not implied.
    family = family_named(find(r"^// .*--family (\w+)", "family in its header"))
    header = text.partition("\n#")[0]
    variant = family(**family.parse(dict(re.findall(r"--set (\w+)=(\w+)", header))))
    entry = find(r'^extern "C" int (\w+)\(const AttentionArgs\*', "host launcher")
    problem = Problem(
        **_problem_of(entry),
        causal=find(r"^#define FLASHGEN_CAUSAL ([01])", "FLASHGEN_CAUSAL") == "1",
    )
    smem_bytes = int(find(r"sizeof\(SharedStorage\) == (\d+)", "size of shared memory"))
    max_blocks = re.search(r"^constexpr int kMaxBlocks = (\d+);", text, re.MULTILINE)
    arch = int(find(r"^// Build: .*=sm_(\d+)", "architecture in its header"))
    # Of the card only these two matter, which the file has itself.
    card = next((card for card in PRESETS.values() if card.arch == arch), None)
    if card is None:
        raise ValueError(f"no preset of sm_{arch}")
    launch = replace(
        variant.launch(problem, card),
        smem_bytes=smem_bytes,
        max_blocks=int(max_blocks[1]) if max_blocks else None,
    )
    device = re.search(
        r"^// (?:Measured on|Predicted .*? for|Not measured: emitted for) ([^,]+),", text, re.MULTILINE
    )
    kernel = Kernel(problem, variant, arch, text, entry, f"{entry}_kernel", launch)
    return kernel, device[1] if device else f"sm_{arch}"


def _problem_of(entry: str) -> dict[str, Any]:
    """Dtype, precision and head dims by a launcher's name, attention_<`Problem.stem`>. Raises ValueError."""
    dtypes = "|".join(PRECISIONS)
    precisions = "|".join({name for names in PRECISIONS.values() for name in names} - {"auto"})
    name = re.fullmatch(rf"attention_({dtypes})(?:_({precisions}))?_d(\d+)(?:v(\d+))?", entry)
    if name is None:
        raise ValueError(f"its launcher is called {entry!r}")
    return {
        "dtype": name[1],
        "precision": name[2] or "auto",
        "head_dim": int(name[3]),
        "head_dim_v": int(name[4] or name[3]),
    }


# -- a module as a device -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleDevice:
    """A card whose kernels are run by an emitted module's ``attention()``."""

    card: CudaDevice
    module: Path
    kernel: str = ""
    """Which one, where the module holds several."""

    @property
    def spec(self) -> str:
        return self.card.spec

    @property
    def limits(self) -> DeviceLimits:
        return self.card.limits

    @property
    def driver(self) -> str:
        return self.card.driver

    @property
    def predicted(self) -> bool:
        return False

    @property
    def lock_key(self) -> str:
        return self.card.lock_key

    def toolchain(self) -> Toolchain:
        """The card's own; the module compiles by itself."""
        return self.card.toolchain()

    def open(self) -> ModuleRunner:
        return ModuleRunner(self.card, self.module, self.kernel)


class ModuleRunner(CudaRunner):
    """Calls an emitted module on PyCUDA arrays that lie in guarded memory."""

    def __init__(self, card: CudaDevice, path: Path, kernel: str = "") -> None:
        super().__init__(card)
        spec = importlib.util.spec_from_file_location(f"flashgen_proved_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise FlashgenError(f"{path} cannot be imported")
        self._module = importlib.util.module_from_spec(spec)
        # Its dataclasses look it up.
        sys.modules[spec.name] = self._module
        try:
            spec.loader.exec_module(self._module)
            if kernel:
                self._module.use(kernel)
        except Exception as error:
            raise FlashgenError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error

    def attend(
        self,
        build: Build,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        scale: float,
        want_lse: bool = False,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """See `Runner.attend`. The log-sum-exp is allocated by the module, from guarded memory too."""
        from pycuda.gpuarray import GPUArray  # pyright: ignore[reportMissingImports]

        require_inputs(build.kernel.problem, q, k, v)
        image = GuardedImage(q.dtype)
        placed = [(*image.add_input(x), x.shape) for x in (q, k, v)]
        o_shape = (*q.shape[:3], v.shape[3])
        output = numpy_dtype(build.kernel.problem.output_dtype)
        placed.append((*image.add_output("o", o_shape, output_strides(q, v.shape[3]), output), o_shape))
        rows = q.shape[:3]
        lse_at = None
        if want_lse:
            lse_at, _ = image.add_output("the log-sum-exp", rows, contiguous_strides(rows), FLOAT32)
        before = image.before()
        after = np.empty_like(before)
        with self._launch_errors(build):
            base = self._arena_of(image.floats)
            self._cuda.memcpy_htod(base, before)

            def allocate(size: int) -> int:
                if lse_at is None or size != 4 * rows[0] * rows[1] * rows[2]:
                    raise LaunchError(f"attention() allocated {size} bytes that nothing asked for")
                return base + q.itemsize * lse_at

            arrays = [
                GPUArray(
                    shape,
                    dtype,
                    allocator=allocate,
                    gpudata=base + q.itemsize * at,
                    strides=tuple(dtype.itemsize * s for s in strides),
                )
                for (at, strides, shape), dtype in zip(placed, [q.dtype] * 3 + [output], strict=True)
            ]
            causal = build.kernel.problem.causal
            try:
                self._module.attention(
                    *arrays[:3], causal=causal, scale=scale, out=arrays[3], return_lse=want_lse
                )
            except (ImportError, RuntimeError, TypeError, ValueError) as error:
                raise LaunchError(f"attention() refused: {error}") from error
            self._cuda.Context.synchronize()
            self._cuda.memcpy_dtoh(after, base)
        outputs = image.outputs(before, after)
        return outputs[0], outputs[1] if want_lse else None


# -- sanitizers -----------------------------------------------------------------------------------------


def _sanitize_emulated(kernel: Kernel, target: SimDevice, seed: int) -> float:
    """Each launch is a program of its own under AddressSanitizer, so nothing here can crash."""
    build = replace(target, sanitize=True).toolchain().build(kernel)
    return validate(SimRunner(target.limits, sanitize=True, seed=seed), build, seed=seed, depth="quick")


def for_sanitizer(kernel: Kernel, tool: str) -> Kernel:
    """The kernel as that tool of compute-sanitizer understands it.

    racecheck takes an arrival at a barrier in shared memory for the arriving lane's alone: what other lanes
    of its warp did before a ``__syncwarp`` looks unordered to it. Under ``FLASHGEN_RACECHECK`` all of them
    arrive.
    """
    if tool != "racecheck":
        return kernel
    return replace(kernel, source=f"#define FLASHGEN_RACECHECK\n{kernel.source}")


def _sanitize_on_card(kernel: Kernel, target: CudaDevice, seed: int) -> float:
    """The quick suite in a process under each tool of compute-sanitizer."""
    tool = find_compute_sanitizer()
    error = 0.0
    for name, finds in SANITIZER_TOOLS.items():
        build = target.toolchain().build(for_sanitizer(kernel, name))
        command = [str(tool), "--tool", name, "--error-exitcode", str(SANITIZER_EXIT), "--print-limit", "3"]
        script = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from {__name__} import run_quick_suite; run_quick_suite(sys.stdin.buffer)"
        )
        try:
            done = subprocess.run(
                [*command, sys.executable, "-c", script],
                input=_pickled(target, build, seed),
                capture_output=True,
                timeout=SANITIZER_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(f"no end within {SANITIZER_TIMEOUT_S} s under {name}") from None
        told = (done.stdout + done.stderr).decode(errors="replace")
        result = re.search(r"^largest error (\S+)$", told, re.MULTILINE)
        if done.returncode or result is None:
            raise LaunchError(f"compute-sanitizer {name} ({finds}):\n{told.strip()[-2000:]}")
        error = max(error, float(result[1]))
    return error


def find_compute_sanitizer() -> Path:
    """compute-sanitizer of $PATH, /usr/local/cuda or PyPI. Raises FlashgenError where there is none."""
    found = shutil.which("compute-sanitizer")
    places = [Path(found)] if found else sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    for folder in filter(None, sys.path):
        places += sorted(Path(folder, "nvidia").glob("*/bin/compute-sanitizer"))
    if not places:
        raise FlashgenError(
            "compute-sanitizer was not found; it comes with the CUDA toolkit (or `pip install "
            "nvidia-cuda-sanitizer-api`). Or sanitize on an emulated card: --device sim:<preset>"
        )
    return places[0]


def _pickled(target: CudaDevice, build: Build, seed: int) -> bytes:
    import pickle

    return pickle.dumps((target, build, seed))


def run_quick_suite(stream: Any) -> None:
    """The process under compute-sanitizer: validates the build that comes in by ``stream``."""
    import pickle

    target, build, seed = pickle.load(stream)
    runner = target.open()
    try:
        error = validate(runner, build, seed=seed, depth="quick")
    except FlashgenError as failure:
        print(failure)
        sys.exit(1)
    finally:
        runner.close()
    print(f"largest error {error:.9g}")
