"""Clients that lie in a simulation: what they send instead of the truth.

`hostile(attack, liars, ...)` is a context in which every simulation lies for some clients. What a
liar sends is drawn from a seed, so a study gives the same figures again.

    flip x1, x5, x20   the update, times -1, -5 or -20
    samples            the update, times -1, and 20 times as many samples as there are
    noise              weights drawn from a normal distribution
    little             the mean of the honest updates, less 1.5 of their standard deviations
    random, constant   losses drawn at random, or all the same
    permuted           the client's own losses in a random order
    copied             the losses of an honest client of another group
    crafted            halfway between the losses of two honest clients of other groups
    labels             wrong labels in the training data; the client does not know

Losses are those of a survey before training and those of training; "constant, survey" lies in the
first only, "constant, training" in the second.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coterie.core.federation import BankRows, Call
from coterie.core.tree import Tree, tree_map
from coterie.data import FederatedData, from_arrays
from coterie.engines.simulation import Simulation

UPDATES = {"flip x1": 1.0, "flip x5": 5.0, "flip x20": 20.0, "noise": 0.0, "little": 1.5}
UPDATES["samples"] = 1.0
MANY = 20
"""Times as many samples as there are."""
ANSWERS = ("random", "constant", "permuted", "copied", "crafted")
PARTS = {"survey": ("mean", "share_mean"), "training": ("losses",)}
"""Parts of a reply that are losses, or label shares, in a survey and later."""
HALVES = tuple(f"{name}, {part}" for name in ("constant", "permuted", "crafted") for part in PARTS)
ATTACKS = (*UPDATES, *ANSWERS, "labels", *HALVES)
TRAINED = ("models", "model", "params")


@contextmanager
def hostile(attack: str, liars: Sequence[int], truth: Tensor, seed: int) -> Iterator[None]:
    """Let some clients lie in every simulation."""
    honest, declared = Simulation.exchange, Simulation.declared
    draw = torch.Generator().manual_seed(seed)

    def exchange(self: Simulation, call: Call) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for position, reply in honest(self, call):
            ids = call.ids[position]
            bad = torch.isin(ids, torch.tensor(list(liars)))
            if bool(bad.any()) and call.phase not in ("evaluation", "deliver"):
                reply = _lie(attack, call, position, bad, reply, truth[ids], draw)
            yield position, reply

    def declare(self: Simulation, split: str) -> Tensor:
        sizes = declared(self, split).clone()
        if attack == "samples":  # a client that lies about its samples began when it joined
            sizes[list(liars)] *= MANY
        return sizes

    Simulation.exchange, Simulation.declared = exchange, declare  # type: ignore[method-assign]
    try:
        yield
    finally:
        Simulation.exchange, Simulation.declared = honest, declared  # type: ignore[method-assign]


def _lie(
    attack: str,
    call: Call,
    position: Tensor,
    bad: Tensor,
    reply: dict[str, Any],
    truth: Tensor,
    draw: torch.Generator,
) -> dict[str, Any]:
    reply = dict(reply)
    if attack in UPDATES:
        for name in TRAINED:
            if isinstance(reply.get(name), dict) and call.info.phase == "train":
                old = _given(call, position, name)
                reply[name] = {
                    leaf: _spoil(attack, value, old[leaf], bad, draw)
                    for leaf, value in reply[name].items()
                }
        if attack == "samples" and isinstance(reply.get("n"), Tensor):
            reply["n"] = torch.where(bad, MANY * reply["n"], reply["n"])
        return reply
    name, _, part = attack.partition(", ")
    for leaf in PARTS[part] if part else sum(PARTS.values(), ()):
        if name in ANSWERS and isinstance(reply.get(leaf), Tensor):
            reply[leaf] = _answer(name, reply[leaf], bad, truth, draw)
    return reply


def _given(call: Call, position: Tensor, name: str) -> Tree:
    """The models that clients were sent, in the order of their replies."""
    banks = [given for given in call.given if isinstance(given, BankRows)]
    if banks:
        index = banks[0].index[position]
        return tree_map(lambda leaf: leaf[index], banks[0].bank)
    first = call.given[0]
    return tree_map(lambda leaf: leaf.expand(len(position), *leaf.shape), first)


def _spoil(attack: str, new: Tensor, old: Tensor, bad: Tensor, draw: torch.Generator) -> Tensor:
    if not new.is_floating_point():
        return new
    out = new.clone()
    if attack == "noise":
        out[bad] = torch.randn(out[bad].shape, generator=draw).to(out)
    elif attack == "little":
        change = (new - old)[~bad]
        spread = change.std(0, correction=0) if len(change) > 1 else torch.zeros_like(old[0])
        centre = change.mean(0) if len(change) else torch.zeros_like(old[0])
        out[bad] = old[bad] + centre - UPDATES[attack] * spread
    else:
        out[bad] = old[bad] - UPDATES[attack] * (new[bad] - old[bad])
    return out


def _answer(
    attack: str, losses: Tensor, bad: Tensor, truth: Tensor, draw: torch.Generator
) -> Tensor:
    out = losses.clone()
    for i in bad.nonzero()[:, 0].tolist():
        own = losses[i]
        others = ((truth != truth[i]) & ~bad).nonzero()[:, 0]
        if attack == "random":
            out[i] = 3 * torch.rand(own.shape, generator=draw).to(own)
        elif attack == "constant":
            out[i] = 1.0
        elif attack == "permuted":
            flat = own.flatten()
            out[i] = flat[torch.randperm(len(flat), generator=draw)].reshape(own.shape)
        elif len(others):
            pick = others[torch.randperm(len(others), generator=draw)]
            if attack == "copied":
                out[i] = losses[pick[0]]
            else:
                away = pick[truth[pick] != truth[pick[0]]]
                out[i] = (losses[pick[0]] + losses[away[0] if len(away) else i]) / 2
    return out


def swap_labels(data: FederatedData, liars: Sequence[int]) -> FederatedData:
    """Data in which some clients have wrong labels, c - 1 - y, in what they train on."""
    parts: dict[str, Any] = {}
    for split in ("train", "test"):
        batches = [data.gather(split, torch.tensor([i])) for i in range(len(data))]
        xs = [b.x[0][b.mask[0]] for b in batches]
        ys = [b.y[0][b.mask[0]] for b in batches]
        parts[split] = xs, ys
    xs, ys = parts["train"]
    ys = [data.n_outputs - 1 - y if i in liars else y for i, y in enumerate(ys)]
    return from_arrays(
        xs, ys, test=parts["test"], names=data.names, truth=data.truth,
        task="classification", n_outputs=data.n_outputs,
    )  # fmt: skip
