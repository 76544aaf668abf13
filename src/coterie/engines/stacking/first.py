"""Faster first layers, for linear layers that read the inputs of the network directly.

Gradient steps change the weights of such a layer only by sums of inputs. Training may therefore
keep one number per sample and unit instead (`Gram`), and all models of a bank may read the inputs
together (`Wide`).
"""

from typing import Any

import torch
from torch import Tensor


class Watch:
    """Records which layers read the inputs of a step directly (they may be reshaped)."""

    def __init__(self, x: Any) -> None:
        self.x = x if isinstance(x, Tensor) else None
        self.version = -1 if self.x is None else self.x._version
        self.seen: list[int] = []  # ids of weights and biases

    def meets(self, x: Tensor) -> bool:
        """Whether `x` is the inputs: same memory, same order, and not changed since."""
        raw = self.x
        if raw is None or x.data_ptr() != raw.data_ptr() or x.numel() != raw.numel():
            return False
        one_value = not any(raw.stride())  # a placeholder for inputs that are not read
        return raw._version == self.version and (one_value or x.is_contiguous())

    def answers(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
        """Whether this object computes the output of a layer; a `Watch` never does."""
        if self.meets(x):
            self.seen += [id(weight)] if bias is None else [id(weight), id(bias)]
        return False


class Gram:
    """A first layer in the space of the samples: exact for plain SGD, up to rounding.

    A step changes W by `-rate * delta^T x`. With A the sums of `-rate * delta` of each sample,
    `x W^T + b = Z + G A`, where Z is the output of the initial weights and G = X X^T + 1 (the one
    is for the bias). A step costs n x n instead of n x d. At the end, W = W0 + A^T X.
    """

    def __init__(
        self,
        x: Tensor,  # [s, n, d]
        weight: Tensor,  # [s, h, d]
        bias: Tensor | None,  # [s, h]
        products: Tensor,  # [s, n, n]  X X^T
        start: Tensor | None = None,  # [s, n, h]  Z, if it is already known
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
    """One step of a `Gram`: computes the layer, and updates it in the backward pass."""

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
    """The first layers of a bank as one layer: the inputs are read once for all models."""

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
