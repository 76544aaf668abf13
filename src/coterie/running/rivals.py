"""Trivial rivals: predictions that need no network, to see whether anything was learnt.

    constant          the same for all: shares of the classes, or the mean, of all clients
    own constant      the same of the client itself
    last value        the client's last label before the held-out rows, where times are given
    linear            logistic or linear regression for all clients

All are fitted to training rows and scored on held-out rows by the loss of the networks. The sums
and gradients behind them add up over clients, so a federation can compute them too.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from coterie.core.client import Batch
from coterie.core.model import LOSSES
from coterie.core.random import seed_key, shuffled
from coterie.core.tree import Ids
from coterie.data.federated import FederatedData
from coterie.running.evaluation import LOSS_OF
from coterie.running.held_out import average_units, rank_units

TRIVIAL = ("constant", "own constant", "last value")
MOST_ROWS, MOST_INPUTS = 20_000, 5_000  # of the linear model
CHUNK = 50  # clients whose rows are gathered at a time
RIDGES = (1e-4, 1e-2, 1.0)


def score_rivals(data: FederatedData, split: str, loss: object) -> Mapping[str, Tensor]:
    """Losses of each client's held-out units by rival, [m, u] each; none for an unusual loss.

    Parameters
    ----------
    split
        The held-out rows.
    loss
        The loss of the networks.
    """
    if data.task == "reconstruction" or loss != LOSS_OF[data.task]:
        return {}
    if data.y.ndim > 1 and data.task == "classification":
        return {}
    rows, rank = data.rows[split], rank_units(data, split)
    if not len(rows.index):
        return {}
    y, owner = data.y[rows.index], rows.owner

    def score(output: Tensor) -> Tensor:
        """From the outputs for all held-out rows."""
        ones = torch.ones(len(y))
        batch = Batch(output, y if y.is_floating_point() else y.long(), ones.bool(), ones)
        losses = torch.full(rank.shape, torch.nan, dtype=torch.float64)
        losses[owner, rows.position] = LOSSES[LOSS_OF[data.task]](output, batch).double()
        return average_units(losses, rank)

    if data.task == "classification":
        outputs = _guess_classes(data)
    else:
        outputs = _guess_numbers(data)
    found = {name: score(output[owner]) for name, output in outputs.items()}
    linear = _linear(data, split)
    return found if linear is None else {**found, "linear": score(linear)}


def _last_rows(data: FederatedData) -> Tensor | None:
    """Pool row of each client's latest training row; None without times."""
    if data.time is None:
        return None
    rows = data.rows["train"]
    order = data.time[rows.index].argsort(stable=True)
    last = torch.zeros(len(data), dtype=torch.int64)
    last[rows.owner[order]] = rows.index[order]  # the latest is written last
    return last


def _guess_classes(data: FederatedData) -> dict[str, Tensor]:
    """Logits of each client by rival: [m, classes]."""
    rows, classes = data.rows["train"], data.n_outputs
    place = rows.owner * classes + data.y[rows.index].long()
    counts = torch.bincount(place, minlength=len(data) * classes).reshape(-1, classes).double()
    whole = (counts.sum(0) + 1) / (counts.sum() + classes)  # a class may not occur in training
    own = (counts + whole) / (counts.sum(1, keepdim=True) + 1)
    found = {"constant": whole.log().expand(len(data), -1), "own constant": own.log()}
    last = _last_rows(data)
    if last is not None:  # as likely as a label is to be that of the row before
        order = data.time[rows.index].argsort(stable=True)  # type: ignore[index]
        order = order[rows.owner[order].argsort(stable=True)]
        y, owner = data.y[rows.index[order]], rows.owner[order]
        pairs = owner[1:] == owner[:-1]
        again = ((y[1:] == y[:-1]) & pairs).sum().double()
        keep = (again + 1) / (pairs.sum() + 2)
        guess = (1 - keep) * whole.repeat(len(data), 1)
        guess[torch.arange(len(data)), data.y[last].long()] += keep
        found["last value"] = guess.log()
    return {name: logits.float() for name, logits in found.items()}


def _guess_numbers(data: FederatedData) -> dict[str, Tensor]:
    """Outputs of each client by rival: [m, outputs]."""
    rows = data.rows["train"]
    y = data.y[rows.index].double().reshape(len(rows.index), -1)
    total = torch.zeros(len(data), y.shape[1], dtype=torch.float64).index_add(0, rows.owner, y)
    own = total / rows.sizes[:, None]
    found = {"constant": y.mean(0).expand(len(data), -1), "own constant": own}
    last = _last_rows(data)
    if last is not None:
        found["last value"] = data.y[last].double().reshape(len(data), -1)
    return {name: output.float() for name, output in found.items()}


def _linear(data: FederatedData, split: str) -> Tensor | None:
    """Outputs of a linear model for all held-out rows; None if there are too many inputs."""
    shape = data.sample_shape
    if isinstance(shape, dict) or torch.Size(shape).numel() > MOST_INPUTS:
        return None
    x, y = _flatten(data, "train")
    if len(x) > MOST_ROWS:
        chosen = shuffled(seed_key(0), len(x))[:MOST_ROWS]
        x, y = x[chosen], y[chosen]
    mean, scale = x.mean(0), x.std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    x = (x - mean) / scale
    later = torch.arange(len(x)) % 5 == 4  # every fifth row chooses the ridge
    loss = _loss(data)
    ridge = RIDGES[1]
    if bool(later.any()):
        fits = {r: _fit(x[~later], y[~later], data.n_outputs, loss, r) for r in RIDGES}
        scores = {r: float(loss(_apply(fit, x[later]), y[later])) for r, fit in fits.items()}
        ridge = min(scores, key=lambda r: scores[r])
    found = _fit(x, y, data.n_outputs, loss, ridge)
    return _apply(found, (_flatten(data, split)[0] - mean) / scale)


def _loss(data: FederatedData) -> Callable[[Tensor, Tensor], Tensor]:
    if data.task == "classification":
        return lambda output, y: torch.nn.functional.cross_entropy(output, y.long())
    return lambda output, y: (output - y.reshape(len(output), -1)).square().mean()


def _apply(weights: Tensor, x: Tensor) -> Tensor:
    return x @ weights[1:] + weights[0]


def _fit(
    x: Tensor, y: Tensor, outputs: int, loss: Callable[[Tensor, Tensor], Tensor], ridge: float
) -> Tensor:
    """Weights with the smallest mean loss plus ridge times their mean square: [1 + d, outputs]."""
    weights = torch.zeros(1 + x.shape[1], outputs, requires_grad=True)
    search = torch.optim.LBFGS([weights], max_iter=60, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        search.zero_grad()
        value = loss(_apply(weights, x), y) + ridge * weights[1:].square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        search.step(objective)
    return weights.detach()


def _flatten(data: FederatedData, split: str) -> tuple[Tensor, Tensor]:
    """All rows of a split as one table, in the order of `data.rows`."""
    parts = [_gather(data, split, ids) for ids in torch.arange(len(data)).split(CHUNK)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _gather(data: FederatedData, split: str, ids: Ids) -> tuple[Tensor, Tensor]:
    batch = data.gather(split, ids)
    return batch.x[batch.mask].flatten(1).float(), batch.y[batch.mask]
