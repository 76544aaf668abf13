"""Operating characteristics of the grouping by replication, on networks that were never trained.

    python -m coterie_lab.studies.evidence_rows --seeds 100 --json rows.jsonl
    python -m coterie_lab.studies.evidence_rows --rows a3,odd-60 --seeds 20 --json rows.jsonl

Each row is a kind of federation whose groups and odd clients are known. An answer is exact if the
number of groups, the members and the odd clients are all right. Every result is appended to the
file as it comes; what stands there is not computed again. `--first` is the first seed: rules were
designed on seeds below 1000.

Images are 8 x 8 digits of scikit-learn or MNIST at half size; `breast-cancer` is scikit-learn's
table; the networks are perceptrons with one hidden layer of 32.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor

from coterie.core.client import Batch
from coterie.core.model import Model
from coterie.core.random import fold, seed_key
from coterie.evidence.grouping import find_groups
from coterie.evidence.summaries import (
    Rows,
    Summary,
    assign_folds,
    average_units,
    number_distinct,
    share_rows,
    summarise,
)
from coterie.models.mlp import MLP
from coterie_lab import sources
from coterie_lab.studies.common import options, table


class Case(NamedTuple):
    """A federation: rows of all clients, and what is true of them."""

    x: np.ndarray  # [n, d]
    y: np.ndarray  # [n]  classes, or numbers
    client: np.ndarray  # [n]
    truth: np.ndarray  # [m]  set of each client; a set of one is odd
    unit: np.ndarray | None = None  # [n]
    by_client: bool = False  # the answer must be: client by client
    shares: bool = False  # compare shares of labels instead of losses
    networks: int = 16


# data


@cache
def images(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images between 0 and 1, and their classes."""
    if name == "digits":
        digits = load_digits()
        return digits.images / 16.0, digits.target.astype(np.int64)
    pool = sources.load("mnist")
    x = torch.as_tensor(pool.x).float().reshape(-1, 1, 28, 28)
    small = torch.nn.functional.avg_pool2d(x, 2)[:, 0].numpy()
    return small / small.max(), np.asarray(pool.y).astype(np.int64)


