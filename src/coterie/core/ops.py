"""Training and probing as operations: written for one client, run on stacks of clients.

`vmap` of a training loop is no faster than the loop, and fast kernels work on whole stacks. The two
expensive things a client does, training and probing, are therefore operations with their own `vmap`
rule: it merges the new axis into a stack axis and calls the operation again. In the end a kernel
gets plain tensors `[S, ...]` (`[1, ...]` if all clients share a value) and may use Python freely.
Gradients do not flow through these operations.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from coterie.core.client import Batch
from coterie.core.errors import TaskError
from coterie.core.random import fold
from coterie.core.tree import Params, Tree, leaves, n_bytes, n_rows, rebuild, stack, tree_map

if TYPE_CHECKING:
    from coterie.core.training import LocalSGD

Losses: TypeAlias = Callable[..., Tensor]
"""`losses(params, batch, key, *given)`: one loss per sample."""


@dataclass(frozen=True)
class Fit:
    """A local training without its tensors."""

    local: "LocalSGD"
    losses: Losses
    penalty: Callable[..., Tensor] | None
    direction: Callable[..., Tree] | None


class Kernel(Protocol):
    """Runs operations on a stack; every leaf is `[S, ...]`, or `[1, ...]` if all share it."""

    def fit(self, fit: Fit, stacked: Tree) -> Tree: ...  # params, batch, key, round, given

    def probe(
        self, losses: Losses, models: Params, batch: Batch, flattens: bool, each: bool = False
    ) -> Tensor: ...

    def serves(self, name: Hashable, x: Any) -> None: ...  # announces the inputs of the next work

    def describe(self) -> dict[str, Any]: ...  # its choices, as plain data


class Loop:
    """The reference: one client at a time."""

    def fit(self, fit: Fit, stacked: Tree) -> Tree:
        trained = [self._train(fit, *each) for each in unstack(stacked)]
        return tree_map(lambda *parts: torch.stack(parts), trained[0], *trained[1:])

    def _train(self, fit: Fit, params: Tree, batch: Batch, *rest: Any) -> Tree:
        """One training, with images and convolution weights in the channels-last layout."""
        if isinstance(batch.x, Tensor) and batch.x.ndim == 4 and convolves(params):
            fast, x = tree_map(channels_last, (params, batch.x))
            try:
                return fit.local.train(fit, fast, batch._replace(x=x), *rest)
            except RuntimeError as error:  # the network may need the usual layout for a view
                if "view size is not compatible" not in str(error):
                    raise
        return fit.local.train(fit, params, batch, *rest)

    def probe(
        self, losses: Losses, models: Params, batch: Batch, flattens: bool, each: bool = False
    ) -> Tensor:
        def one(bank: Params, batch: Batch) -> Tensor:  # one model in memory at a time
            k = n_rows(bank)
            rows = (tree_map(lambda leaf, j=j: leaf[j], bank) for j in range(k))
            values = (losses(model, batch) for model in rows)
            return torch.stack([value if each else batch.mean(value) for value in values])

        return torch.stack([one(*each) for each in unstack((models, batch))])

    def serves(self, name: Hashable, x: Any) -> None:
        """Do nothing: this kernel keeps nothing from one client to the next."""

    def describe(self) -> dict[str, Any]:
        """Nothing: this kernel makes no choices."""
        return {}


def convolves(params: Tree) -> bool:
    """Whether a model has convolutions of images among its weights."""
    return any(leaf.ndim == 4 for leaf in leaves(params))


def channels_last(leaf: Tensor) -> Tensor:
    """Images or convolution weights in the layout in which convolutions are fastest."""
    # `to`, not `contiguous`: with one channel the two layouts differ in their strides only.
    return leaf.to(memory_format=torch.channels_last) if leaf.ndim == 4 else leaf


def unstack(stacked: Tree) -> Iterator[Tree]:
    """The members of a stack; values that all share (`[1, ...]`) are repeated."""
    for s in range(stack_size(stacked)):
        yield tree_map(lambda leaf, s=s: leaf[s if len(leaf) > 1 else 0], stacked)


def stack_size(stacked: Tree) -> int:
    """S: the largest leading axis."""
    return max(len(leaf) for leaf in leaves(stacked))


_KERNEL: ContextVar[Kernel] = ContextVar("kernel", default=Loop())  # noqa: B039 - stateless


@contextmanager
def using(kernel: Kernel) -> Iterator[None]:
    """Run operations on this kernel; engines choose it."""
    token = _KERNEL.set(kernel)
    try:
        yield
    finally:
        _KERNEL.reset(token)


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> Any:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, dims: Any, run: Any, *tensors: Tensor) -> Any:
        size = info.batch_size
        width = max(
            leaf.shape[0 if dim is None or dim > 0 else 1]
            for leaf, dim in zip(tensors, dims[1:], strict=True)
        )
        merged = [_merge(t, d, size, width) for t, d in zip(tensors, dims[1:], strict=True)]
        out = _Operation.apply(run, *merged)  # type: ignore[no-untyped-call]
        return tuple(leaf.unflatten(0, (size, width)) for leaf in out), (0,) * len(out)


def _merge(leaf: Tensor, dim: int | None, size: int, width: int) -> Tensor:
    """Merge a batch axis into the stack axis; values that all share stay `[1, ...]`."""
    if dim is None:
        if len(leaf) == 1:
            return leaf
        return leaf.expand(size, *leaf.shape).flatten(0, 1)
    leaf = leaf.movedim(dim, 0)  # [size, width or 1, ...]
    return leaf.expand(size, width, *leaf.shape[2:]).flatten(0, 1)


def operate(run: Callable[[Tree], Tree], tree: Tree, like: Tree) -> Tree:
    """Call a function of stacked trees as an operation on the tree of one client.

    The leaves of the stack are `[S, ...]`, or `[1, ...]` if all clients share a value. The function
    may use Python freely; its result has the leaves of `like` with a leading axis.
    """

    def on_leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaves(run(rebuild(tree, tensors))))

    stacked = (leaf.unsqueeze(0) for leaf in leaves(tree))
    out = _Operation.apply(on_leaves, *stacked)  # type: ignore[no-untyped-call]
    return rebuild(like, (leaf.squeeze(0) for leaf in out))


def train(
    fit: Fit, params: Tree, batch: Batch, key: Tensor, round: Tensor, given: tuple[Tree, ...]
) -> Tree:
    """Train one client's parameters; stacked under `vmap`."""
    for function in (fit.losses, fit.penalty, fit.direction):
        _refuse_stacked_closure(function)
    kernel = _KERNEL.get()
    return operate(
        lambda stacked: kernel.fit(fit, stacked), (params, batch, key, round, given), params
    )


