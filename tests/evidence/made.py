"""Small federations as summaries."""

import torch

from coterie.core.random import fold, seed_key
from coterie.evidence.summaries import Rows, Summary, assign_folds, summarise


def make(seed, labels, n=60, apart=1.0, classes=2, r=6):
    """Clients whose losses depend on their set: the mean of a class moves by about `apart`."""
    g = torch.Generator().manual_seed(seed)
    centre = apart * torch.randn(max(labels) + 1, classes, r, generator=g, dtype=torch.float64)
    mixed = torch.randn(r, r, generator=g, dtype=torch.float64)
    parts = []
    for i, k in enumerate(labels):
        y = torch.randint(classes, (n,), generator=g)
        values = torch.randn(n, r, generator=g, dtype=torch.float64) @ mixed + centre[k][y]
        rows = Rows(values.T, y, torch.arange(n), torch.ones(n, dtype=torch.bool))
        parts.append(summarise(rows, assign_folds(fold(seed_key(seed), i), rows, classes), classes))
    count, mean, scatter = (torch.stack(part) for part in zip(*parts, strict=True))
    return Summary(count, mean, scatter.sum(0))


def pick(answers, ids):
    """The answers of some clients; the scatter stays that of all."""
    ids = torch.as_tensor(ids)
    return Summary(answers.counts[ids], answers.mean[ids], answers.scatter)
