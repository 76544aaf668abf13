"""FedGMI's partitions: clients whose rows come from several components."""

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, unknown
from coterie.core.random import fold, seed_key, uniform
from coterie.data.arrays import unit_scale
from coterie.data.cutting import dirichlet_shares, whole
from coterie.data.federated import FederatedData, RowIndex
from coterie.data.synthetic import problem
from coterie_lab import sources
from coterie_lab.partitions.pools import SPLITS, of_class
from coterie_lab.sources import Pool


@problem
def component_mixture(
    source: str = "mnist",
    n_clients: int = 50,
    n_components: int = 2,
    shares: str = "random",
    sizes: tuple[int, int] = (100, 200),
    test: int = 100,
    seed: int = 0,
    data_dir: str | None = None,
) -> FederatedData:
    """FedGMI's mixtures: the rows of a client come from several components, in its own shares.

    The components are rotations by 0, 90 and 180 degrees. For EMNIST they are upper-case and
    lower-case letters, which share 26 labels. All classes are equally likely on every client, and
    rows are drawn with replacement. `extra["shares"]` holds the actual shares
    [clients, components], and `extra["component"]` the component of every row.

    Parameters
    ----------
    source
        Name of the data set.
    n_clients
        Number of clients.
    n_components
        Number of components: 2 or 3, for EMNIST 2.
    shares
        "linear": client i has the share (i + 0.5) / `n_clients` of component 0. "random": the
        shares are drawn uniformly.
    sizes
        Smallest and largest number of training rows of a client.
    test
        Number of test rows of a client, in the same shares.
    seed
        Seed of the partition.
    data_dir
        Folder of the data sets; None for the usual folders.
    """
    pool = sources.load(source, data_dir)
    letters = len(pool.classes) == 62
    most = 2 if letters else 3
    if not 2 <= n_components <= most:
        raise ConfigError(
            f"component_mixture: n_components must be from 2 to {most}, got {n_components}."
        )
    if shares not in ("linear", "random"):
        raise ConfigError(unknown("kind of shares", shares, ("linear", "random")))
    if shares == "linear" and n_components != 2:
        raise ConfigError(
            f"component_mixture: linear shares need n_components = 2, got {n_components}."
        )
    key = fold(seed_key(seed), "mixture")
    if shares == "linear":
        first = (torch.arange(n_clients, dtype=torch.float64) + 0.5) / n_clients
        wanted = torch.stack([first, 1 - first], 1)  # [m, k]
    else:  # uniform over the simplex; for two components the first share is uniform
        wanted = dirichlet_shares(1.0, (n_clients, n_components), fold(key, "shares"))
    low, high = sizes
    draw = uniform(fold(key, "sizes"), (n_clients,), torch.float64)
    n = (low + (draw * (high - low + 1)).floor()).long()  # [m]
    names, supply = _supply(pool, letters, n_components, key)
    parts: dict[str, list[Tensor]] = {"rows": [], "component": []}
    blocks: list[int] = []
    for split in SPLITS:
        for i in range(n_clients):
            count = whole(wanted[i], int(n[i]) if split == "train" else test)  # [k]
            component = torch.arange(n_components).repeat_interleave(count)
            own = fold(key, split, i)
            label = (uniform(fold(own, "label"), component.shape) * len(names)).long()
            place = uniform(fold(own, "row"), component.shape, torch.float64)
            choice = supply[split]
            picked = [
                choice[int(j)][int(c)][int(p * len(choice[int(j)][int(c)]))]
                for j, c, p in zip(component, label, place, strict=True)
            ]
            parts["rows"].append(torch.tensor(picked, dtype=torch.int64))
            parts["component"].append(component)
            blocks.append(len(component))
    rows, component = torch.cat(parts["rows"]), torch.cat(parts["component"])
    x, y = pool.x[rows], pool.y[rows].long()
    if letters:
        y = torch.where(component == 0, y - 10, y - 36)
    else:
        for j in range(1, n_components):
            x[component == j] = torch.rot90(x[component == j], j, (-2, -1))
    ends = sum(blocks[:n_clients])
    got = torch.stack(
        [torch.bincount(part, minlength=n_components) for part in parts["component"][:n_clients]]
    )
    return FederatedData(
        x,
        y.to(torch.uint8),
        {
            "train": RowIndex.blocks(blocks[:n_clients]),
            "test": RowIndex.blocks(blocks[n_clients:], start=ends),
        },
        names=tuple(f"client-{i}" for i in range(n_clients)),
        task="classification",
        n_outputs=len(names),
        transform=unit_scale,
        truth=got.argmax(1),
        extra={"shares": (got / got.sum(1, keepdim=True)).float(), "component": component},
        classes=names,
        notes=pool.notes,
    )


def _supply(
    pool: Pool, letters: bool, n_components: int, key: Tensor
) -> tuple[tuple[str, ...], dict[str, list[list[Tensor]]]]:
    """The labels, and the rows to draw from for each split, component and label."""
    rows = {split: pool.rows(split) for split in SPLITS}
    if not len(
        rows["train"]
    ):  # only the test split was found: a sixth of each class is for testing
        own = [of_class(pool, "test", c, key) for c in range(len(pool.classes))]
        cut = [(len(part) + 5) // 6 for part in own]
        rows["test"] = torch.cat([part[:n] for part, n in zip(own, cut, strict=True)])
        rows["train"] = torch.cat([part[n:] for part, n in zip(own, cut, strict=True)])
    offsets = (10, 36) if letters else (0,) * n_components
    names = pool.classes[10:36] if letters else pool.classes
    supply = {
        split: [[own[pool.y[own] == offset + c] for c in range(len(names))] for offset in offsets]
        for split, own in rows.items()
    }
    return names, supply
