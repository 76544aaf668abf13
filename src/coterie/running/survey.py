"""A survey of the clients before training: are there groups, how many, and who belongs where?

Every client evaluates a few networks that are drawn from a seed and never trained, and reports its
losses class by class. One exchange, no model sent, nothing trained.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.survey import Survey, seeded
from coterie.clustering import lenses
from coterie.clustering.lenses import Block, Look
from coterie.core.errors import DataError
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.data import FederatedData
from coterie.engines.simulation import Simulation
from coterie.running.folder import no_nan


class Findings(NamedTuple):
    """What a survey found."""

    n_groups: int | None  # None: no number of groups describes the clients
    kind: lenses.Kind  # "one", "meaning", "labels" or "client by client"
    assignment: dict[str, int]  # group of each client, by name
    evidence: dict[str, Any]  # as plain values

    @property
    def proposal(self) -> tuple[int, dict[str, int]]:
        """The number of groups and the groups to train, even where no number fits well."""
        if self.n_groups is not None:
            return self.n_groups, self.assignment
        return int(self.evidence["proposal"]), dict(self.evidence["proposed_assignment"])


def survey_clients(
    data: FederatedData,
    model: Model,
    *,
    max_groups: int = 10,
    networks: int = seeded.NETWORKS,
    threshold: float = lenses.THRESHOLD,
    seed: int = 0,
) -> Findings:
    """Look for groups with untrained networks; the options are those of `coterie.advise`."""
    if len(data) < 2:
        raise DataError(f"advise: there must be at least two clients to compare. Got {len(data)}.")
    local = LocalSGD(batch_size=32)  # never used: nothing is trained
    method = Survey(
        model, local, max_groups=max_groups, networks=max(networks, 1), threshold=threshold
    )
    fed = Simulation(data, seed)
    fed.begin(-1)
    ids, block = seeded.ask(method, fed, fed.everyone(), fed.key("survey"), method.networks)
    if block is None:
        raise DataError(
            "advise: at least one client must have a loss that is a number. None has. Look for nan "
            "in the data."
        )
    seen = lenses.look(seeded.views(block, model), max_groups, threshold)
    names = [data.names[i] for i in ids.tolist()]
    stray = seen.loose and seen.k != 1  # no number fits: every client is a group of its own
    label = torch.arange(len(ids)) if stray else seen.labels
    found = {
        "curves": [curve._asdict() for curve in _curves(seen)],
        "loose": seen.loose,
        "proposal": seen.k if stray else None,
        "proposed_assignment": dict(zip(names, seen.labels.tolist(), strict=True)) if stray else {},
        "label_overlap": _overlap(block, seen.labels) if seen.kind == "labels" else None,
        "networks": method.networks,
        "model": model.title,
        "threshold": threshold,
        "max_groups": max_groups,
        "clients": len(ids),
        "set_aside": sorted(set(data.names) - set(names)),
        "samples": _range(data.sizes("train")[ids]),
        "classes": block.counts.shape[1] if isinstance(block, Block) else None,
        "bytes_down": _per_client(fed, "down"),
        "bytes_up": _per_client(fed, "up"),
    }
    return Findings(
        None if stray else seen.k,
        seen.kind,
        dict(zip(names, label.tolist(), strict=True)),
        no_nan(found),
    )


def _curves(seen: Look) -> list[Any]:
    width = max(len(choice.ratio) for choice in seen.choices.values())
    return lenses.evidence(lenses.curves(seen, width), seen.kind, seen.lens)


def _overlap(block: seeded.Answers, labels: Tensor) -> float | None:
    """Mean over pairs of groups of what their label shares have in common: 0 nothing, 1 all."""
    if not isinstance(block, Block):
        return None
    counts = torch.zeros(int(labels.max()) + 1, block.counts.shape[1], dtype=torch.float64)
    counts.index_add_(0, labels, block.counts)
    share = counts / counts.sum(1, keepdim=True)
    common = torch.minimum(share[:, None], share[None]).sum(2)  # [k, k]
    pairs = common[torch.triu(torch.ones_like(common), 1) > 0]
    return float(pairs.mean())


def _range(sizes: Tensor) -> dict[str, int]:
    ordered = sizes.sort().values
    return {
        "least": int(ordered[0]),
        "median": int(ordered[len(ordered) // 2]),
        "most": int(ordered[-1]),
    }


def _per_client(fed: Simulation, direction: str) -> int:
    total = sum(int(n.sum()) for (_, way), n in fed.traffic.totals.items() if way == direction)
    return total // max(fed.n_clients, 1)
