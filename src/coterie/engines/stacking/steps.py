"""Training steps of a stack of clients: the rows of each step, and ways to compute it."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from coterie.core.client import Batch
from coterie.core.layers import entering
from coterie.core.model import Model, Network
from coterie.core.ops import Fit, stack_size
from coterie.core.random import fold, permutation
from coterie.core.training import LocalSGD, join, part
from coterie.core.tree import Tree, row, tree_map
from coterie.engines.stacking.first import Gram, Watch
from coterie.engines.stacking.mode import StackMode

Optimizer: TypeAlias = dict[str, list[Tensor]]


class Now(NamedTuple):
    """The present step of a stack: every leaf has a row for each client."""

    trained: list[Tensor]
    fixed: list[Tensor]
    batch: Batch  # of this step
    share: Tensor  # [c, b]  weight of each row in its client's mean
    key: Tensor  # [c]
    given: Tree
    rows: Tensor | None  # [c * b]  rows of the step among all rows of the stack; None: all of them


class Step(Protocol):
    """One step of all clients of a stack: changes `trained` in place, returns the new buffers."""

    blind: bool  # inputs are not read, so they need not be gathered

    def __call__(self, now: Now, state: Optimizer, rate: float) -> list[Tensor]: ...

    def finish(self) -> None: ...


class Work:
    """The data of a stack and the rows of every client's every step.

    Labels, masks and weights of all steps are gathered at once; inputs, which are large, step by
    step.
    """

    def __init__(self, local: LocalSGD, batch: Batch, key: Tensor, totals: Tensor) -> None:
        self.batch, self.totals = batch, totals
        steps = torch.arange(int(totals[0]), device=key.device)
        self.keys = fold(key[:, None], "step", steps)  # [s, t]
        self.rows, real = _schedule(local, batch.mask, key, totals)
        share = torch.vmap(Batch.share)
        if self.rows is None:
            self.share = share(batch)  # [s, n]
            return
        s, n = batch.mask.shape
        place = torch.arange(s, device=key.device)[:, None, None]
        self.flat = self.rows + place * n  # [s, t, b]
        picked = [leaf[place, self.rows] for leaf in (batch.y, batch.mask, batch.weight)]
        picked[1] = picked[1] & real
        self.small = picked
        each = Batch(picked[1], *picked)  # the inputs do not matter for the share
        self.share = torch.vmap(share)(each)  # [s, t, b]

    @property
    def passes(self) -> float:
        """Number of passes of the first client over its data."""
        n = max(int(self.batch.mask[0].sum()), 1)
        return int(self.totals[0]) if self.rows is None else int(self.small[1][0].sum()) / n

    def batch_at(self, t: int, active: int, inputs: bool = True) -> tuple[Batch, Tensor, Any]:
        """Batch of a step, its shares and its rows; NaN in place of inputs that are not read."""
        if self.rows is None:
            batch = _head(self.batch, active)
            x = batch.x if inputs else replace_by_nan(batch.x, batch.mask.shape)
            return batch._replace(x=x), self.share[:active], None
        shape = self.flat[:active, t].shape
        index = self.flat[:active, t].reshape(-1)
        if inputs:
            x = tree_map(
                lambda leaf: leaf.flatten(0, 1).index_select(0, index).unflatten(0, shape),
                self.batch.x,
            )
        else:
            x = replace_by_nan(self.batch.x, shape)
        y, mask, weight = (leaf[:active, t] for leaf in self.small)
        return Batch(x, y, mask, weight), self.share[:active, t], index


def replace_by_nan(x: Tensor, shape: Any) -> Tensor:
    """NaN in place of inputs that should not be read, so that reading them is noticed."""
    return x.new_full((), torch.nan).expand(*shape, *x.shape[2:])


def _head(tree: Tree, active: int) -> Tree:
    # Optimiser counters are 0-d and the same for all clients.
    return tree_map(lambda leaf: leaf[:active] if leaf.ndim else leaf, tree)


def _schedule(
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


def walk(fit: Fit, stacked: Tree, choose: Callable[[Fit, Tree, Work, Now, float], Step]) -> Tree:
    """The whole training of a stack; clients that have finished are removed from it."""
    local = fit.local
    params, batch, key, round, given = stacked
    s = stack_size(stacked)
    params, batch, key, given = tree_map(
        lambda leaf: leaf.expand(s, *leaf.shape[1:]), (params, batch, key, given)
    )
    totals = torch.tensor([local.total_steps(n) for n in batch.mask.sum(1).tolist()])
    if not int(totals.max()):
        return params
    order = None
    if bool((totals != totals[0]).any()):  # most steps first, so that clients leave from the end
        order = totals.argsort(descending=True, stable=True)
        totals = totals[order]
        params, batch, key, given = tree_map(
            lambda leaf: leaf.index_select(0, order), (params, batch, key, given)
        )
    work = Work(local, batch, key, totals)
    # Changed in place from here on; buffers are replaced, and copied back when clients leave.
    whole, buffers = ([leaf.clone() for leaf in leaves] for leaves in part(params))
    trained, fixed = whole, buffers
    state, rate, active = local.start(trained), local.rate(round), s
    step: Step | None = None
    for t in range(int(totals[0])):
        running = int((totals > t).sum())
        if running < active:
            _copy(buffers, fixed)
            active = running
            trained, fixed = _head(trained, active), _head(fixed, active)
            state = {name: _head(leaves, active) for name, leaves in state.items()}
            given = _head(given, active)
        data, share, rows = work.batch_at(t, active, step is None or not step.blind)
        now = Now(trained, fixed, data, share, work.keys[:active, t], given, rows)
        if step is None:
            step = choose(fit, params, work, now, rate)
        fixed = step(now, state, rate)
    assert step is not None
    step.finish()
    _copy(buffers, fixed)
    moved = join(params, whole, buffers)
    if order is None:
        return moved
    back = order.argsort()
    return tree_map(lambda leaf: leaf.index_select(0, back), moved)


def _copy(out: list[Tensor], rows: list[Tensor]) -> None:
    for old, new in zip(out, rows, strict=True):
        if old is not new:
            old[: len(new)] = new


class Vmapped:
    """`vmap` of the gradient of one client's objective."""

    blind = False

    def __init__(self, fit: Fit, params: Tree) -> None:
        def objective(
            trained: list[Tensor], fixed: list[Tensor], batch: Batch, key: Tensor, given: Tree
        ) -> tuple[Tree, list[Tensor]]:
            return fit.local.objective(fit, params, trained, fixed, batch, key, given)

        self.local = fit.local
        gradient = objective if fit.direction else torch.func.grad(objective, has_aux=True)
        self.gradient = torch.vmap(gradient)

    def __call__(self, now: Now, state: Optimizer, rate: float) -> list[Tensor]:
        gradients, fixed = self.gradient(now.trained, now.fixed, now.batch, now.key, now.given)
        self.local.move(now.trained, list(gradients), state, rate)
        return list(fixed)

    def finish(self) -> None:
        """Nothing is left to do."""


