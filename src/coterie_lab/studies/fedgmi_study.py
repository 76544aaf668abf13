"""Blend and FedGMI on mixtures of rotated digits, letters and photographs.

Fifty clients have disjoint images of components in different shares. The components are rotations
by 0, 90 and 180 degrees, or upper and lower case. The study measures the division of the samples,
the shares and the experts. Every line is one run; runs that are in the file are not repeated.

    python -m coterie_lab.studies.fedgmi_study --only K2-linear --seeds 3 --json bars.json

Needs the data folder named by COTERIE_DATA.
"""

import json
import sys
import time
import warnings
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from coterie import LocalSGD, Model
from coterie.algorithms import Blend, FedGMI
from coterie.algorithms.blend import DONE
from coterie.algorithms.common_vae import latent_size, score
from coterie.core.client import Batch
from coterie.core.random import normal, seed_key
from coterie.core.tree import row
from coterie.data import from_arrays
from coterie.engines import Simulation
from coterie.metrics import mixture_error
from coterie.models import CNN, MLP, VAE, ConvVAE
from coterie.models.vae import bernoulli, gaussian, pixels
from coterie.report.mixture_pictures import proportions_picture
from coterie_lab.figures import mixtures as pictures
from coterie_lab.sources import load
from coterie_lab.studies.common import options, table, write

CLIENTS = 50


class Mixed(NamedTuple):
    """A federation of mixtures, and the facts that only a simulation knows."""

    data: Any
    part: list[Tensor]  # component of every sample of each client
    shares: Tensor  # [m, k]
    tests: list[tuple[Tensor, Tensor]]  # test set of each component
    classes: int


