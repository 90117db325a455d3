"""What a module offers of the backward pass under masks and changes of scores: gradients of these, too."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .arrays import _address, _torch_of
from .attention import _check_call, _default_mask
from .facts import Launch, Tuned
from .gradient_plans import _GradientPlan, _ReadByGradients
from .gradient_tensors import _GradientTensors, _Settings
from .gradients import Gradients
from .plans import _beside
from .scored_attention import ScoredAttention
from .scored_kinds import _arrays_of, _ByKind, _operands, _ScoredTable, _shape_of, _sizes_of, _told
from .scored_values import Scored, _Asked, _needed
from .table import Choice

_FLOAT_BYTES = 4


class _WantedGradients(_ReadByGradients):
    """What kernels of the backward pass read for masks and changes of scores, and the gradients of it that a
    call wants."""

    def __init__(self, tuned: Tuned, scoring: _Asked | None, wanted: tuple[str, ...] = ()) -> None:
        """`wanted` are the arrays whose gradients are, as the kernel calls them and in its order; `scoring`
        is None where it reads nothing."""
        super().__init__()
        self.tuned, self.scoring, self.wanted = tuned, scoring, wanted
        if scoring is not None:
            scoring.whole = wanted

    @property
    def requires_grad(self) -> bool:
        return self.scoring is not None and self.scoring.requires_grad

    @property
    def in_no_order(self) -> tuple[str, ...]:
        return tuple(name for name in self.wanted if name in _scored(self.tuned).scattered)

    def make(self, plan: _GradientPlan, allocate: Callable[[tuple[int, ...]], Any]) -> None:
        for name in self.wanted:
            self.made[name] = allocate(self.shape_of(name, plan.sizes))

    def shape_of(self, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape that a kernel fills of an array's gradient: all axes, the last one whole."""
        assert self.scoring is not None
        needed = _needed(_scored(self.tuned).buffers[name], sizes)
        passed = _shape_of(self.scoring.array(name))
        *outer, last = (1,) * (len(needed) - len(passed)) + passed
        return *outer, max(needed[-1], 1) if last == 1 else last

    @property
    def zeroed(self) -> tuple[tuple[int, int], ...]:
        """All that is made: not every element may be read, and there may be no launch."""
        return tuple((_at(x), _FLOAT_BYTES * math.prod(_shape_of(x))) for x in self.made.values())

    def values(self, plan: Any, q: Any, may_make: bool) -> dict[str, float]:
        """Returns what kernels read, by name, but for gradients."""
        if self.scoring is None:
            return {}
        values = self.scoring.values(plan, q, may_make)
        self.streams = self.scoring.streams
        return values

    def numbers(self, plan: Any, q: Any, may_make: bool) -> tuple[float, ...]:
        values: dict[str, float] = dict.fromkeys(_reads(self.tuned), 0)  # as of gradients that are not wanted
        values |= self.values(plan, q, may_make)
        for name, array in self.made.items():
            shape = _shape_of(array)
            values[f"d{name}"] = _at(array)
            for axis, length in enumerate(shape[:-1]):
                step = 0 if length == 1 else math.prod(shape[axis + 1 :])
                values[f"d{name}_stride_{axis}"] = step
        return tuple(values[name] for name in _reads(self.tuned))

    def skips(self, launch: Launch) -> bool:
        return bool(launch.makes) and launch.makes.removeprefix("d") not in self.wanted

    def as_passed(self, made: dict[str, Any], may_sum: bool = True) -> tuple[Any, ...]:
        assert self.scoring is not None or not self.wanted
        grads = []
        for name in self.wanted:
            assert self.scoring is not None
            grad, shape = made[name], _shape_of(self.scoring.array(name))
            if shape[-1] == 1 < _shape_of(grad)[-1]:
                grad = _summed(name, grad, may_sum)
            grads.append(grad.reshape(shape))
        return tuple(grads)

    def on_device(self, put: Callable[[Any], Any]) -> "_WantedGradients":
        scoring = None if self.scoring is None else self.scoring.on_device(put)
        return _WantedGradients(self.tuned, scoring, self.wanted)

    def through(self, read: Callable[[Any], Any]) -> "_WantedGradients":
        scoring = None if self.scoring is None else self.scoring.through(read)
        return _WantedGradients(self.tuned, scoring, self.wanted)