class Alone:
    """One client at a time, each by its own gradient; used where nothing else works."""

    blind = False

    def __init__(self, fit: Fit, params: Tree) -> None:
        self.fit, self.params = fit, params
        self.states: dict[int, Optimizer] = {}

    def __call__(self, now: Now, state: Optimizer, rate: float) -> list[Tensor]:
        local, news = self.fit.local, []
        for c in range(len(now.key)):
            trained, fixed, batch, given = row((now.trained, now.fixed, now.batch, now.given), c)
            real = batch.mask.nonzero().flatten()
            batch = batch.rows(real, batch.mask[real])
            mine = [leaf.detach().requires_grad_() for leaf in trained]
            with torch.enable_grad():
                value, new = local.objective(
                    self.fit, self.params, mine, fixed, batch, now.key[c], given, True
                )
                slopes = local.slope(self.fit, value, mine)
            local.move(trained, slopes, self.states.setdefault(c, local.start(trained)), rate)
            news.append(new)
        return [torch.stack(leaves) for leaves in zip(*news, strict=True)]

    def finish(self) -> None:
        """Nothing is left to do."""


class Twinned:
    """One network of stacked weights; the sum of the clients' objectives has all their gradients.

    With plain SGD, layers update their weights in the backward pass (`stepping`), and a first layer
    may be computed in the space of the samples (`gram`).
    """

    def __init__(
        self,
        fit: Fit,
        params: Tree,
        network: Callable[[Model], Network],
        stepping: list[bool] | None = None,
        gram: Gram | None = None,
        blind: bool = False,
        look: bool = False,
    ) -> None:
        self.fit, self.params, self.network = fit, params, network
        self.stepping = stepping or [False] * len(part(params)[0])
        self.gram, self.blind, self.look = gram, blind, look
        self.used_once: list[bool] = []  # leaves of layers that can update themselves
        self.first: list[int] = []  # leaves of the layer that reads the inputs directly
        self.convolved = 0  # number of outputs of a client's convolutions in a step

    def __call__(self, now: Now, state: Optimizer, rate: float) -> list[Tensor]:
        trained, fixed, batch, share, key, given, rows = now
        fit, local, clients = self.fit, self.fit.local, len(key)
        if local.augment is not None:
            keys = fold(key, "augment")
            batch = batch._replace(x=torch.vmap(local.augment)(batch.x, keys))
        flat = tree_map(lambda leaf: leaf.flatten(0, 1), batch)
        stepping = self.stepping
        moved = [
            leaf.detach().requires_grad_(not own)
            for leaf, own in zip(trained, stepping, strict=True)
        ]
        anchor = torch.zeros((), requires_grad=True)
        watch: Watch | None = None
        if self.gram is not None:
            watch = self.gram.at(flat.x, rows, clients, rate)
        elif self.look:
            watch = Watch(flat.x)
        ids = frozenset(id(leaf) for leaf, own in zip(moved, stepping, strict=True) if own)
        mode = StackMode(
            True,
            flat.mask,
            key,
            whole=bool(flat.mask.all()),
            clients=clients,
            network=self.network,
            step=rate,
            stepping=ids,
            anchor=anchor,
            first=watch,
        )
        with torch.enable_grad():
            with entering(mode):
                whole = join(self.params, moved, fixed)
                losses = fit.losses(whole, flat, key, *given)
                if not mode.whole:
                    losses = torch.where(flat.mask, losses, torch.zeros_like(losses))
                value = (losses.double().reshape(clients, -1) * share).sum()
                if fit.penalty is not None:
                    value = value + torch.vmap(fit.penalty)(whole, *given).sum()
            wanted = [leaf for leaf, own in zip(moved, stepping, strict=True) if not own]
            gradients = torch.autograd.grad(value, [*wanted, anchor], allow_unused=True)[:-1]
        if wanted:
            pairs = zip(gradients, wanted, strict=True)
            slopes = [torch.zeros_like(leaf) if g is None else g for g, leaf in pairs]
            rest = [leaf for leaf, own in zip(trained, stepping, strict=True) if not own]
            local.move(rest, slopes, state, rate)
        if self.look and watch is not None:
            # Weights that are used twice need both gradients, so they are not updated in backward.
            counts = Counter(map(id, mode.used))
            self.used_once = [counts[id(leaf)] == 1 for leaf in moved]
            self.convolved = mode.convolved // clients
            self.first = [i for i, leaf in enumerate(moved) if id(leaf) in watch.seen]
        if not fixed:
            return fixed
        renewed = {id(old): new for old, new in mode.updates}
        return [renewed.get(id(leaf), leaf) for leaf in fixed]

    def finish(self) -> None:
        """Write the weights of a layer that was computed in the space of the samples."""
        if self.gram is not None:
            self.gram.finish()
