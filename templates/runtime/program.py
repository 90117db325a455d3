"""What a module does when it is run: it checks and times its kernels."""

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import _Buffer
from .attention import Attention
from .driver import _check, _driver, _pop_context, _push_context
from .facts import Tuned
from .plans import _Beside
from .table import _SIZES


def run_module(attention: Attention, doc: str | None) -> int:
    """Says what the module is, checks and times its kernels on device 0; the exit code."""
    check, time_us = functools.partial(_self_check, attention), functools.partial(_time_us, attention)
    return _check_and_time(attention._table.kernels, attention.use, check, time_us, _visible_share, doc)


def _check_and_time(
    kernels: Sequence[Tuned],
    use: Callable[[str | None], None],
    check: Callable[[Tuned], float],
    time_us: Callable[[Tuned], float],
    visible_share: Callable[[Tuned], float],
    doc: str | None,
) -> int:
    """Says of each kernel how large its error is, and how fast it is; the exit code of a program."""
    print((doc or "").partition("\n    from")[0])
    name = ctypes.create_string_buffer(256)
    try:
        _check(_driver().cuDeviceGetName(name, len(name), 0), "asking for device 0")
    except RuntimeError as reason:
        print(f"Not run here: {reason}")
        return 0
    failed = False
    print(f"Here, on {name.value.decode()}, with a warm cache:")
    for tuned in kernels:
        try:
            use(tuned.name)
            error, median_us = check(tuned), time_us(tuned)
        except RuntimeError as reason:
            print(f"{tuned.name}: failed: {reason}")
            failed = True
            continue
        finally:
            use(None)
        failed = failed or not error <= tuned.tolerance
        extents = ("batch", "num_q_heads", "seqlen_q", "seqlen_k")
        pairs = math.prod(tuned.problem[extent] for extent in extents)
        columns = tuned.head_dim + tuned.head_dim_v
        if tuned.problem.get("backward"):
            columns = 3 * tuned.head_dim + 2 * tuned.head_dim_v
        flops = 2 * columns * pairs * visible_share(tuned)
        verdict = "correct" if error <= tuned.tolerance else "WRONG"
        print(
            f"{tuned.name}: {median_us:.1f} us, {flops / median_us / 1e6:.1f} TFLOP/s, error against float64 "
            f"{error:.2e}, {tuned.tolerance:.0e} allowed: {verdict}"
        )
    return 1 if failed else 0


def _visible_share(tuned: Tuned) -> float:
    """Which share of the pairs of a row and a key is counted."""
    return 0.5 if tuned.problem["causal"] else 1.0


def _reference(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], causal: bool) -> NDArray[Any]:
    """float64 attention of (batch, heads, seqlen, head_dim) arrays."""
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), groups, axis=1) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
    if causal:
        visible = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    result: NDArray[Any] = weights / weights.sum(axis=3, keepdims=True) @ v
    return result


