"""Checks of replies before they count, and the record of those that were left out.

A reply is faulty if it does not have the names, types and shapes that its task sends; if a value is
not finite, a million times larger than usual, or one that no client can have, such as a negative
loss or an accuracy above 1; if it counts more samples than the client declared when it joined, less
than none, or none although it has declared some; or if it names a group that does not exist. A
faulty reply is left out as a whole, and the client is named. If half of all replies to a call are
not finite, the models have diverged, and nobody is to blame. Large losses are honest, too.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.aggregate import Mean
from coterie.core.tree import Ids, Tree, leaves, n_rows, tree_map

SAMPLES = "n"
"""The name under which tasks send their number of samples. Weights of means may be named after it
(`n_expert`), or be called `counts`."""
WILD = 1e6
"""A reply is wild if its values are this many times larger than those of the usual reply."""
FEW = 3
"""Fewer replies have no usual size; then the present model's is used."""
ROUNDING = 1e-3  # shares of samples are sums of rounded numbers


class Fault(NamedTuple):
    """Why a reply was left out."""

    position: int  # of the client among those asked
    why: str  # begins with a verb; the client is its subject


# structure


Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of every leaf of one client's reply, by its path."""


def shapes_of(reply: Tree, path: str = "") -> Shapes:
    """Type and shape of every leaf, and the place of every empty dict and list.

    Equal results mean equal trees but for the values: a list is told from a dict.

    >>> shapes_of({"w": {"a": torch.zeros(2, 3)}, "n": torch.tensor(1)})
    {'w/a': ('float32', (2, 3)), 'n': ('int64', ())}
    """
    if isinstance(reply, Tensor):
        return {path: (str(reply.dtype).removeprefix("torch."), tuple(reply.shape))}
    named = isinstance(reply, dict)
    parts = reply.items() if named else enumerate(reply)
    out: Shapes = {} if reply else {path: (type(reply).__name__, ())}
    for key, part in parts:
        name = str(key).replace("%", "%p").replace("/", "%s") if named else f"%{key}"
        out |= shapes_of(part, f"{path}/{name}" if path else name)
    return out


def find_misfit(reply: Any, expected: Shapes) -> str | None:
    """What is wrong with the structure of a reply; None if nothing is.

    >>> find_misfit({"n": torch.tensor(1.0)}, {"n": ("int64", ())})
    "sent 'n' as float32 of shape [], not int64 of shape []"
    """
    if not isinstance(reply, dict):
        return f"sent a {type(reply).__name__}, not named tensors"
    got = shapes_of(reply)
    for name in [name for name in expected if name not in got]:
        return f"did not send '{name}'"
    for name in [name for name in got if name not in expected]:
        return f"sent '{_short(name)}', which the task does not send"
    for name, (kind, shape) in expected.items():
        if got[name] != (kind, shape):
            other, size = got[name]
            return (
                f"sent '{name}' as {other} of shape {list(size)}, not {kind} of shape {list(shape)}"
            )
    return None if list(got) == list(expected) else "sent its parts in another order"


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


# values


