"""A link without a network: workers in this process, and the faults a network has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.deploy.worker import Worker
from coterie.engines.relay import Envelope


class LocalLink:
    """Nodes that answer at once, unless a test says otherwise."""

    def __init__(self, workers: dict[int, Worker]) -> None:
        self.workers = workers
        self.away: set[int] = set()
        self.answers: dict[str, Envelope | str] = {}
        self.sent: list[tuple[int, Envelope]] = []
        self.spoil: Callable[[int, Envelope, Envelope], Envelope | str | None] | None = None
        self.registered: dict[int, str] = {}
        self._number = 0

    def nodes(self) -> dict[int, str]:
        return {n: self.registered.get(n, "") for n in self.workers if n not in self.away}

    def push(self, messages: list[tuple[int, Envelope]], seconds: float) -> list[str | None]:
        numbers: list[str | None] = []
        for node, asked in messages:
            self.sent.append((node, asked))
            self._number += 1
            number = str(self._number)
            answer: Any = self.workers[node].handle(asked)
            if self.spoil is not None and asked.head["calls"]:
                answer = self.spoil(node, asked, answer)
            if answer is not None:
                self.answers[number] = answer
            numbers.append(number)
        return numbers

    def pull(self, numbers: set[str]) -> list[tuple[str, Envelope | str]]:
        return [(n, self.answers.pop(n)) for n in sorted(numbers) if n in self.answers]


def workers(
    folder: Path,
    names: list[str],
    data: str = "run",
    allow: tuple[str, ...] = (),
    answers: tuple[str, ...] = (),
) -> dict[int, Worker]:
    """A worker for each name."""
    out = {}
    for number, name in enumerate(names):
        home = folder / name
        home.mkdir(parents=True, exist_ok=True)
        out[100 + number] = Worker(home, name, data, allow, answers)
    return out
