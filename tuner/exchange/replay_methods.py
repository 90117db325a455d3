"""Which search methods are replayed: ours, with or without the cost model, and Kernel Tuner's strategies."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..request import suggestion
from ..search.sampler_names import SamplerName, is_installed, parse_sampler
from . import strategies

#: After the name of a sampler that starts at random and does not hear the cost model.
NO_PRIOR = ":no-prior"
#: Before the name of a strategy of Kernel Tuner.
KERNEL_TUNER = "kt:"
#: Samplers that the cost model orders or teaches.
PRIMED = (SamplerName.GP, SamplerName.FOREST, SamplerName.EXHAUSTIVE)


def default_methods() -> tuple[str, ...]:
    """Returns our methods, what they are compared with, and Kernel Tuner's, as far as they are installed."""
    gp, *others = filter(
        is_installed, (SamplerName.GP, SamplerName.FOREST, SamplerName.TPE, SamplerName.RANDOM)
    )
    theirs = [KERNEL_TUNER + name for name in strategies.STRATEGIES] if strategies.is_installed() else []
    return (str(gp), gp + NO_PRIOR, *map(str, others), *theirs)


def parse_methods(names: Sequence[str]) -> tuple[str, ...]:
    """Checks the names of methods and returns each once. Raises UsageError for an unknown one."""
    known = [str(name) for name in SamplerName] + [name + NO_PRIOR for name in PRIMED]
    for name in names:
        if name.startswith(KERNEL_TUNER):
            if not strategies.is_installed():
                raise UsageError(f"{name} needs Kernel Tuner; get it with `pip install kernel_tuner`")
            theirs = strategies.all_strategies()
            if name.removeprefix(KERNEL_TUNER) not in theirs:
                close = suggestion(name, [KERNEL_TUNER + each for each in theirs])
                raise UsageError(f"Kernel Tuner has no strategy {name.removeprefix(KERNEL_TUNER)!r}; {close}")
        elif name not in known:
            raise UsageError(f"unknown sampler {name!r}; {suggestion(name, known)}")
        else:
            parse_sampler(name.removesuffix(NO_PRIOR))
    return tuple(dict.fromkeys(names))