class Inspector:
    """Looks at the replies to one call as they arrive.

    Parameters
    ----------
    means
        What is averaged of them.
    sizes
        Number of samples that each client asked has declared, -1 if unknown. [asked]
    samples
        Further names of numbers of samples.
    strict
        Whether all values must be finite, or only those that are averaged.
    limits
        Smallest and largest value of some parts.
    """

    def __init__(
        self,
        means: Sequence[Mean],
        sizes: Tensor,
        samples: Sequence[str] = (),
        strict: bool = True,
        limits: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.means, self.sizes, self.strict = means, sizes, strict
        self.limits = limits or {}
        weights = {mean.weight for mean in means if mean.weight is not None}
        named = {w for w in weights if w == "counts" or w.startswith(f"{SAMPLES}_")}
        self.samples = {SAMPLES, *samples, *named}
        self.weights = sorted(weights | self.samples)
        self.faults: list[Fault] = []
        self.suspects: list[tuple[Tensor, dict[str, Tree]]] = []  # replies that are not finite
        self.answers = 0
        self._lengths: dict[str, list[Tensor]] = {mean.leaf: [] for mean in means}
        self._reduced = {mean.leaf for mean in means}

    def check(self, position: Tensor, reply: dict[str, Tree]) -> tuple[Tensor, dict[str, Tree]]:
        """The positions and replies that count; the others are noted."""
        self.answers += len(position)
        good = torch.ones(len(position), dtype=torch.bool)
        for name in self.weights:
            if isinstance(reply.get(name), Tensor):
                good &= self._check_count(name, reply[name], position)
        for mean in self.means:
            if isinstance(mean.by, str) and mean.by in reply:
                good &= self._check_group(mean, reply[mean.by], position)
        for name, limits in self.limits.items():
            if isinstance(reply.get(name), Tensor):
                good &= self._check_limits(name, *limits, reply[name], position)
        finite = self._find_finite(reply, len(position))
        for mean in self.means:
            if mean.leaf in reply:
                good &= self._check_size(mean, reply, position, finite & good)
        if bool((good & finite).all()):
            return position, reply
        odd = good & ~finite
        if bool(odd.any()):
            rest = {name: part for name, part in reply.items() if name not in self._reduced}
            self.suspects.append((position[odd], tree_map(lambda leaf: leaf[odd], rest)))
        good &= finite
        return position[good], tree_map(lambda leaf: leaf[good], reply)

    def judge(self) -> list[tuple[Tensor, dict[str, Tree]]]:
        """Once all replies are there: those that are not finite but nobody's fault."""
        number = sum(len(position) for position, _ in self.suspects)
        if 2 * number >= self.answers:
            return self.suspects
        for position, _ in self.suspects:
            self.faults += [Fault(p, "sent values that are not finite") for p in position.tolist()]
        return []

    def _note(self, bad: Tensor, position: Tensor, say: Any) -> Tensor:
        """Note the faults of some clients; which are fine: [m]."""
        for i in bad.nonzero()[:, 0].tolist():
            self.faults.append(Fault(int(position[i]), say(i)))
        return ~bad

    def _check_count(self, name: str, count: Tensor, position: Tensor) -> Tensor:
        flat = count.reshape(len(count), -1).double()
        least, total = flat.amin(1), flat.sum(1)
        most = self.sizes[position].double()
        known = (most >= 0) & (name in self.samples)
        # One number: all samples of the client, and not those of some groups or classes.
        none = (total == 0) & (most > 0) & (name == SAMPLES and count.ndim == 1)
        bad = (least < 0) | none | (known & (total > most * (1 + ROUNDING)))
        if not bool(bad.any()):
            return ~bad

        def say(i: int) -> str:
            if float(least[i]) < 0:
                return f"sent {float(least[i]):g} as weight '{name}'"
            return f"sent {float(total[i]):g} samples in '{name}', but declared {int(most[i])}"

        return self._note(bad, position, say)

    def _check_limits(
        self, name: str, low: float, high: float, value: Tensor, position: Tensor
    ) -> Tensor:
        flat = value.reshape(len(value), -1)
        # Not a number lies in all limits: whether values must be finite is another question.
        wrong = (flat < low - ROUNDING) | (flat > high + ROUNDING)
        if not bool(wrong.any()):
            return ~wrong.any(1)
        above = f"between {low:g} and {high:g}" if high < float("inf") else f"{low:g} or more"
        return self._note(
            wrong.any(1),
            position,
            lambda i: f"sent {float(flat[i][wrong[i]][0]):.3g} in '{name}', which is {above}",
        )

    def _check_group(self, mean: Mean, group: Tensor, position: Tensor) -> Tensor:
        k = n_rows(mean.around) if leaves(mean.around) else 1
        bad = (group < 0) | (group >= k)
        return self._note(
            bad, position, lambda i: f"sent group {int(group[i])}, but groups are 0 to {k - 1}"
        )

    def _find_finite(self, reply: dict[str, Tree], m: int) -> Tensor:
        """Which replies are finite, [m]; of averaged leaves the lengths tell."""
        finite = torch.ones(m, dtype=torch.bool)
        weights = {mean.weight for mean in self.means}
        for name, part in reply.items():
            if name in self._reduced or not (self.strict or name in weights):
                continue
            for leaf in leaves(part):
                if leaf.is_floating_point() and not torch.isfinite(leaf.sum()):
                    finite &= torch.isfinite(leaf.reshape(m, -1)).all(1)
        for name in self._reduced & reply.keys():
            length = _length(reply[name], m)
            self._lengths[name].append(length)
            finite &= torch.isfinite(length)
        return finite

    def _check_size(
        self, mean: Mean, reply: dict[str, Tree], position: Tensor, some: Tensor
    ) -> Tensor:
        length = self._lengths[mean.leaf][-1]
        seen = torch.cat(self._lengths[mean.leaf])
        seen = seen[torch.isfinite(seen)]
        usual = float(seen.median()) if len(seen) >= FEW else 0.0
        if len(seen) < FEW:
            usual = float(_length(tree_map(lambda leaf: leaf[None], mean.around), 1))
        if not usual > 0:
            return torch.ones_like(some)
        return self._note(
            some & (length > WILD * usual),
            position,
            lambda i: (
                f"sent values in '{mean.leaf}' of length {float(length[i]):.2g}, where "
                f"{usual:.2g} is usual"
            ),
        )


def _length(tree: Tree, m: int) -> Tensor:
    """Euclidean length of the floating leaves of each of m replies, [m]; nan, inf if not finite."""
    total = torch.zeros(m, dtype=torch.float64)
    for leaf in leaves(tree):
        if leaf.is_floating_point():
            flat = leaf.reshape(m, -1)
            length = torch.linalg.vector_norm(flat, dim=1).double()
            if not bool(torch.isfinite(length).all()):  # too large to be squared in its own type
                odd = ~torch.isfinite(length)
                length[odd] = torch.linalg.vector_norm(flat[odd].double(), dim=1)
            total += length.cpu().square()
    return total.sqrt()


# record


class Record:
    """Faulty replies: how many each client sent, and those not written down yet."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.new: list[dict[str, str]] = []
        self.aside: dict[str, str] = {}  # clients whose answers are not believed, and why
        self._untold: dict[str, str] = {}

    def set_aside(self, client: str, why: str) -> None:
        """Note that the answers of a client are not believed, and warn the first time."""
        if client not in self.aside:
            warnings.warn(f"'{client}' is set aside: {why}.", stacklevel=4)
            self.aside[client] = self._untold[client] = why

    def add(self, client: str, task: str, why: str, strikes: int) -> None:
        """Note a faulty reply, and warn."""
        self.counts[client] = number = self.counts.get(client, 0) + 1
        self.new.append({"client": client, "task": task, "why": why})
        last = f" This was fault {number}: it is asked no more." if number == strikes else ""
        warnings.warn(f"{task}: '{client}' {why}. Its reply is left out.{last}", stacklevel=4)

    def take(self) -> dict[str, Any]:
        """What was noted since the last time: entries of a round's line."""
        new = {"faults": self.new, "aside": self._untold}
        self.new, self._untold = [], {}
        return {name: value for name, value in new.items() if value}

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Read the lines of rounds of an earlier part of the run."""
        self.counts, self.aside = {}, {}
        for line in lines:
            self.aside |= line.get("aside", {})
            for fault in line.get("faults", ()):
                name = str(fault["client"])
                self.counts[name] = self.counts.get(name, 0) + 1

    def trusted(self, names: Sequence[str], ids: Ids, strikes: int) -> Tensor:
        """Which of some clients are still asked: [m]."""
        if not self.counts:
            return torch.ones(len(ids), dtype=torch.bool)
        out = {name for name, number in self.counts.items() if number >= strikes}
        return torch.tensor([names[i] not in out for i in ids.tolist()], dtype=torch.bool)
