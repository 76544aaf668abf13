"""Functions that several studies use: runs, partitions, tables and files."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from coterie.core import Algorithm, Federation, Info, LocalSGD, Model
from coterie.data import FederatedData, from_arrays, make
from coterie.models import make as make_model


def options(description: str, seeds: int) -> argparse.ArgumentParser:
    """The common options of all studies. One thread, so that several studies can run at once."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=seeds, help="number of seeds, starting at 0")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser


def run(
    algorithm: Algorithm, fed: Federation, rounds: int, state: Any = None
) -> Iterator[tuple[Any, Info]]:
    """Run some rounds from `init` or from a given state; yield state and info of each round."""
    if state is None:
        fed.begin(-1)
        state = algorithm.init(fed)
        fed.commit()
    for number in range(rounds):
        fed.begin(number)
        state, info = algorithm.step(fed, state)
        fed.commit()
        yield state, info


# Partitions of MNIST: the problem, clients per group, groups used, true number of groups.
PARTITIONS: dict[str, tuple[dict[str, Any], int, tuple[int, ...] | None, int]] = {
    "IID": ({"name": "published_feature_skew"}, 25, (0,), 1),
    "rot 2": ({"name": "published_feature_skew"}, 10, (0, 2), 2),
    "concept 2": ({"name": "published_concept_shift"}, 10, (0, 1), 2),
    "rot 4": ({"name": "published_feature_skew"}, 6, None, 4),
    "concept 4": ({"name": "published_concept_shift"}, 6, None, 4),
    "LS1": ({"name": "published_label_skew", "kind": 1}, 5, None, 5),
    "LS3": ({"name": "published_label_skew", "kind": 3}, 5, None, 5),
    "LS4": ({"name": "published_label_skew", "kind": 4}, 5, None, 10),
}
LOCAL = LocalSGD(0.01, batch_size=100, optimizer="adam")


def partition(name: str, seed: int, n: int = 500, per_group: int | None = None) -> FederatedData:
    """A partition of MNIST by name; the seed decides the rows of the clients."""
    if name == "own labels":  # twelve clients, each numbering the classes in a different order
        data = partition("IID", seed, n, 12)
        draw = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(10, generator=draw) for _ in range(12)]
        parts = {}
        for split in ("train", "test"):
            batch = data.gather(split, torch.arange(12))
            labels = [order[y.long()] for order, y in zip(orders, batch.y, strict=True)]
            parts[split] = list(batch.x), labels
        known = {"test": parts["test"], "n_outputs": 10, "task": "classification"}
        return from_arrays(*parts["train"], truth=list(range(12)), **known)
    problem, clients, kept, _ = PARTITIONS[name]
    options = {**problem, "clients_per_group": per_group or clients, "n": n, "seed": seed}
    data = make(options.pop("name"), **options)
    if kept is None:
        return data
    assert data.truth is not None
    return data.subset(torch.isin(data.truth, torch.tensor(kept)).nonzero().flatten())


def small_net(data: FederatedData) -> Model:
    """CLoVE's network for grey images."""
    return Model(make_model("grey_cnn", data))


class Store:
    """Figures by name, written to a file at once; figures in the file are not computed again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        there = path is not None and path.exists()
        self.figures: dict[str, Any] = json.loads(path.read_text()) if there and path else {}

    def __contains__(self, name: str) -> bool:
        return name in self.figures

    def put(self, name: str, value: Any) -> None:
        """Store a figure and write the file."""
        self.figures[name] = value
        if self.path is not None:
            aside = self.path.with_suffix(".part")
            aside.write_text(json.dumps(self.figures, indent=1) + "\n")
            aside.replace(self.path)


def stays(values: list[float | None], level: float = 1.0) -> int | None:
    """The first round, from 1, after which the value never falls below a level; None if never."""
    below = [i for i, value in enumerate(values) if value is None or value < level - 1e-12]
    first = below[-1] + 2 if below else 1
    return first if first <= len(values) else None


def table(title: str, names: list[str], lines: list[list[Any]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n")
    print("| " + " | ".join(names) + " |")
    print("|" + " --- |" * len(names))
    for line in lines:
        print("| " + " | ".join(_format(value) for value in line) + " |", flush=True)


def write(path: Path | None, figures: Any) -> None:
    """Write all figures to a file, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


def _format(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_format(part) for part in value)
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
