"""What the survey finds before training: the kind and the number of groups.

    python -m coterie_lab.studies.survey_study --seeds 10 --json survey.json
    python -m coterie_lab.studies.survey_study --only mnist/rot4/500,amazon --json survey.json

The first command takes two hours on one core, mostly for the networks on images. It can be stopped
and started again: every result is written to the JSON file at once and is not repeated.

MNIST and Fashion-MNIST are divided among clients with 500, 100, or 50 to 500 images. Class counts
are multinomial, and no image is used twice until a class is exhausted. The groups are: none (iid),
rotated images (rot2, rot4), swapped labels (concept2, concept4), label frequencies (ls1, ls3, ls4
of the CLoVE paper), rotated images with different label frequencies for each client (rot4-shares),
and only different label frequencies for each client (shares). The other data sets are those on
which the survey may fail: CIFAR-10, FEMNIST (one client per writer), AG News, Amazon reviews,
reconstruction and regression. `newcomers` places new clients by the same survey, and clients that
belong to no group; `ifca` uses the survey to start another method.

Seeds start at 21. The thresholds were not chosen on any of these seeds.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie import metrics
from coterie.algorithms import IFCA
from coterie.algorithms.survey import Survey, seeded
from coterie.core.algorithm import Algorithm
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.data import FederatedData, from_arrays, make
from coterie.engines.simulation import Simulation
from coterie.models import make as make_net
from coterie_lab import sources
from coterie_lab.partitions.pools import swap_labels
from coterie_lab.partitions.published import CONCEPT_SWAPS, LABEL_SKEW_3
from coterie_lab.studies.common import options, run, table

FIRST_SEED = 21
IMAGES = ("mnist", "fashion_mnist")
# name: groups, clients per group, expected kind
CASES = {
    "iid": (1, 25, "one"),
    "rot2": (2, 10, "meaning"),
    "rot4": (4, 6, "meaning"),
    "concept2": (2, 10, "meaning"),
    "concept4": (4, 6, "meaning"),
    "ls1": (5, 5, "labels"),
    "ls3": (5, 5, "labels"),
    "ls4": (10, 5, "labels"),
    "ls3-even": (5, 5, "labels"),  # the same with equal frequencies of the classes of a group
    "rot4-shares": (4, 6, "meaning"),
    "shares": (1, 25, "client by client"),
}
SIZES = ("500", "100", "50-500")


# data


def group_shares(case: str, n_groups: int, generator: torch.Generator) -> Tensor:
    """The label frequencies of each group: [groups, 10]."""
    if case == "ls1":
        return torch.eye(10).reshape(5, 2, 10).mean(1)
    if case == "ls4":
        return torch.eye(10) * 0.666 + (1 - torch.eye(10)) * 0.334 / 9
    owned = torch.ones(n_groups, 10)
    if case.startswith("ls3"):  # each group lacks one class or none
        owned = torch.zeros(5, 10)
        for group, classes in enumerate(LABEL_SKEW_3):
            owned[group, list(classes)] = 1.0
    if case != "ls3":
        return owned / owned.sum(1, keepdim=True)
    reserve, shares = 0.05, torch.zeros(5, 10)  # as published: Dirichlet(.5) plus a reserve
    while shares.sum(1).min() < 1.0:  # a tenth of the images for each group
        reserve += 0.05
        for c in range(10):
            own = owned[:, c].nonzero().flatten()
            drawn = torch._sample_dirichlet(torch.full((len(own),), 0.5), generator)
            shares[own, c] = reserve / len(own) + (1 - reserve) * drawn
    return shares / shares.sum(1, keepdim=True)


def n_samples(size: str, generator: torch.Generator) -> int:
    """The number of samples of one client."""
    low, _, high = size.partition("-")
    return int(torch.randint(int(low), int(high or low) + 1, (1,), generator=generator))


def images(name: str, case: str, size: str, seed: int) -> FederatedData:
    """Clients with training images of a data set with ten classes."""
    pool = sources.load(name)
    generator = torch.Generator().manual_seed(1000 * seed + len(case))
    y = pool.y[: pool.n_train].long()
    rows = [(y == c).nonzero().flatten() for c in range(10)]
    rows = [own[torch.randperm(len(own), generator=generator)] for own in rows]
    taken = [0] * 10
    n_groups, per_group, _ = CASES[case]
    shares = group_shares(case, n_groups, generator)
    xs, ys, truth = [], [], []
    for client in range(n_groups * per_group):
        group = client // per_group
        share = shares[group]
        if "shares" in case:
            share = torch._sample_dirichlet(torch.ones(10), generator)
        n = n_samples(size, generator)
        label = torch.multinomial(share, n, replacement=True, generator=generator)
        index = torch.empty(n, dtype=torch.int64)
        for c in label.unique().tolist():
            own = (label == c).nonzero().flatten()
            places = (taken[c] + torch.arange(len(own))) % len(rows[c])  # pools wrap
            index[own] = rows[c][places]
            taken[c] += len(own)
        x = pool.x[index].float() / 255
        x = x if x.ndim == 4 else x[:, None]
        if case.startswith("rot"):
            x = torch.rot90(x, group * (2 if n_groups == 2 else 1), (2, 3))
        if case.startswith("concept"):
            swaps = ((), ((1, 4), (6, 9)))[group] if n_groups == 2 else CONCEPT_SWAPS[group]
            label = swap_labels(swaps, 10)[label]
        xs.append(x)
        ys.append(label)
        truth.append(group)
    return from_arrays(xs, ys, n_outputs=10, test_fraction=0.0, truth=torch.tensor(truth))


# surveys


def look(
    data: FederatedData, net: str | dict[str, Any], seed: int, networks: int = seeded.MOST_NETWORKS,
    max_groups: int = 15,
) -> dict[str, Any]:  # fmt: skip
    """Run one survey: its answer, how right it is, and its time."""
    name = net if isinstance(net, str) else net["name"]
    extra = {} if isinstance(net, str) else {k: v for k, v in net.items() if k != "name"}
    kind = {"classification": "cross_entropy", "regression": "squared_error"}.get(
        data.task, "reconstruction"
    )
    model = Model(make_net(name, data, **extra), kind)
    method = Survey(model, LocalSGD(batch_size=32), max_groups=max_groups, networks=networks)
    fed = Simulation(data, seed)
    fed.begin(-1)
    began = time.process_time()
    ids, seen = seeded.look(
        method, fed, fed.everyone(), fed.key("survey"), max_groups, most_networks=networks
    )
    assert seen is not None
    seconds = time.process_time() - began
    k = 0 if data.truth is None else int(data.truth.max()) + 1
    return {
        "kind": seen.kind, "k": seen.n_groups, "statistic": seen.statistic,
        "odd": int(seen.odd.sum()), "networks": seen.networks,
        "explained": round(seen.explained, 3), "confidence": round(seen.confidence, 3),
        "worth": round(seen.worth, 4),
        "ari": None if k < 2 else float(metrics.adjusted_rand(seen.labels, data.truth[ids])),
        "seconds": round(seconds, 2), "clients": len(ids),
        "up": int(fed.traffic.totals["setup", "up"][0]),
        "down": int(fed.traffic.totals["setup", "down"][0]),
        "parameters": sum(leaf.numel() for leaf in model.init(torch.tensor(0)).values()),
    }  # fmt: skip


def is_right(line: dict[str, Any], kind: str, k: int) -> bool:
    """Check whether the kind, the number (0: any) and the groups are right."""
    exact = line["ari"] is None or line["ari"] > 0.999
    return bool(line["kind"] == kind and line["k"] in (k, k or line["k"]) and exact)


# newcomers

FOREIGN = ("inverted", "noise", "relabelled", "other set", "half and half", "contrast")


def newcomers(name: str, case: str, seed: int) -> dict[str, Any]:
    """Place new clients by the survey, and clients that belong to no group."""
    data = images(name, case, "500", seed)
    method = Survey(Model(make_net("grey_cnn", data)), LocalSGD(batch_size=32), networks=8)
    fed = Simulation(data, seed)
    fed.begin(-1)
    state = method.init(fed)
    assert data.truth is not None
    meaning = {g: int(data.truth[state.assignment == g].mode().values)
               for g in state.assignment.unique().tolist()}  # fmt: skip
    line: dict[str, Any] = {"k": len(meaning)}
    per_group = CASES[case][1]
    for size in ("50", "100", "500"):
        fresh = images(name, case, size, seed + 500)
        found = weigh_strangers(method, state, fresh)
        right = [
            meaning[g] == int(t) for g, t in zip(found.group.tolist(), fresh.truth, strict=True)
        ]
        line[size] = {
            "right": sum(right) / len(right), "refused": float((~found.fits).double().mean()),
            "margin": round(float(found.margin.median()), 3),
        }  # fmt: skip
    base = images(name, case, "100", seed + 700)
    draw = torch.Generator().manual_seed(seed)
    other = images(IMAGES[1 - IMAGES.index(name)], case, "100", seed + 700)
    batch = [base.gather("train", torch.tensor([i])) for i in range(len(base))]
    for kind in FOREIGN:
        xs, ys = [], []
        for i in range(min(24, len(base))):
            x, y = batch[i].x[0].clone(), batch[i].y[0].clone()
            if kind == "inverted":
                x = 1 - x
            elif kind == "noise":
                x = torch.rand(x.shape, generator=draw)
            elif kind == "relabelled":
                y = (y + 1 + (0 if case != "ls1" else 1)) % 10
            elif kind == "other set":
                theirs = other.gather("train", torch.tensor([i]))
                x, y = theirs.x[0], theirs.y[0]
            elif kind == "half and half":
                j = (i + per_group) % len(base)
                x = torch.cat([x[:50], batch[j].x[0][:50]])
                y = torch.cat([y[:50], batch[j].y[0][:50]])
            else:
                x = 0.35 * x
            xs.append(x)
            ys.append(y)
        strange = from_arrays(xs, ys, n_outputs=10, test_fraction=0.0)
        found = weigh_strangers(method, state, strange)
        line[kind] = float((~found.fits).double().mean())
    return line


def weigh_strangers(method: Algorithm, state: Any, data: FederatedData) -> Any:
    """The evidence on clients that were not in the survey."""
    fed = Simulation(data, 0)
    fed.begin(0)
    nobody = torch.full((len(data),), -1)
    state = state._replace(assignment=nobody, odd=torch.zeros(len(data)))
    _, found = method.place(fed, state, torch.arange(len(data)))
    return found


# regression and reconstruction


def autoencoder(case: str, seed: int) -> dict[str, Any]:
    """Images to reconstruct, without labels: groups by class or by rotation."""
    if case == "one-class":
        data = make("published_one_class", seed=seed)
    else:
        labelled = images("mnist", case, "500", seed)
        parts = [labelled.gather("train", torch.tensor([i])).x[0] for i in range(len(labelled))]
        data = from_arrays(parts, None, test_fraction=0.0, truth=labelled.truth)
    return look(data, "autoencoder", seed)


def regression(case: str, seed: int) -> dict[str, Any]:
    """Regression of the digit on its pixels; groups by rotation, or by the sign of the target."""
    labelled = images("mnist", "rot4" if case == "rot4" else "iid", "500", seed)
    xs, ys, truth = [], [], []
    for i in range(len(labelled)):
        batch = labelled.gather("train", torch.tensor([i]))
        group = int(labelled.truth[i]) if case == "rot4" else (i % 2 if case == "sign" else 0)
        answer = batch.y[0].float() / 4.5 - 1  # the digit as a number
        xs.append(batch.x[0].flatten(1))
        ys.append(-answer if case == "sign" and group else answer)
        truth.append(group)
    data = from_arrays(xs, ys, task="regression", test_fraction=0.0, truth=torch.tensor(truth))
    return look(data, {"name": "mlp", "hidden": (64,)}, seed)


# the survey as the start of another method


def ifca(first: str, seed: int) -> dict[str, Any]:
    """IFCA on rotated digits, 40 clients, 4 groups: the ARI after five rounds.

    The first groups are its own choice ("evaluation"), or those of a survey.
    """
    data = make("digits", n_clients=40, n_groups=4, seed=seed)
    local = LocalSGD(learning_rate=0.01, optimizer="adam", batch_size=32)
    model = Model(make_net("mlp", data))
    fed = Simulation(data, seed)
    if first == "survey":
        fed.begin(-1)
        method = Survey(model, local)
        ids, seen = seeded.look(method, fed, fed.everyone(), fed.key("survey"), 4, 4)
        fed.start = fed.per_client(-1).index_copy(0, ids, seen.labels.masked_fill(seen.odd, -1))
    for state, _ in run(IFCA(model, local, n_groups=4), fed, 5):
        ari = float(metrics.adjusted_rand(state.assignment, data.truth))
    return {"ari": ari}


# all studies


def studies() -> dict[str, tuple[Callable[[int], dict[str, Any]], str, int]]:
    """All studies by name: a function of the seed, and the expected kind and number of groups."""
    out: dict[str, tuple[Callable[[int], dict[str, Any]], str, int]] = {}
    for name in IMAGES:
        for case, (k, _, kind) in CASES.items():
            for size in (*SIZES, "40") if case == "ls4" else SIZES:
                out[f"{name}/{case}/{size}"] = (
                    lambda seed, a=(name, case, size): look(images(*a, seed), "grey_cnn", seed),
                    kind, k,
                )  # fmt: skip
        for case in ("rot4", "concept4", "ls1", "ls4"):
            out[f"newcomers/{name}/{case}"] = (
                lambda seed, a=(name, case): newcomers(*a, seed), "", 0,
            )  # fmt: skip
    amazon = {"name": "mlp", "hidden": (1000, 500, 100)}
    out["amazon"] = (
        lambda seed: look(make("published_reviews", seed=seed), amazon, seed), "meaning", 4,
    )  # fmt: skip
    for case, options_ in (
        ("ls1", {"name": "published_label_skew", "kind": 1, "n": 100}),
        ("rot4", {"name": "published_feature_skew", "clients_per_group": 5, "n": 100}),
        ("concept4", {"name": "published_concept_shift", "n": 100}),
    ):  # four networks and 100 images, because each image takes two milliseconds
        out[f"cifar10/{case}"] = (
            lambda seed, cut=options_: look(
                make(**cut, source="cifar10", seed=seed), "cifar_cnn", seed, networks=4
            ),
            CASES[case][2], CASES[case][0],
        )  # fmt: skip
    out["femnist/writers"] = (
        lambda seed: look(make("published_writers", n_clients=40, seed=seed), "grey_cnn", seed),
        "client by client", 0,
    )  # fmt: skip
    out["ag_news"] = (
        lambda seed: look(make("published_news", seed=seed), {"name": "text_cnn", "n_outputs": 6},
                          seed), "labels", 6,
    )  # fmt: skip
    for first in ("evaluation", "survey"):
        out[f"ifca/{first}"] = (lambda seed, first=first: ifca(first, seed), "", 0)
    for case, k in (("one-class", 10), ("rot4", 4), ("iid", 1)):
        out[f"reconstruction/{case}"] = (
            lambda seed, case=case: autoencoder(case, seed), "one" if k == 1 else "meaning", k,
        )  # fmt: skip
    for case, k in (("rot4", 4), ("sign", 2), ("iid", 1)):
        out[f"regression/{case}"] = (
            lambda seed, case=case: regression(case, seed), "one" if k == 1 else "meaning", k,
        )  # fmt: skip
    return out


def main() -> None:
    parser = options(__doc__.split("\n")[0], seeds=10)
    parser.add_argument(
        "--only", default="", help="only names that start with one of these, separated by commas"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this many")
    given = parser.parse_args()
    path: Path | None = given.json
    kept: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}
    wanted = [part for part in given.only.split(",") if part]
    chosen = {
        name: study for name, study in studies().items()
        if not wanted or any(name.startswith(part) for part in wanted)
    }  # fmt: skip
    began = time.perf_counter()
    for number in range(given.seeds):
        for name, (study, *_) in chosen.items():
            key = f"{name}#{FIRST_SEED + number}"
            if key in kept or time.perf_counter() - began > given.seconds:
                continue
            try:
                kept[key] = study(FIRST_SEED + number)
            except Exception as error:
                kept[key] = {"error": f"{type(error).__name__}: {error}"}
            print(key, json.dumps(kept[key])[:300], flush=True)
            if path:
                path.write_text(json.dumps(kept, indent=0) + "\n")
    report(kept, chosen)


def report(kept: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Print the tables of results."""
    lines, places, later = [], [], []
    for name, (_, kind, k) in chosen.items():
        seeds = [line for key, line in kept.items() if key.split("#")[0] == name]
        seeds = [line for line in seeds if "error" not in line]
        if seeds and name.startswith("newcomers"):
            places.append([name, len(seeds), *summarise_places(seeds)])
        elif seeds and name.startswith("ifca"):
            aris = [line["ari"] for line in seeds]
            right = sum(ari > 0.999 for ari in aris)
            later.append([name, f"{right}/{len(seeds)}", sum(aris) / len(aris), min(aris)])
        elif seeds:
            lines.append([name, *summarise_answers(seeds, kind, k)])
    if lines:
        names = ["case", "kind, K, groups right", "ARI", "least", "says"]
        table("Before training", [*names, "seconds, most"], lines)
    if later:
        table("IFCA, five rounds", ["first round by", "groups right", "ARI", "least"], later)
    if places:
        names = ["case", "seeds", "placed right, 50 100 500", "wrongly refused"]
        table("Newcomers", [*names, "foreign refused: " + ", ".join(FOREIGN)], places)


def summarise_answers(seeds: list[dict[str, Any]], kind: str, k: int) -> list[Any]:
    """Summarise the answers: how often they were right, the ARI, and all answers."""
    right = sum(is_right(line, kind, k) for line in seeds)
    words = [f"{line['kind']} {line['k'] or '-'}" for line in seeds]
    counts = [f"{word}: {words.count(word)};" for word in sorted(set(words))]
    aris = [line["ari"] for line in seeds if line["ari"] is not None]
    mean = sum(aris) / len(aris) if aris else None
    seconds = max(line["seconds"] for line in seeds)
    return [f"{right}/{len(seeds)}", mean, min(aris, default=None), counts, seconds]


def summarise_places(seeds: list[dict[str, Any]]) -> list[list[str]]:
    """Summarise newcomers: shares placed right, wrongly refused, and foreign refused."""
    sizes, n = ("50", "100", "500"), len(seeds)
    by_size = [
        [f"{sum(line[size][what] for line in seeds) / n:.1%}" for size in sizes]
        for what in ("right", "refused")
    ]
    return [*by_size, [f"{sum(line[kind] for line in seeds) / n:.0%}" for kind in FOREIGN]]


if __name__ == "__main__":
    main()
