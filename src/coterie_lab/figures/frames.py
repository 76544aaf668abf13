"""Frames of a run of mosaic: the components of every client after each exchange."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.mosaic import MERGE, REFINEMENT, ROUNDS, STAGES, Mosaic, State
from coterie.core.algorithm import play
from coterie.core.errors import ConfigError
from coterie.data.federated import FederatedData
from coterie.engines.simulation import Simulation


class Frame(NamedTuple):
    """The components that the server knows after one exchange."""

    title: str
    centres: NDArray[np.float64]  # [c, d]
    radii: NDArray[np.float64]  # [c]  of the uncertainty balls; 0 after the rounds
    client: NDArray[np.int64]  # [c]
    group: NDArray[np.int64]  # [c]  -1 before the merge
    merged: NDArray[np.float64]  # [k, d]  centres of the groups, none before the merge


def watch(method: Mosaic, data: FederatedData, seed: int = 0) -> tuple[list[Frame], State]:
    """Run a method to its end; return a frame for each exchange, and the last state."""
    if method.covariance == "tied_full":
        raise ConfigError(
            "watch: with covariance='tied_full' balls are drawn in other units than the samples "
            "have. Give covariance='tied'."
        )
    states = [state for state, _ in play(method, Simulation(data, seed))]
    return [_frame(*step) for step in pairwise(states)], states[-1]


def _frame(before: State, state: State) -> Frame:
    stage, turn = int(before.stage), int(before.turn) + 1
    early = stage == ROUNDS
    title = STAGES[stage] if stage == MERGE else f"{'round' if early else STAGES[stage]} {turn}"
    real = state.radii >= 0 if early else state.sizes > 0
    centres = (state.centres if early else state.means)[real].numpy()
    radii = state.radii[real].numpy() if early else np.zeros(len(centres))
    merged = state.groups.centres.numpy()
    group = state.members[real].numpy()
    if stage == REFINEMENT:
        centres = merged[group]  # from here on everyone uses the common centres
    return Frame(title, centres, radii, real.nonzero()[:, 0].numpy(), group, merged)
