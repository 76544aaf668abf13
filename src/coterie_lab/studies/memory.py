"""Peak memory of one IFCA round by number of clients; it must not grow by one model per client.

    python -m coterie_lab.studies.memory --clients 250 1000 2000

Each size runs in its own process: an MLP 784-200-10 (159,010 weights, 636 kB), 50 images of uint8
noise per client from a common pool of 10,000, four groups, 10 full-batch steps.
"""

import argparse
import json
import resource
import subprocess
import sys
import time


def one(n_clients: int) -> dict[str, float]:
    import torch

    from coterie.algorithms import IFCA
    from coterie.core.model import Model
    from coterie.core.training import LocalSGD
    from coterie.data import FederatedData, RowIndex
    from coterie.data.arrays import unit_scale
    from coterie.engines import Simulation
    from coterie.models.mlp import MLP

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 256, (10_000, 784), dtype=torch.uint8, generator=draw)
    labels = torch.randint(0, 10, (10_000,), generator=draw)
    rows = torch.randint(0, 10_000, (n_clients, 50), generator=draw)
    data = FederatedData(
        pool,
        labels,
        {"train": RowIndex.of(list(rows))},
        tuple(f"client-{i}" for i in range(n_clients)),
        "classification",
        10,
        transform=unit_scale,
    )
    model = Model(lambda: MLP(784, 10, (200,)))
    method = IFCA(model, LocalSGD(0.1, steps=10), n_groups=4)
    fed = Simulation(data)
    fed.begin(-1)
    state = method.init(fed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    fed.begin(0)
    began = time.perf_counter()
    method.step(fed, state)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"clients": n_clients, "before_mb": before, "peak_mb": peak, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="*", default=[250, 1000, 2000])
    parser.add_argument("--one", type=int)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return
    for n_clients in options.clients:
        out = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--one", str(n_clients)],
            capture_output=True,
            check=True,
        )
        line = json.loads(out.stdout)
        print(
            f"{line['clients']:>6} clients: {line['before_mb']:.0f} MB before the round, peak "
            f"{line['peak_mb']:.0f} MB, {line['seconds']:.1f} s"
        )


if __name__ == "__main__":
    main()
