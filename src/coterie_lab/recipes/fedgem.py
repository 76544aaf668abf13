"""FedGEM's studies: how many groups the data of all clients contain, on synthetic and real samples.

We had only the abstract of the paper, and other sources contradict each other about its figures.
The tables therefore have no published figures. They compare the methods with rivals that are given
the number of groups.
"""

from typing import Any

import numpy as np
from sklearn.metrics import adjusted_rand_score

from coterie.running.build import Description
from coterie.running.evaluation import components
from coterie_lab.central import central_dpgmm, central_gmm, central_kmeans
from coterie_lab.recipe import Entry, Recipe, Study, add
from coterie_lab.studies import thorough_kfed  # noqa: F401 - registers it

PAPER = "FedGEM"
SEEDS = tuple(range(700, 710))  # no decision was based on these seeds

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedGEM": ("fedgem", {}),
    "mosaic": ("mosaic", {}),
    "mosaic, clients count": ("mosaic", {"n_components": "auto"}),
    "mosaic, BIC": ("mosaic", {"criterion": "bic"}),
    "mosaic, one shot": ("mosaic", {"rounds": 0}),
    "k-FED (given K)": ("kfed", {}),
    "k-FED, thorough (given K)": ("thorough_kfed", {}),
    "federated k-means (given K)": ("federated_kmeans", {}),
    "federated c-means (given K)": ("federated_cmeans", {"tolerance": 0.0}),
}
CENTRAL = {
    "central k-means (given K, pooled data)": "central_kmeans",
    "central mixture (given K, pooled data)": "central_gmm",
    "central Dirichlet process (pooled data)": "central_dpgmm",
}
COLUMNS = {"K": "components", "ARI": "global_ari", "ARI per client": "client_ari"}


def _tight(n_clients: int, k: int, d: int, n: int, separation: float, **more: Any) -> Description:
    own = {"n_clients": n_clients, "n_clusters": k, "d": d, "n": n, "separation": separation}
    return {"name": "mixture_tight", **own, **more}


def _classes(source: str, n_clients: int, most: int, **more: Any) -> Description:
    own = {"source": source, "n_clients": n_clients, "most": most}
    return {"name": "class_mixture", **own, **more}


SYNTHETIC: dict[str, tuple[int, Description]] = {
    **{
        f"sensitivity, R = {r}": (10, {"name": "mixture_sensitivity", "separation": float(r)})
        for r in (1, 2, 4, 6, 8)
    },
    "10 clients, K = 5, d = 2, n = 200, R = 4": (5, _tight(10, 5, 2, 200, 4.0)),
    "30 clients, K = 10, d = 10, n = 60, R = 3": (10, _tight(30, 10, 10, 60, 3.0)),
    "30 clients, K = 10, d = 10, n = 100, R = 4": (10, _tight(30, 10, 10, 100, 4.0)),
    "30 clients, K = 10, d = 10, n = 200, R = 6": (10, _tight(30, 10, 10, 200, 6.0)),
    "50 clients, K = 20, d = 10, n = 200, R = 5": (20, _tight(50, 20, 10, 200, 5.0)),
    "50 clients, K = 20, d = 50, n = 200, R = 6": (20, _tight(50, 20, 50, 200, 6.0)),
    **{
        f"shifted by {shift}, n = {n}": (10, _tight(30, 10, 10, n, 6.0, shift=shift))
        for n in (200, 1000)
        for shift in (0.2, 0.5)
    },
}
SMALL_MNIST = {"per_class": 500}
REAL: dict[str, tuple[int, Description]] = {
    "digits, 20 features, 10 clients": (10, _classes("digits", 10, 5, features=20)),
    "digits, 20 features, 20 clients": (10, _classes("digits", 20, 6, fewest=3, features=20)),
    "5,000 of MNIST, 20 features, 10 clients": (
        10,
        _classes("mnist", 10, 5, features=20, **SMALL_MNIST),
    ),
    "5,000 of MNIST, 20 features, 20 clients": (
        10,
        _classes("mnist", 20, 6, fewest=3, features=20, **SMALL_MNIST),
    ),
    "5,000 of MNIST, 50 features, 10 clients": (
        10,
        _classes("mnist", 10, 5, features=50, **SMALL_MNIST),
    ),
    "MNIST, 20 features, 100 clients": (
        10,
        _classes("mnist", 100, 8, features=20, rule="share"),
    ),
    "Fashion-MNIST, 20 features, 100 clients": (
        10,
        _classes("fashion_mnist", 100, 8, features=20, rule="share"),
    ),
    "Waveform, 10 clients": (3, _classes("waveform", 10, 3)),
    "Anuran calls by species, 5 clients": (10, _classes("anuran_species", 5, 10)),
    "Anuran calls by genus, 5 clients": (8, _classes("anuran_genus", 5, 8)),
    "Abalone, 5 clients": (8, _classes("abalone", 5, 8)),
}


# Standard deviation of a feature within a client, mean over clients (seed 700): FedGEM has a
# fixed covariance, so it needs data in these units.
SIGMAS = {
    "digits": 0.43,
    "mnist": 1.27,
    "mnist, 50 features": 0.90,
    "fashion_mnist": 1.59,
    "waveform": 1.50,
    "anuran_species": 0.142,
    "anuran_genus": 0.152,
    "abalone": 0.225,
}


