"""What adversarial inputs show of one kernel of each family and class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...gen.problem import Problem
from ...gen.promise import promise_of
from ..cards.device import Device
from ..errors import BuildError, CorruptedMemory, LaunchError
from ..evaluate.adversarial import Finding
from ..evaluate.adversarial_inputs import AdversarialCase
from ..evaluate.worker import DEADLINE_S, Worker
from ..evaluate.worker_life import Died, TimedOut
from .subjects import Subject

#: A survey of a large tile takes an emulated card minutes.
EMULATED_DEADLINE_S = 10 * DEADLINE_S


@dataclass(frozen=True)
class Surveyed:
    """A kernel and what each case showed of it.

    ``failure`` is why it could not be built or run, else empty.
    """

    subject: Subject
    findings: tuple[Finding, ...]
    failure: str = ""

    @property
    def kept(self) -> bool:
        return not self.failure and not self.broken

    @property
    def broken(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.kept)

    @property
    def promised(self) -> str:
        """What the kernel's class promises, in words."""
        return promise_of(self.subject.kernel.problem).words()

    def to_dict(self) -> dict[str, Any]:
        kernel = self.subject.kernel
        return {
            "family": self.subject.family,
            "class": self.subject.arithmetic,
            "mask": self.subject.mask,
            "device": self.subject.device.limits.name,
            "problem": kernel.problem.to_dict(),
            "variant": kernel.variant.to_dict(),
            "promise": self.promised,
            "failure": self.failure,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def survey_accuracy(
    found: Iterable[Subject],
    choose: Callable[[Problem], Sequence[AdversarialCase]],
    *,
    seed: int = 0,
    on_subject: Callable[[Subject], None] = lambda subject: None,
    on_surveyed: Callable[[Surveyed], None] = lambda surveyed: None,
) -> list[Surveyed]:
    """Tries every kernel on the cases that ``choose`` names for its problem. One that cannot be built or run
    leaves the others to be tried."""
    workers: dict[str, Worker] = {}
    surveyed = []
    try:
        for subject in found:
            on_subject(subject)
            worker = workers.setdefault(subject.device.spec, _worker(subject.device, seed))
            cases = [case.name for case in choose(subject.kernel.problem)]
            try:
                build = subject.device.toolchain().build(subject.kernel)
                surveyed.append(Surveyed(subject, tuple(worker.try_adversarial(build, cases))))
            except (BuildError, CorruptedMemory, Died, LaunchError, TimedOut) as error:
                surveyed.append(Surveyed(subject, (), str(error)))
            on_surveyed(surveyed[-1])
    finally:
        for worker in workers.values():
            worker.close()
    return surveyed


def _worker(device: Device, seed: int) -> Worker:
    return Worker(device, seed=seed, deadline_s=EMULATED_DEADLINE_S if device.predicted else DEADLINE_S)
