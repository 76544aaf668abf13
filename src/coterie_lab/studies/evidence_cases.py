"""Federations whose groups and odd clients are known, for `evidence_rows.py`.

Images are 8 x 8 digits of scikit-learn or MNIST at half size; the tables are scikit-learn's breast
cancer data; news are the titles of AG News. Everything else is drawn from formulas.
"""

import csv
import gzip
import io
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits

import coterie
from coterie.core.errors import DataError
from coterie.data import FederatedData
from coterie_lab import sources


class Case(NamedTuple):
    """A federation: rows of all clients, and what is true of them."""

    x: np.ndarray  # [n, d]
    y: np.ndarray  # [n]  classes, or numbers
    client: np.ndarray  # [n]
    truth: np.ndarray  # [m]  set of each client; a set of one is odd
    unit: np.ndarray | None = None  # [n]
    by_client: bool = False  # the answer must be: client by client
    time: np.ndarray | None = None  # [n]


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
    """Ten sites; five as they are, four with labels flipped, one with two columns in mm."""
    x, y, client = breast(10, rng)
    truth = np.array([0] * 5 + [1] * 4 + [2])
    rng.shuffle(truth)
    flipped = truth[client] == 1
    y[flipped] = 1 - y[flipped]
    columns = rng.choice(x.shape[1], 2, replace=False)
    x[np.ix_(truth[client] == 2, columns)] *= 10
    return Case(scaled(x), y, client, truth)


def nine_sites(rng: np.random.Generator) -> Case:
    """Nine sites in three groups: as they are, labels flipped, columns reversed."""
    x, y, client = breast(11, rng)
    kept = client < 9
    x, y, client = scaled(x[kept]), y[kept], client[kept]
    truth = np.repeat(np.arange(3), 3)
    group = truth[client]
    y[group == 1] = 1 - y[group == 1]
    x[group == 2] = x[group == 2][:, ::-1]
    return Case(x, y, client, truth)


def turned_digits(rng: np.random.Generator) -> Case:
    """Twenty clients of 89 digits, turned by 0, 90, 180 and 270 degrees."""
    x, y, client = cut("digits", [89] * 20, rng)
    truth = np.arange(20) % 4
    for turn in range(1, 4):
        rows = truth[client] == turn
        x[rows] = np.rot90(x[rows], turn, axes=(1, 2))
    return Case(flat(x), y, client, truth)


def three_and_eight(rng: np.random.Generator) -> Case:
    """Three groups of six clients; one has its images turned, one 3 and 8 exchanged."""
    x, y, client = cut("digits", [99] * 18, rng)
    truth = np.arange(18) % 3
    x[truth[client] == 1] = np.rot90(x[truth[client] == 1], 1, axes=(1, 2))
    order = np.arange(10)
    order[[3, 8]] = 8, 3
    relabel(y, truth[client] == 2, order)
    return Case(flat(x), y, client, truth)


def surfaces(rng: np.random.Generator) -> Case:
    """Fifteen plants of 60 rows, six inputs, three response surfaces."""
    m, n = 15, 60
    client = np.repeat(np.arange(m), n)
    x = rng.normal(size=(m * n, 6))
    truth = np.arange(m) % 3
    linear, bend = rng.normal(size=(3, 6)), rng.normal(size=(3, 6)) / 2
    of = truth[client]
    y = (x * linear[of]).sum(1) + (x**2 * bend[of]).sum(1) + rng.normal(size=m * n)
    return Case(x, (y - y.mean()) / y.std(), client, truth)


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
    """MNIST in two groups; "distinct" rows, "repeats" of rows, or noisy rows of "patients".

    Rows occur one to three times, those of patients five times. The names of both end in "named"
    if the column with the number of the row, or of the patient, is given.
    """

    def make(rng: np.random.Generator) -> Case:
        x, y, client = cut("mnist", [60] * 16, rng)
        truth = np.arange(16) % 2
        relabel(y, truth[client] == 1, derangement(10, rng))
        if kind == "distinct":
            return Case(flat(x), y, client, truth)
        patients = kind.startswith("patients")
        often = np.full(len(y), 5) if patients else rng.integers(1, 4, len(y))
        rows = np.repeat(np.arange(len(y)), often)
        seen = flat(x)[rows]
        if patients:
            seen = seen + rng.normal(size=seen.shape) * 0.05
        unit = rows if kind.endswith("named") else None
        return Case(seen, y[rows], client[rows], truth, unit)

    return make


