"""The goals of mosaic: groups found on synthetic and real data, compared with rivals that know K.

No decision was based on the seeds used here. The global ARI is over all samples of all clients; the
per-client ARI is the mean of each client's own ARI. The rivals are k-FED (ten local starts, k-means
on the server), federated k-means (ten rounds) and a central spherical mixture with five starts on
the pooled data. Clients know their number of components, as in the paper. On real data there are
two more rows without a goal: mosaic with spherical components in the units of the samples, and
mosaic with clients that count their components. With 100 clients there is a third: mosaic in which
a group never has two components of the same client.
Run one bar: `python -m coterie_lab.studies.mosaic_bars --bar 5`.
"""

import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import multivariate_normal
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

from coterie.algorithms import FederatedKMeans, Mosaic
from coterie.algorithms.mosaic import merging
from coterie.algorithms.mosaic.privacy import noise_for
from coterie.core.algorithm import Algorithm, grow, per_client_fields, play
from coterie.core.errors import DataError
from coterie.core.tree import row
from coterie.data import FederatedData
from coterie.data.mixture import (
    federate,
    mixture_sensitivity,
    mixture_tight,
)
from coterie.engines import Simulation
from coterie.running.evaluation import components
from coterie_lab import sources
from coterie_lab.central import central_gmm
from coterie_lab.partitions.classes import share_classes, split_classes
from coterie_lab.studies.common import options, table, write
from coterie_lab.studies.thorough_kfed import ThoroughKFed

Make = Callable[[int], FederatedData]
MOST = "k-FED, most first"  # it starts with the client that has the most centres
ROUND = "mosaic, tied"  # spherical components in the units of the samples
OWN = "mosaic, clients count"  # the default: clients do not know their number of components
STRICT = "mosaic, exclusive"  # two components of a client are never in one group
BESIDE: dict[str, Algorithm] = {
    ROUND: Mosaic(n_components="facts", covariance="tied"),
    OWN: Mosaic(),
}
FIRST = 700  # no decision was based on seeds from here on; see --first


def fit(method: Algorithm, data: FederatedData, seed: int) -> tuple[Simulation, Any]:
    """Run a method until it is finished."""
    fed = Simulation(data, seed)
    for state, _ in play(method, fed):  # noqa: B007 - the last one counts
        pass
    return fed, state


def both(labels: list[np.ndarray], true: list[np.ndarray]) -> tuple[float, float]:
    """The global ARI and the mean ARI over clients."""
    whole = adjusted_rand_score(np.concatenate(true), np.concatenate(labels))
    own = [adjusted_rand_score(t, f) for t, f in zip(true, labels, strict=True)]
    return float(whole), float(np.mean(own))


def score(method: Algorithm, data: FederatedData, seed: int) -> dict[str, float]:
    """Run a method; return the number of groups, both ARIs and the seconds."""
    began = time.process_time()
    fed, state = fit(method, data, seed)
    seconds = time.process_time() - began
    whole, own = both(*components(method, fed, state, data))
    k = len(state.groups.n) if hasattr(state, "groups") else len(state.centres)
    return {"K": k, "ari": whole, "own": own, "seconds": seconds}


def central(data: FederatedData, k: int, seed: int) -> dict[str, float]:
    """The central mixture with a given K."""
    rows = data.rows["train"]
    cuts = rows.sizes.cumsum(0)[:-1].numpy()
    labels = central_gmm(data.x[rows.index].numpy(), k, seed)
    whole, own = both(np.split(labels, cuts), np.split(data.y[rows.index].numpy(), cuts))
    return {"K": k, "ari": whole, "own": own}


def rivals(k: int, rounds: int = 10) -> dict[str, Algorithm]:
    """The federated rivals with a given K."""
    return {
        "k-FED": ThoroughKFed(n_clusters=k),
        MOST: ThoroughKFed(n_clusters=k, most_first=True),
        "federated k-means": FederatedKMeans(n_clusters=k, rounds=rounds),
    }


