"""Functions that the studies of deployments share."""

import hashlib
import itertools
import json
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.core import wire
from coterie.core.federation import Call
from coterie.deploy.app import write_app
from coterie.deploy.local import Deployment
from coterie.engines.simulation import Simulation
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
    _, manifest = RunFolder(folder).manifests()[-1]
    content = wire.load((folder / "checkpoint" / manifest["state"]).read_bytes())
    return manifest["round"], hashlib.sha256(wire.dump(content["state"])).hexdigest()


def simulate_run(tables: dict[str, Any], out: Path) -> tuple[int, str]:
    """Simulate the same run in one process; every message is converted to bytes."""
    ready = build({**tables, "run": {**tables["run"], "engine": "wire"}})
    simulate(ready.algorithm, ready.data, ready.settings, out)
    return state_of(out)


class Lost(NamedTuple):
    """A reply that is missing: round (from 0), phase, name of the client."""

    round: int
    phase: str
    client: str


def simulate_without(tables: dict[str, Any], out: Path, lost: Iterable[Lost]) -> tuple[int, str]:
    """Simulate a run in which some replies are missing."""
    missing, find = set(lost), Simulation._find_heard

    def find_heard(self: Simulation, call: Call) -> torch.Tensor:
        heard = find(self, call)
        asked = [Lost(self.round, call.phase, self.names[i]) for i in call.ids.tolist()]
        return heard & ~torch.tensor([each in missing for each in asked])

    Simulation._find_heard = find_heard  # type: ignore[method-assign]
    try:
        return simulate_run(tables, out)
    finally:
        Simulation._find_heard = find  # type: ignore[method-assign]


def guess_lost(missing: dict[str, list[int]], phases: tuple[str, str]) -> list[list[Lost]]:
    """Which replies may have been missing, from the rounds in which each client missed one.

    A client that was away for several rounds in a row missed everything between the first and the
    last; in these two it may have missed one of the two exchanges of the round, or both.
    """
    stretches = []
    for client, rounds in missing.items():
        for _, run in itertools.groupby(enumerate(sorted(rounds)), lambda pair: pair[1] - pair[0]):
            whole = [number for _, number in run]
            options = {}
            for first, last in itertools.product((phases, phases[:1], phases[1:]), repeat=2):
                parts = {number: set(phases) for number in whole}
                parts[whole[0]] &= set(first)
                parts[whole[-1]] &= set(last)
                lost = {Lost(number, part, client) for number in whole for part in parts[number]}
                if {each.round for each in lost} == set(whole):
                    options[frozenset(lost)] = None
            stretches.append(list(options))
    return [sorted(frozenset().union(*chosen)) for chosen in itertools.product(*stretches)]


def keep(path: Path, lines: Iterable[dict[str, Any]], keys: tuple[str, ...]) -> None:
    """Write lines to a file at once; older lines about the same remain only if there is no new."""
    new = {tuple(line[key] for key in keys): line for line in lines}
    old = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    whole = {tuple(line[key] for key in keys): line for line in old} | new
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in whole.values()))


def fill(page: Path, name: str, lines: Iterable[str]) -> None:
    """Write a table into a page, between two marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        raise SystemExit(f"{page} must have the marks of {name}. It has not.")
    page.write_text(before + begin + "\n".join(lines) + "\n" + end + after)


def quiet(text: str) -> None:
    """Print progress."""
    print(f"  {time.strftime('%T')} {text}", flush=True)