def label_shares(groups: int) -> Callable[[np.random.Generator], Case]:
    """Twenty clients of 60 rows of four classes; groups differ in how often they have each."""

    def make(rng: np.random.Generator) -> Case:
        m, n = 20, 60
        truth = np.arange(m) % groups
        share = rng.dirichlet(np.ones(4), groups)
        y = np.concatenate([rng.choice(4, n, p=share[g]) for g in truth])
        x = rng.normal(size=(m * n, 8)) + rng.normal(size=(4, 8))[y]
        return Case(x, y, np.repeat(np.arange(m), n), truth)

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
        return Case(x, y, client, np.zeros(m, int))

    return make


# federations for training


def alike(m: int, n: int) -> Callable[[np.random.Generator], Case]:
    """m clients of n MNIST images, all of one kind."""

    def make(rng: np.random.Generator) -> Case:
        x, y, client = cut("mnist", [n] * m, rng)
        return Case(flat(x), y, client, np.zeros(m, int))

    return make


def turned(m: int, n: int, groups: int) -> Callable[[np.random.Generator], Case]:
    """m clients of n MNIST images, which groups see turned by multiples of 90 degrees."""

    def make(rng: np.random.Generator) -> Case:
        x, y, client = cut("mnist", [n] * m, rng)
        truth = np.arange(m) % groups
        for turn in range(1, groups):
            rows = truth[client] == turn
            x[rows] = np.rot90(x[rows], turn, axes=(1, 2))
        return Case(flat(x), y, client, truth)

    return make


def alike_hospitals(rng: np.random.Generator) -> Case:
    """Ten hospitals of one kind."""
    x, y, client = breast(10, rng)
    return Case(scaled(x), y, client, np.zeros(10, int))


def thousand(rng: np.random.Generator) -> Case:
    """1,000 clients of five rows, half of them with inverted labels."""
    m, n = 1000, 5
    client = np.repeat(np.arange(m), n)
    x = rng.normal(size=(m * n, 8))
    truth = rng.permutation(m) % 2
    y = (x @ rng.normal(size=8) > 0).astype(int)
    return Case(x, np.where(truth[client] == 1, 1 - y, y), client, truth)


def drift(rng: np.random.Generator) -> Case:
    """Two groups whose meanings of the label move towards a common one.

    Each client has 150 rows in the order of time. The rule of a group turns from its own direction
    to the common one over the first 60 % of the time; the rest, and the future, have one rule.
    """
    m, n, d = 16, 150, 8
    client, when = np.repeat(np.arange(m), n), np.tile(np.arange(n), m)
    truth = np.arange(m) % 2
    x = rng.normal(size=(m * n, d))
    axes = np.linalg.qr(rng.normal(size=(d, 2)))[0]
    left = np.clip(1 - when / (0.6 * n), 0, 1)
    angle = np.where(truth[client] == 1, 1, -1) * np.pi * 0.4 * left
    score = (x @ axes[:, 0]) * np.cos(angle) + (x @ axes[:, 1]) * np.sin(angle)
    y = (score + 0.3 * rng.normal(size=m * n) > 0).astype(int)
    return Case(x, y, client, truth, time=when)


def news(rng: np.random.Generator) -> tuple[FederatedData, np.ndarray]:
    """Twelve news desks of 300 articles each, four of which have exchanged topics."""
    found = sources.source("ag_news").find()
    if found is None:
        raise DataError(sources.source("ag_news").missing())
    packed = (found[0] / "ag_news_csv" / "train_subset.csv.gz").read_bytes()
    articles = list(csv.reader(io.StringIO(gzip.decompress(packed).decode())))
    chosen = rng.permutation(len(articles))[: 12 * 300]
    truth = np.array([0] * 8 + [1] * 4)
    rng.shuffle(truth)
    order = derangement(4, rng)
    table: dict[str, list[Any]] = {"desk": [], "title": [], "text": [], "topic": []}
    for place, row in enumerate(chosen):
        desk, topic = place % 12, int(articles[row][0]) - 1
        values = f"desk-{desk:02d}", *articles[row][1:3], f"topic {topic}"
        if truth[desk] == 1:
            values = (*values[:3], f"topic {order[topic]}")
        for column, value in zip(table.values(), values, strict=True):
            column.append(value)
    return coterie.from_table(table, client="desk", label="topic"), truth