def cut(name: str, sizes: list[int], rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Images without repeats for clients of these sizes, and whose they are."""
    x, y = images(name)
    rows = rng.permutation(len(x))[: sum(sizes)]
    return x[rows].copy(), y[rows].copy(), np.repeat(np.arange(len(sizes)), sizes)


def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)


def relabel(y: np.ndarray, rows: np.ndarray, order: np.ndarray) -> None:
    y[rows] = order[y[rows]]


def derangement(c: int, rng: np.random.Generator) -> np.ndarray:
    """An order of classes that leaves none in its place."""
    while True:
        order = rng.permutation(c)
        if (order != np.arange(c)).all():
            return order


def odd_ones(m: int, alike: list[int], rng: np.random.Generator) -> Case:
    """Clients of 40 to 120 MNIST images; `alike` lists how many share each strange labelling."""
    x, y, client = cut("mnist", rng.integers(40, 121, m).tolist(), rng)
    truth = np.zeros(m, int)
    strange = rng.permutation(m)
    for number, size in enumerate(alike, 1):
        chosen, strange = strange[:size], strange[size:]
        relabel(y, np.isin(client, chosen), derangement(10, rng))
        truth[chosen] = number
    return Case(flat(x), y, client, truth)


def breast(m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = load_breast_cancer()
    rows = rng.permutation(len(data.target))
    return data.data[rows].copy(), data.target[rows].copy(), np.arange(len(rows)) % m


def scaled(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


def hospitals(rng: np.random.Generator) -> Case:
    """A2: ten sites; five as they are, four with labels flipped, one with two columns in mm."""
    x, y, client = breast(10, rng)
    truth = np.array([0] * 5 + [1] * 4 + [2])
    rng.shuffle(truth)
    flipped = truth[client] == 1
    y[flipped] = 1 - y[flipped]
    columns = rng.choice(x.shape[1], 2, replace=False)
    x[np.ix_(truth[client] == 2, columns)] *= 10
    return Case(scaled(x), y, client, truth)


def nine_sites(networks: int) -> Callable[[np.random.Generator], Case]:
    """A3: nine sites in three groups: as they are, labels flipped, columns reversed."""

    def make(rng: np.random.Generator) -> Case:
        x, y, client = breast(11, rng)
        kept = client < 9
        x, y, client = scaled(x[kept]), y[kept], client[kept]
        truth = np.repeat(np.arange(3), 3)
        group = truth[client]
        y[group == 1] = 1 - y[group == 1]
        x[group == 2] = x[group == 2][:, ::-1]
        return Case(x, y, client, truth, networks=networks)

    return make


def turned_digits(rng: np.random.Generator) -> Case:
    """Twenty clients of 89 digits, turned by 0, 90, 180 and 270 degrees."""
    x, y, client = cut("digits", [89] * 20, rng)
    truth = np.arange(20) % 4
    for turn in range(1, 4):
        rows = truth[client] == turn
        x[rows] = np.rot90(x[rows], turn, axes=(1, 2))
    return Case(flat(x), y, client, truth)


def three_and_eight(rng: np.random.Generator) -> Case:
    """A9: three groups of six clients; one has its images turned, one 3 and 8 exchanged."""
    x, y, client = cut("digits", [99] * 18, rng)
    truth = np.arange(18) % 3
    x[truth[client] == 1] = np.rot90(x[truth[client] == 1], 1, axes=(1, 2))
    order = np.arange(10)
    order[[3, 8]] = 8, 3
    relabel(y, truth[client] == 2, order)
    return Case(flat(x), y, client, truth)


def surfaces(groups: int, networks: int) -> Callable[[np.random.Generator], Case]:
    """A8: fifteen plants of 60 rows, six inputs, a response surface for each group."""

    def make(rng: np.random.Generator) -> Case:
        m, n = 15, 60
        client = np.repeat(np.arange(m), n)
        x = rng.normal(size=(m * n, 6))
        truth = np.arange(m) % groups
        linear, bend = rng.normal(size=(groups, 6)), rng.normal(size=(groups, 6)) / 2
        of = truth[client]
        y = (x * linear[of]).sum(1) + (x**2 * bend[of]).sum(1) + rng.normal(size=m * n)
        return Case(x, (y - y.mean()) / y.std(), client, truth, networks=networks)

    return make


def four_labels(rng: np.random.Generator) -> Case:
    """Thirty clients of 40 rows of four Gaussian classes; labels turned by 0, 1 or 2."""
    m, n = 30, 40
    client = np.repeat(np.arange(m), n)
    y = rng.integers(0, 4, m * n)
    x = rng.normal(size=(m * n, 8)) + rng.normal(size=(4, 8))[y]
    truth = np.arange(m) % 3
    return Case(x, (y + truth[client]) % 4, client, truth)


def own_rules(rng: np.random.Generator) -> Case:
    """Twenty clients of 89 digits, each with its own order of labels."""
    x, y, client = cut("digits", [89] * 20, rng)
    for c in range(20):
        relabel(y, client == c, rng.permutation(10))
    return Case(flat(x), y, client, np.arange(20), by_client=True)


def repeats(kind: str) -> Callable[[np.random.Generator], Case]:
    """A5: MNIST in two groups; rows repeated up to three times, or five noisy rows a patient."""

    def make(rng: np.random.Generator) -> Case:
        x, y, client = cut("mnist", [60] * 16, rng)
        truth = np.arange(16) % 2
        relabel(y, truth[client] == 1, derangement(10, rng))
        often = np.full(len(y), 5) if kind == "patients" else rng.integers(1, 4, len(y))
        rows = np.repeat(np.arange(len(y)), often)
        seen = flat(x)[rows]
        if kind == "patients":
            seen = seen + rng.normal(size=seen.shape) * 0.05
        unit = None if kind == "unnamed" else rows
        if kind == "found":  # exact repeats are detected
            columns = torch.tensor(seen), torch.tensor(y[rows]), torch.tensor(client[rows])
            unit = number_distinct(*columns).numpy()
        return Case(seen, y[rows], client[rows], truth, unit)

    return make


def label_shares(groups: int) -> Callable[[np.random.Generator], Case]:
    """Twenty clients of 60 rows of four classes; groups differ in how often they have each."""

    def make(rng: np.random.Generator) -> Case:
        m, n = 20, 60
        truth = np.arange(m) % groups
        share = rng.dirichlet(np.ones(4), groups)
        y = np.concatenate([rng.choice(4, n, p=share[g]) for g in truth])
        return Case(np.zeros((m * n, 1)), y, np.repeat(np.arange(m), n), truth, shares=True)

    return make


def nothing(
    m: int, n: int | tuple[int, int], c: int | str, tails: bool = False
) -> Callable[[np.random.Generator], Case]:
    """No groups: m clients of n rows; c classes, "regression" or "unlabelled"."""

    def make(rng: np.random.Generator) -> Case:
        low, high = n if isinstance(n, tuple) else (n, n)
        sizes = np.exp(rng.uniform(np.log(low), np.log(high + 0.99), m)).astype(int)
        client = np.repeat(np.arange(m), sizes)
        total = len(client)
        x = rng.standard_t(2, size=(total, 8)) if tails else rng.normal(size=(total, 8))
        if isinstance(c, int):
            y = rng.choice(c, total, p=rng.dirichlet(np.full(c, 3.0)))
            x = x + rng.normal(size=(c, 8))[y]
        elif c == "regression":
            noise = rng.standard_t(2, size=total) if tails else rng.normal(size=total)
            y = x @ rng.normal(size=8) + noise
        else:
            y = np.zeros(total)
        return Case(x, y, client, np.zeros(m, int), networks=16 if isinstance(c, int) else 64)

    return make


ROWS: dict[str, Callable[[np.random.Generator], Case]] = {
    "odd-20": lambda rng: odd_ones(20, [1], rng),
    "odd-60": lambda rng: odd_ones(60, [1], rng),
    "odd-150": lambda rng: odd_ones(150, [1], rng),
    "unlike-20": lambda rng: odd_ones(20, [1, 1], rng),
    "pair-20": lambda rng: odd_ones(20, [2], rng),
    "pair-60": lambda rng: odd_ones(60, [2], rng),
    "trio-60": lambda rng: odd_ones(60, [3], rng),
    "a2": hospitals,
    "a3-16": nine_sites(16),
    "a3-64": nine_sites(64),
    "a5-unnamed": repeats("unnamed"),
    "a5-found": repeats("found"),
    "a5-named": repeats("named"),
    "a5-patients": repeats("patients"),
    "a8-16": surfaces(3, 16),
    "a8-64": surfaces(3, 64),
    "a9": three_and_eight,
    "four-labels": four_labels,
    "own-rules": own_rules,
    "digits": turned_digits,
    "shares-2": label_shares(2),
    "null-shares": label_shares(1),
    "null-3": nothing(3, 100, 3),
    "null-5-small": nothing(5, 20, 2),
    "null-10": nothing(10, 60, 2),
    "null-20": nothing(20, 60, 3),
    "null-20-many": nothing(20, 1000, 3),
    "null-20-unequal": nothing(20, (10, 1000), 10),
    "null-60": nothing(60, 40, 10),
    "null-60-tiny": nothing(60, 10, 2),
    "null-200": nothing(200, 30, 3),
    "null-20-tails": nothing(20, 60, 3, tails=True),
    "null-60-unequal-tails": nothing(60, (10, 300), 2, tails=True),
    "null-20-regression": nothing(20, 60, "regression"),
    "null-20-regression-tails": nothing(20, 60, "regression", tails=True),
    "null-20-unlabelled": nothing(20, 60, "unlabelled"),
    "null-10-unlabelled-tails": nothing(10, (20, 200), "unlabelled", tails=True),
}


# what clients would send


def network(case: Case) -> Model:
    """A small perceptron for the data."""
    d = case.x.shape[1]
    if case.y.dtype.kind == "i":
        return Model(lambda: MLP(d, int(case.y.max()) + 1))
    if not case.y.any():
        return Model(lambda: MLP(d, d), loss="reconstruction")
    return Model(lambda: MLP(d, 1), loss="squared_error")


def ask(case: Case, seed: int) -> Summary:
    """What the clients of a federation answer."""
    n, m = len(case.y), int(case.client.max()) + 1
    classes = int(case.y.max()) + 1 if case.y.dtype.kind == "i" else 1
    everyone = torch.ones(n, dtype=torch.bool)
    unit = torch.arange(n) if case.unit is None else torch.tensor(case.unit)
    label = torch.tensor(case.y) if classes > 1 else torch.zeros(n, dtype=torch.int64)
    if case.shares:
        rows, classes = share_rows(label, unit, everyone, classes), 1
    else:
        x, y = torch.tensor(case.x).float(), torch.tensor(case.y)
        y = y if classes > 1 else y.float()
        batch = Batch(x, y, everyone, torch.ones(n))
        values = network(case).probe_random(seed_key(seed), case.networks, batch)
        rows = Rows(values.double(), label, unit, everyone)
    parts = []
    for c in range(m):
        ids = torch.tensor(np.flatnonzero(case.client == c))
        own = average_units(Rows(rows.values[:, ids], *(part[ids] for part in rows[1:])))
        folds = assign_folds(fold(seed_key(seed), "folds", c), own, classes)
        parts.append(summarise(own, folds, classes))
    count, mean, scatter = (torch.stack(part) for part in zip(*parts, strict=True))
    return Summary(count, mean, scatter.sum(0))


def judge(case: Case, seed: int) -> dict[str, Any]:
    """What the rule says, and whether it is right."""
    start = time.perf_counter()
    answers = ask(case, seed)
    asked = time.perf_counter()
    found = find_groups(answers, fold(seed_key(seed), "groups"))
    sizes = np.bincount(case.truth)
    odd = [] if len(sizes) == 1 else np.flatnonzero(sizes[case.truth] == 1).tolist()
    n_groups = None if case.by_client else int((sizes > 1).sum())
    same = same_sets(found.labels, torch.tensor(case.truth))
    return {
        "exact": found.n_groups == n_groups and (case.by_client or same),
        "sets": bool(same),
        "n_groups": found.n_groups,
        "odd_found": set(odd) <= set(found.odd),
        "false_odd": len(set(found.odd) - set(odd)),
        "explained": round(found.explained, 3),
        "p": [[step.n_sets, *(round(p, 3) for p in step.test[:3])] for step in found.steps],
        "ask": round(asked - start, 2),
        "decide": round(time.perf_counter() - asked, 2),
    }


def same_sets(a: Tensor, b: Tensor) -> bool:
    """Whether two labellings name the same sets."""
    return bool(((a[:, None] == a) == (b[:, None] == b)).all())


def main() -> None:
    parser = options(__doc__.split("\n")[0], seeds=20)
    parser.add_argument("--rows", default="all", help="names, separated by commas; or all")
    parser.add_argument("--first", type=int, default=1000, help="first seed")
    given = parser.parse_args()
    path = given.json or Path("evidence_rows.jsonl")
    names = list(ROWS) if given.rows == "all" else given.rows.split(",")
    seeds = range(given.first, given.first + given.seeds)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(line["row"], line["seed"]) for line in lines}
    for seed in seeds:
        for name in names:
            if (name, seed) not in done:
                case = ROWS[name](np.random.default_rng([seed, crc32(name.encode())]))
                line = {"row": name, "seed": seed, **judge(case, seed)}
                lines.append(line)
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    by_row = defaultdict(list)
    for line in lines:
        if line["row"] in names and line["seed"] in seeds:
            by_row[line["row"]].append(line)
    heads = ["row", "n", "exact", "sets", "all odd found", "false odd", "answers wrong", "seconds"]
    table("Grouping by replication", heads, [summed_up(row, by_row[row]) for row in names])


def summed_up(row: str, lines: list[dict[str, Any]]) -> list[Any]:
    """A line of the table."""
    wrong: dict[str, int] = defaultdict(int)
    for line in lines:
        if not line["exact"]:
            wrong[str(line["n_groups"])] += 1
    return [
        row,
        len(lines),
        sum(line["exact"] for line in lines),
        sum(line["sets"] for line in lines),
        sum(line["odd_found"] for line in lines),
        sum(line["false_odd"] > 0 for line in lines),
        " ".join(f"{k}:{v}" for k, v in sorted(wrong.items())) or "-",
        sum(line["decide"] for line in lines) / max(len(lines), 1),
    ]


if __name__ == "__main__":
    main()
