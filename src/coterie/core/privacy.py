"""Client-level differential privacy: clipped replies, Gaussian noise, and a budget that runs out.

Two federations are neighbours if the data of one client are replaced by none, so that it adds
nothing. A *release* is a mean of models of which every client adds at most `clip`, or the answers
of the clients, such as losses, each at most `answers` long. Every release gets Gaussian noise of
`noise` times that length. Who answered, and how many clients a group has, is not protected.

The server is trusted: it sees replies before the noise, and the noise protects what it passes on.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from coterie.core.aggregate import Mean
from coterie.core.config import check_fields
from coterie.core.errors import ConfigError, FederationError
from coterie.core.policy import Policy
from coterie.core.replies import SAMPLES
from coterie.core.tree import Tree, leaves, tree_map


class BudgetSpent(FederationError):
    """The next release would cost more than what is left of the privacy budget."""


@dataclass(frozen=True)
class Privacy:
    """How much a run may reveal about any one client.

    Parameters
    ----------
    epsilon
        The budget. A run ends before it would be exceeded.
    delta
        Probability that the promise of `epsilon` does not hold.
    noise
        Standard deviation of the noise, as a multiple of `clip` or `answers`.
    clip
        The largest change of a model that a client may send; longer ones are shortened.
    answers
        The largest length of everything else that a client sends in a reply, such as its losses.
    """

    epsilon: Annotated[float, Gt(0)]
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    noise: Annotated[float, Gt(0)] = 1.0
    clip: Annotated[float, Gt(0)] = 1.0
    answers: Annotated[float, Gt(0)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def limit(self, policy: Policy) -> Policy:
        """The policy of the run, with clipped means."""
        if policy.mean not in ("plain", "clipped") or policy.cap is not None:
            raise ConfigError(
                "privacy needs means whose noise is known: clipped ones in which every client "
                f'counts once. Got policy mean="{policy.mean}", cap={policy.cap}. Leave them out.'
            )
        return replace(policy, mean="clipped", radius=self.clip)


@cache
def spent(noise: float, releases: int, delta: float) -> float:
    """The epsilon of a number of releases, by the Renyi accountant of dp-accounting.

    >>> round(spent(5.0, 30, 1e-5), 2)
    5.25
    """
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise ConfigError(
            'privacy needs the package dp-accounting. Install it: pip install "coterie[privacy]"'
        ) from None
    if not releases:
        return 0.0
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise), releases)
    return float(accountant.get_epsilon(delta))


class Budget:
    """The privacy of one run: what was spent, and the noise.

    Parameters
    ----------
    privacy
        What the user asked for.
    secret
        Noise is a function of it, of the number of the release and of what is released, so that a
        resumed run has the same noise, and other answers never do. Who knows it can remove the
        noise: it must stay with the server.
    """

    def __init__(self, privacy: Privacy, secret: bytes) -> None:
        self.privacy, self._secret = privacy, secret
        self.releases = 0
        self.used_up = False
        self.note: Callable[[int], None] | None = None  # hears of releases before they are made
        spent(privacy.noise, 1, privacy.delta)  # says at once if the package is missing

    @property
    def epsilon(self) -> float:
        """What was spent so far."""
        return spent(self.privacy.noise, self.releases, self.privacy.delta)

    def admit(self, task: str, means: Sequence[Mean]) -> tuple[Mean, ...]:
        """Means in which every client counts once; an error for means that noise cannot protect."""
        for mean in means:
            if mean.slots or isinstance(mean.by, str):
                raise ConfigError(
                    f"privacy: clients must not choose how they are averaged, and those of {task} "
                    "do. Choose a method that groups by losses, such as census or clove."
                )
        return tuple(replace(mean, weight=None) for mean in means)

    def pay(self, task: str, releases: int) -> None:
        """Spend part of the budget, or refuse."""
        after = spent(self.privacy.noise, self.releases + releases, self.privacy.delta)
        if after > self.privacy.epsilon:
            self.used_up = True
            raise BudgetSpent(
                f"{task}: the privacy budget is used up. {self.epsilon:.3g} of epsilon = "
                f"{self.privacy.epsilon:g} is spent, and this exchange would bring it to "
                f"{after:.3g}"
            )
        self.releases += releases
        if self.note is not None:
            self.note(self.releases)

    def blur_mean(self, mean: Tree, members: Tensor, bank: bool, *number: int) -> Tree:
        """A mean with noise; rows that no client has trained are unchanged.

        Parameters
        ----------
        members
            Number of clients in the mean: [rows], or [1] if there is one model.
        bank
            Whether there is a row for each group.
        number
            Numbers that no other release has: those released before this exchange, and its place
            in the exchange.
        """
        scale = self.privacy.noise * self.privacy.clip
        width = torch.where(members > 0, scale / members.clamp(min=1), 0.0)
        part, content = iter(range(10**6)), _digest(leaves(mean))

        def blur(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            noise = self.draw(leaf.shape, content, *number, next(part))
            each = width.reshape(-1, *(1,) * (leaf.ndim - 1)) if bank else width[0]
            return (leaf.double() + each * noise).to(leaf.dtype)

        return tree_map(blur, mean)

    def blur_answers(
        self, reply: dict[str, Any], samples: tuple[str, ...], task: str, number: int
    ) -> dict[str, Any]:
        """Replies that are not averaged: clipped as a whole, with noise; counts are made alike."""
        out, flat, places = dict(reply), [], []
        for name in sorted(reply):
            leaf = reply[name]
            if _counts(name, samples):
                out[name] = tree_map(torch.ones_like, leaf)
            elif not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                raise ConfigError(
                    f"privacy: clients must send means and losses only. {task} also sends "
                    f"'{name}', which noise does not protect. Choose another method."
                )
            else:
                flat.append(leaf.reshape(len(leaf), -1).double())
                places.append(name)
        if not flat:
            return out
        whole = torch.cat(flat, 1)  # [m, d]
        length = whole.norm(dim=1, keepdim=True).clamp(min=1e-300)
        whole = whole * (self.privacy.answers / length).clamp(max=1.0)
        noise = self.draw(whole.shape, _digest([whole]), number)
        whole = whole + self.privacy.noise * self.privacy.answers * noise
        for name, part in zip(places, whole.split([f.shape[1] for f in flat], 1), strict=True):
            out[name] = part.reshape(reply[name].shape).to(reply[name].dtype)
        return out

    def draw(self, shape: Sequence[int], *labels: int | str) -> Tensor:
        """Normal numbers that nobody can predict without the secret."""
        count = int(torch.Size(shape).numel())
        text = ",".join(map(str, labels)).encode()
        stream = hashlib.shake_256(self._secret + b"noise:" + text).digest(8 * count)
        words = torch.frombuffer(bytearray(stream), dtype=torch.int64) if count else torch.zeros(0)
        uniform = ((words >> 11) & ((1 << 53) - 1)).double() if count else words.double()
        normal: Tensor = torch.special.ndtri((uniform + 0.5) / 2**53)
        return normal.reshape(tuple(shape))


def _digest(values: Sequence[Tensor]) -> str:
    """What is released, before the noise: with the same labels other values get other noise."""
    parts = [leaf.detach().cpu().double().numpy().tobytes() for leaf in values]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def answers_count(reply: dict[str, Any], samples: tuple[str, ...]) -> int:
    """Releases in the part of a reply that is not averaged: 1, or 0 if it has counts alone."""
    return int(any(not _counts(name, samples) for name in reply))


def _counts(name: str, samples: tuple[str, ...]) -> bool:
    return name == SAMPLES or name in samples or name.startswith(f"{SAMPLES}_") or name == "counts"
