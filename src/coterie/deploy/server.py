"""The server of a deployment: a run on connected clients, which survives a restart."""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from coterie.core import wire
from coterie.core.algorithm import Algorithm, state_type
from coterie.core.config import construct, find_imports
from coterie.core.errors import ConfigError
from coterie.core.federation import Federation
from coterie.core.question import Question
from coterie.data.card import DataCard
from coterie.deploy.personal import keep_model
from coterie.deploy.rehearsal import Rehearsal
from coterie.engines.relay import Link
from coterie.engines.remote import Remote
from coterie.running.build import Settings, build_algorithm
from coterie.running.folder import NAMES, RunFolder, read_json, to_json, write
from coterie.running.loop import conduct

DELIVERED = "delivered.json"


def serve(link: Link, folder: Path, config: Mapping[str, Any]) -> None:
    """Run, or resume, the run of an app's folder; then send every client its model.

    Parameters
    ----------
    folder
        Folder with run.json, the run file, and data.json, the data card.
    config
        The Flower run's configuration: out, clients, wait, deadline, at-least.
    """
    description = read_json(folder / "run.json")
    plain = read_json(folder / "data.json")
    settings = construct(Settings, dict(description.get("run", {})))
    if settings.restarts != 1:
        raise ConfigError(
            "run.restarts must be 1 in a deployment, which cannot repeat a run. Set it to 1."
        )
    torch.set_num_threads(settings.threads or 1)
    os.umask(0o077)  # the run folder is for its owner alone
    out = Path(str(config["out"])).expanduser()
    with _alone(out):
        run = RunFolder(out)
        if not (out / "run.json").exists():
            run.create({**description, "run_id": secrets.token_hex(8)})
        names = json.loads((out / NAMES).read_text()) if (out / NAMES).exists() else []

        def remember(known: tuple[str, ...]) -> None:
            run.name_clients(known)

        card = DataCard.from_dict(plain)
        # The folder holds the code of this server, too: `coterie deploy init` asked for trust.
        algorithm = build_algorithm(description, card, find_imports(description))
        parts = isinstance(card.sample_shape, dict)  # then replies are compared with each other
        rehearse = None if parts else Rehearsal(card, settings.seed)
        fed = Remote(
            link,
            {"description": description, "card": plain},
            run.description()["run_id"],
            settings.seed,
            settings.participation,
            names=names,
            deadline=float(config["deadline"]),
            at_least=int(config["at-least"]),
            poll=0.05,
            on_join=remember,
            rehearse=rehearse,
            known=run.description().get("plan", {}).get("replies"),
        )
        began = any(run.checkpoints.glob("*.json"))
        fed.meet(1 if began else int(config["clients"]), float(config["wait"]))
        if not (out / "summary.json").exists():
            result = conduct(algorithm, card, settings, fed, out, progress=True)
            state = result.state
        else:
            fed.restore(run.load(algorithm).memory)
            like = {"state": state_type(algorithm)}
            state = wire.load(run.final_files()["state.safetensors"], like=like)["state"]
            fed.begin(settings.rounds)
        missed = deliver(algorithm, fed, state)
        write(out / DELIVERED, to_json({"missed": missed}))


def deliver(algorithm: Algorithm, fed: Federation, state: Any) -> list[str]:
    """Send every connected client its own model; return the names of the other clients."""
    ids = fed.everyone()
    assignment = getattr(state, "assignment", None)
    if assignment is not None:
        ids = ids[: len(assignment)]
        ids = ids[assignment[ids] >= 0]
    with fed.aside("deliver"):
        heard, _ = fed.map(
            Question(keep_model, algorithm), algorithm.deploy(state, ids), to=ids, at_least=0
        )
    missed = sorted(set(fed.names) - {fed.names[i] for i in heard.tolist()})
    print(f"{len(heard)} of {fed.n_clients} clients have their model.", flush=True)
    if missed:
        print(
            f"Not reached: {', '.join(missed)}. Start the run again to send them their model.",
            flush=True,
        )
    return missed


def locked(out: Path) -> bool:
    """Whether a server is writing to a run folder."""
    path = out.with_name(out.name + ".lock")
    if not path.exists():
        return False
    with open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextmanager
def _alone(out: Path, seconds: float = 120.0) -> Iterator[None]:
    """Lock a run folder for one server; the previous server may need some time to end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_name(out.name + ".lock"), "w") as lock:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ConfigError(
                        f"Only one server may write to {out}. Another one does. Stop it first."
                    ) from None
                time.sleep(1.0)
        yield
