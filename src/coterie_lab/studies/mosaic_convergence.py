"""How fast the rounds of mosaic converge: distance of the centres to the fixed point, by round.

The fixed point of a run is its state after many more rounds. The distance is that of the farthest
centre of any client, in standard deviations of the groups, as the median over seeds. The rate is
the factor per round, fitted between 0.1 and 1e-8 standard deviations. "alone" is local EM: the
server returns no centres.
"""

from pathlib import Path

import numpy as np
import torch

from coterie.algorithms import Mosaic
from coterie.algorithms.mosaic import returned_centres
from coterie.data.mixture import mixture_tight
from coterie.engines import Simulation
from coterie_lab.figures.balls import convergence_picture
from coterie_lab.studies.common import options, table, write

FIRST = 700
ROUNDS, LAST = 40, 160  # rounds shown, and rounds until the fixed point


def distances(method: Mosaic, separation: float, seed: int, alone: bool) -> np.ndarray:
    """The distance of the farthest centre to its fixed point after each round."""
    data = mixture_tight(20, 8, 5, 300, separation, 2, 5, seed=seed)
    fed = Simulation(data, seed)
    fed.begin(-1)
    state, path = method.init(fed), []
    fed.commit()
    for number in range(LAST):
        fed.begin(number)
        if alone:
            given = state.units, returned_centres(state, fed.everyone())
            _, reply = fed.map(method.update, *given, to=fed.everyone())
            centres, radii = reply["centres"], reply["radii"]
        else:
            state, _ = method.pull(fed, state, fed.everyone())
            centres, radii = state.centres, state.radii
        fed.commit()
        path.append(torch.where(radii[..., None] >= 0, centres, torch.nan))
    gaps = [(centres - path[-1]).norm(dim=2).nan_to_num(0).max() for centres in path[:ROUNDS]]
    return torch.stack(gaps).numpy()


def rate(values: np.ndarray) -> float:
    """The factor per round while the distance is small but above the rounding error."""
    inside = np.flatnonzero((values < 0.1) & (values > 1e-8))
    if len(inside) < 3:
        return float("nan")
    return float(np.exp(np.polyfit(inside, np.log(values[inside]), 1)[0]))


def main() -> None:
    parser = options(__doc__, 10)
    parser.add_argument("--out", type=Path, help="file of the picture")
    arguments = parser.parse_args()
    curves, lines, figures = {}, [], {}
    for separation in (8.0, 6.0, 4.0):
        for alone, suffix in ((False, ""), (True, ", alone")):
            method = Mosaic(n_components="facts", rounds=LAST, min_count=0.0)
            name = f"{separation:g} apart{suffix}"
            runs = np.stack(
                [distances(method, separation, FIRST + s, alone) for s in range(arguments.seeds)]
            )
            curves[name] = np.median(runs, 0)
            rates = [rate(run) for run in runs]
            figures[name] = {"median": curves[name].tolist(), "rates": rates}
            lines.append([name, *curves[name][[4, 9, 19]], *np.nanquantile(rates, [0, 0.5, 1])])
    for line in lines:
        line[1:4] = [f"{value:.1e}" for value in line[1:4]]
    names = ["groups", "round 5", "round 10", "round 20", "least rate", "median", "largest"]
    table(f"Distance to the fixed point, {arguments.seeds} seeds from {FIRST}.", names, lines)
    write(arguments.json, figures)
    if arguments.out:
        print(convergence_picture(curves, arguments.out))


if __name__ == "__main__":
    main()
