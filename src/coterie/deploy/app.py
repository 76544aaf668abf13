"""Write a Flower app from a run file: `coterie deploy init`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError
from coterie.data.card import DataCard
from coterie.running.build import Description, build
from coterie.running.folder import to_json

SERVER = '''"""The server app: runs the method of run.json on the connected clients."""

from pathlib import Path

from coterie.deploy.server import serve
from coterie.engines.flower import server_app

app = server_app(serve, Path(__file__).parent)
'''
CLIENT = '''"""The client app: passes every message to the worker of its node."""

from coterie.engines.flower import client_app

app = client_app()
'''
PROJECT = """[project]
name = "{name}"
version = "1.0.0"
description = "{method} on a real federation, by Coterie"
license = "Apache-2.0"
dependencies = []  # Coterie must be installed on the server and on every node

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["app"]

[tool.flwr.app]
publisher = "coterie"
fab-include = ["app/**/*.py", "app/**/*.json"]  # never keys, runs or data

[tool.flwr.app.components]
serverapp = "app.server_app:app"
clientapp = "app.client_app:app"

[tool.flwr.app.config]
out = {out}  # the run folder, on the server
clients = {clients}  # the number of clients that must join before the run begins
wait = 600  # seconds to wait for them
deadline = {deadline}  # seconds an exchange may take; later answers are lost
at-least = 1  # answers without which a round is abandoned
"""
README = """# {method} on a real federation

`coterie deploy init` wrote this folder from a run file. `app/run.json` has the method, the network
and the settings. `app/data.json` has what the data of all clients have in common (columns, classes,
scales); it contains no data.

To try it on this machine, with one node for each of the first {clients} clients in the data of the
run file:

    coterie deploy up {folder} --clients {clients}
    coterie deploy run {folder}
    coterie deploy status {folder}
    coterie deploy pull {folder} --client NAME --out my-model
    coterie deploy down {folder}

`coterie deploy run` calls `flwr run`, waits for the end, and starts the server app again if it
dies. To call Flower yourself:

    FLWR_HOME={folder}/state/flower flwr run {folder} deployment --stream

For several machines see "Deploying" in Coterie's documentation.
"""
GITIGNORE = "state/\nrun/\n*.lock\n"


def write_app(
    folder: Path, description: Description, clients: int | None, deadline: float
) -> dict[str, Any]:
    """Write the app and return the data card."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"The folder must be new or empty. {folder} is not empty. Choose another."
        )
    ready = build(description)
    clients = len(ready.data) if clients is None else clients
    card = replace(DataCard.of(ready.data), truth=None, names=())
    description = {key: value for key, value in description.items() if isinstance(value, dict)}
    description.pop("plan", None)
    settings = description.setdefault("run", {})
    settings.setdefault("threads", 1)
    (folder / "app").mkdir(parents=True)
    method = type(ready.algorithm).__name__
    words = {
        "name": f"coterie-{method.lower()}",
        "method": method,
        "folder": str(folder.resolve()),
        "out": json.dumps(str(folder.resolve() / "run")),
        "clients": clients,
        "deadline": f"{deadline:g}",
    }
    files = {
        "pyproject.toml": PROJECT.format(**words),
        "README.md": README.format(**words),
        ".gitignore": GITIGNORE,
        "app/__init__.py": f'"""{method} on a real federation."""\n',
        "app/server_app.py": SERVER,
        "app/client_app.py": CLIENT,
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "app" / "run.json").write_bytes(to_json(description))
    (folder / "app" / "data.json").write_bytes(to_json(card.to_dict()))
    return {"clients": clients, "names": list(ready.data.names), "method": method}