def compare(
    name: str,
    make: Make,
    k: int,
    seeds: int,
    method: Algorithm | None = None,
    rounds: int = 10,
    beside: Mapping[str, Algorithm] | None = None,
) -> dict[str, Any]:
    """Compare mosaic with the rivals in one setting, over all seeds."""
    method = Mosaic(n_components="facts") if method is None else method
    lines: dict[str, list[dict[str, float]]] = {}
    for seed in range(FIRST, FIRST + seeds):
        data = make(seed)
        for who, other in {"mosaic": method, **(beside or {}), **rivals(k, rounds)}.items():
            lines.setdefault(who, []).append(score(other, data, seed))
        lines.setdefault("central EM", []).append(central(data, k, seed))
    mean = {n: {m: float(np.mean([r[m] for r in rs])) for m in rs[0]} for n, rs in lines.items()}
    found = {n: [int(line["K"]) for line in rs] for n, rs in lines.items() if "mosaic" in n}
    exact = {n: sum(own == k for own in counts) for n, counts in found.items()}
    ours = {
        n: f"{exact[n]}/{seeds} exact, {min(counts)}-{max(counts)}" for n, counts in found.items()
    }
    out = [
        [
            name if row == "mosaic" else "",
            row,
            f"{mean[row]['K']:.1f}",
            ours.get(row, "told"),
            f"{mean[row]['ari']:.3f}",
            f"{mean[row]['own']:.3f}",
            f"{mean[row]['seconds']:.1f}" if "seconds" in mean[row] else "",
        ]
        for row in mean
    ]
    for line in out:
        print("| " + " | ".join(map(str, line)) + " |", flush=True)
    return {
        "name": name,
        "K": found["mosaic"],
        "exact": exact["mosaic"],
        "mean": mean,
        "lines": lines,
    }


def verdict(text: str, holds: bool) -> dict[str, Any]:
    """A goal and whether it is met."""
    print(f"{'holds' if holds else 'MISSED'}: {text}", flush=True)
    return {"bar": text, "holds": bool(holds)}


def reduce_dimensions(x: np.ndarray, d: int) -> np.ndarray:
    """Principal components of pooled samples; a test shows that the federated ones are equal."""
    return np.asarray(PCA(d, random_state=0).fit_transform(x))