@functools.cache
def _reads(tuned: Tuned) -> tuple[str, ...]:
    """What a kernel reads beside its arrays, by name and in order."""
    return _beside(tuned.launches[0].arguments)


def _scored(tuned: Tuned) -> Scored:
    assert isinstance(tuned, Scored)
    return tuned


def _differentiable(tuned: Tuned) -> tuple[str, ...]:
    """The arrays that have gradients, as the kernel calls them and in its order."""
    made = {launch.makes for launch in tuned.launches}
    return tuple(name for name in _scored(tuned).buffers if f"d{name}" in made)


def _at(array: Any) -> int:
    return int(array.data_ptr()) if _torch_of(array) is not None else _address(array)


def _summed(name: str, grad: Any, may_sum: bool) -> Any:
    """The sum of a gradient over its last axis, which the array repeats."""
    if not may_sum:
        raise ValueError(
            f"the last axis of {name} is repeated, and beside stream= no gradient is summed over it: pass "
            "all of its entries"
        )
    if not hasattr(grad, "sum"):
        raise TypeError(
            f"the last axis of {name} is repeated, and torch, CuPy and numpy alone sum its gradient: pass "
            "all of its entries"
        )
    return grad.sum(-1, keepdims=True)


class _ScoredGradientTensors(_GradientTensors):
    """Such kernels for tensors: the operator takes the arrays and numbers that they read, and for each array
    whether its gradient is wanted, behind the settings."""

    settings = (
        "Tensor? dlse, bool? causal, float? scale, str layout, bool deterministic, Tensor[] buffers, "
        "float[] numbers, bool[] wanted"
    )
    results = "(Tensor, Tensor, Tensor, Tensor[])"

    def scoring_in(self, buffers: list[Any], numbers: list[float]) -> _Asked | None:
        """Returns what kernels read, of what the operator took."""
        tuned = _scored(self.table.kernels[0])
        return _operands(tuned, tuned.numbers, buffers, numbers)

    def numbers_in_graph(self, tuned: Scored) -> tuple[str, ...]:
        """Returns the names of the numbers that the operator takes."""
        return tuned.numbers

    def read_in(self, layout: Any, taken: tuple[Any, ...]) -> _ReadByGradients:
        buffers, numbers, wanted = taken
        tuned = self.table.kernels[0]
        return _WantedGradients(tuned, self.scoring_in(buffers, numbers), self.named(wanted))

    def named(self, wanted: Sequence[bool]) -> tuple[str, ...]:
        """Returns the arrays whose gradients the operator was told to make."""
        tuned = self.table.kernels[0]
        if not isinstance(tuned, Scored):
            return ()
        told = zip(tuned.buffers, wanted, strict=True)
        return tuple(name for name, each in told if each and name in _differentiable(tuned))

    def in_graph(self, read: _ReadByGradients) -> tuple[Any, ...]:
        assert isinstance(read, _WantedGradients)
        if read.scoring is None:
            return [], [], []
        tuned = read.scoring.tuned
        wanted = [name in read.wanted for name in tuned.buffers]
        return *read.scoring.in_graph(self.numbers_in_graph(tuned)), wanted

    def returned(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        return *grads[:3], list(grads[3:])

    def in_order(self, returned: tuple[Any, ...]) -> tuple[Any, ...]:
        return *returned[:3], *returned[3]

    def more_like(self, taken: tuple[Any, ...]) -> tuple[Any, ...]:
        buffers, _, wanted = taken[-3:]
        names = self.named(wanted)
        if not names:
            return ()
        torch: Any = _torch_of(buffers[0])
        told = zip(_scored(self.table.kernels[0]).buffers, buffers, strict=True)
        return tuple(x.new_empty(x.shape, dtype=torch.float32) for name, x in told if name in names)

    def wanted_of(self, ctx: Any) -> tuple[Any, ...]:
        return (list(ctx.needs_input_grad[-2]),)

    def of_settings(self, ctx: Any, settings: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        *others, buffers, numbers = settings
        found = dict(zip(self.named(self.wanted_of(ctx)[0]), grads, strict=True))
        names = _scored(self.table.kernels[0]).buffers if buffers else ()
        of_buffers = [
            found[name].to(x.dtype) if name in found else None for name, x in zip(names, buffers, strict=True)
        ]
        # Of a list without entries an empty one.
        return (*(None for _ in others), of_buffers, None if numbers else [])


class ScoredGradients(_ByKind[Gradients]):
    """The gradients of attention by kernels with masks and changes of scores, those that compute just what is
    asked. Modules offer its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str, default_mask: bool | None = None) -> None:
        """`operator` names the kernels among torch's operators. Where a call does not say, the causal mask
        holds as `default_mask` says, or as that of a module's only kernel."""
        self._default_mask = _default_mask(kernels) if default_mask is None else default_mask
        super().__init__(kernels, operator)

    def _serving_plain(self, kernels: Sequence[Tuned], operator: str) -> Gradients:
        made = Gradients(kernels, operator)
        made._tensors.default_mask = self._default_mask
        return made

    def _serving(self, kernels: tuple[Scored, ...], numbers: tuple[float, ...], operator: str) -> Gradients:
        def make_table(kernels: tuple[Scored, ...]) -> _ScoredTable:
            return _ScoredTable(kernels, numbers)

        name = f"{operator}_gradients"
        made = Gradients.__new__(Gradients)
        made._serve_by(_ScoredGradientTensors(kernels, name, self._default_mask, make_table))
        return made

    def gradients(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        dout: Any,
        causal: bool | None = None,
        scale: float | None = None,
        stream: Any = None,
        *,
        dlse: Any = None,
        layout: str = "bhsd",
        deterministic: bool | None = None,
        wanted: Sequence[str] = (),
        **asked: Any,
    ) -> tuple[Any, ...]:
        """Computes the gradients dq, dk and dv of attention, given that of its output, and those of arrays
        that masks and changes of scores read.

        Arrays, settings and what is made are as `Gradients.gradients` has them; `asked` is what `attention`
        was told by keyword: a window, a soft cap, a bias and others, and what expressions read by its name.

        wanted: whose gradients are wanted beside those of q, k and v, by the keywords of `attention`: "bias",
            "alibi_slopes", "sinks", the float arrays of expressions. They stand behind dv in this order, each
            of its array's shape, in float32: what an array repeats is summed. Elements that expressions read
            at computed places are added to in no order, and are refused where `deterministic` holds.

        Raises TypeError and ValueError for what no kernel here serves, and otherwise as `Gradients.gradients`
        does.
        """
        _check_call(layout, scale)
        asked = _told(asked)
        alike = self._alike(asked)
        if alike is None:
            assert self._plain is not None
            if wanted:
                raise TypeError(f"gradients of {', '.join(wanted)} are wanted, which the call does not name")
            return self._plain.gradients(
                *(q, k, v, o, lse, dout, causal, scale, stream),
                dlse=dlse,
                layout=layout,
                deterministic=deterministic,
            )
        group, numbers = self._group(alike, asked)
        arrays = _arrays_of(alike.first, asked, q, True)
        scoring = _Asked(alike.first, numbers, arrays, _sizes_of(q, k, layout))
        names = _wanted(alike.first, wanted)
        read = _WantedGradients(alike.first, scoring, _in_order(alike.first, names))
        settings = _Settings(causal, scale, stream, layout, deterministic, read)
        dq, dk, dv, *more = group._gradients((q, k, v, o, dout), lse, dlse, settings)
        return dq, dk, dv, *(more[read.wanted.index(name)] for name in names)

    def explain(
        self, q: Any, k: Any, v: Any, causal: bool | None = None, *, layout: str = "bhsd", **asked: Any
    ) -> Choice:
        """Says which kernel `gradients` would run on these arrays, and why. Nothing is compiled or launched.

        What `gradients` is told by keyword is told here, too. Raises TypeError and ValueError as `gradients`
        does where none serves.
        """
        asked = _told(asked)
        alike = self._alike(asked)
        if alike is None:
            assert self._plain is not None
            return self._plain.explain(q, k, v, causal, layout=layout)
        return self._group(alike, asked)[0].explain(q, k, v, causal, layout=layout)

    def register_torch(self) -> str:
        """Makes operators of the kernels in torch.ops.flashgen, for graphs to hold, once. Returns the name of
        the first of them:

            NAME(q, k, v, o, lse, dout, dlse, causal, scale, layout, deterministic, buffers, numbers, wanted)
                -> (dq, dk, dv, more)

        They take what `gradients` takes, arrays and numbers in the order of the kernel's arguments and for
        each array whether its gradient is wanted, and copy what no kernel can step by. `gradients` registers
        them as needed. Needs PyTorch 2.7 or newer."""
        names = [group.register_torch() for group in self._groups()]
        return names[0]


def _wanted(tuned: Tuned, keywords: Sequence[str]) -> tuple[str, ...]:
    """The arrays of those keywords, as the kernel calls them; raises TypeError for what has no gradient."""
    told = tuned.keywords if isinstance(tuned, Scored) else {}
    has = {each: parts[0] for each, parts in told.items()}
    has = {each: name for each, name in has.items() if name in _differentiable(tuned)}
    names = []
    for each in keywords:
        keyword = "bias" if each == "attn_mask" else each
        if keyword not in has:
            raise TypeError(
                f"{each!r} is wanted, of which {tuned.name} takes no gradient; it takes those of "
                f"{', '.join(has) or 'q, k and v alone'}"
            )
        names.append(has[keyword])
    if len(set(names)) < len(names):
        raise TypeError(f"gradients are wanted of {', '.join(keywords)}: name each once")
    return tuple(names)


def _in_order(tuned: Tuned, names: Sequence[str]) -> tuple[str, ...]:
    """Arrays in a kernel's order."""
    return tuple(name for name in _scored(tuned).buffers if name in names) if names else ()


class DifferentiableScoredAttention(ScoredAttention):
    """Attention by kernels with masks and changes of scores, whose gradients kernels take, too. Modules offer
    its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str, gradients: Sequence[Tuned]) -> None:
        """`operator` names the kernels among torch's operators, `gradients` are those of the backward
        pass."""
        super().__init__(kernels, operator)
        # What says nothing of the mask means the same forwards and backwards.
        self._gradients = ScoredGradients(gradients, operator, self._default_mask)
        if self._plain is not None and self._gradients._plain is not None:
            self._plain._tensors.gradients = self._gradients._plain._tensors
        for alike in self._kinds:
            for other in self._gradients._kinds:
                if other.first.kind == alike.first.kind:
                    for numbers, group in alike.groups.items():
                        group._tensors.gradients = other.group(numbers)._tensors
        self.gradients = self._gradients.gradients

    def use(self, name: str | None) -> None:
        """Makes the kernel of that name serve whatever it can compute from now on, however far its shapes:
        for measuring and checking. None lets the nearest serve again. Raises ValueError for an unknown
        name."""
        of_gradients = self._takes_gradients(name)
        self._gradients.use(name if of_gradients else None)
        super().use(None if of_gradients else name)

    def compile(self, name: str, arch: int, causal: bool) -> bytes:
        """Compiles the kernel of that name for one compute capability, times ten, and mask; returns the
        cubin."""
        if self._takes_gradients(name):
            return self._gradients.compile(name, arch, causal)
        return super().compile(name, arch, causal)

    def carry(self, name: str, causal: bool, cubin: bytes) -> None:
        """Makes that cubin serve for the kernel of that name on the cards it was tuned for."""
        if self._takes_gradients(name):
            self._gradients.carry(name, causal, cubin)
        else:
            super().carry(name, causal, cubin)

    def _takes_gradients(self, name: str | None) -> bool:
        """Whether the kernel of that name is of the backward pass."""
        return any(name == tuned.name for tuned in self._gradients.kernels)
