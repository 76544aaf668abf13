"""How stacks of clients are trained and probed; every kernel equals the reference to rounding."""

import warnings

import torch
from torch import Tensor

from coterie.core.client import Batch
from coterie.core.ops import Fit, Loop, Losses, stack_size
from coterie.core.random import fold, permutation
from coterie.core.training import LocalSGD, join, part
from coterie.core.tree import Params, Tree, leaves, row, tree_map


class Stacked:
    """All clients of a stack step together: `vmap` of the gradient, one optimiser call.

    What cannot be stacked is trained one client after the other, after one warning.
    """

    def __init__(self) -> None:
        self._loop = Loop()
        self._warned: set[str] = set()

    def fit(self, fit: Fit, stacked: Tree) -> Tree:
        if stack_size(stacked) == 1:
            return self._loop.fit(fit, stacked)
        try:
            return _fit(fit, stacked)
        except (RuntimeError, NotImplementedError) as error:
            trained = self._loop.fit(fit, stacked)  # if this fails too, its error is the better one
            self._warn(fit.losses, error)
            return trained

    def probe(self, losses: Losses, models: Params, batch: Batch, flattens: bool) -> Tensor:
        if len(leaves(models)[0]) > 1 or not flattens:
            return self._loop.probe(losses, models, batch, flattens)
        bank = row(models, 0)
        s, n = stack_size(batch), batch.mask.shape[1]
        batch = tree_map(lambda leaf: leaf.expand(s, *leaf.shape[1:]), batch)
        rows = tree_map(lambda leaf: leaf.flatten(0, 1), batch)
        mean = torch.vmap(Batch.mean)
        k = len(leaves(bank)[0])
        columns = [mean(batch, losses(row(bank, j), rows).reshape(s, n)) for j in range(k)]
        return torch.stack(columns, 1)  # [s, k]

    def _warn(self, losses: Losses, error: Exception) -> None:
        owner = getattr(losses, "__self__", None)
        name = str(getattr(owner, "title", getattr(losses, "__qualname__", "the loss")))
        if name in self._warned:
            return
        self._warned.add(name)
        reason = str(error).strip().splitlines()[0]
        warnings.warn(
            f"{name} cannot be stacked, so its clients train one after the other ({reason}).",
            stacklevel=2,
        )


def _fit(fit: Fit, stacked: Tree) -> Tree:
    local, s = fit.local, stack_size(stacked)
    params, batch, key, round, given = tree_map(
        lambda leaf: leaf.expand(s, *leaf.shape[1:]), stacked
    )
    totals = torch.tensor([local.total_steps(n) for n in batch.mask.sum(1).tolist()])
    order = totals.argsort(descending=True, stable=True)  # who finishes early leaves from the end
    totals = totals[order]
    if not int(totals[0]):
        return params
    params, batch, key, given = tree_map(
        lambda leaf: leaf.index_select(0, order), (params, batch, key, given)
    )
    rows, real = _schedules(local, batch.mask, key, totals)
    steps = torch.arange(int(totals[0]), device=key.device)
    keys = fold(key[:, None], "step", steps)  # [s, t]

    def objective(
        trained: list[Tensor],
        fixed: list[Tensor],
        batch: Batch,
        index: Tree,
        key: Tensor,
        given: Tree,
    ) -> tuple[Tree, list[Tensor]]:
        picked = batch.rows(*index) if index else batch
        return local.objective(fit, params, trained, fixed, picked, key, given)

    step = torch.vmap(objective if fit.direction else torch.func.grad(objective, has_aux=True))
    trained, fixed = part(params)
    trained = [leaf.clone() for leaf in trained]
    out_trained, out_fixed = [leaf.clone() for leaf in trained], [leaf.clone() for leaf in fixed]
    state, rate, active = local.start(trained), local.rate(round), s
    for t in range(int(totals[0])):
        running = int((totals > t).sum())
        if running < active:
            _copy(out_trained + out_fixed, trained + fixed)
            active = running
            trained, fixed = _head(trained, active), _head(fixed, active)
            state = {name: _head(part_, active) for name, part_ in state.items()}
            batch, given = _head((batch, given), active)
        index = () if rows is None else (rows[:active, t], real[:active, t])
        gradients, fixed = step(trained, fixed, batch, index, keys[:active, t], given)
        local.move(trained, list(gradients), state, rate)
    _copy(out_trained + out_fixed, trained + fixed)
    back = order.argsort()
    return tree_map(lambda leaf: leaf.index_select(0, back), join(params, out_trained, out_fixed))


def _schedules(
    local: LocalSGD, mask: Tensor, key: Tensor, totals: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Rows of every client's steps and which are real: [s, t, b]; None: all data is a batch."""
    if local.batch_size is None:
        return None, mask
    size = local.batch_size
    n = mask.sum(1)  # [s]
    per_epoch = ((n + size - 1) // size).clamp(min=1)
    t = torch.arange(int(totals[0]), device=mask.device)
    epoch = t // per_epoch[:, None]  # [s, t]
    place = (t % per_epoch[:, None])[..., None] * size + torch.arange(size, device=mask.device)
    draw = torch.vmap(permutation)
    last = (totals - 1).clamp(min=0).to(mask.device)
    epochs = range(int(epoch[torch.arange(len(n)), last].max()) + 1)
    orders = torch.stack([draw(fold(key, "epoch", e), mask) for e in epochs], 1)  # [s, e, n]
    epoch = epoch.clamp(max=len(epochs) - 1)
    client = torch.arange(len(n), device=mask.device)[:, None, None]
    rows = orders[client, epoch[..., None], place.clamp(max=mask.shape[1] - 1)]
    return rows, place < n[:, None, None]


def _head(tree: Tree, active: int) -> Tree:
    # Optimiser counters are 0-d and common to all.
    return tree_map(lambda leaf: leaf[:active] if leaf.ndim else leaf, tree)


def _copy(out: list[Tensor], rows: list[Tensor]) -> None:
    for old, new in zip(out, rows, strict=True):
        old[: len(new)] = new
