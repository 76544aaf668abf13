"""FedGEM watched: what every client's components look like after each exchange."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.fedgem import REFINEMENT, ROUNDS, STAGES, FedGEM, State
from coterie.data.federated import FederatedData
from coterie.engines.simulation import Simulation


class Frame(NamedTuple):
    """Components as the server knows them at one moment."""

    title: str
    centres: NDArray[np.float64]  # [c, d]
    radii: NDArray[np.float64]  # [c]  of the uncertainty balls; 0 after the rounds
    client: NDArray[np.int64]  # [c]
    group: NDArray[np.int64]  # [c]  -1 before the merge
    merged: NDArray[np.float64]  # [k, d]  centres of the groups, none before the merge


def watch(method: FedGEM, data: FederatedData, seed: int = 0) -> tuple[list[Frame], State]:
    """Run a method to its end; a frame after each exchange, and the last state."""
    fed = Simulation(data, seed)
    fed.begin(-1)
    state = method.init(fed)
    fed.commit()
    out: list[Frame] = []
    while not method.done(state):
        stage, turn = int(state.stage), int(state.turn) + 1
        fed.begin(len(out))
        state, _ = method.step(fed, state)
        fed.commit()
        name = STAGES[stage] if stage != ROUNDS else "round"
        title = name if stage == 1 else f"{name} {turn}"
        out.append(_frame(title, stage, state))
    return out, state


def _frame(title: str, stage: int, state: State) -> Frame:
    early = stage == ROUNDS
    real = state.radii >= 0 if early else state.sizes > 0
    centres = (state.centres if early else state.means)[real].numpy()
    radii = state.radii[real].numpy() if early else np.zeros(len(centres))
    merged = state.groups.centres.numpy()
    group = state.members[real].numpy()
    if stage == REFINEMENT:
        centres = merged[group]  # from here on everyone uses the common centres
    return Frame(title, centres, radii, real.nonzero()[:, 0].numpy(), group, merged)