class Later(NamedTuple):
    """A federation, and rows of its clients and of newcomers some time later."""

    case: Case
    x: list[np.ndarray]
    y: list[np.ndarray]
    names: list[str]  # client-0, client-1, ... are those of the federation
    groups: list[int]  # now; -1: like no group
    turned: list[int]  # now, by inputs alone


def years_later(rng: np.random.Generator) -> Later:
    """Sixteen clients of 80 MNIST images in three groups, and 50 images of each later.

    Groups: as they are, other labels, images turned. Client 0 has moved to another group, client 1
    has labels of its own, client 2 has its images turned in a new way; the others are as before.
    There are three newcomers: of the first group, of the third, and of none.
    """
    m, n, later = 16, 80, 50
    x, y, _ = cut("mnist", [n] * m + [later] * (m + 3), rng)
    truth = np.arange(m) % 3
    first, second = derangement(10, rng), derangement(10, rng)
    kinds = [*truth.tolist(), *truth.tolist(), 0, 2, 3]
    kinds[m : m + 3] = (truth[0] + 1) % 3, 3, 4
    owner = np.repeat(np.arange(2 * m + 3), [n] * m + [later] * (m + 3))
    for c, kind in enumerate(kinds):
        rows = owner == c
        if kind in (1, 3):
            relabel(y, rows, first if kind == 1 else second)
        if kind in (2, 4):
            x[rows] = np.rot90(x[rows], 1 if kind == 2 else 2, axes=(1, 2))
    old = owner < m
    case = Case(flat(x[old]), y[old], owner[old], truth)
    parts = [owner == c for c in range(m, 2 * m + 3)]
    names = [*(f"client-{i}" for i in range(m)), "guest-0", "guest-2", "guest-none"]
    now = [kind if kind < 3 else -1 for kind in kinds[m:]]
    turned = [2 if kind == 2 else -1 if kind == 4 else 0 for kind in kinds[m:]]
    return Later(
        case, [flat(x[p]).astype(np.float32) for p in parts], [y[p] for p in parts], names, now,
        turned,
    )  # fmt: skip


def sites_later(rng: np.random.Generator) -> Later:
    """Nine sites of 30 rows in three groups, and 25 rows of each later, all as before.

    Breast cancer: as it is, labels flipped, columns reversed.
    """
    x, y, owner = breast(20, rng)
    kept = owner < 18
    x, y, owner = scaled(x[kept]), y[kept], owner[kept]
    truth = np.repeat(np.arange(3), 3)
    group = truth[owner % 9]
    y[group == 1] = 1 - y[group == 1]
    x[group == 2] = x[group == 2][:, ::-1]
    old = owner < 9
    case = Case(x[old], y[old], owner[old], truth)
    parts = [owner == c for c in range(9, 18)]
    names = [f"client-{i}" for i in range(9)]
    turned = [2 if g == 2 else 0 for g in truth]
    return Later(
        case, [x[p].astype(np.float32) for p in parts], [y[p] for p in parts], names,
        truth.tolist(), turned,
    )  # fmt: skip


def federation(case: Case, test_fraction: float = 0.0) -> FederatedData:
    """A case as data that a user has."""
    ids = [np.flatnonzero(case.client == c) for c in range(int(case.client.max()) + 1)]

    def parts(column: np.ndarray | None) -> list[np.ndarray] | None:
        return None if column is None else [column[i] for i in ids]

    labelled = case.y.dtype.kind == "i" or bool(case.y.any())
    xs = [case.x[i].astype(np.float32) for i in ids]
    ys = parts(case.y if case.y.dtype.kind == "i" else case.y.astype(np.float32))
    options = {"unit": parts(case.unit), "time": parts(case.time), "truth": case.truth.tolist()}
    return coterie.from_arrays(xs, ys if labelled else None, test_fraction=test_fraction, **options)
