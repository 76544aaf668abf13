"""Shares of components in clients' data: what the server notes and reports of them."""

from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.finite import find_finite
from coterie.core.algorithm import ComponentShares, Evidence
from coterie.core.tree import Ids, put


def note_shares(owner: str, state: Any, ids: Ids, reply: dict[str, Tensor], **others: str) -> Any:
    """The state with the shares that clients reported, and the largest component of each.

    `others` are further fields of the state, each with its name in the replies.
    """
    if not len(ids):
        return state
    fine = find_finite(owner, "shares", reply["share"])
    new = {"shares": reply["share"], "assignment": reply["share"].argmax(1)}
    new |= {field: reply[name] for field, name in others.items()}
    noted = {name: put(getattr(state, name), ids[fine], leaf[fine]) for name, leaf in new.items()}
    return state._replace(**noted)


def evidence_of(shares: Tensor) -> Evidence:
    """The component of the largest share, and how far the next one is behind: shares [m, k]."""
    shares = shares.clamp(min=0)
    two = torch.cat([shares, torch.zeros_like(shares[:, :1])], 1).topk(2, dim=1).values
    fits = torch.ones(len(shares), dtype=torch.bool)
    unknown = torch.full_like(two[:, 0], torch.nan)
    return Evidence(shares.argmax(1), two[:, 0] - two[:, 1], unknown, fits)


def report_counts(shares: Tensor, size: Tensor) -> ComponentShares:
    """Shares [m, k] that were counted among `size` samples each; negative where unknown."""
    shares = torch.where(shares < 0, torch.nan, shares)
    errors = (shares * (1 - shares) / size[:, None].clamp(min=1)).sqrt()
    evidence = {"n_components": shares.shape[1], "estimate": "count"}
    return ComponentShares(shares, errors, {"count": shares}, evidence)


def place_heard(asked: Ids, heard: Ids, shares: Tensor) -> Evidence:
    """Place the clients that answered by their shares [m, k]; others are in no component."""
    found, answered = evidence_of(shares), torch.isin(asked, heard)
    nothing = torch.full((len(asked),), torch.nan, dtype=shares.dtype)
    group = torch.full((len(asked),), -1).masked_scatter(answered, found.group)
    margin = nothing.masked_scatter(answered, found.margin)
    return Evidence(group, margin, nothing, torch.ones_like(answered))