def probe(
    losses: Losses, models: Params, batch: Batch, flattens: bool = False, each: bool = False
) -> Tensor:
    """Mean loss of every model of a bank on one client's batch: [k]; with `each`, losses [k, n].

    `flattens` means that a sample's loss does not depend on its batch, so the rows of many clients
    may run as one batch.
    """
    kernel = _KERNEL.get()

    def run(stacked: tuple[Params, Batch]) -> Tensor:
        return kernel.probe(losses, *stacked, flattens=flattens, each=each)

    out: Tensor = operate(run, (models, batch), like=torch.empty(0))
    return out


DRAWN = 64 * 2**20
"""Bytes of random networks in memory at a time; there are never more than eight networks."""


def probe_random(
    init: Callable[[Tensor], Params],
    losses: Losses,
    key: Tensor,
    count: int,
    batch: Batch,
    flattens: bool = False,
) -> Tensor:
    """Losses of random networks, the same for all clients, on each sample: [count, n].

    Network r is `init(fold(key, r))`. Only a few networks are in memory at a time. This is an
    operation because modules cannot be drawn inside `vmap`.
    """
    kernel = _KERNEL.get()

    def run(stacked: tuple[Tensor, Batch]) -> Tensor:
        keys, batch = stacked
        if not bool((keys == keys[0]).all()):
            raise TaskError(
                "probe_random: all clients must have the same key. Got different keys. Use a key "
                "of the server, fed.key(...)."
            )
        first = init(fold(keys[0], 0))
        step = max(1, min(8, DRAWN // max(n_bytes(first), 1)))
        parts = []
        for start in range(0, count, step):
            numbers = range(start, min(start + step, count))
            bank = stack([init(fold(keys[0], r)) if r else first for r in numbers])
            bank = tree_map(lambda leaf: leaf.unsqueeze(0), bank)  # the same for all clients
            parts.append(kernel.probe(losses, bank, batch, flattens=flattens, each=True))
        return torch.cat(parts, 1)

    out: Tensor = operate(run, (key, batch), like=torch.empty(0))
    return out


def _refuse_stacked_closure(function: Any) -> None:
    """Refuse a closure over a client's tensor, which would be used with the wrong client."""
    if any(torch._C._functorch.is_batchedtensor(leaf) for leaf in _held(function, set())):
        raise TaskError(
            f"LocalSGD: {function.__qualname__} must not close over a client's tensor, "
            "because clients are stacked. Pass it by given=(...) and take it as an argument."
        )


def _held(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in the closure of a function, and of the functions in this closure."""
    if id(value) in seen:
        return
    seen.add(id(value))
    function = getattr(value, "__func__", value)
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _held(part, seen)
    elif isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield from _held(held, seen)
