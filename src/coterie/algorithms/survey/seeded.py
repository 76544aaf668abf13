"""The exchange of a survey: clients evaluate networks that are drawn from a seed.

The server sends a seed and a number of networks, and no model. Clients build the networks, evaluate
them and send their losses class by class (`clustering/lenses.py`). `census` can begin with it, too.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from coterie.clustering.lenses import (
    THRESHOLD,
    Block,
    Look,
    Scale,
    Sums,
    View,
    Whole,
    class_moments,
    class_sums,
    conditional,
    joint,
    look,
    sound,
    whole,
    whole_moments,
)
from coterie.core.client import Batch, Client
from coterie.core.federation import Federation
from coterie.core.model import Model
from coterie.core.question import Question, question
from coterie.core.tree import Ids

NETWORKS = 16
"""Number of networks. Two are enough on MNIST; sixteen leave room for other data."""

Lens: TypeAlias = Literal["auto", "conditional", "joint"]


@question(phase="cluster", key="survey")
def probe_seeded(
    method: Any,
    client: Client,
    seed: Tensor,
    networks: Tensor,
    *,
    lens: Lens = "auto",
) -> dict[str, Tensor]:
    """Losses of networks that are drawn from a seed and not trained, class by class.

    Parameters
    ----------
    method
        Its `model` is drawn; nothing else of it matters.
    lens
        "joint" keeps the label counts on the client and sends sums.
    """
    model: Model = method.model
    batch = client.train
    classes = count_classes(model, batch)
    losses = model.probe_random(seed, int(networks), batch)  # [r, n]
    if classes == 1:
        return pack_answer(whole_moments(losses, batch.mask), model)
    block = class_moments(losses, batch.y, batch.mask, classes)
    if lens == "joint":
        return pack_answer(class_sums(block, undecided_loss(model, classes)), model)
    return pack_answer(block, model)


Answers: TypeAlias = Block | Sums | Whole


def pack_answer(answer: Answers, model: Model) -> dict[str, Tensor]:
    """An answer as it travels: counts in 4 bytes, the rest as precise as the model."""
    count, mean, variance = answer
    return {
        "count": count.float(),
        "mean": mean.to(model.dtype),
        "variance": variance.to(model.dtype),
    }


def count_classes(model: Model, batch: Batch) -> int:
    """Number of classes that losses are split by: 1 unless a network learns by cross-entropy."""
    single = batch.y.ndim == 1 and not batch.y.is_floating_point()
    return model.n_outputs(batch.x) if single and model.loss == "cross_entropy" else 1


def undecided_loss(model: Model, classes: int) -> float:
    """Loss of a network for which all classes are equally likely.

    Without it, sums of losses do not contain the noise of label counts.
    """
    return math.log(classes) if model.loss == "cross_entropy" else 0.0


def ask(
    method: Any,
    fed: Federation,
    ids: Ids,
    seed: Tensor,
    networks: int = NETWORKS,
    lens: Lens = "auto",
) -> tuple[Ids, Answers | None]:
    """The clients that answered with numbers, and their answers; None if there are none."""
    task = Question(probe_seeded, method, {"lens": lens})
    ids, reply = fed.map(task, seed, torch.tensor(networks), to=ids, at_least=0)
    if not len(ids):
        return ids, None
    parts = reply["count"].double(), reply["mean"].double(), reply["variance"].double()
    kind = Block if parts[0].ndim == 2 else Whole if parts[1].ndim == 2 else Sums
    answers: Answers = kind(*parts)
    good = sound(answers)
    return ids[good], kind(*(part[good] for part in answers)) if bool(good.any()) else None


def views(
    block: Answers, model: Model, lens: Lens = "auto", scales: Mapping[str, Scale] | None = None
) -> dict[str, View]:
    """Answers through the lenses; in units of others, where scales are given."""
    scales = scales or {}
    if isinstance(block, Whole):
        return {"joint": whole(block, scales.get("joint"))}
    if isinstance(block, Sums):
        return {"joint": joint(block, scales.get("joint"))}
    out = {}
    if lens != "joint":
        out["conditional"] = conditional(block, scales.get("conditional"))
    if lens != "conditional":
        sums = class_sums(block, undecided_loss(model, block.counts.shape[1]))
        out["joint"] = joint(sums, scales.get("joint"))
    return out


def number_groups(fed: Federation, ids: Ids, labels: Tensor) -> Tensor:
    """Group numbers that do not depend on how clients are numbered."""
    turn = fed.turns(ids, "groups", every_round=True)
    first = torch.full((int(labels.max()) + 1,), len(ids)).scatter_reduce(0, labels, turn, "amin")
    return first.argsort().argsort()[labels]


def survey(
    method: Any, fed: Federation, ids: Ids, n_groups: int | None, max_groups: int
) -> tuple[Ids, Look | None]:
    """The clients that answered a survey, and what it shows; None if no client answered."""
    heard, block = ask(method, fed, ids, fed.key("survey"))
    if block is None:
        return heard, None
    seen = look(views(block, method.model), n_groups or max_groups, THRESHOLD, n_groups)
    return heard, seen._replace(labels=number_groups(fed, heard, seen.labels))
