"""The number of components that Blend's moments find, and the purity of its anchors.

Nothing is trained. The features are the first 16 principal components of the images. The cases are
rotated digits with clients of equal size, with clients of 50 to 1,000 images, and with labels from
Dirichlet(0.5), counted over all labels and within each class.

    python -m coterie_lab.studies.fedgmi_count --seeds 10 --json count.json

Needs the data folder named by COTERIE_DATA.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.blend.simplex import per_class, simplex
from coterie.metrics import match_components
from coterie_lab.studies.common import options, table, write
from coterie_lab.studies.fedgmi_study import CLIENTS, draw_shares, images, rotate, whole

ANGLES = {
    "1": [0.0],
    "2 (0, 90)": [0.0, 90.0],
    "2 (0, 30)": [0.0, 30.0],
    "2 (0, 20)": [0.0, 20.0],
    "3 (0, 90, 180)": [0.0, 90.0, 180.0],
    "4 (90 apart)": [0.0, 90.0, 180.0, 270.0],
    "5 (45 apart)": [0.0, 45.0, 90.0, 135.0, 180.0],
}


def basis(views: list[Tensor], d: int = 16) -> Tensor:
    """Principal directions of all components together: [pixels, d]."""
    pool = torch.cat([x.flatten(1) for x in views])
    values, vectors = torch.linalg.eigh(torch.cov(pool.T))
    return vectors[:, values.argsort(descending=True)[:d]]


def one(
    x: dict[float, Tensor], y: Tensor, angles: list[float], n: Tensor, seed: int,
    labels: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Count the components of one federation, overall and within classes; check the anchors."""
    draw = np.random.default_rng(seed)
    k = len(angles)
    shares = torch.ones(CLIENTS, 1).double() if k == 1 else draw_shares("random", k, seed)
    counts = whole(shares, n)
    order = draw.permutation(len(y))
    pools = {c: [i for i in order if y[i] == c] for c in range(10)} if labels else {}
    at = 0
    means, sums, per, scatter = [], [], [], []
    for i, size in enumerate(n.tolist()):
        if labels:
            want = draw.multinomial(size, draw.dirichlet(np.full(10, labels)))
            rows = []
            for c in range(10):
                rows += [pools[c].pop() for _ in range(min(int(want[c]), len(pools[c])))]
            while len(rows) < size:
                rows.append(pools[max(pools, key=lambda c: len(pools[c]))].pop())
            own = torch.tensor(rows)[torch.from_numpy(draw.permutation(size))]
        else:
            own = torch.from_numpy(order[at : at + size])
            at += size
        parts = own.split(counts[i].tolist())
        code = torch.cat([x[a][rows] for a, rows in zip(angles, parts, strict=True)]).double()
        member = torch.nn.functional.one_hot(y[own], 10).double()
        means.append(code.mean(0))
        sums.append(member.T @ code)
        per.append(member.sum(0))
        apart = code - code.mean(0)
        inner = code - member @ (sums[-1] / per[-1].clamp(min=1)[:, None])
        scatter.append((apart.T @ apart, torch.einsum("nc,nd,ne->cde", member, inner, inner)))
    total, inside = (sum(part) for part in zip(*scatter, strict=True))
    size = n.double()
    found = simplex(torch.stack(means), size, total / (size.sum() - CLIENTS), most=12)
    per_, sums_ = torch.stack(per), torch.stack(sums)
    freedom = (per_.sum(0) - (per_ > 0).sum(0)).clamp(min=1)
    classes = per_class(sums_, per_, inside / freedom[:, None, None])
    known = simplex(torch.stack(means), size, total / (size.sum() - CLIENTS), k=k)
    largest = shares[known.anchors].argmax(1)
    pure = [
        float(shares[a, j] / shares[:, j].max())
        for a, j in zip(known.anchors, largest, strict=True)
    ]
    first = known.shares[:, match_components(known.shares, shares)]
    return {
        "true": k,
        "raw": found.counted,
        "per_class": int(classes.median()) if len(classes) else 0,
        "eigenvalues": [round(v, 1) for v in found.eigenvalues[:6].tolist()],
        "anchors_differ": len(largest.unique()) == k,
        "purity": min(pure),
        "first_share_error": float((first - shares).abs().mean()),
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__.splitlines()[0], seeds=10)
    parser.add_argument("--first", type=int, default=2000, help="first seed")
    parser.add_argument("--source", default="mnist", help="data set: mnist or cifar10")
    args = parser.parse_args()
    x, y, _, _ = images(args.source)
    x, y = x[:40000], y[:40000]
    kept: dict[str, Any] = {}
    lines = []
    settings = [("equal, n = 300", 300, None), ("equal, n = 50", 50, None)]
    settings += [("50 to 1,000", 0, None), ("Dirichlet(0.5) labels, n = 300", 300, 0.5)]
    for name, angles in ANGLES.items():
        views = {a: rotate(x, a) for a in angles}
        axes = basis([view[:2000] for view in views.values()])
        codes = {a: view.flatten(1) @ axes for a, view in views.items()}
        for title, n, labels in settings:
            if len(angles) > 3 and n != 300:
                continue
            runs = []
            for seed in range(args.first, args.first + args.seeds):
                sizes = torch.full((CLIENTS,), n)
                if not n:
                    draw = np.random.default_rng(seed + 1)
                    sizes = torch.from_numpy(draw.integers(50, 1001, CLIENTS))
                runs.append(one(codes, y, angles, sizes, seed, labels))
            kept[f"{name}, {title}"] = runs
            right = sum(run["raw"] == len(angles) for run in runs)
            inside = sum(run["per_class"] == len(angles) for run in runs)
            differ = sum(run["anchors_differ"] for run in runs)
            purity = min(run["purity"] for run in runs)
            error = sum(run["first_share_error"] for run in runs) / len(runs)
            of = len(runs)
            lines.append(
                [name, title, f"{right} of {of}", f"{inside} of {of}", f"{differ} of {of}",
                 purity, error, json.dumps(runs[0]["eigenvalues"])]
            )  # fmt: skip
            write(args.json, kept)
            print(lines[-1], flush=True)
    head = ["true", "clients", "counted right", "inside classes", "anchors differ",
            "least purity", "error of initial shares", "eigenvalues, first seed"]  # fmt: skip
    table("Components counted by moments", head, lines)


if __name__ == "__main__":
    main()
