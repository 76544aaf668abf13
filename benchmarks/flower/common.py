"""Functions that the studies of deployments share."""

import hashlib
import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.core import wire
from coterie.deploy.app import write_app
from coterie.deploy.local import Deployment
from coterie.running.build import build, make_data
from coterie.running.folder import RunFolder
from coterie.running.loop import run as simulate

DIGITS = {"name": "digits", "n_clients": 4, "n_groups": 2, "per_client": 100}
MLP = {"model": {"name": "mlp", "hidden": [32]}}
LOCAL = {"local": {"learning_rate": 0.1, "batch_size": 16, "epochs": 5}}
METHODS: dict[str, dict[str, Any]] = {
    "clove": {"algorithm": {"name": "clove", "n_groups": 2}, **MLP, **LOCAL, "data": DIGITS},
    "census": {"algorithm": {"name": "census", "n_groups": 2}, **MLP, **LOCAL, "data": DIGITS},
    "ifca": {"algorithm": {"name": "ifca", "n_groups": 2}, **MLP, **LOCAL, "data": DIGITS},
    "fedgmi": {
        "algorithm": {
            "name": "fedgmi",
            "n_components": 2,
            "start_epochs": 1,
            "n_decoded": 32,
            "interval": 3,
        },
        "vae": {"name": "vae", "hidden": [16], "latent": 4},
        **MLP,
        **LOCAL,
        "data": DIGITS,
    },
    "blend": {
        "algorithm": {
            "name": "blend",
            "n_components": 2,
            "warm_rounds": 1,
            "warm_epochs": 1,
            "anchor_epochs": 1,
            "interval": 3,
        },
        "vae": {"name": "vae", "hidden": [16], "latent": 4},
        **MLP,
        **LOCAL,
        "data": DIGITS,
    },
    "mosaic": {
        "algorithm": {"name": "mosaic", "rounds": 3, "feedback": 1, "refine": 1},
        "data": {"name": "blobs", "n_groups": 2, "clients_per_group": 2, "n": 60, "test": 20},
    },
}


def describe_run(method: str, rounds: int = 6, **settings: Any) -> dict[str, Any]:
    """A run file with four clients and one thread."""
    return {**METHODS[method], "run": {"rounds": rounds, "threads": 1, **settings}}


@contextmanager
def federation(folder: Path, tables: dict[str, Any], *, insecure: bool = False, **options: Any):
    """Start a deployment, and stop it at the end."""
    clients = options.pop("clients", 4)
    names = list(make_data(tables["data"]).names)[:clients]
    write_app(folder, tables, clients, options.pop("deadline", 60.0))
    local = Deployment(folder)
    try:
        local.up(names, "run", insecure=insecure, **options)
        yield local
    finally:
        local.down()


def state_of(folder: Path) -> tuple[int, str]:
    """The round of the last checkpoint of a run folder, and the checksum of its state."""
    _, manifest = RunFolder(folder)._manifests()[-1]
    content = wire.load((folder / "checkpoint" / manifest["state"]).read_bytes())
    return manifest["round"], hashlib.sha256(wire.dump(content["state"])).hexdigest()


def simulate_run(tables: dict[str, Any], out: Path) -> tuple[int, str]:
    """Simulate the same run in one process; every message is converted to bytes."""
    ready = build({**tables, "run": {**tables["run"], "engine": "wire"}})
    simulate(ready.algorithm, ready.data, ready.settings, out)
    return state_of(out)


def note(path: Path | None, figures: Any) -> None:
    """Write figures at once, so that an interruption loses none."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


def quiet(text: str) -> None:
    """Print progress."""
    print(f"  {time.strftime('%T')} {text}", flush=True)
