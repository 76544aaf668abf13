"""FedGEM's partitions of public data sets, in which the classes are the groups to find."""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.errors import ConfigError, DataError, unknown
from coterie.data.federated import FederatedData
from coterie.data.mixture import draw_holdings, federate
from coterie.data.synthetic import problem
from coterie_lab import sources

Array = NDArray[Any]


def split_classes(
    x: Array, y: Array, n_clients: int, fewest: int, most: int, seed: int = 0
) -> FederatedData:
    """Each client draws its classes; each class is divided evenly among the clients that have it.

    >>> data = split_classes(np.zeros((40, 2)), np.arange(40) % 4, 3, 2, 3)
    >>> int(data.sizes("train").sum())
    40
    """
    rng = np.random.default_rng([seed, 3])
    k = int(y.max()) + 1
    held = draw_holdings(rng, n_clients, k, fewest, most)
    parts: list[list[Array]] = [[] for _ in range(n_clients)]
    for label in range(k):
        holders = [i for i, own in enumerate(held) if label in own]
        rows = rng.permutation(np.flatnonzero(y == label))
        for i, part in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[i].append(part)
    index = [np.concatenate(part) for part in parts]
    counts = [len(np.unique(y[rows])) for rows in index]
    return federate([x[rows] for rows in index], [y[rows] for rows in index], counts, k)


def share_classes(
    x: Array, y: Array, n_clients: int, fewest: int, most: int, share: float = 0.7, seed: int = 0
) -> FederatedData:
    """FedGEM's split: each client takes `share` / `n_clients` of the samples of its classes.

    No sample is used twice, and some samples are not used.
    """
    rng = np.random.default_rng([seed, 4])
    k = int(y.max()) + 1
    held = draw_holdings(rng, n_clients, k, fewest, most)
    rest = {label: list(rng.permutation(np.flatnonzero(y == label))) for label in range(k)}
    take = {label: int(share * len(rows) / n_clients) for label, rows in rest.items()}
    if min(take.values()) < 1:
        raise DataError(
            f"share_classes: each class needs at least {n_clients / share:.0f} samples "
            f"for {n_clients} clients. One class has fewer. Use fewer clients."
        )
    index = []
    for own in held:
        rows = []
        for label in own.tolist():
            rows += [rest[label].pop() for _ in range(take[label])]
        index.append(np.array(rows))
    counts = [len(own) for own in held]
    return federate([x[rows] for rows in index], [y[rows] for rows in index], counts, k)


@problem
def class_mixture(
    source: str = "digits",
    n_clients: int = 10,
    fewest: int = 2,
    most: int = 5,
    features: int | None = None,
    per_class: int | None = None,
    rule: str = "split",
    share: float = 0.7,
    seed: int = 0,
    data_dir: str | None = None,
) -> FederatedData:
    """Real samples whose classes are the groups to find; each client has some of the classes.

    Parameters
    ----------
    source
        "digits" (of scikit-learn), or the name of a public data set.
    n_clients
        Number of clients.
    fewest
        Smallest number of classes of a client.
    most
        Largest number of classes of a client.
    features
        Number of principal components to use, as a federation finds them with
        `coterie.running.features.principal`; None for the original inputs.
    per_class
        Use only the first samples of each class, this many; None for all.
    rule
        "split": each class is divided evenly among the clients that have it. "share": a client
        takes `share` / `n_clients` of the samples of each of its classes, as FedGEM's authors do.
    share
        Share of the samples that the rule "share" uses if all clients have a class.
    seed
        Seed of the partition.
    data_dir
        Folder of the data sets; None for the usual folders.

    >>> class_mixture(n_clients=4, most=4, features=5)
    FederatedData('class_mixture', 4 clients, 1797 train + 0 test samples, ...)
    """
    rules = {"split": split_classes, "share": share_classes}
    if rule not in rules:
        raise ConfigError(unknown("rule of class_mixture", rule, rules))
    x, y = _samples(source, features, per_class, data_dir)
    if rule == "share":
        return share_classes(x, y, n_clients, fewest, most, share, seed)
    return split_classes(x, y, n_clients, fewest, most, seed)


@functools.lru_cache(maxsize=2)
def _samples(
    source: str, features: int | None, per_class: int | None, data_dir: str | None
) -> tuple[Array, Array]:
    if source == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = x / 16
    else:
        pool = sources.load(source, data_dir)
        x, y = pool.x.flatten(1).numpy(), pool.y.long().numpy()
        x = x.astype(np.float64) / 255 if pool.x.dtype == torch.uint8 else x.astype(np.float64)
    if per_class is not None:
        rows = [np.flatnonzero(y == label)[:per_class] for label in range(int(y.max()) + 1)]
        x, y = x[np.concatenate(rows)], y[np.concatenate(rows)]
    if features is not None:
        x = x - x.mean(0)
        _, vectors = np.linalg.eigh(x.T @ x / len(x))
        x = x @ vectors[:, ::-1][:, :features]
    return x, y
