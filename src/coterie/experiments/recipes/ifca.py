"""IFCA's Table 1: rotated images (Ghosh et al., NeurIPS 2020, arXiv:2006.04088, section 6)."""

from typing import Any

from coterie.experiments.recipe import Entry, Recipe, Study, Value, add, estimate
from coterie.running.build import Description

PAPER = "IFCA"
SIZES = {"MNIST, m=4800, n=50": 4800, "MNIST, m=2400, n=100": 2400, "MNIST, m=1200, n=200": 1200}
COLOUR = "CIFAR, m=200, n=500"
ROWS = {"IFCA": "ifca", "global model": "fedavg", "local model": "local_only"}
TABLE_1 = """
IFCA | 94.20 ± 0.03 | 95.05 ± 0.02 | 95.25 ± 0.40 | 81.51 ± 1.37
global model | 86.74 ± 0.04 | 88.65 ± 0.08 | 89.73 ± 0.13 | 77.87 ± 0.39
local model | 63.32 ± 0.02 | 73.66 ± 0.04 | 80.05 ± 0.02 | 33.97 ± 1.19
"""


def rotated_mnist(row: str, m: int, seed: int, scale: str) -> Description:
    """Ten full-batch steps of 0.1 a round, everybody takes part, equal weights."""
    algorithm: dict[str, Any] = {"name": ROWS[row]}
    if row == "IFCA":
        algorithm["n_groups"] = 4
    if row == "global model":
        algorithm["weights"] = "equal"
    paper = scale == "paper"
    data = {"name": "rotated_clients", "n_clients": m if paper else 4800, "n_groups": 4}
    out: Description = {
        "algorithm": algorithm,
        "model": {"name": "mlp", "hidden": [200]},
        "local": {"learning_rate": 0.1, "steps": 10},
        "data": {**data, "seed": seed} | ({} if paper else {"keep": 40}),
        "run": {"rounds": 300 if paper else 5, "seed": seed},
    }
    return out


def rotated_cifar(row: str, seed: int, scale: str) -> Description:
    """Five epochs in batches of 50, a tenth of the clients, a step that shrinks by 1 % a round."""
    algorithm: dict[str, Any] = {"name": ROWS[row]}
    if row == "IFCA":
        algorithm |= {"n_groups": 2, "redraw": 0.35}
    if row == "global model":
        algorithm["weights"] = "equal"
    return {
        "algorithm": algorithm,
        "model": {"name": "cropped_cnn"},
        "local": {
            "learning_rate": 0.25,
            "decay": 0.99,
            "epochs": 5,
            "batch_size": 50,
            "augment": "coterie.models.published:cropped_views",
        },
        "data": {
            "name": "rotated_clients",
            "source": "cifar10",
            "n_clients": 200,
            "n_groups": 2,
            "seed": seed,
        },
        "run": {"rounds": 600, "participation": 0.1, "seed": seed},
    }


def _study(row: str, column: str) -> Study:
    if column == COLOUR:
        seconds = estimate(600, 20 * 500, 4e7, 5, 2 / 5 if row == "IFCA" else 0)
        return Study(
            f"ifca/rotated-cifar/200/{ROWS[row]}",
            lambda seed, scale: rotated_cifar(row, seed, scale),
            "cifar10",
            seconds,
            quick=False,
        )
    m = SIZES[column]
    probes = 4 if row == "IFCA" else 0
    return Study(
        f"ifca/rotated-mnist/{m}/{ROWS[row]}",
        lambda seed, scale: rotated_mnist(row, m, seed, scale),
        "mnist",
        estimate(300, 240_000, 0.32e6, 10, probes),
        quick=m == 1200,
    )


def _entries() -> tuple[Entry, ...]:
    out = []
    for line in TABLE_1.strip().splitlines():
        row, *printed = (part.strip() for part in line.split("|"))
        for column, figure in zip([*SIZES, COLOUR], printed, strict=True):
            cell = _study(row, column)
            out.append(Entry("", row, column, "accuracy", Value.of(figure), cell))
    return tuple(out)


DEPARTURES = (
    "The paper tests on clients of their own, which choose a model by their test loss. Here every "
    "client has an equal part of its rotation's test images and uses the model it trained with; "
    "where all identities are right the two are the same figure.",
    "The paper tests each local model on all test images of its rotation; here each is tested on "
    "its client's part of them, and the mean is over all clients.",
)

add(
    Recipe(
        "ifca-table1",
        "Table 1: test accuracy in % on rotated images",
        PAPER,
        _entries(),
        (1, 2, 3, 4, 5),
        None,
        DEPARTURES,
    )
)
_FIG4 = (("Rotated MNIST", "MNIST, m=1200, n=200"), ("Rotated CIFAR", COLOUR))
add(
    Recipe(
        "ifca-fig4",
        "Fig. 4: share of clients in the right group, by round",
        PAPER,
        tuple(
            Entry(part, "IFCA", "identity", "identity", None, _study("IFCA", column))
            for part, column in _FIG4
        ),
        (1, 2, 3, 4, 5),
        "identity",
        DEPARTURES[:1],
        ("Published: all groups identified after about 30 rounds (MNIST) and 10 rounds (CIFAR).",),
    )
)