@cache
def digits(d: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Scikit-learn's digits."""
    x, y = load_digits(return_X_y=True)
    return reduce_dimensions(x / 16, d), y


@cache
def images(name: str, d: int, per_class: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Images of a data set: all, or the first ones of each class."""
    pool = sources.load(name)
    x, y = pool.x.flatten(1).numpy(), pool.y.long().numpy()
    if per_class is not None:
        rows = np.concatenate([np.flatnonzero(y == c)[:per_class] for c in range(y.max() + 1)])
        x, y = x[rows], y[rows]
    return reduce_dimensions(x / np.float32(255), d).astype(np.float64), y


def uci(name: str) -> tuple[np.ndarray, np.ndarray]:
    """A table without changes."""
    pool = sources.load(name)
    return pool.x.double().numpy(), pool.y.long().numpy()


# the goals


def bar_1(seeds: int) -> list[Any]:
    """K exact on separated groups."""
    out, exact = [], 0
    for separation, least in ((4.0, 0.98), (6.0, 0.995), (8.0, 0.999)):
        got = compare(
            f"sens R {separation:g}",
            lambda seed, r=separation: mixture_sensitivity(r, seed=seed),  # type: ignore[misc]
            10,
            seeds,
        )
        exact += got["exact"]
        ari = got["mean"]["mosaic"]["ari"]
        out += [got, verdict(f"sens R {separation:g}: ARI {ari:.4f} >= {least}", ari >= least)]
    settings = {(10, 5, 2, 200, 4.0): 0.95, (30, 10, 10, 200, 6.0): 0.995}
    settings |= {(50, 20, 10, 200, 5.0): 0.995, (50, 20, 50, 200, 6.0): 0.995}
    for setting, least in settings.items():
        got = compare(
            f"tight {setting}",
            lambda seed, s=setting: mixture_tight(*s, seed=seed),  # type: ignore[misc]
            setting[1],
            seeds,
        )
        exact += got["exact"]
        ari = got["mean"]["mosaic"]["ari"]
        out += [got, verdict(f"tight {setting}: ARI {ari:.4f} >= {least}", ari >= least)]
    most = 7 * seeds
    out.append(
        verdict(
            f"K exact in {exact} of {most}, at least {68 * most / 70:.0f}", exact >= 68 * most / 70
        )
    )
    return out


def bar_2(seeds: int) -> list[Any]:
    """Small clients, groups four standard deviations apart."""
    make = lambda seed: mixture_tight(30, 10, 10, 100, 4.0, seed=seed)  # noqa: E731
    got = compare("tight (30, 10, 10, 100, 4)", make, 10, seeds)
    ari = got["mean"]["mosaic"]["ari"]
    return [
        got,
        verdict(
            f"K exact in {got['exact']} of {seeds}, at least {0.9 * seeds:g}",
            got["exact"] >= 0.9 * seeds,
        ),
        verdict(f"ARI {ari:.4f} >= 0.96", ari >= 0.96),
    ]


def bar_3(seeds: int) -> list[Any]:
    """BIC on close Gaussian groups."""
    out: list[Any] = []
    method = Mosaic(n_components="facts", criterion="bic")
    for separation, share, least in ((2.0, 0.9, 0.94), (1.0, 0.6, 0.90)):
        make = lambda seed, r=separation: mixture_sensitivity(r, seed=seed)  # noqa: E731
        got = compare(f"sens R {separation:g}, BIC", make, 10, seeds, method)
        ari, exact = got["mean"]["mosaic"]["ari"], got["exact"]
        out += [
            got,
            verdict(
                f"exact in {exact} of {seeds}, at least {share * seeds:g}", exact >= share * seeds
            ),
            verdict(f"ARI {ari:.4f} >= {least}", ari >= least),
        ]
    return out


def bar_4(seeds: int) -> list[Any]:
    """Groups that are shifted differently on each client."""
    out: list[Any] = []
    method = Mosaic(n_components="facts")
    for n in (200, 1000):
        for shift in (0.2, 0.5, 1.0):  # no bar asks for the last
            runs = [
                score(method, mixture_tight(30, 10, 10, n, 6.0, shift=shift, seed=seed), seed)
                for seed in range(FIRST, FIRST + seeds)
            ]
            counts = [int(run["K"]) for run in runs]
            ari = float(np.mean([run["ari"] for run in runs]))
            text = f"n = {n}, shift {shift}: K {sorted(set(counts))}, ARI {ari:.4f}"
            out.append({"shift": shift, "n": n, "K": counts, "ari": ari})
            if shift < 1:
                out.append(verdict(f"{text}; K = 10 in every run", set(counts) == {10}))
            else:
                print(f"{text}; K = 10 in {counts.count(10)} of {seeds}", flush=True)
    return out


def _margins(
    got: dict[str, Any], em: float, kfed: float, rivals: tuple[str, ...] = ("k-FED",)
) -> list[Any]:
    mean, name = got["mean"], got["name"]
    ours = mean["mosaic"]["ari"]
    out = []
    for rival, margin in (("central EM", em), *((rival, kfed) for rival in rivals)):
        other = mean[rival]["ari"]
        text = f"{name}: ARI {ours:.3f} >= {rival} {other:.3f} {margin:+}"
        out.append(verdict(text, ours >= other + margin))
    return out


def _check_range(got: dict[str, Any], low: float, high: float) -> Any:
    k = got["mean"]["mosaic"]["K"]
    return verdict(f"{got['name']}: mean K {k:.1f} in {low}-{high}", low <= k <= high)


def bar_5(seeds: int) -> list[Any]:
    """Digits."""
    out: list[Any] = []
    for clients, low, high in ((10, 2, 5), (20, 3, 6)):
        make = lambda seed, c=clients, a=low, b=high: split_classes(*digits(), c, a, b, seed)  # noqa: E731
        got = compare(f"digits-20, {clients} clients, {low}-{high}", make, 10, seeds, beside=BESIDE)
        ari = got["mean"]["mosaic"]["ari"]
        out += [got, *_margins(got, 0.12, 0.05), _check_range(got, 10, 12.5)]
        out.append(verdict(f"{got['name']}: ARI {ari:.3f} >= 0.75", ari >= 0.75))
    return out


def bar_6(seeds: int) -> list[Any]:
    """5,000 images of MNIST (the first 500 of each class)."""
    out: list[Any] = []
    for d, clients, low, high in ((20, 10, 2, 5), (20, 20, 3, 6), (50, 10, 2, 5)):
        make = lambda seed, d=d, c=clients, a=low, b=high: split_classes(  # noqa: E731
            *images("mnist", d, 500), c, a, b, seed
        )
        name = f"MNIST-{d}, {clients} clients, {low}-{high}"
        got = compare(name, make, 10, seeds, beside=BESIDE)
        out += [got, *_margins(got, 0.12, 0.03), _check_range(got, 10, 14)]
    return out


def bar_7(seeds: int) -> list[Any]:
    """100 clients."""
    # The goal on Fashion-MNIST begins above its ten classes, so a run that finds exactly ten does
    # not meet it. Strict exclusivity, which splits more, is therefore compared there as well.
    out: list[Any] = []
    beside = {**BESIDE, STRICT: Mosaic(n_components="facts", exclusivity=0.0)}
    for name, least, low, high, judged in (
        ("mnist", 0.46, 10, 14, ["mosaic"]),
        ("fashion_mnist", 0.42, 11, 18, ["mosaic", STRICT]),
    ):
        make = lambda seed, name=name: share_classes(*images(name, 20), 100, 2, 8, 0.7, seed)  # noqa: E731
        got = compare(f"{name} PCA-20, 100 clients", make, 10, seeds, rounds=5, beside=beside)
        out.append(got)
        for who in judged:
            ari, seconds = got["mean"][who]["ari"], got["mean"][who]["seconds"]
            k, what = [int(line["K"]) for line in got["lines"][who]], f"{name}, {who}"
            fits = low <= min(k) and max(k) <= high
            out += [
                verdict(f"{what}: ARI {ari:.3f} >= {least}", ari >= least),
                verdict(f"{what}: K {min(k)}-{max(k)} in {low}-{high}", fits),
                verdict(f"{what}: a fit takes {seconds:.1f} s <= 30 s", seconds <= 30),
            ]
    return out


def bar_8(seeds: int) -> list[Any]:
    """Tables of the UCI repository."""
    # The k-FED paper allows the centres of any client to come first; both choices are rivals. When
    # the goal was set, k-FED had 0.560 and 0.439 on species and genus (ten seeds). On seeds 1000 to
    # 1149 it has 0.638 and 0.539 if it starts with any client, and 0.508 and 0.443 if it starts
    # with the client with the most centres. Means of ten seeds have a standard deviation of 0.06
    # and 0.04, so the goal was probably set with the second choice.
    out: list[Any] = []
    for name, clients, high, k, extra in (
        ("waveform", 10, 3, 3, 1),
        ("anuran_species", 5, 10, 10, 5),
        ("anuran_genus", 5, 8, 8, 5),
        ("abalone", 5, 8, 8, 5),
    ):
        make = lambda seed, n=name, c=clients, b=high: split_classes(*uci(n), c, 2, b, seed)  # noqa: E731
        got = compare(f"{name}, {clients} clients, 2-{high}", make, k, seeds, beside=BESIDE)
        out += [got, *_margins(got, 0.0, -0.03, ("k-FED", MOST)), _check_range(got, 1, k + extra)]
    return out


def bar_9(seeds: int) -> list[Any]:
    """Many components."""
    out: list[Any] = []
    for d, most in ((10, 5.0), (50, None)):
        rng = np.random.default_rng(FIRST)
        mu = rng.normal(size=(100, d))
        gaps = np.linalg.norm(mu[:, None] - mu, axis=2)[np.triu_indices(100, 1)]
        mu *= 6 / gaps.min()
        true = np.concatenate([rng.permutation(100)[:5] for _ in range(2000)])
        n = rng.integers(20, 60, len(true)).astype(float)
        centres = mu[true] + rng.normal(size=(len(true), d)) / np.sqrt(n)[:, None]
        clients = np.repeat(np.arange(2000), 5)
        began, wall = time.process_time(), time.perf_counter()
        got = merging.merge(n, centres, np.ones(len(n)), clients)
        seconds = time.process_time() - began  # processor time of one core
        wall = time.perf_counter() - wall
        ari = adjusted_rand_score(true, got.labels)
        text = (
            f"10,000 components, d = {d}: {seconds:.1f} s ({wall:.1f} s by the clock), "
            f"K {got.labels.max() + 1}, ARI {ari:.3f}"
        )
        out.append(verdict(text, ari == 1 and (most is None or seconds < most)))
    data = mixture_tight(100, 20, 50, 300, 6.0, 8, 8, seed=FIRST)
    line = score(Mosaic(n_components="facts"), data, FIRST)
    text = f"100 clients x 8 components x 50 dimensions: {line['seconds']:.1f} s, K {line['K']}"
    out.append(verdict(f"{text}, ARI {line['ari']:.3f}", line["seconds"] < 30))
    return out


def bar_11(seeds: int) -> list[Any]:
    """Newcomers, an unseen group, and noise on refinement."""
    out: list[Any] = []
    method = Mosaic(n_components="facts")
    scores, right, outside, unseen = [], 0, [], []
    for seed in range(FIRST, FIRST + seeds):
        data = mixture_tight(31, 10, 10, 200, 5.0, seed=seed)
        _, state = fit(method, data.subset(torch.arange(30)), seed)
        own = {name: getattr(state, name)[:0] for name in per_client_fields(state)}
        nobody = state._replace(**own)
        last = data.gather("train", torch.tensor([30]))
        far = torch.from_numpy(np.random.default_rng(seed).normal(size=(60, 10))) + 30.0
        for x, note in ((last.x[0], True), (torch.cat([last.x[0], far]), False)):
            alone = federate([x.numpy()], [np.zeros(len(x), dtype=int)], [1], 10)
            new = Simulation(alone, seed)
            new.begin(99)
            with new.aside():
                _, evidence = method.place(new, grow(nobody, 1), new.everyone())
            with new.aside():
                given = method.deploy(state, new.everyone())
                personal = row(new.map(method.personalise, given, to=new.everyone())[1], 0)
            share = float(evidence.score[0]) * 0.05
            if not note:
                unseen.append(share)
                continue
            outside.append(share)
            right += int((personal["weights"] > 0).sum()) == int(
                data.client_facts["n_components"][30]
            )
            labels = method.predict(personal, x).argmax(1).numpy()
            scores.append(adjusted_rand_score(last.y[0].numpy(), labels))
    out += [
        verdict(
            f"newcomer: ARI {np.mean(scores):.3f} (min {min(scores):.3f}) >= 0.98",
            np.mean(scores) >= 0.98,
        ),
        verdict(f"number of its groups right in {right} of {seeds}", right >= 0.9 * seeds),
        verdict(f"outside share {np.mean(outside):.4f} (0.001 expected)", np.mean(outside) < 0.005),
        verdict(
            f"with 60 of 260 unseen: {np.mean(unseen):.3f} (0.231)",
            abs(np.mean(unseen) - 60 / 260) < 0.01,
        ),
    ]
    for eps in (0.5, 1.0, 2.0, 4.0):
        runs = []
        for seed in range(FIRST, FIRST + seeds):
            data = mixture_tight(30, 10, 10, 200, 4.0, seed=seed)
            clip = float((data.x - data.x.mean(0)).norm(dim=1).max())
            private = Mosaic(n_components="facts", refine=5, noise=noise_for(eps, 5), clip=clip)
            runs.append(score(private, data, seed)["ari"])
        text = f"noise at eps = {eps:g}: ARI {np.mean(runs):.3f}"
        out.append(
            verdict(text + (" >= 0.96" if eps == 2 else ""), eps != 2 or np.mean(runs) >= 0.96)
        )
    return out


def _draw_shapes(seed: int, kind: str, separation: float) -> FederatedData:
    """Groups with covariances of eigenvalues 0.2 to 3: one for all, different, or axis-parallel.

    The ratio between successive eigenvalues is constant. With this rule, a central spherical
    mixture has about the same ARI on seeds 0 to 4 as when the goal was set: 0.966, 0.936, 0.962
    instead of 0.969, 0.951, 0.962. With constant differences it has 0.907, 0.886, 0.935.
    """
    rng = np.random.default_rng([seed, 9])
    data = mixture_tight(20, 8, 5, 400, separation, seed=seed)
    shapes = []
    for _ in range(8):
        turn = np.eye(5) if kind == "axis-parallel" else np.linalg.qr(rng.normal(size=(5, 5)))[0]
        shapes.append(turn * np.sqrt(rng.permutation(np.geomspace(0.2, 3, 5))))
    if kind == "one":
        shapes = [shapes[0]] * 8
    means = np.stack([data.extra["centres"][k] for k in range(8)])
    y = data.y.numpy()
    noise = data.x.numpy() - means[y]
    x = means[y] + np.einsum("nij,nj->ni", np.stack(shapes)[y], noise)
    sizes = data.rows["train"].sizes.cumsum(0)[:-1].numpy()
    counts = data.client_facts["n_components"].tolist()
    return federate(np.split(x, sizes), np.split(y, sizes), counts, 8)


def _classify_exactly(data: FederatedData, one: bool) -> float:
    """The ARI of a classifier that knows the means and covariances, and each client's groups."""
    rows = data.rows["train"]
    x, y = data.x[rows.index].numpy(), data.y[rows.index].numpy()
    cuts = rows.sizes.cumsum(0)[:-1].numpy()
    means = [x[y == k].mean(0) for k in range(8)]
    shapes = [np.cov(x[y == k].T) for k in range(8)]
    if one:
        shapes = [np.average(shapes, axis=0, weights=np.bincount(y))] * 8
    labels = []
    for own, truth in zip(np.split(x, cuts), np.split(y, cuts), strict=True):
        held, n = np.unique(truth, return_counts=True)
        density = [multivariate_normal(means[k], shapes[k]).logpdf(own) for k in held]
        labels.append(held[(np.stack(density, 1) + np.log(n)).argmax(1)])
    return float(adjusted_rand_score(y, np.concatenate(labels)))


def bar_12(seeds: int) -> list[Any]:
    """Other covariances."""
    out: list[Any] = []
    for separation in (5.0, 7.0):
        for kind in ("one", "own", "axis-parallel"):
            data = [_draw_shapes(seed, kind, separation) for seed in range(FIRST, FIRST + seeds)]
            ceiling = np.mean([_classify_exactly(one, kind == "one") for one in data])
            print(f"{kind}, R = {separation:g}: with known means and covariances {ceiling:.4f}")
            for covariance in ("spherical", "diagonal", "full"):
                method = Mosaic(n_components="facts", covariance=covariance)  # type: ignore[arg-type]
                runs = [score(method, one, FIRST + i) for i, one in enumerate(data)]
                counts = [int(run["K"]) for run in runs]
                ari = float(np.mean([run["ari"] for run in runs]))
                name, seen = f"{kind}, R = {separation:g}, {covariance}", sorted(set(counts))
                text = f"{name}: K {seen}, ARI {ari:.3f}"
                good = set(counts) == {8} and (covariance != "full" or ari >= 0.99)
                out.append(verdict(text, good))
    return out


BARS = {
    1: bar_1,
    2: bar_2,
    3: bar_3,
    4: bar_4,
    5: bar_5,
    6: bar_6,
    7: bar_7,
    8: bar_8,
    9: bar_9,
    11: bar_11,
    12: bar_12,
}
SEEDS = {9: 1}


def main() -> None:
    global FIRST
    parser = options(__doc__, 10)
    parser.add_argument("--bar", type=int, nargs="*", default=list(BARS), choices=list(BARS))
    parser.add_argument("--first", type=int, default=FIRST, help="first seed")
    arguments = parser.parse_args()
    FIRST = arguments.first
    figures = {}
    for number in arguments.bar:
        seeds = min(arguments.seeds, SEEDS.get(number, arguments.seeds))
        table(
            f"{number}. {BARS[number].__doc__} {seeds} seeds from {FIRST}.",
            ["data", "method", "K", "", "ARI", "per client", "seconds"],
            [],
        )
        began = time.perf_counter()
        try:
            figures[number] = BARS[number](seeds)
        except DataError as error:
            print(f"left out: {error}")
            continue
        print(f"({time.perf_counter() - began:.0f} s)")
        write(arguments.json and Path(f"{arguments.json}.{number}"), figures[number])
    missed = [v["bar"] for bar in figures.values() for v in bar if v.get("holds") is False]
    print(f"\n{len(missed)} missed" + "".join(f"\n  {text}" for text in missed))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
