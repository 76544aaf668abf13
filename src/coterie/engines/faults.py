"""Injected faults: clients that do not answer, or answer too late."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from coterie.core.config import check_fields
from coterie.core.random import fold, seed_key, uniform


@dataclass(frozen=True)
class Faults:
    """Which replies are lost; drawn per round, exchange and client from a separate seed.

    Parameters
    ----------
    drop
        Probability that a client does not answer an exchange.
    delay
        Mean of the exponentially distributed time, in simulated seconds, until a client answers.
    deadline
        Answers after this time are lost.
    seed
        Seed of these draws, independent of the seed of the run.
    """

    drop: Annotated[float, Ge(0), Le(1)] = 0.0
    delay: Annotated[float, Ge(0)] = 0.0
    deadline: Annotated[float, Gt(0)] = float("inf")
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def lost(self, key: Tensor, names: Tensor) -> tuple[Tensor, Tensor]:
        """Clients that do not answer, and clients that answer too late: two masks."""
        keys = fold(fold(seed_key(self.seed), "faults", key), names)  # [m]
        draw = torch.vmap(lambda k: uniform(k, (2,), torch.float64))(keys)
        dropped = draw[:, 0] < self.drop
        late = -self.delay * torch.log1p(-draw[:, 1]) > self.deadline
        return dropped, late & ~dropped
