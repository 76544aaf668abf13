"""The first layer, where it is linear and meets the inputs as they are.

Its weights move only by sums of inputs, so that training may keep one number per sample and unit
instead (`Gram`), and all models of a bank may read the inputs together (`Wide`).
"""

from typing import Any

import torch
from torch import Tensor


class Watch:
    """Sees which layers meet the inputs of a step as they are, at most reshaped."""

    def __init__(self, x: Any) -> None:
        self.x = x if isinstance(x, Tensor) else None
        self.version = -1 if self.x is None else self.x._version
        self.seen: list[int] = []  # ids of weights and biases

    def meets(self, x: Tensor) -> bool:
        """Whether these are the inputs: same memory, same order, not written to since."""
        raw = self.x
        if raw is None or x.data_ptr() != raw.data_ptr() or x.numel() != raw.numel():
            return False
        one_value = not any(raw.stride())  # a stand-in for inputs that are not read
        return raw._version == self.version and (one_value or x.is_contiguous())

    def answers(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
        """Whether the output of a layer comes from here; a watch only looks."""
        if self.meets(x):
            self.seen += [id(weight)] if bias is None else [id(weight), id(bias)]
        return False


class Gram:
    """A first layer in the space of the samples: exact for plain SGD, rounded differently.

    W moves by `-rate * delta^T x`, so with A the sums of `-rate * delta` of each sample,
    `x W^T + b = Z + G A`, where Z is the output of the first weights and G = X X^T + 1 (the one
    is the bias). A step costs n x n instead of n x d, and W = W0 + A^T X is written at the end.
    """

    def __init__(
        self,
        x: Tensor,  # [s, n, d]
        weight: Tensor,  # [s, h, d]
        bias: Tensor | None,  # [s, h]
        products: Tensor,  # [s, n, n]  X X^T
        start: Tensor | None = None,  # [s, n, h]  Z, if somebody made it already
    ) -> None:
        self.x, self.weight, self.bias, self.products = x, weight, bias, products
        if start is None:
            start = torch.bmm(x, weight.mT) if bias is None else _affine(x, weight, bias)
        self.start = start
        self.moves = torch.zeros_like(start)  # A
        self.moved = False

    def at(self, x: Tensor, rows: Tensor | None, clients: int, rate: float) -> "GramStep":
        """The layer in one step, on some rows of the first clients."""
        return GramStep(self, x, rows, clients, rate)

    def finish(self) -> None:
        """Write the weights."""
        self.weight.baddbmm_(self.moves.mT, self.x)
        if self.bias is not None:
            self.bias.add_(self.moves.sum(1))


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias[:, None], x, weight.mT)


def products(x: Tensor) -> Tensor:
    """X X^T of every client: [s, n, n]."""
    return torch.bmm(x, x.mT)


class GramStep(Watch):
    """One step of a `Gram`: answers for the layer, and takes its step in the backward pass."""

    def __init__(
        self, gram: Gram, x: Tensor, rows: Tensor | None, clients: int, rate: float
    ) -> None:
        super().__init__(x)
        self.gram, self.rows, self.clients, self.rate = gram, rows, clients, rate

    def answers(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
        super().answers(weight, bias, x)
        return id(weight) in self.seen

    def value(self) -> Tensor:
        """Output of the layer: [c, b, h]."""
        gram, c = self.gram, self.clients
        moves = gram.moves[:c]
        if self.rows is None:
            out = gram.start[:c]
            if gram.moved:
                out = torch.baddbmm(out, gram.products[:c], moves)
                out = out if gram.bias is None else out.add_(moves.sum(1, keepdim=True))
            return out.clone() if not gram.moved else out
        out = gram.start.flatten(0, 1).index_select(0, self.rows).unflatten(0, (c, -1))
        if gram.moved:
            products = gram.products.flatten(0, 1).index_select(0, self.rows)
            out = torch.baddbmm(out, products.unflatten(0, (c, -1)), moves)
            out = out if gram.bias is None else out.add_(moves.sum(1, keepdim=True))
        return out

    def learn(self, slope: Tensor) -> None:
        """Take the step: `slope` is the gradient by the layer's output, [c, b, h]."""
        gram, c = self.gram, self.clients
        gram.moved = True
        if self.rows is None:
            gram.moves[:c].sub_(slope, alpha=self.rate)
        else:
            flat = gram.moves.flatten(0, 1)
            flat.index_add_(0, self.rows, slope.flatten(0, 1), alpha=-self.rate)


class Wide:
    """The first layers of a bank side by side: the inputs are read once for all models."""

    def __init__(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> None:
        k, h, _ = weights.shape
        flat = weights.flatten(0, 1)  # [k * h, d]
        out = x @ flat.T if biases is None else torch.addmm(biases.flatten(), x, flat.T)
        self.out = out.unflatten(1, (k, h))  # [rows, k, h]
        self.x, self.weights, self.biases = x, weights, biases

    def start(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Z of a `Gram`, if every client of a stack starts from a row of the bank: [s, n, h]."""
        s, n = x.shape[:2]
        if x.data_ptr() != self.x.data_ptr() or s * n != len(self.x):
            return None
        rows = [self._row(weight[i], None if bias is None else bias[i]) for i in range(s)]
        if None in rows:
            return None
        out = self.out.unflatten(0, (s, n))
        return torch.stack([out[i, :, row] for i, row in enumerate(rows)])

    def _row(self, weight: Tensor, bias: Tensor | None) -> int | None:
        for k, known in enumerate(self.weights):
            if not torch.equal(known[0, :8], weight[0, :8]) or not torch.equal(known, weight):
                continue
            if bias is None or (self.biases is not None and torch.equal(self.biases[k], bias)):
                return k
        return None
