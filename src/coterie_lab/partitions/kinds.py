"""Digits whose clients are alike, or differ in size only: what is won where there are no groups."""

import numpy as np

from coterie.core.errors import ConfigError
from coterie.data import from_arrays
from coterie.data.federated import FederatedData
from coterie.data.synthetic import problem


@problem
def digits_without_groups(
    n_clients: int = 20, sizes: str = "equal", test_fraction: float = 0.25, seed: int = 0
) -> FederatedData:
    """Handwritten digits, assigned to clients at random, so that there are no groups.

    Parameters
    ----------
    n_clients
        Number of clients.
    sizes
        "equal", or "unequal": the size of the i-th client is proportional to 1 / i, and at least 8.
    test_fraction
        Share of a client's images that are test data.
    seed
        Seed for the rows of the clients.

    >>> data = digits_without_groups(sizes="unequal")
    >>> int(data.sizes("train").max()) > 20 * int(data.sizes("train").min())
    True
    """
    from sklearn.datasets import load_digits

    if sizes not in ("equal", "unequal"):
        raise ConfigError(
            f'digits_without_groups: sizes must be "equal" or "unequal". Got {sizes!r}.'
        )
    x, y = load_digits(return_X_y=True)
    rank = np.arange(1, n_clients + 1)
    part = np.full(n_clients, 1.0) if sizes == "equal" else 1 / rank
    count = np.maximum(8, np.floor(part / part.sum() * len(x))).astype(int)
    while count.sum() > len(x):  # the least size may have added too many
        count[0] -= count.sum() - len(x)
    order = np.random.default_rng([seed, 5]).permutation(len(x))
    ends = count.cumsum()
    rows = [order[end - n : end] for end, n in zip(ends, count, strict=True)]
    return from_arrays(
        [x[own].astype(np.float32) / 16 for own in rows],
        [y[own] for own in rows],
        test_fraction=test_fraction,
        seed=seed,
    )
