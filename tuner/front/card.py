"""The cards that calls run on: one of this machine by the runtime of emitted modules, or an emulated one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...templates.runtime.attention import Attention
from ...templates.runtime.build import _pack
from ...templates.runtime.driver import _driver, _pop_context, _push_context
from ...templates.runtime.facts import Tuned
from ...templates.runtime.gradient_plans import _NOTHING_READ
from ...templates.runtime.gradient_tensors import _Settings
from ...templates.runtime.gradients import Gradients
from ...templates.runtime.packed_attention import PackedAttention
from ...templates.runtime.packed_gradients import PackedGradients
from ...templates.runtime.paged_attention import PagedAttention
from ...templates.runtime.plans import _Beside
from ...templates.runtime.scored_attention import ScoredAttention
from ...templates.runtime.scored_gradients import ScoredGradients, _differentiable, _WantedGradients
from ...templates.runtime.scored_values import Scored, _Asked
from ...templates.runtime.table import _SIZES
from ..build.compile import cuda_toolchain
from ..build.protocol import Build, Toolchain
from ..cards.cuda import find_device
from ..cards.dtypes import numpy_dtype
from ..cards.emulated import PREFIX, SimDevice
from ..cards.names import preset_named
from ..cards.score_values import by_keyword, score_values, stored
from ..cards.sequences import index_arrays, sizes_of_call

#: The way out where there is no card.
EMULATE = 'or pass device="sim:h200", which emulates one (`flashgen devices` lists others)'


class Card(Protocol):
    """A card on which calls run."""

    @property
    def limits(self) -> DeviceLimits: ...

    @property
    def where(self) -> str:
        """The card and its driver: a proof on one counts for no other."""
        ...

    @property
    def predicted(self) -> bool:
        """Whether times there are the cost model's."""
        ...

    def toolchain(self) -> Toolchain: ...

    def take(self, entry: Tuned, build: Build) -> None:
        """Makes a build serve for an entry, under the mask it was built for."""
        ...

    def runs(self, entry: Tuned, build: Build) -> Any:
        """Returns what runs an entry's kernel on host arrays: a `Runner` as far as it attends and
        differentiates."""
        ...


@dataclass(frozen=True)
class CudaCard:
    """A card of this machine, by its CUDA ordinal."""

    ordinal: int
    limits: DeviceLimits
    driver: str

    predicted = False

    @property
    def where(self) -> str:
        return f"{self.limits.name}, driver {self.driver}"

    def toolchain(self) -> Toolchain:
        return cuda_toolchain(self.limits.arch)

    def take(self, entry: Tuned, build: Build) -> None:
        entry.cubins[build.kernel.problem.causal] = _pack(build.artifact.read_bytes())

    def runs(self, entry: Tuned, build: Build) -> Any:
        return _OnCard(self.ordinal, entry)