def images(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images [n, c, h, w] in 0..1 and labels of a data set."""
    pool = load(name)
    x = pool.x if pool.x.ndim == 4 else pool.x[:, None]
    train, test = pool.rows("train"), pool.rows("test")
    y = pool.y.long()
    return x[train].float() / 255, y[train], x[test].float() / 255, y[test]


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Rotate images counter-clockwise: exactly for multiples of 90 degrees, otherwise bilinear."""
    if degrees % 90 == 0:
        return torch.rot90(x, int(degrees // 90), (2, 3))
    angle = torch.tensor(degrees * torch.pi / 180)
    c, s = angle.cos(), angle.sin()
    matrix = torch.tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(x), 2, 3)
    grid = functional.affine_grid(matrix, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def draw_shares(kind: str, k: int, seed: int) -> Tensor:
    """Draw the shares of the components for each client: [clients, k]."""
    draw = np.random.default_rng(seed + 7919)
    if kind == "linear":
        first = (torch.arange(CLIENTS) + 0.5) / CLIENTS
    elif kind == "middle":
        first = 0.2 + 0.6 * torch.from_numpy(draw.random(CLIENTS))
    elif k == 2:
        first = torch.from_numpy(draw.random(CLIENTS))
    else:
        return torch.from_numpy(draw.dirichlet(np.ones(k), CLIENTS))
    return torch.stack([first, 1 - first], 1).double()


def whole(shares: Tensor, n: Tensor) -> Tensor:
    """Round shares to counts that add up to n."""
    exact = shares * n[:, None]
    counts = exact.floor().long()
    left = (n - counts.sum(1)).tolist()
    for i, rest in enumerate(left):
        order = (exact[i] - counts[i]).argsort(descending=True)
        counts[i, order[:rest]] += 1
    return counts


def federation(
    x: Tensor, y: Tensor, tx: Tensor, ty: Tensor, degrees: list[float], shares: Tensor,
    n: Tensor, seed: int, labels: float | None = None,
) -> Mixed:  # fmt: skip
    """Clients with rotated images; optionally with labels from a Dirichlet distribution."""
    draw = np.random.default_rng(seed)
    order = torch.from_numpy(draw.permutation(len(x)))
    counts = whole(shares, n)
    if labels is not None:
        pools = {c: order[y[order] == c].tolist() for c in range(10)}
        picked = []
        for size in n.tolist():
            want = draw.multinomial(size, draw.dirichlet(np.full(10, labels)))
            rows: list[int] = []
            for c in range(10):
                rows += [pools[c].pop() for _ in range(min(int(want[c]), len(pools[c])))]
            while len(rows) < size:
                c = max(pools, key=lambda c: len(pools[c]))
                rows.append(pools[c].pop())
            picked.append(torch.tensor(rows)[torch.from_numpy(draw.permutation(size))])
    else:
        picked = list(order[: int(n.sum())].split(n.tolist()))
    xs, ys, parts = [], [], []
    for i, rows in enumerate(picked):
        part = torch.repeat_interleave(torch.arange(len(degrees)), counts[i])
        xs.append(torch.cat([rotate(x[rows[part == j]], d) for j, d in enumerate(degrees)]))
        ys.append(y[rows])
        parts.append(part)
    data = from_arrays(xs, ys, test_fraction=0.0)
    tests = [(rotate(tx, d), ty) for d in degrees]
    return Mixed(data, parts, counts / n[:, None], tests, 10)


def letters(shares: Tensor, n: int, seed: int) -> Mixed:
    """Upper against lower case, 26 labels; 3,000 of each case held out."""
    _, _, x, y = images("emnist")  # the test file alone has enough letters
    draw = np.random.default_rng(seed)
    pools, tests = [], []
    for low in (10, 36):
        rows = torch.nonzero((y >= low) & (y < low + 26)).flatten()
        rows = rows[torch.from_numpy(draw.permutation(len(rows)))]
        tests.append((x[rows[:3000]], y[rows[:3000]] - low))
        pools.append((rows[3000:], low))
    counts = whole(shares, torch.full((CLIENTS,), n))
    room = torch.tensor([len(rows) for rows, _ in pools])
    if bool((counts.sum(0) > room).any()):  # the file has fewer than the recipe needs
        n = int(n * float((room / counts.sum(0)).min()) * 0.999)
        counts = whole(shares, torch.full((CLIENTS,), n))
    xs, ys, parts, at = [], [], [], [0, 0]
    for i in range(CLIENTS):
        own_x, own_y, part = [], [], []
        for j, (rows, low) in enumerate(pools):
            own = rows[at[j] : at[j] + int(counts[i, j])]
            at[j] += len(own)
            own_x.append(x[own])
            own_y.append(y[own] - low)
            part.append(torch.full((len(own),), j))
        xs.append(torch.cat(own_x))
        ys.append(torch.cat(own_y))
        parts.append(torch.cat(part))
    return Mixed(from_arrays(xs, ys, test_fraction=0.0), parts, counts / n, tests, 26)


def digit_vae() -> VAE:
    return VAE((1, 28, 28), 16, (400,), "bernoulli")


def models(classes: int) -> tuple[Model, Model]:
    """N-VAE-M and N-CLS-M."""
    expert = Model(lambda: MLP(784, classes, (200,)))
    return Model(digit_vae, bernoulli), expert


def slope(estimate: Tensor, truth: Tensor) -> float:
    """The slope of a regression of the estimate on the truth, over clients and components."""
    t, e = truth - truth.mean(0), estimate - estimate.mean(0)
    return float((t * e).sum() / (t * t).sum())


def best_order(estimate: Tensor, truth: Tensor) -> list[int]:
    """Match the estimated components to the true ones by their shares."""
    k = truth.shape[1]
    cost = {p: float((estimate[:, list(p)] - truth).abs().mean()) for p in permutations(range(k))}
    return list(min(cost, key=lambda p: cost[p]))


def judge(algorithm: Blend | FedGMI, fed: Simulation, state: Any, mixed: Mixed) -> dict[str, Any]:
    """Compute all figures of one state."""
    k, truth = mixed.shares.shape[1], mixed.shares
    found = algorithm.mixture(state, fed.everyone())
    if found is None or found.others["count"].shape[1] != k:
        return {"k": 0 if found is None else found.others["count"].shape[1]}
    order = best_order(found.others["count"], truth)
    out: dict[str, Any] = {"k": k}
    for name, estimate in found.others.items():
        # The moments do not depend on the division and can be right where its counts are wrong.
        estimate = estimate[:, best_order(estimate, truth) if name == "moments" else order]
        out[name] = [float((estimate - truth).abs().mean()), slope(estimate, truth)]
    out["spearman"] = min(v or 0 for v in mixture_error(found.others["count"], truth)["spearman"])
    own = (state.own if isinstance(algorithm, Blend) else state.shares)[:, order]
    out["own"] = [float((own - truth).abs().mean()), slope(own, truth)]
    back = torch.tensor(order).argsort()
    right = total = local = 0
    experts, vaes = state.experts, state.vaes
    with torch.no_grad():
        for i in range(len(mixed.part)):
            part = fed.memory.get(i)["samples"]["part"]
            right += int((back[part] == mixed.part[i]).sum())
            total += len(part)
            if experts:
                batch = mixed.data.gather("train", torch.tensor([i]))
                x, y = batch.x[0], batch.y[0]
                every = torch.stack(
                    [algorithm.model.apply(row(experts, j), x) for j in range(k)], 1
                )
                answer = every[torch.arange(len(x)), part].argmax(1)
                local += int((answer == y).sum())
        out["division"] = right / total
        matrix = torch.zeros(k, k)
        routed = held = 0
        for true, (x, y) in enumerate(mixed.tests):
            n = len(x)
            batch = Batch(x, y, torch.ones(n).bool(), torch.ones(n))
            scores = torch.cat(
                [score(algorithm.vae, vaes, batch.part(a, 2000)) for a in range(0, n, 2000)]
            )
            held += int((back[scores.argmin(1)] == true).sum())
            if experts:
                answers = torch.stack(
                    [algorithm.model.apply(row(experts, j), x).argmax(1) for j in range(k)], 1
                )
                matrix[:, true] = torch.tensor(
                    [float((answers[:, j] == y).float().mean()) for j in order]
                )
                cost = scores.double()
                if isinstance(algorithm, Blend):
                    cost = cost / state.scale + state.offsets
                at = cost.argmin(1)
                routed += int((answers[torch.arange(n), at] == y).sum())
        n = sum(len(y) for _, y in mixed.tests)
        out["held_out"] = held / n
    if experts:
        matched = matrix.diagonal() * 100
        others = (matrix - 2 * torch.eye(k)).max(0).values * 100
        out |= {
            "matrix": (100 * matrix).tolist(),
            "matched": matched.tolist(), "gap": (matched - others).tolist() if k > 1 else [],
            "client_local": 100 * local / total, "client_test": 100 * routed / n,
        }  # fmt: skip
    return out


def purity(state: Any, truth: Tensor) -> dict[str, Any]:
    """Check whether the anchors are pure clients of different components."""
    at = torch.nonzero(state.anchor >= 0).flatten()
    shares = truth[at]
    largest = shares.argmax(1)
    return {
        "anchors_differ": len(largest.unique()) == truth.shape[1] == len(at),
        "anchor_purity": [
            float(a[j] / truth[:, j].max()) for a, j in zip(shares, largest, strict=True)
        ],
    }  # fmt: skip


def draw(
    algorithm: Blend, fed: Simulation, state: Any, mixed: Mixed, history: dict[int, Any], out: Path
) -> None:
    """Draw all pictures of a run."""
    found = algorithm.mixture(state, fed.everyone())
    order = best_order(found.others["count"], mixed.shares)
    named = {name: found.others[name][:, order].tolist() for name in ("count", "tail", "anchor")}
    truth = mixed.shares.tolist()
    pictures.shares_picture(truth, named, out / "shares.png")
    pictures.eigenvalue_picture(
        state.eigenvalues.tolist(), state.thresholds.tolist(), out / "eigenvalues.png"
    )
    errors = found.errors[:, order].tolist()
    names = list(fed.names)
    proportions_picture(names, named["tail"], errors, out / "proportions.png")
    if len(order) == 3:
        pictures.ternary_picture(truth, named["tail"], out / "ternary.png")
    rounds = list(history)
    pictures.experts_picture(rounds, [history[t]["matrix"] for t in rounds], out / "experts.png")
    samples = {t: history[t]["samples"][order] for t in rounds}
    pictures.samples_picture(samples, out / "samples.png")


def decode(algorithm: Blend, state: Any, m: int = 6) -> Tensor:
    """Draw samples from every VAE, always with the same codes: [k, m, c, h, w]."""
    code = normal(seed_key(0), (m, latent_size(algorithm.vae)))
    with torch.no_grad():
        shown = [
            pixels(algorithm.vae.apply(row(state.vaes, j), {"code": code}), algorithm.vae.loss)
            for j in range(len(state.offsets))
        ]
    return torch.stack(shown)


PICTURES: list[Path] = []  # folder for pictures, if one was given


def run(
    algorithm: Blend, mixed: Mixed, seed: int, selected: int, most: int = 10**6
) -> dict[str, Any]:
    """Run to the end, with figures at the start, after some rounds and at the end."""
    history: dict[int, Any] = {}
    fed = Simulation(mixed.data, seed, selected / CLIENTS)
    began = time.process_time()
    fed.begin(-1)
    state = algorithm.init(fed)
    fed.commit()
    out: dict[str, Any] = {"warnings": []}
    number = 0
    started = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        while int(state.stage) != DONE and number < most:
            fed.begin(number)
            before = int(state.stage)
            state, info = algorithm.step(fed, state)
            fed.commit()
            number += 1
            if before == 1:
                out["eigenvalues"], out["threshold"] = info["eigenvalues"], info["threshold"]
                out["k_found"] = len(state.offsets)
            if before == 2 and int(state.stage) == 3:
                started = time.process_time() - began
                out |= {"start_seconds": started, **purity(state, mixed.shares)}
            turn = int(state.turn) if int(state.stage) == before else algorithm.rounds
            if before == 3 and (turn in (1, 11, 21) or (PICTURES and turn % 5 == 0)):
                kept = judge(algorithm, fed, state, mixed)
                out[f"round_{turn - 1}"] = kept.get("division")
                if "matrix" in kept:
                    history[turn] = {**kept, "samples": decode(algorithm, state)}
    out |= judge(algorithm, fed, state, mixed)
    if PICTURES and history:
        draw(algorithm, fed, state, mixed, history, PICTURES[0])
    out["seconds"] = time.process_time() - began
    out["warnings"] = sorted({str(w.message)[:160] for w in warned})
    return out


def run_printed(classes: int, k: int, mixed: Mixed, seed: int, rounds: int = 40) -> Any:
    """Run FedGMI for some rounds, with figures at the end."""
    vae, expert = models(classes)
    algorithm = FedGMI(vae, k, expert)
    fed = Simulation(mixed.data, seed, 5 / CLIENTS)
    began = time.process_time()
    fed.begin(-1)
    state = algorithm.init(fed)
    fed.commit()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(rounds):
            fed.begin(number)
            state, _ = algorithm.step(fed, state)
            fed.commit()
    out = judge(algorithm, fed, state, mixed)
    out["seconds"] = time.process_time() - began
    return {**out, "warnings": sorted({str(w.message)[:160] for w in warned})}


def method(classes: int, n: int, **changes: Any) -> Blend:
    vae, expert = models(classes)
    large = n >= 1000
    epochs = 2 if large else 5
    work = {
        "local": LocalSGD(
            0.001 if large else 0.003, epochs=epochs, batch_size=32, optimizer="adam"
        ),
        "local_vae": LocalSGD(0.001, epochs=epochs, batch_size=32, optimizer="adam"),
    }
    if large:
        work |= {"warm_rounds": 5, "anchor_epochs": 3}  # type: ignore[dict-item]
    return Blend(vae, expert, **{**work, "evidence": "x", **changes})


def digits(degrees: list[float], kind: str, n: int, seed: int, **more: Any) -> Mixed:
    shares = draw_shares(kind, len(degrees), seed)
    return federation(*images("mnist"), degrees, shares, torch.full((CLIENTS,), n), seed, **more)


TWO, THREE, NEAR = [0.0, 90.0], [0.0, 90.0, 180.0], [0.0, 25.0]


def lines() -> dict[str, Any]:
    """The runs by name; each is a function of the seed."""

    def digits_run(degrees: list[float], kind: str, n: int, s: int = 5, **changes: Any) -> Any:
        return lambda seed: run(method(10, n, **changes), digits(degrees, kind, n, seed), seed, s)

    def printed_run(degrees: list[float]) -> Any:
        k = len(degrees)
        return lambda seed: run_printed(10, k, digits(degrees, "random", 300, seed), seed)

    def letters_run(kind: str, s: int = 5, **changes: Any) -> Any:
        def one(seed: int) -> dict[str, Any]:
            mixed = letters(draw_shares(kind, 2, seed), 300, seed)
            out = run(method(26, 300, **changes), mixed, seed, s)
            return {**out, "n": len(mixed.part[0])}

        return one

    def photographs(
        degrees: list[float], n: int, rounds: int, widths: tuple[int, ...] = (16, 32)
    ) -> Any:
        def one(seed: int) -> dict[str, Any]:
            shares = draw_shares("random", len(degrees), seed)
            x, y, tx, ty = images("cifar10")
            sizes = torch.full((CLIENTS,), n)
            mixed = federation(x, y, tx[:2000], ty[:2000], degrees, shares, sizes, seed)
            vae = Model(lambda: ConvVAE(3, 32, 32, widths), gaussian)
            expert = Model(lambda: CNN(3, 32, 10, (16, 32)))
            work = LocalSGD(0.001, epochs=2, batch_size=32, optimizer="adam")
            algorithm = Blend(vae, expert, work, work, evidence="x", rounds=rounds)
            return run(algorithm, mixed, seed, 5)

        return one

    return {
        "photographs-K2": photographs(TWO, 150, 10),
        "photographs-K3": photographs(THREE, 150, 10),
        "photographs-large-K2": photographs(TWO, 800, 20, (16, 32, 64)),
        "photographs-large-K3": photographs(THREE, 800, 20, (16, 32, 64)),
        "K2-linear": digits_run(TWO, "linear", 300),
        "K2-random": digits_run(TWO, "random", 300),
        "K2-large": digits_run(TWO, "random", 1200, rounds=30),
        "K3": digits_run(THREE, "random", 300),
        "K3-large": digits_run(THREE, "random", 1200, rounds=30),
        "K2-s20": digits_run(TWO, "random", 300, 20, rounds=20),
        "K3-s20": digits_run(THREE, "random", 300, 20, rounds=20),
        "near": digits_run(NEAR, "random", 300, rounds=20),
        "near-middle": digits_run(NEAR, "middle", 300, rounds=20),
        "letters": letters_run("linear", rounds=20),
        "letters-joint": letters_run("linear", rounds=20, evidence="joint"),
        "letters-random-joint": letters_run("random", evidence="joint"),
        "K3-joint": digits_run(THREE, "random", 300, rounds=20, evidence="joint"),
        "near-joint": digits_run(NEAR, "random", 300, rounds=20, evidence="joint"),
        "K3-small": digits_run(THREE, "random", 150, rounds=20),
        "K2-joint": digits_run(TWO, "random", 300, evidence="joint"),
        "fedgmi-K2": printed_run(TWO),
        "fedgmi-K3": printed_run(THREE),
    }


def main() -> None:
    parser = options(__doc__.splitlines()[0], seeds=3)
    parser.add_argument("--first", type=int, default=1000, help="first seed")
    parser.add_argument("--only", nargs="+", help="names of the runs")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the last run")
    args = parser.parse_args()
    PICTURES.extend([args.pictures] if args.pictures else [])
    known = lines()
    kept = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in args.only or known:
        for seed in range(args.first, args.first + args.seeds):
            if f"{name}/{seed}" in kept:
                continue
            kept[f"{name}/{seed}"] = known[name](seed)
            write(args.json, kept)
            print(
                f"{name}/{seed}",
                json.dumps(kept[f"{name}/{seed}"])[:600],
                file=sys.stderr,
                flush=True,
            )
    names = (
        "division",
        "held_out",
        "count",
        "tail",
        "anchor",
        "spearman",
        "matched",
        "gap",
        "client_local",
        "client_test",
        "seconds",
    )
    table(
        "Mixtures",
        ["run", *names],
        [[k, *(v.get(name) for name in names)] for k, v in kept.items()],
    )


if __name__ == "__main__":
    main()
