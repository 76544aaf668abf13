"""What stacked layers must know about the present pass, in addition to other layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coterie.core.layers import Mode, current_mode, entering


@dataclass
class StackMode(Mode):
    """The mode of a pass through a kernel's own network."""

    step: float = 0.0  # learning rate of the update that some layers make in the backward pass,
    stepping: frozenset[int] = frozenset()  # of these weights (ids of their tensors)
    anchor: Tensor | None = None  # requires a gradient, so that backward reaches those layers
    used: list[Tensor] = field(default_factory=list)  # weights of such layers, in order of use
    first: Any = None  # may compute the output of a layer that reads the inputs directly
    convolved: int = 0  # number of outputs of convolutions, of all clients


def stack_mode() -> StackMode:
    """The mode of the present pass."""
    mode = current_mode()
    assert isinstance(mode, StackMode)  # a kernel's network runs nowhere else
    return mode


@contextmanager
def probing(network: Callable[[Any], Any], first: Any) -> Iterator[None]:
    """Evaluation mode on a kernel's own network, whose first layer `first` may compute."""
    with entering(StackMode(network=network, first=first)):
        yield