@dataclass(frozen=True)
class _OnCard:
    """Runs a kernel through the runtime of emitted modules, on the card's own memory."""

    ordinal: int
    entry: Tuned

    def attend(
        self,
        build: Build,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        scale: float,
        want_lse: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        problem = build.kernel.problem
        made = np.full((*q.shape[:3], v.shape[3]), np.nan, numpy_dtype(problem.output_dtype))
        if problem.layout.is_paged:
            return self._attend_paged(problem, q, k, v, made, scale, want_lse, values or {})
        if problem.layout.is_packed:
            return self._attend_packed(problem, q, k, v, made, scale, want_lse, values or {})
        attention, beside = self._attention(problem, q, k, values)
        with self._on_card():
            found = attention._through_buffers(
                *(q, k, v, problem.causal, scale, made, 0, want_lse, "bhsd", self.entry.dtype, beside)
            )
        return found if want_lse else (found, None)

    def _attend_packed(
        self,
        problem: Problem,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        made: np.ndarray,
        scale: float,
        want_lse: bool,
        values: Mapping[str, Any],
    ) -> tuple[np.ndarray, np.ndarray | None]:
        sizes = sizes_of_call(problem, q, k, values)
        told = self._told(problem, sizes, values)
        with self._on_card():
            found = PackedAttention((self.entry,), self._name).attention_varlen(
                *(x[0].swapaxes(0, 1) for x in (q, k, v)),
                max_seqlen_q=sizes["seqlen_q"],
                max_seqlen_k=sizes["seqlen_k"],
                causal=problem.causal,
                scale=scale,
                out=made[0].swapaxes(0, 1),
                return_lse=want_lse,
                **told,
            )
        return made, found[1][None] if want_lse else None

    def _attend_paged(
        self,
        problem: Problem,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        made: np.ndarray,
        scale: float,
        want_lse: bool,
        values: Mapping[str, Any],
    ) -> tuple[np.ndarray, np.ndarray | None]:
        sizes, packed = sizes_of_call(problem, q, k, values), problem.layout.is_packed
        told = self._told(problem, sizes, values)
        told |= {"max_seqlen_q": sizes["seqlen_q"]} if packed else {}
        with self._on_card():
            found = PagedAttention((self.entry,), self._name).attention_paged(
                *(q[0].swapaxes(0, 1) if packed else q, k, v),
                max_seqlen_k=sizes["seqlen_k"],
                causal=problem.causal,
                scale=scale,
                kv_layout="HND",
                out=made[0].swapaxes(0, 1) if packed else made,
                return_lse=want_lse,
                **told,
            )
        lse = found[1] if want_lse else None
        return made, lse[None] if lse is not None and packed else lse

    def _told(
        self,
        problem: Problem,
        sizes: Mapping[str, int],
        values: Mapping[str, Any],
        wanted: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """What a call is told beside arrays of sequences, and of what masks and changes of scores read.
        Arrays whose gradients are ``wanted`` repeat nothing."""
        told: dict[str, Any] = dict(index_arrays(problem, values))
        if isinstance(self.entry, Scored):
            read = score_values(problem.scores, values, sizes)
            arrays = {name: stored(x) if name in wanted else x for name, x in read.arrays.items()}
            told |= by_keyword(self.entry.keywords, {**arrays, **read.numbers})
        return told

    def differentiate(
        self,
        build: Build,
        inputs: Mapping[str, np.ndarray],
        *,
        scale: float,
        values: Mapping[str, Any] | None = None,
    ) -> dict[str, np.ndarray]:
        problem, entry = build.kernel.problem, self.entry
        if problem.layout.is_packed:
            return self._differentiate_packed(problem, inputs, scale, values or {})
        arrays = tuple(inputs[name] for name in ("q", "k", "v", "o", "dout"))
        gradients, read, wanted = Gradients((entry,), self._name), _NOTHING_READ, ()
        if isinstance(entry, Scored):
            (alike,) = ScoredGradients((entry,), self._name)._kinds
            (gradients,), wanted = alike.groups.values(), _differentiable(entry)
            asked = self._read(problem, inputs["q"], inputs["k"], values, wanted)
            read = _WantedGradients(entry, asked, wanted)
        settings = _Settings(problem.causal, scale, None, "bhsd", None, read)
        with self._on_card():
            found = gradients._through_buffers(
                arrays, inputs["lse"], inputs.get("dlse"), settings, entry.dtype
            )
        made = {
            name: each.view(inputs["q"].dtype) for name, each in zip(("dq", "dk", "dv"), found, strict=False)
        }
        return made | {f"d{name}": each for name, each in zip(wanted, found[3:], strict=True)}

    def _differentiate_packed(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], scale: float, values: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        entry, sizes = self.entry, sizes_of_call(problem, inputs["q"], inputs["k"], values)
        wanted = _differentiable(entry) if isinstance(entry, Scored) else ()
        keywords = entry.keywords if isinstance(entry, Scored) else {}
        by_name = {parts[0]: keyword for keyword, parts in keywords.items()}
        given = {name: x[0] if x.ndim == 3 else x[0].swapaxes(0, 1) for name, x in inputs.items()}
        with self._on_card():
            found = PackedGradients((entry,), self._name).gradients_varlen(
                **given,
                max_seqlen_q=sizes["seqlen_q"],
                max_seqlen_k=sizes["seqlen_k"],
                causal=problem.causal,
                scale=scale,
                wanted=[by_name[name] for name in wanted],
                **self._told(problem, sizes, values, wanted),
            )
        made = {f"d{name}": x.swapaxes(0, 1)[None] for name, x in zip("qkv", found, strict=False)}
        return made | {f"d{name}": each for name, each in zip(wanted, found[3:], strict=True)}

    @property
    def _name(self) -> str:
        return f"proof_{id(self.entry)}"

    def _attention(
        self, problem: Problem, q: np.ndarray, k: np.ndarray, values: Mapping[str, Any] | None
    ) -> tuple[Attention, _Beside]:
        """What attends by the entry alone, and what it reads beside arrays."""
        if not isinstance(self.entry, Scored):
            attention = Attention((self.entry,), self._name)
            return attention, attention._usual_beside
        (alike,) = ScoredAttention((self.entry,), self._name)._kinds
        (attention,) = alike.groups.values()
        return attention, self._read(problem, q, k, values)

    def _read(
        self,
        problem: Problem,
        q: np.ndarray,
        k: np.ndarray,
        values: Mapping[str, Any] | None,
        wanted: tuple[str, ...] = (),
    ) -> _Asked:
        """What the entry reads for masks and changes of scores. Arrays whose gradients are ``wanted`` repeat
        nothing: gradients are sums over what others would."""
        assert isinstance(self.entry, Scored)
        told = zip(_SIZES, (len(q), q.shape[1], k.shape[1], q.shape[2], k.shape[2]), strict=True)
        read = score_values(problem.scores, values, sizes := dict(told))
        needed = {name: parts for name, parts in self.entry.keywords.items() if name in self.entry.required}
        numbers = {**read.numbers, **({"value_scale": 1.0} if problem.has_scales else {})}
        arrays = {name: stored(x) if name in wanted else x for name, x in read.arrays.items()}
        return _Asked(self.entry, numbers, by_keyword(needed, arrays), sizes)

    @contextlib.contextmanager
    def _on_card(self) -> Iterator[None]:
        pushed = _push_context(_driver(), 0, self.ordinal)
        try:
            yield
        finally:
            if pushed:
                _pop_context()


class SimCard:
    """An emulated card, which computes on the host and whose times are predictions."""

    predicted = True

    def __init__(self, name: str) -> None:
        """Raises UsageError where no card is called so."""
        self.device = SimDevice(name, preset_named(name))
        self.builds: dict[tuple[Tuned, bool], Build] = {}
        """What was built of entries, by the causal mask."""

    @property
    def limits(self) -> DeviceLimits:
        return self.device.limits

    @property
    def where(self) -> str:
        return f"{self.limits.name}, emulated"

    def toolchain(self) -> Toolchain:
        return self.device.toolchain()

    def take(self, entry: Tuned, build: Build) -> None:
        self.builds[entry, build.kernel.problem.causal] = build

    def runs(self, entry: Tuned, build: Build) -> Any:
        return self.device.open()


def check_card(card: Card | None, array: Any) -> None:
    """Raises RuntimeError that says how to emulate a card where there is none for an array of the host."""
    if card is not None or not isinstance(array, np.ndarray):
        return
    try:
        _driver()
    except RuntimeError as error:
        raise RuntimeError(f"{error}; {EMULATE}") from None


@cache
def cuda_card(ordinal: int) -> CudaCard:
    """Returns the card of that ordinal. Raises FlashgenError where there is none."""
    found = find_device(ordinal)
    return CudaCard(ordinal, found.limits, found.driver)


@cache
def sim_card(device: str) -> SimCard:
    """Returns the emulated card of a name like ``sim:a100``. Raises UsageError for another."""
    return SimCard(device.removeprefix(PREFIX))
