"""Newcomers on the demo data: members of known groups must be placed, others refused.

    python -m coterie_lab.studies.newcomers --seeds 3 --json newcomers.json

The members are the clients of the quickstart (rotated digits, 40 clients, 4 groups, the same model,
training and rounds), with 70 % of the images. Newcomers are drawn from the other 30 %: 60 to 180
different images each, rotated as in their group. Foreign clients are such draws with inverted
pixels, or uniform noise with the labels of a draw.

A newcomer is placed right if most members of its group have the same true group. If a method did
not find the true groups (ARI below 1), its placements say more about the method than about placing.
These runs are listed as well.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from coterie.data.synthetic import digits
from coterie.fitted import Fitted
from coterie.fitting import fit_run
from coterie.quickstart import tables
from coterie.running.build import build
from coterie_lab.studies.common import options, table, write

N_GROUPS = 4
N_MEMBERS = 1257  # images, of 1,797
KINDS = ("known", "inverted", "noise")


class Newcomer(NamedTuple):
    """A client that was not part of the training."""

    kind: str
    group: int  # the true group; for a foreign client the rotation of its images
    x: np.ndarray  # [n, 64]
    y: np.ndarray  # [n]


def members(method: str, seed: int, **run: Any) -> tuple[Fitted, torch.Tensor]:
    """Fit the quickstart on part of the images; return the fit and the true groups."""
    changes = {"data": {"n_max": N_MEMBERS, "seed": seed}, "run": {"seed": seed, **run}}
    ready = build(tables(method, changes))
    assert ready.data.truth is not None
    return fit_run(ready), ready.data.truth


def newcomers(n: int, seed: int) -> list[Newcomer]:
    """Draw n newcomers of each kind from the images that no member has."""
    views = digits(N_GROUPS, N_GROUPS, test_fraction=0.0, seed=seed)  # a client per group: all
    used = digits(N_GROUPS, N_GROUPS, test_fraction=0.0, seed=seed, n_max=N_MEMBERS)
    draw, out = np.random.default_rng(seed), []
    for kind in KINDS:
        for number in range(n):
            group = number % N_GROUPS
            ids = torch.tensor([group])
            free = ~torch.isin(views.rows["train"].of_clients(ids).index, used.rows["train"].index)
            batch = views.gather("train", ids)
            x, y = batch.x[0, free].numpy(), batch.y[0, free].numpy()
            chosen = draw.choice(len(x), draw.integers(60, 181), replace=False)
            x, y = x[chosen], y[chosen]
            if kind == "inverted":
                x = 1 - x
            elif kind == "noise":
                x = draw.uniform(size=x.shape).astype(x.dtype)
            out.append(Newcomer(kind, group, x, y))
    return out


def count_placed(fit: Fitted, truth: torch.Tensor, guests: list[Newcomer]) -> dict[str, float]:
    """Count the newcomers that were placed right and those of each kind that were refused."""
    found = torch.tensor([line["group"] for line in fit.rows])
    meaning = {group: int(truth[found == group].mode().values) for group in found.tolist()}
    counts = dict.fromkeys(("right", *(f"refused {kind}" for kind in KINDS)), 0)
    for guest in guests:
        spot = fit.place(guest.x, guest.y)
        counts[f"refused {guest.kind}"] += not spot.fits
        counts["right"] += guest.kind == "known" and meaning.get(spot.group) == guest.group
    return counts


def main() -> None:
    parser = options(__doc__.split("\n")[0], seeds=3)
    parser.add_argument(
        "--newcomers", type=int, default=100, help="number of newcomers of each kind"
    )
    given = parser.parse_args()
    names = ["method", "seed", "ARI", "newcomers", "right", *(f"refused {kind}" for kind in KINDS)]
    lines = []
    for method in ("census", "survey"):
        for seed in range(given.seeds):
            fit, truth = members(method, seed)
            counts = count_placed(fit, truth, newcomers(given.newcomers, seed))
            lines.append([method, seed, fit.summary["ari"], given.newcomers, *counts.values()])
    table(f"Newcomers, {given.newcomers} of each kind", names, lines)
    write(given.json, [dict(zip(names, line, strict=True)) for line in lines])


if __name__ == "__main__":
    main()
