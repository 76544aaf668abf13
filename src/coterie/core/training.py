"""Local training: what a client does with a model it was handed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from coterie.core.client import Batch, Client
from coterie.core.config import check_fields
from coterie.core.errors import ConfigError
from coterie.core.layers import training
from coterie.core.ops import Fit, Losses, train
from coterie.core.random import fold, permutation
from coterie.core.tree import Params, Tree, is_buffer, named_leaves, rebuild, tree_map

Leaves = list[Tensor]


@dataclass(frozen=True)
class LocalSGD:
    """Gradient steps on one client's data; a fresh optimiser every round.

    Parameters
    ----------
    learning_rate
        Step size, multiplied by `decay` once per round.
    steps, epochs
        Amount of work: gradient steps, or passes over the data. Give one; default one epoch.
    batch_size
        Samples per step, reshuffled each pass, the last short batch kept. None: all of them.
    momentum, weight_decay, optimizer
        As in torch's SGD and Adam. The decay never enters the losses that choose a group.
    augment
        `augment(x, key) -> x`, applied to each batch; keyed, training only.
    """

    learning_rate: Annotated[float, Ge(0)] = 0.1
    epochs: Annotated[int, Ge(0)] | None = None
    steps: Annotated[int, Ge(0)] | None = None
    batch_size: Annotated[int, Ge(1)] | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: Annotated[float, Ge(0)] = 0.0
    weight_decay: Annotated[float, Ge(0)] = 0.0
    decay: Annotated[float, Gt(0)] = 1.0
    augment: Callable[[Any, Tensor], Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"LocalSGD: give steps or epochs, not both. Got steps={self.steps}, "
                f"epochs={self.epochs}."
            )

    def __call__(
        self,
        client: Client,
        params: Tree,
        losses: Losses,
        on: Batch | None = None,
        salt: int | Tensor = 0,
        penalty: Callable[..., Tensor] | None = None,
        given: tuple[Tree, ...] = (),
        direction: Callable[..., Tree] | None = None,
    ) -> Tree:
        """The parameters after local training.

        Parameters
        ----------
        losses
            `losses(params, batch, key, *given)`: one loss per sample; averaged over real rows.
        on
            Data to train on; default the client's training data.
        salt
            Tells several trainings of one task apart.
        penalty
            `penalty(params, *given)`, added to the objective (a proximal term).
        given
            Further tensors for losses and penalty. A client's tensors go here, never by closure.
        direction
            `direction(params, batch, key, *given)` instead of the gradient of the objective.
        """
        batch = client.train if on is None else on
        fit = Fit(self, losses, penalty, direction)
        return train(fit, params, batch, fold(client.local_key, "local", salt), client.round, given)

    def gradient(
        self, client: Client, params: Tree, losses: Losses, given: tuple[Tree, ...] = ()
    ) -> Tree:
        """Gradient of the mean loss in evaluation mode: of all data, or of one drawn batch.

        Leaves that are not trained get zeros.
        """
        key, batch = fold(client.local_key, "gradient"), client.train
        if self.batch_size is not None:
            order = permutation(key, batch.mask)[: self.batch_size]
            batch = batch.rows(order, torch.ones_like(order, dtype=torch.bool))

        def objective(trained: Leaves) -> Tensor:
            return batch.mean(losses(join(params, trained, fixed), batch, key, *given))

        trained, fixed = part(params)
        gradients = torch.func.grad(objective)(trained)
        return join(params, list(gradients), [torch.zeros_like(leaf) for leaf in fixed])

    def train(
        self, fit: Fit, params: Tree, batch: Batch, key: Tensor, round: Tensor, given: Any
    ) -> Tree:
        """One client's whole training, step by step: the reference every kernel must equal."""
        trained, fixed = part(params)
        trained = [leaf.clone() for leaf in trained]
        state = self.start(trained)
        rate = self.rate(round)
        plan = self.schedule(batch.mask, key)
        whole = self.batch_size is not None or bool(batch.mask.all())
        alike = whole and bool((batch.weight == 1).all())
        for rows, real, step_key in zip(*plan, strict=True):
            picked = batch
            if self.batch_size is not None:
                picked = batch.first_of(rows, int(real.sum()))
            leaves_ = [leaf.detach().requires_grad_() for leaf in trained]
            with torch.enable_grad():
                value, fixed = self.objective(
                    fit, params, leaves_, fixed, picked, step_key, given, whole, alike
                )
                gradients = self.slope(fit, value, leaves_)
            self.move(trained, gradients, state, rate)
        return join(params, trained, fixed)

    def slope(self, fit: Fit, value: Any, trained: Leaves) -> Leaves:
        """Gradients of an objective, or the direction a method gave in its place."""
        if fit.direction is not None:
            return [leaf.detach() for leaf in value]
        gradients = torch.autograd.grad(value, trained, allow_unused=True)
        pairs = zip(gradients, trained, strict=True)
        return [torch.zeros_like(leaf) if g is None else g for g, leaf in pairs]

    def objective(
        self,
        fit: Fit,
        params: Tree,
        trained: Leaves,
        fixed: Leaves,
        batch: Batch,
        key: Tensor,
        given: tuple[Tree, ...],
        whole_batch: bool = False,
        alike: bool = False,
    ) -> tuple[Any, Leaves]:
        """The objective of one step (or the method's direction), and the buffers after it.

        `whole_batch`: no row is padding; `alike`: and all weigh the same.
        """
        if self.augment is not None:
            batch = batch._replace(x=self.augment(batch.x, fold(key, "augment")))
        with training(batch.mask, key) as mode:
            mode.whole = whole_batch
            whole = join(params, trained, fixed)
            value: Any
            if fit.direction is not None:
                value, _ = part(fit.direction(whole, batch, key, *given))
            else:
                losses = fit.losses(whole, batch, key, *given)
                simple = alike and losses.shape == batch.mask.shape
                value = losses.double().mean().to(losses.dtype) if simple else batch.mean(losses)
                if fit.penalty is not None:
                    value = value + fit.penalty(whole, *given)
        renewed = {id(old): new for old, new in mode.updates}
        return value, [renewed.get(id(leaf), leaf) for leaf in fixed]

    def schedule(self, mask: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of every step, which of them are real, [t, b] each, and the keys of the steps."""
        n = int(mask.sum())
        size = self.batch_size or max(n, 1)
        per_epoch = math.ceil(n / size)
        total = self.total_steps(n)
        keys = fold(key, "step", torch.arange(total, device=key.device))
        if self.batch_size is None or total == 0:  # the mask of the data serves every step
            rows = torch.arange(len(mask), device=mask.device).expand(total, -1)
            return rows, mask.expand(total, -1), keys
        epochs = range(math.ceil(total / per_epoch))
        order = torch.stack([permutation(fold(key, "epoch", e), mask) for e in epochs])
        place = torch.arange(per_epoch * size, device=mask.device)
        rows = order[:, place.clamp(max=len(mask) - 1)].reshape(-1, size)
        real = (place < n).repeat(len(epochs)).reshape(-1, size)
        return rows[:total], real[:total], keys

    def total_steps(self, n: int) -> int:
        """Steps a client with n samples takes; none without samples, whatever the penalty says."""
        if n == 0:
            return 0
        if self.steps is not None:
            return self.steps
        epochs = 1 if self.epochs is None else self.epochs
        return epochs * math.ceil(n / (self.batch_size or n))

    def rate(self, round: Tensor) -> float:
        """Step size of a round; init counts as round 0."""
        return float(self.learning_rate * self.decay ** max(int(round.reshape(-1)[0]), 0))

    def start(self, trained: Leaves) -> dict[str, Leaves]:
        """A fresh optimiser state."""
        if self.optimizer == "adam":
            first = [torch.zeros_like(leaf) for leaf in trained]
            second = [torch.zeros_like(leaf) for leaf in trained]
            return {"first": first, "second": second, "count": [torch.zeros(()) for _ in trained]}
        return {"momentum": [torch.zeros_like(leaf) for leaf in trained]} if self.momentum else {}

    def move(
        self, trained: Leaves, gradients: Leaves, state: dict[str, Leaves], rate: float
    ) -> None:
        """One step of the optimiser, in place; elementwise, so that stacks are no special case."""
        if not trained:
            return
        if self.weight_decay:
            gradients = list(torch._foreach_add(gradients, trained, alpha=self.weight_decay))
        if self.optimizer == "sgd":
            if self.momentum:
                torch._foreach_mul_(state["momentum"], self.momentum)
                torch._foreach_add_(state["momentum"], gradients)
                gradients = state["momentum"]
            torch._foreach_add_(trained, gradients, alpha=-rate)
            return
        torch._foreach_add_(state["count"], 1)
        pairs = zip(gradients, trained, strict=True)
        torch._fused_adam_(
            trained,
            [_laid_out_like(leaf, gradient) for gradient, leaf in pairs],
            state["first"],
            state["second"],
            [],
            state["count"],
            lr=rate,
            beta1=0.9,  # torch's defaults
            beta2=0.999,
            weight_decay=0.0,  # already in the gradients
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


def _laid_out_like(leaf: Tensor, gradient: Tensor) -> Tensor:
    """A gradient in the memory layout of its leaf, which fused kernels walk side by side."""
    if gradient.stride() == leaf.stride():
        return gradient
    return torch.empty_like(leaf).copy_(gradient)


def part(params: Tree) -> tuple[Leaves, Leaves]:
    """Leaves that are trained, and those that are not: buffers and integers."""
    trained: Leaves = []
    fixed: Leaves = []
    for path, leaf in named_leaves(params):
        (trained if trainable(path, leaf) else fixed).append(leaf)
    return trained, fixed


def trainable(path: tuple[str, ...], leaf: Tensor) -> bool:
    """Whether a leaf is trained."""
    return leaf.is_floating_point() and not is_buffer(path)


def join(like: Tree, trained: Leaves, fixed: Leaves) -> Tree:
    """The inverse of `part`."""
    t, f = iter(trained), iter(fixed)
    return rebuild(
        like, [next(t) if trainable(path, leaf) else next(f) for path, leaf in named_leaves(like)]
    )


def descend(models: Tree, gradients: Tree, rate: float | Tensor) -> Tree:
    """Models after one gradient step; `rate` is a number, or one per row of a bank.

    >>> descend({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, 1.0])}, 0.5)
    {'w': tensor([0.5000, 0.5000])}
    """

    def one(leaf: Tensor, gradient: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        step = torch.as_tensor(rate, dtype=leaf.dtype, device=leaf.device)
        return (
            leaf - step.reshape(-1, *(1,) * (leaf.ndim - 1)) * gradient
            if step.ndim
            else (leaf - step * gradient)
        )

    return tree_map(one, models, gradients)


def half_square_distance(params: Params, anchor: Params) -> Tensor:
    """Half the squared distance between the trained weights of two models: a proximal term.

    >>> half_square_distance({"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([1.0, 1.0])})
    tensor(2., dtype=torch.float64)
    """
    squares = [
        (leaf - anchor[name]).square().sum().double()
        for name, leaf in params.items()
        if trainable((name,), leaf)
    ]
    return torch.stack(squares).sum() / 2
