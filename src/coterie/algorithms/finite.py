"""Replies that are not finite: the server leaves them out."""

import warnings

import torch
from torch import Tensor


def find_finite(owner: str, what: str, *values: Tensor) -> Tensor:
    """Which replies are finite in all values, [m]; a warning says how many of `what` are not."""
    finite = torch.stack([value[:, None].flatten(1).isfinite().all(1) for value in values]).all(0)
    if lost := int((~finite).sum()):
        warnings.warn(f"{owner}: {lost} {what} were not finite and were left out.", stacklevel=3)
    return finite
