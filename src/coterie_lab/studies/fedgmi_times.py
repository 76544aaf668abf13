"""The time of Blend's parts: one division pass of fifty clients, and one round of training.

Each client has 300 rotated digits. A division scores every sample with every VAE and computes
offsets, parts and shares. A round trains both models of every component on the part of the client's
data that belongs to it. The parts add up to the data, so a round with three components should take
as long as one model on all data. If it takes longer, it computes samples outside the parts. Times
are seconds of one core.

    python -m coterie_lab.studies.fedgmi_times --profile

Needs the data folder named by COTERIE_DATA.
"""

import cProfile
import pstats
import time
import warnings
from collections.abc import Callable
from typing import Any

from coterie.algorithms.blend import ROUNDS
from coterie.core.aggregate import Mean
from coterie.engines import Simulation
from coterie_lab.studies.common import options, table, write
from coterie_lab.studies.fedgmi_study import CLIENTS, THREE, TWO, digits, method


def time_best(work: Callable[[], Any], times: int, profile: bool) -> float:
    """The best of several times, in seconds of this process; the first call is not timed."""
    work()
    seconds = []
    for _ in range(times):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    if profile:
        watched = cProfile.Profile()
        watched.runcall(work)
        pstats.Stats(watched).sort_stats("tottime").print_stats(8)
    return min(seconds)


def measure(degrees: list[float], k: int | None, stack: bool, args: Any) -> dict[str, float]:
    """Time a division pass and a training round, after two rounds."""
    algorithm = method(10, 300, n_components=k, warm_rounds=2, anchor_epochs=1)
    fed = Simulation(digits(degrees, "random", 300, 0).data, 0, 5 / CLIENTS, stack=stack)
    fed.begin(-1)
    state, number = algorithm.init(fed), 0
    fed.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while int(state.stage) < ROUNDS or int(state.turn) < 2:
            fed.begin(number)
            state, _ = algorithm.step(fed, state)
            fed.commit()
            number += 1
    fed.begin(number)
    cohort = fed.cohort()
    means = [
        Mean("vaes", state.vaes, weight="n_vae", slots=True),
        Mean("experts", state.experts, weight="n_expert", slots=True),
    ]
    given = state.vaes, state.experts

    def division() -> None:
        with fed.aside():
            algorithm.divide(fed, state, fed.everyone())

    def training() -> None:
        with fed.aside():
            fed.map(algorithm.train_experts, *given, to=cohort, reduce=means)

    profile = args.profile and stack
    return {
        "components": len(state.offsets),
        "division": time_best(division, args.seeds, profile),
        "round": time_best(training, args.seeds, profile),
    }


def main() -> None:
    parser = options(__doc__, 2)
    parser.add_argument("--profile", action="store_true", help="print a profile")
    args = parser.parse_args()
    lines, figures = [], {}
    for degrees, k in ((THREE, 3), (TWO, 2), (THREE, 1)):
        for stack in (True, False):
            got = measure(degrees, k, stack, args)
            name = f"{len(degrees)} kinds, {k} components, {'stacked' if stack else 'one by one'}"
            figures[name] = got
            lines.append([name, got["division"], got["round"]])
            print(lines[-1], flush=True)
    table("Seconds on one core", ["", "division, 50 clients", "round, 5 clients"], lines)
    write(args.json, figures)


if __name__ == "__main__":
    main()
