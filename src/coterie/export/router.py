"""The router of a bundle: it finds the group of a new client, or says that it fits none.

The rule is that of the run (`evidence/placing.py`): the losses of networks that were drawn from a
seed and never trained are compared with those of the groups. The networks travel with the bundle,
because only Coterie can draw them again; `bundle.py` does the rest with numpy. Where a run keeps no
such answers, or the networks would be too large, the smallest loss decides, and nobody is refused.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.algorithms.survey.seeded import REFUSAL
from coterie.core.model import Model
from coterie.core.random import fold
from coterie.core.tree import Tree, n_bytes, named_leaves, tree_map
from coterie.evidence.placing import LEVEL, Known
from coterie.running.reference import Reference

if TYPE_CHECKING:
    from coterie.fitted import Fitted

ARRAYS = "router.npz"
MOST_BYTES = 50_000_000  # of all networks together
SMALLEST = (
    "smallest mean loss of the groups' models on the labelled rows of the new client; nobody is "
    "refused"
)
DISTANCE = (
    "losses of networks that were never trained, by class and fold, compared with those of the "
    f"groups; a score of 1 is a p-value of {LEVEL}, and a client is refused from {REFUSAL} on"
)
TIES = "; of several groups that fit, the one whose model has the smallest loss"


class Drawn(nn.Module):
    """Networks that were drawn from a seed, as one module: outputs [n, networks, outputs]."""

    def __init__(self, model: Model, seed: Tensor, networks: int) -> None:
        super().__init__()
        self.model, self.networks = model, networks
        self.trees = [model.init(fold(seed, number)) for number in range(networks)]
        for number, tree in enumerate(self.trees):
            for i, (_, leaf) in enumerate(named_leaves(tree)):
                self.register_buffer(f"weight_{number}_{i}", leaf)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all networks for some inputs."""
        # One by one: a network that is stacked over its weights cannot be exported.
        outputs = [self.model.apply(self._weights(number), x) for number in range(self.networks)]
        flat = [one.flatten(1) if one.ndim > 1 else one[:, None] for one in outputs]
        return torch.stack(flat, 1)

    def _weights(self, number: int) -> Tree:
        tree = self.trees[number]
        kept = iter([getattr(self, f"weight_{number}_{i}") for i in range(len(named_leaves(tree)))])
        return tree_map(lambda _: next(kept), tree)


def find_router(fit: "Fitted") -> tuple[Drawn, Known, bool] | None:
    """The networks, what is known of the groups, and whether losses decide between those that fit.

    None: there is nothing to compare with, or it would be too large.
    """
    model = getattr(fit.algorithm, "model", None)
    if not isinstance(model, Model) or model.mixes_samples or fit.summary.get("personal"):
        return None
    if model.loss not in ("cross_entropy", "squared_error") or not fit.algorithm.supervised:
        return None
    seed, known = getattr(fit.state, "seed", None), getattr(fit.state, "known", None)
    groups = {card["model"]: card["group"] for card in fit.cards if "odd" not in card}
    if "epsilon" in fit.summary:  # what is known of the groups has no noise
        return None
    small = "min_group" in fit.summary  # the state also knows groups that are too small
    if seed is None or not isinstance(known, Known) or not len(known.number) or small:
        if "reference.safetensors" not in fit.files:
            return None
        kept = Reference.read(fit.files["reference.safetensors"])
        seed, known = kept.seed, kept.labelled
    else:
        number = torch.tensor([groups.get(int(one), -1) for one in known.number])
        known = known._replace(number=number)
    networks = known.losses.mean.shape[-1]
    if networks * n_bytes(model.init(seed)) > MOST_BYTES:
        return None
    by_loss = fit.summary["algorithm"] != "survey"
    return Drawn(model, seed, networks).eval(), known, by_loss


def write_known(known: Known, to: Path) -> None:
    """Write what is known of the groups as plain arrays."""
    arrays: dict[str, Any] = {"number": known.number.numpy()}
    for name, groups in (("losses", known.losses), ("shares", known.shares)):
        if len(groups.mean):
            arrays |= {f"{name}_centre": groups.units.centre, f"{name}_root": groups.units.root}
            parts = ("mean", "weight", "shift", "spread", "members")
            arrays |= {f"{name}_{part}": getattr(groups, part).numpy() for part in parts}
    plain: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    np.savez(to / ARRAYS, **plain)