def describe(row: str, k: int, data: Description, seed: int, scale: str) -> Description:
    """The run file of a method in one setting."""
    name, options = METHODS[row]
    algorithm: dict[str, Any] = {"name": name, **options}
    if name == "fedgem" and "source" in data:
        wide = f"{data['source']}, {data.get('features')} features"
        algorithm["sigma"] = SIGMAS.get(wide, SIGMAS[data["source"]])
        if data["source"] == "fashion_mnist":
            algorithm["rounds"] = 21  # as in the released code
    if "given K" in row:
        algorithm["n_clusters"] = k
    if name in ("fedgem", "mosaic", "kfed", "thorough_kfed"):
        algorithm.setdefault("n_components", "facts")
    data = {**data, "seed": seed}
    if scale == "quick" and data["name"] != "class_mixture":
        data["n"] = 60
    return {
        "algorithm": algorithm,
        "data": data,
        "run": {"rounds": 60, "seed": seed, "evaluate_every": 0, "save_every": 10},
    }


def scores(result: Any, central: int | None = None) -> dict[str, Any]:
    """The number of components, the ARI over all samples, and the mean ARI over clients."""
    found, truth = components(result.algorithm, result.fed, result.state, result.data)
    out = _both("", found, truth)
    out["components"] = result.summary.get("components") or result.rounds[-1]["components"]
    if central is None:
        return out
    rows = result.data.rows["train"]
    x, ends = result.data.x[rows.index].numpy(), rows.sizes.cumsum(0)[:-1].tolist()
    for name, labels in (
        ("central_kmeans", central_kmeans(x, central)),
        ("central_gmm", central_gmm(x, central)),
        ("central_dpgmm", central_dpgmm(x)),
    ):
        out |= _both(f"{name}_", np.split(labels, ends), truth)
        out[f"{name}_components"] = len(set(labels.tolist()))
    return out


def _both(prefix: str, found: list[Any], truth: list[Any]) -> dict[str, float]:
    own = [adjusted_rand_score(t, f) for t, f in zip(truth, found, strict=True)]
    whole = adjusted_rand_score(np.concatenate(truth), np.concatenate(found))
    return {f"{prefix}global_ari": float(whole), f"{prefix}client_ari": float(np.mean(own))}


def _study(setting: str, row: str, k: int, data: Description) -> Study:
    place = setting.replace(", ", "-").replace(" = ", "").replace(" ", "-").lower()
    last = row.split(" (")[0].replace(", ", "-").replace(" ", "_").lower()
    source = data.get("source")
    return Study(
        f"fedgem/{place}/{last}",
        lambda seed, scale: describe(row, k, data, seed, scale),
        None if source in (None, "digits") else source,
        seconds=20.0 if data.get("rule") == "share" else 3.0,
        quick=source in (None, "digits"),
        after=lambda result: scores(result, k if row == "mosaic" else None),
    )


def _entries(settings: dict[str, tuple[int, Description]]) -> tuple[Entry, ...]:
    out = []
    for setting, (k, data) in settings.items():
        part = setting if "K = " in setting else f"{setting} (K = {k})"
        studies = {row: _study(setting, row, k, data) for row in METHODS}
        for row, study in studies.items():
            for column, metric in COLUMNS.items():
                out.append(Entry(part, row, column, metric, None, study))
        for row, name in CENTRAL.items():
            for column, metric in COLUMNS.items():
                out.append(Entry(part, row, column, f"{name}_{metric}", None, studies["mosaic"]))
    return tuple(out)


COMPARED = tuple(
    (row, rival)
    for row in ("FedGEM", "mosaic")
    for rival in ("central mixture (given K, pooled data)", "k-FED (given K)")
)
DEPARTURES = (
    'ARI: the column "ARI" is over all samples of all clients. The column "ARI per client" is '
    "the mean of each client's own ARI; the code of the authors computes it for FedGEM only. Both "
    "are given for every method.",
    'Data: "5,000 of MNIST" are the first 500 images of each class. The features are principal '
    "components of all training samples, as a federation can compute them from second moments.",
    "Covariance: FedGEM has the unit covariance of the authors' code, in units of the mean "
    "standard deviation of a feature within a client (1 on synthetic data).",
)
NOTES = (
    "AFCL (Zhang et al., Asynchronous federated clustering with unknown number of clusters, AAAI "
    "2025, arXiv:2412.20341), which the paper compares with, is not built. Its authors published "
    "MATLAB code; we have not yet checked whether its paper describes all update rules.",
    "k-FED, thorough: a stronger rival than the paper's method, with the best of ten k-means on "
    "every client, and k-means on the server instead of one pass.",
    "Federated c-means uses the common fuzzifier 2. With twenty features, this makes the "
    "memberships almost equal, and the centres almost coincide. On digits, a fuzzifier of 1.2 "
    "gives an ARI of 0.66, and 2 gives 0.21.",
    "AFCL, which the paper also compares with, is not built, because its public description (Zhang "
    "et al., AAAI 2025, arXiv 2412.20341, and its code) does not suffice. In the code, the server "
    "gets a difference for every sample, from which it restores the sample itself, and the number "
    "of seeds is drawn between the true number of clusters and twice that; the scripts behind the "
    "rows of FedGEM's tables never call the server's step.",
)
add(
    Recipe(
        "fedgem-synthetic",
        "Gaussian groups: number of groups found, and ARI",
        PAPER,
        _entries(SYNTHETIC),
        SEEDS,
        None,
        DEPARTURES,
        NOTES,
        compare=COMPARED,
    )
)
add(
    Recipe(
        "fedgem-real",
        "Images and tables: number of groups found, and ARI with the classes",
        PAPER,
        _entries(REAL),
        SEEDS,
        None,
        DEPARTURES,
        NOTES,
        compare=COMPARED,
    )
)
