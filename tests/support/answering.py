"""Foresight in a thread of ours instead of a process of its own."""

from __future__ import annotations

import contextlib
from queue import SimpleQueue
from typing import Any

from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.child_process import Ended
from flashgen.tuner.tune.foresight import Foresight, Question


class AnswersInPlace:
    """Answers what it is sent, as `foresight.serve` does."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.answers: list[Any] = []
        self._foresight = Foresight()
        self._unread: SimpleQueue[Question | None] = SimpleQueue()
        self.closed = False

    def send(self, message: Question) -> None:
        self.questions.append(message)
        self._unread.put(message)

    def receive(self, timeout_s: float) -> Any:
        question = self._unread.get()
        if question is None:
            raise Ended
        answer = None
        with contextlib.suppress(FlashgenError):
            answer = self._foresight.answer(question)
        self.answers.append(answer)
        return answer

    def last_words(self) -> str:
        return ""

    def kill(self) -> None:
        self._unread.put(None)

    def close(self) -> None:
        self.closed = True
