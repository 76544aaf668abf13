"""What stacked layers must know of the pass they are in, beyond what all layers know."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coterie.core.layers import Mode, current_mode, entering


@dataclass
class StackMode(Mode):
    """The mode of a pass through a kernel's own network."""

    step: float = 0.0  # rate of the gradient step that some layers take in backward,
    stepping: frozenset[int] = frozenset()  # of these weights (ids of their tensors)
    anchor: Tensor | None = None  # requires a gradient, so that those layers are reached
    used: list[Tensor] = field(default_factory=list)  # weights of such layers, as they are used
    first: Any = None  # may answer for a layer that gets the inputs as they are
    convolved: int = 0  # numbers that convolutions have put out, of all clients


def stack_mode() -> StackMode:
    """The mode of the pass under way."""
    mode = current_mode()
    assert isinstance(mode, StackMode)  # a kernel's network runs nowhere else
    return mode


@contextmanager
def probing(network: Callable[[Any], Any], first: Any) -> Iterator[None]:
    """Evaluation mode on a kernel's own network, whose first layer may be answered for."""
    with entering(StackMode(network=network, first=first)):
        yield
