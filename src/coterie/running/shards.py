"""The sharded engine of a run: which clients are where, and how each shard loads its data."""

import os
from functools import partial
from typing import Any

import torch

from coterie.core.algorithm import Algorithm
from coterie.core.errors import DataError
from coterie.core.tree import Ids
from coterie.data.federated import FederatedData
from coterie.engines.faults import Faults
from coterie.engines.ray_pool import Actors
from coterie.engines.sharded import Sharded
from coterie.engines.stacking.chunks import chunk_size
from coterie.running.build import Description, Settings, make_data


def start_shards(
    algorithm: Algorithm,
    data: FederatedData,
    settings: Settings,
    description: Description,
    restart: int,
    faults: Faults | None,
) -> Sharded:
    """Divide the clients among shards, and start them.

    Data that a run file can name are loaded by each shard; data from memory are sent to it once.
    """
    plan = description.get("plan", {})
    count = plan.get("shards") or settings.shards or os.cpu_count() or 1
    parts = torch.arange(len(data)).tensor_split(min(count, len(data)))
    table = description["data"]
    loaders = [
        partial(_given, data.subset(ids).compact())
        if "given" in table
        else partial(_load, table, ids, settings, data.subset(ids).compact().fingerprint())
        for ids in parts
    ]
    chunk = plan.get("chunk") or settings.chunk or chunk_size(algorithm, data)
    threads = plan.get("threads") or settings.threads or 1
    kernels = plan.get("kernels") or [None] * len(parts)
    options: list[dict[str, Any]] = [
        {
            "seed": settings.seed,
            "chunk": chunk,
            "faults": faults,
            "restart": restart,
            "device": settings.device,
            "kernel": settings.kernel,
            "choices": chosen,
        }
        for chosen in kernels
    ]
    pool = Actors(algorithm, loaders, options, threads, settings.address)
    return Sharded(
        data.names,
        pool,
        [len(ids) for ids in parts],
        settings.seed,
        settings.participation,
        restart=restart,
        faults=faults,
        plan={"engine": "ray", "chunk": chunk, "threads": threads, "device": settings.device},
    )


def _given(data: FederatedData) -> FederatedData:
    return data


def _load(table: dict[str, Any], ids: Ids, settings: Settings, fingerprint: str) -> FederatedData:
    """The clients of one shard, from the data that the run file names."""
    data = make_data(table)
    if settings.validation:
        data = data.hold_out(settings.validation, seed=settings.seed)
    own = data.subset(ids).compact()
    if own.fingerprint() != fingerprint:
        raise DataError(
            "A shard has read other data than the run began with. All machines must have the same "
            "files under the same path."
        )
    return own
