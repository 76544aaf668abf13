"""Clients that hold some of many groups of samples: for methods that look inside clients' data.

Labels are the true groups, for the examiner; a client's fact `n_components` is how many it holds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.errors import ConfigError
from coterie.core.random import fold, seed_key
from coterie.data.federated import FederatedData, RowIndex
from coterie.data.synthetic import problem

Array = NDArray[Any]


@problem
def mixture_sensitivity(
    separation: float = 4.0,
    n_clients: int = 5,
    n: int = 500,
    n_clusters: int = 10,
    d: int = 4,
    fewest: int = 2,
    most: int = 8,
    test_fraction: float = 0.0,
    seed: int = 0,
) -> FederatedData:
    """Gaussian groups of which two are exactly `separation` standard deviations apart.

    Centres are drawn one after the other from N(mean of those before, 25 I); the second is moved to
    the exact distance from the first, all others are farther from everybody. FedGEM's sensitivity
    study.

    >>> data = mixture_sensitivity(n_clusters=4, n=20, most=3)
    >>> len(data), data.n_outputs
    (5, 4)
    """
    rng = np.random.default_rng([seed, 1])
    centres = [5 * rng.normal(size=d)]
    way = rng.normal(size=d)
    centres.append(centres[0] + separation * way / np.linalg.norm(way))
    while len(centres) < n_clusters:
        new = np.mean(centres, 0) + 5 * rng.normal(size=d)
        if min(np.linalg.norm(new - old) for old in centres) > separation:
            centres.append(new)
    mu = np.array(centres)
    held = draw_holdings(rng, n_clients, n_clusters, fewest, most)
    return _gaussian(rng, mu, held, n, 0.0, test_fraction)


@problem
def mixture_tight(
    n_clients: int = 30,
    n_clusters: int = 10,
    d: int = 10,
    n: int = 200,
    separation: float = 6.0,
    fewest: int = 2,
    most: int = 5,
    shift: float = 0.0,
    test_fraction: float = 0.0,
    seed: int = 0,
) -> FederatedData:
    """Gaussian groups with centres at least `separation` apart, the closest of 50 draws.

    `shift` moves each client's copy of a group by normal noise of this size: the clients then
    agree on no centre exactly.

    >>> mixture_tight(n_clients=4, n_clusters=3, n=10, most=3).facts(torch.arange(4))
    {'n_components': tensor([3, 2, 3, 2])}
    """
    rng = np.random.default_rng([seed, 2])
    best, mu = -1.0, np.zeros((n_clusters, d))
    for _ in range(50):
        draw = rng.uniform(size=(n_clusters, d)) if d <= 3 else rng.normal(size=(n_clusters, d))
        gaps = np.linalg.norm(draw[:, None] - draw, axis=2)[np.triu_indices(n_clusters, 1)]
        if gaps.min() / gaps.mean() > best:
            best, mu = gaps.min() / gaps.mean(), draw * separation / gaps.min()
    held = draw_holdings(rng, n_clients, n_clusters, fewest, most)
    return _gaussian(rng, mu, held, n, shift, test_fraction)


def draw_holdings(
    rng: np.random.Generator, n_clients: int, n_clusters: int, fewest: int, most: int
) -> list[Array]:
    """Which groups each client holds: a uniform number of uniform ones, every group somewhere."""
    if not 1 <= fewest <= most <= n_clusters or most * n_clients < n_clusters:
        raise ConfigError(
            "A client must hold from 1 to n_clusters groups, and all clients together every one. "
            f"Got {fewest} to {most} of {n_clusters}, and {n_clients} clients."
        )
    for _ in range(100_000):
        held = [
            np.sort(rng.choice(n_clusters, rng.integers(fewest, most + 1), replace=False))
            for _ in range(n_clients)
        ]
        if len(np.unique(np.concatenate(held))) == n_clusters:
            return held
    raise ConfigError(
        f"No draw of {fewest} to {most} groups for {n_clients} clients covers all {n_clusters}."
    )


def _gaussian(
    rng: np.random.Generator,
    mu: Array,
    held: list[Array],
    n: int,
    shift: float,
    test_fraction: float,
) -> FederatedData:
    xs, ys = [], []
    for own in held:
        label = rng.choice(own, n)
        # Everyone's groups really occur: a group without a sample is not held.
        label[: len(own)] = own
        copies = mu + shift * rng.normal(size=mu.shape)
        xs.append(copies[label] + rng.normal(size=(n, mu.shape[1])))
        ys.append(label)
    data = federate(xs, ys, [len(own) for own in held], len(mu), test_fraction, seed=int(n))
    return replace(data, extra={"centres": mu})


def federate(
    xs: Sequence[Array],
    ys: Sequence[Array],
    n_components: Sequence[int],
    n_clusters: int,
    test_fraction: float = 0.0,
    classes: Sequence[str] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Samples, true groups and local numbers of groups as a federation in double precision."""
    x = torch.from_numpy(np.concatenate(xs)).double()
    y = torch.from_numpy(np.concatenate(ys)).long()
    names = tuple(f"client-{i}" for i in range(len(xs)))
    rows = RowIndex.blocks([len(part) for part in xs])
    train, test = rows.divide(names, test_fraction, fold(seed_key(seed), "test"))
    return FederatedData(
        x,
        y,
        {"train": train, "test": test},
        names,
        "classification",
        n_clusters,
        client_facts={"n_components": torch.tensor(list(n_components))},
        classes=None if classes is None else tuple(classes),
    )
