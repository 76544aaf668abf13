"""Do intervals of gains cover, and how often is a way of training recommended without a reason?

    python -m coterie_lab.studies.evidence_gains --seeds 1000 --json gains.json

Losses are simulated. Every held-out row has a loss that all ways of training share (exponential)
and one of its own for each way. Clients gain more or less by a way ("clients", normal or
log-normal), a training moves all clients of a way together ("training"), and each client by itself
("both"). The first table has the share of intervals of 95 % that cover the true gain. The second
has, where no way is better than another, the share of federations in which groups or training alone
are recommended, and in which a client is named as better off otherwise.
"""

import torch
from torch import Tensor

from coterie.evidence.gains import interval
from coterie.evidence.recommend import Losses, recommend
from coterie_lab.studies.common import options, table, write

ARMS = ("one", "groups", "alone", "constant")
# clients, training, both: standard deviations in units of the spread between clients
SPREADS = {
    "clients": (1.0, 0.0, 0.0),
    "clients, both": (1.0, 0.0, 1.0),
    "all": (1.0, 0.3, 0.3),
    "training": (0.3, 1.0, 0.3),
}


def draw_gains(
    generator: torch.Generator, m: int, t: int, spread: tuple[float, float, float], skew: bool
) -> Tensor:
    """Gains whose true mean is zero: [t, m]."""
    client = torch.randn(m, generator=generator, dtype=torch.float64)
    if skew:
        client = client.exp() - torch.tensor(0.5).exp()
    run = torch.randn(t, 1, generator=generator, dtype=torch.float64)
    both = torch.randn(t, m, generator=generator, dtype=torch.float64)
    return spread[0] * client + spread[1] * run + spread[2] * both


def coverage(m: int, t: int, name: str, kind: str, seeds: int) -> float:
    """Share of intervals that cover the true gain."""
    hits = 0
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        gain = draw_gains(generator, m, t, SPREADS[name], kind == "log-normal")
        weight = torch.randn(m, generator=generator).exp() if kind == "unequal weights" else None
        found = interval(gain, weight)
        hits += found.low <= 0 <= found.high
    return hits / seeds


def draw_losses(generator: torch.Generator, m: int, rows: int, t: int, training: float) -> Losses:
    """Losses of ways of training none of which is better; a constant prediction is worse."""
    common = torch.empty(1, m, rows, 1, dtype=torch.float64).exponential_(generator=generator)
    shape = (t, m, rows, len(ARMS))
    own = torch.empty(shape, dtype=torch.float64).exponential_(generator=generator)
    run = training * torch.randn(t, 1, 1, len(ARMS), generator=generator, dtype=torch.float64)
    loss = 0.5 * common + 0.2 * own + run
    loss[..., -1] += 1.0
    mean = loss.mean(2)
    apart = loss - mean[:, :, None]
    covariance = torch.einsum("tmra,tmrb->tmab", apart, apart) / max(rows - 1, 1)
    return Losses(ARMS, mean, covariance, torch.full((m,), rows))


def without_reason(m: int, rows: int, t: int, training: float, seeds: int) -> list[float]:
    """Shares of federations: another way recommended, a client named, no recommendation."""
    wrong = named = undecided = 0
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        found = recommend(draw_losses(generator, m, rows, t, training), n_groups=2)
        wrong += found.most in ("groups", "alone")
        named += bool(found.exceptions)
        undecided += found.choice == "undecided"
    return [wrong / seeds, named / seeds, undecided / seeds]


def main() -> None:
    given = options(__doc__.split("\n")[0], seeds=1000).parse_args()
    kinds = ("normal", "unequal weights", "log-normal")
    heads = ["clients", "replicates", "what varies", *kinds]
    covers = [
        [m, t, name, *(f"{coverage(m, t, name, kind, given.seeds):.1%}" for kind in kinds)]
        for m in (5, 10, 40, 300)
        for t in (1, 2, 3)
        for name, spread in SPREADS.items()
        if t > 1 or spread[1] == 0
    ]
    table("Intervals of 95 % that cover", heads, covers)
    names = ["clients", "rows", "replicates", "training", "another way", "named", "undecided"]
    wrong = []
    for m, rows in ((8, 40), (20, 20), (40, 100), (1000, 1), (60, 4)):
        for t, training in ((1, 0.0), (1, 0.02), (2, 0.02), (3, 0.02)):
            shares = without_reason(m, rows, t, training, max(given.seeds // 2, 1))
            wrong.append([m, rows, t, training, *(f"{share:.1%}" for share in shares)])
    table("No way is better than another", names, wrong)
    write(given.json, {"coverage": [heads, *covers], "without reason": [names, *wrong]})


if __name__ == "__main__":
    main()