def _to_host(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """float32 as that type; as its bits where numpy has none such."""
    if dtype == "float8_e4m3fn":  # the nearest below
        values = _values_of_eight_bits()
        order = np.argsort(np.where(np.isnan(values), np.inf, values), kind="stable")[:254]
        below = np.searchsorted(values[order], x, side="right") - 1
        return np.asarray(order[below], np.uint8)
    return _to_bits(x) if dtype == "bfloat16" else x.astype(dtype)


def _from_host(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "float8_e4m3fn":
        return np.asarray(_values_of_eight_bits()[x])
    return _from_bits(x) if dtype == "bfloat16" else x


def _values_of_eight_bits() -> NDArray[Any]:
    """What the 256 patterns of float8_e4m3fn stand for: four bits of exponent, biased by 7, and three of
    fraction."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size))


def _to_bits(x: NDArray[Any]) -> NDArray[Any]:
    """float32 rounded to bfloat16, whose bits are the upper half of float32's; numpy has no such type."""
    bits = x.view(np.uint32)
    rounded: NDArray[Any] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded.astype(np.uint16)


def _from_bits(bits: NDArray[Any]) -> NDArray[Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


#: The sizes of arrays by which kernels are checked: no tile divides the lengths.
_CHECKED: dict[str, int] = dict(zip(_SIZES, (2, 4, 2, 197, 333), strict=True))


def _self_check(
    attention: Attention,
    tuned: Tuned,
    beside: _Beside | None = None,
    reference_of: Callable[..., NDArray[Any]] = _reference,
    sizes: Mapping[str, int] = _CHECKED,
    layout: Any = "bhsd",
) -> float:
    """The largest per-head error over both masks."""
    random = np.random.default_rng(0)
    batch, heads, kv_heads, rows, keys = (sizes[name] for name in _SIZES)
    q_shape, k_shape = (batch, heads, rows, tuned.head_dim), (batch, kv_heads, keys, tuned.head_dim)
    shapes = [q_shape, k_shape, (*k_shape[:3], tuned.head_dim_v)]
    drawn = (random.uniform(-3, 3, shape).astype(np.float32) for shape in shapes)
    hosts = list(map(_to_host, drawn, tuned.input_dtypes))
    if tuned.problem.get("latent"):
        hosts[2] = np.ascontiguousarray(hosts[1][..., : tuned.head_dim_v])
    q, k, v = map(_from_host, hosts, tuned.input_dtypes)
    made = _to_host(np.zeros((*q_shape[:3], tuned.head_dim_v), np.float32), tuned.output_dtype)
    worst = 0.0
    for causal in (False, True):
        reference = reference_of(q, k, v, causal)
        attention._through_buffers(
            hosts[0],
            hosts[1],
            hosts[2],
            causal,
            None,
            made,
            0,
            False,
            layout,
            tuned.dtype,
            beside or attention._usual_beside,
        )
        difference = np.linalg.norm(_from_host(made, tuned.output_dtype) - reference, axis=(2, 3))
        # NaN is an error too, which max() would pass over.
        worst = float(np.maximum(worst, (difference / np.linalg.norm(reference, axis=(2, 3))).max()))
    return worst


def _time_us(
    attention: Attention,
    tuned: Tuned,
    beside: _Beside | None = None,
    layout: Any = "bhsd",
    repeats: int = 20,
) -> float:
    """The median time of a call on the tuned problem's shape, by CUDA events, with a warm cache."""
    problem = tuned.problem
    q_shape = (problem["batch"], problem["num_q_heads"], problem["seqlen_q"], tuned.head_dim)
    k_shape = (problem["batch"], problem["num_kv_heads"], problem["seqlen_k"], tuned.head_dim)
    shapes = (q_shape, k_shape, (*k_shape[:3], tuned.head_dim_v), (*q_shape[:3], tuned.head_dim_v))

    def place(put: Callable[..., _Buffer]) -> tuple[Any, _Beside]:
        return layout, (beside or attention._usual_beside).on_device(put)

    return _median_time_us(attention, tuned, shapes, place, repeats)


def _median_time_us(
    attention: Attention,
    tuned: Tuned,
    shapes: Sequence[tuple[int, ...]],
    place: Callable[[Callable[..., _Buffer]], tuple[Any, _Beside]],
    repeats: int,
) -> float:
    """The median time of calls on random arrays of those shapes of q, k, v and o; `place` returns their
    layout and what stands beside them, once it has put that on the GPU."""
    driver, problem = _driver(), tuned.problem
    random = np.random.default_rng(0)
    pushed = _push_context(driver, 0, 0)
    buffers: list[_Buffer] = []

    def put(host: NDArray[Any], dtype: str | None = None) -> _Buffer:
        buffers.append(_Buffer(host.shape, host.dtype, dtype or host.dtype.name))
        buffers[-1].write(host, 0)
        _check(driver.cuStreamSynchronize(None), "copying to the GPU")
        return buffers[-1]

    try:
        for shape, dtype in zip(shapes, (*tuned.input_dtypes, tuned.output_dtype), strict=True):
            put(_to_host(random.standard_normal(shape, dtype=np.float32), dtype), dtype)
        query, key, value, output = buffers
        settings = (problem["causal"], None, output, None, False, *place(put))

        def call() -> None:
            attention._attend_others(query, key, value, *settings)

        return _time_calls(call, repeats)
    finally:
        for buffer in buffers:
            buffer.free()
        if pushed:
            _pop_context()


def _time_calls(call: Callable[[], None], repeats: int) -> float:
    """The median time of so many calls, in microseconds, by CUDA events."""
    driver, times = _driver(), []
    events = [ctypes.c_void_p(), ctypes.c_void_p()]
    try:
        for event in events:
            _check(driver.cuEventCreate(ctypes.byref(event), 0), "creating an event")
        for _ in range(repeats + 3):
            driver.cuEventRecord(events[0], None)
            call()
            driver.cuEventRecord(events[1], None)
            _check(driver.cuEventSynchronize(events[1]), "running the kernel")
            milliseconds = ctypes.c_float()
            driver.cuEventElapsedTime(ctypes.byref(milliseconds), *events)
            times.append(1000 * milliseconds.value)
        return sorted(times[3:])[repeats // 2]
    finally:
        for event in events:
            if event.value is not None:
                driver.cuEventDestroy_v2(event)
