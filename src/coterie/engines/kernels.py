"""How stacks of clients are trained and probed; every kernel equals the reference to rounding."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from coterie.core.client import Batch
from coterie.core.layers import training
from coterie.core.model import Model
from coterie.core.ops import Fit, Loop, Losses, stack_size
from coterie.core.random import fold, permutation
from coterie.core.training import LocalSGD, join, part
from coterie.core.tree import Params, Tree, leaves, named_leaves, row, tree_map
from coterie.engines.twins import NoTwin, twin_of


class Now(NamedTuple):
    """Where the clients of a stack are: every leaf has a row for each."""

    trained: list[Tensor]
    fixed: list[Tensor]
    batch: Batch
    index: Tree  # rows of the batch of this step and which are real; () for all
    key: Tensor
    given: Tree


Optimizer: TypeAlias = dict[str, list[Tensor]]


class Step(Protocol):
    """One step of all clients of a stack: moves `trained` in place, gives the new buffers."""

    def __call__(self, now: Now, state: Optimizer, rate: float) -> list[Tensor]: ...


class Trust(NamedTuple):
    """What was found when a loss was tried on twins."""

    stepping: list[bool] | None  # leaves that layers step in backward; None: use `vmap`
    holds: tuple[object, ...]  # what the name of the loss is made of, kept so that it stays unique


class Stacked:
    """All clients of a stack step together.

    Networks whose layers all have a twin run as one network of stacked weights. Before a loss is
    trusted to that, three steps are compared with `vmap` of the gradient, which any loss can take.
    What neither can do is trained one client after the other, after one warning.
    """

    def __init__(self, twins: bool = True) -> None:
        self._loop = Loop()
        self._warned: set[str] = set()
        self._networks: dict[Model, nn.Module] = {}
        self._trusted: dict[Hashable, Trust] = {}
        self.twins = twins

    def fit(self, fit: Fit, stacked: Tree) -> Tree:
        if stack_size(stacked) == 1:
            return self._loop.fit(fit, stacked)
        try:
            return _fit(fit, stacked, self._stepper)
        except (RuntimeError, NotImplementedError) as error:
            trained = self._loop.fit(fit, stacked)  # if this fails too, its error is the better one
            self._warn(fit.losses, error)
            return trained

    def _stepper(self, fit: Fit, params: Tree, first: Now, rate: float) -> Step:
        """The fastest way to take this fit's steps."""
        if not self.twins or fit.direction is not None:
            return Vmapped(fit, params)
        name, holds = _signature(fit, params)
        if name not in self._trusted:
            self._trusted[name] = Trust(self._tried(fit, params, first, rate), holds)
        stepping = self._trusted[name].stepping
        if stepping is None:
            return Vmapped(fit, params)
        return Twinned(fit, params, self._network, stepping)

    def _tried(self, fit: Fit, params: Tree, first: Now, rate: float) -> list[bool] | None:
        """Some steps by twins against as many by `vmap`: the leaves twins step, if they agree."""
        local = fit.local
        plain = local.optimizer == "sgd" and not local.momentum and not local.weight_decay
        twinned = Twinned(fit, params, self._network)
        ends = []
        try:
            for step in (Vmapped(fit, params), twinned):
                now = tree_map(torch.clone, first)
                state = local.start(now.trained)
                for _ in range(3):  # the first without steps in backward, to see who could
                    now = now._replace(fixed=step(now, state, rate))
                    if step is twinned and plain and fit.penalty is None:
                        twinned.stepping = twinned.used_once
                ends.append([*now.trained, *now.fixed])
        except (NoTwin, RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
            return None
        return twinned.stepping if all(map(_close, *ends)) else None

    def _network(self, model: Model) -> nn.Module:
        if model not in self._networks:
            self._networks[model] = twin_of(model)
        return self._networks[model]

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


class Vmapped:
    """`vmap` of the gradient of one client's objective."""

    def __init__(self, fit: Fit, params: Tree) -> None:
        def objective(
            trained: list[Tensor],
            fixed: list[Tensor],
            batch: Batch,
            index: Tree,
            key: Tensor,
            given: Tree,
        ) -> tuple[Tree, list[Tensor]]:
            picked = batch.rows(*index) if index else batch
            return fit.local.objective(fit, params, trained, fixed, picked, key, given)

        self.local = fit.local
        gradient = objective if fit.direction else torch.func.grad(objective, has_aux=True)
        self.gradient = torch.vmap(gradient)

    def __call__(self, now: Now, state: Optimizer, rate: float) -> list[Tensor]:
        gradients, fixed = self.gradient(*now)
        self.local.move(now.trained, list(gradients), state, rate)
        return list(fixed)


class Twinned:
    """One network of stacked weights; the sum of the clients' objectives has all their gradients.

    Where the optimiser is plain SGD, linear layers take their step in the backward pass.
    """

    def __init__(
        self,
        fit: Fit,
        params: Tree,
        network: Callable[[Model], nn.Module],
        stepping: list[bool] | None = None,
    ) -> None:
        self.fit, self.params, self.network = fit, params, network
        self.stepping = stepping or [False] * len(part(params)[0])
        self.used_once: list[bool] = []  # leaves of linear layers, after a step

    def __call__(self, now: Now, state: Optimizer, rate: float) -> list[Tensor]:
        trained, fixed, batch, index, key, given = now
        fit, local, clients = self.fit, self.fit.local, len(key)
        if index:
            rows, real = index
            place = torch.arange(clients, device=rows.device)[:, None]
            batch = tree_map(lambda leaf: leaf[place, rows], batch)
            batch = batch._replace(mask=batch.mask & real)
        if local.augment is not None:
            keys = fold(key, "augment")
            batch = batch._replace(x=torch.vmap(local.augment)(batch.x, keys))
        flat = tree_map(lambda leaf: leaf.flatten(0, 1), batch)
        stepping = self.stepping
        moved = [
            leaf.detach().requires_grad_(not own)
            for leaf, own in zip(trained, stepping, strict=True)
        ]
        anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
        stacked = {"network": self.network, "clients": clients, "anchor": anchor, "step": rate}
        ids = frozenset(id(leaf) for leaf, own in zip(moved, stepping, strict=True) if own)
        with torch.enable_grad():
            with training(flat.mask, key, stepping=ids, **stacked) as mode:
                whole = join(self.params, moved, fixed)
                losses = fit.losses(whole, flat, key, *given)
                share = torch.vmap(Batch.share)(batch)
                losses = torch.where(flat.mask, losses, torch.zeros_like(losses))
                value = (losses.double().reshape(clients, -1) * share).sum()
                if fit.penalty is not None:
                    value = value + torch.vmap(fit.penalty)(whole, *given).sum()
            wanted = [leaf for leaf, own in zip(moved, stepping, strict=True) if not own]
            gradients = torch.autograd.grad(value, [*wanted, anchor], allow_unused=True)[:-1]
        pairs = zip(gradients, wanted, strict=True)
        slopes = [torch.zeros_like(leaf) if g is None else g for g, leaf in pairs]
        rest = [leaf for leaf, own in zip(trained, stepping, strict=True) if not own]
        local.move(rest, slopes, state, rate)
        # Weights used twice must wait for both gradients, so they are not stepped in backward.
        counts = Counter(map(id, mode.used))
        self.used_once = [counts[id(leaf)] == 1 for leaf in moved]
        renewed = {id(old): new for old, new in mode.updates}
        return [renewed.get(id(leaf), leaf) for leaf in fixed]


def _signature(fit: Fit, params: Tree) -> tuple[Hashable, tuple[object, ...]]:
    """A name for fits that run alike (code, options, shapes), and the objects it is made of."""
    codes = [getattr(getattr(f, "__func__", f), "__code__", f) for f in (fit.losses, fit.penalty)]
    cells = getattr(fit.losses, "__closure__", None) or ()
    holds = (getattr(fit.losses, "__self__", None), *(cell.cell_contents for cell in cells))
    shapes = tuple((path, leaf.shape[1:], leaf.dtype) for path, leaf in named_leaves(params))
    return (*codes, tuple(map(id, holds)), fit.local, shapes), holds


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = 1e-9 if a.dtype == torch.float64 else 1e-4
    # Diverged clients diverge alike; what a run resumes with must not depend on them.
    return a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)


def _fit(fit: Fit, stacked: Tree, choose: Callable[[Fit, Tree, Now, float], Step]) -> Tree:
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
    trained, fixed = part(params)
    trained = [leaf.clone() for leaf in trained]
    out_trained, out_fixed = [leaf.clone() for leaf in trained], [leaf.clone() for leaf in fixed]
    state, rate, active = local.start(trained), local.rate(round), s
    step: Step | None = None
    for t in range(int(totals[0])):
        running = int((totals > t).sum())
        if running < active:
            _copy(out_trained + out_fixed, trained + fixed)
            active = running
            trained, fixed = _head(trained, active), _head(fixed, active)
            state = {name: _head(part_, active) for name, part_ in state.items()}
            batch, given = _head((batch, given), active)
        index = () if rows is None else (rows[:active, t], real[:active, t])
        now = Now(trained, fixed, batch, index, keys[:active, t], given)
        step = step or choose(fit, params, now, rate)
        fixed = step(now, state, rate)
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
