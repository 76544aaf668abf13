"""Components of many clients that are copies of common groups, for tests of grouping."""

import numpy as np


def copies(seed, n_clients=12, held=4, n_clusters=8, d=4, spread=6.0, noise=1.0):
    """Components of many clients around common centres: n, centres, variance, clients, truth."""
    rng = np.random.default_rng(seed)
    mu = spread * rng.normal(size=(n_clusters, d))
    truth = np.concatenate([rng.permutation(n_clusters)[:held] for _ in range(n_clients)])
    clients = np.repeat(np.arange(n_clients), held)
    n = rng.integers(20, 80, len(truth)).astype(float)
    centres = mu[truth] + noise * rng.normal(size=(len(truth), d)) / np.sqrt(n)[:, None]
    return n, centres, np.ones(len(truth)), clients, truth


def same_partition(a, b):
    return bool(((a[:, None] == a) == (b[:, None] == b)).all())
