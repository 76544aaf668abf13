"""Write a Flower app from a run file: `coterie deploy init`."""

import getpass
import json
import sys
from collections.abc import Iterable
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

For several machines see "Deploying" in Coterie's documentation. `service/` has systemd units for
the server and for nodes, and a file for a container image.
"""
SERVER_UNIT = """# The server as a system service. Put this file in /etc/systemd/system, adapt
# user, host and port, then:
#     systemctl enable --now coterie-server
[Unit]
Description=Coterie: SuperLink and server of {name}
Wants=network-online.target
After=network-online.target

[Service]
User={user}
WorkingDirectory={folder}
ExecStart={python} -m coterie deploy up {folder} --host 127.0.0.1 --port 8443 --foreground
Restart=always
RestartSec=5
TimeoutStopSec=60
UMask=0077
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""
NODE_UNIT = """# A node as a system service, on a client's machine; %i is the name of the
# client. Put this file in /etc/systemd/system, adapt user, paths and address, then:
#     systemctl enable --now coterie-node@site-1
[Unit]
Description=Coterie: node of %i
Wants=network-online.target
After=network-online.target

[Service]
User={user}
StateDirectory=coterie
StateDirectoryMode=0700
ExecStart={python} -m coterie deploy node /var/lib/coterie/%i --name %i --data /srv/data/%i.csv \\
    --superlink server.example.org:8443 --certificate /etc/coterie/ca.crt --key /etc/coterie/%i.key
Restart=always
RestartSec=5
TimeoutStopSec=30
UMask=0077
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict

[Install]
WantedBy=multi-user.target
"""
CONTAINER = """# An image for server and nodes. Data, keys and memory stay outside, in volumes:
#     docker build -t coterie -f Containerfile WHEELS
# (WHEELS is a folder with Coterie's wheel), and on a client's machine
#     docker run --read-only --tmpfs /tmp -v /srv/data:/data:ro -v /etc/coterie:/keys:ro \\
#         -v coterie-node:/home/coterie coterie deploy node /home/coterie/node --name site-1 \\
#         --data /data/site-1.csv --superlink server.example.org:8443 \\
#         --certificate /keys/ca.crt --key /keys/site-1.key
FROM python:{version}-slim
COPY *.whl /tmp/
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \\
    "$(ls /tmp/*.whl)[flower]" && rm /tmp/*.whl && useradd --create-home --uid 1000 coterie
USER 1000
WORKDIR /home/coterie
ENTRYPOINT ["python", "-m", "coterie"]
CMD ["deploy", "--help"]
"""
GITIGNORE = "state/\nrun/\n*.lock\n*.live.json\n"


def write_app(
    folder: Path,
    description: Description,
    clients: int | None,
    deadline: float,
    trust: Iterable[str] = (),
) -> dict[str, Any]:
    """Write the app and return the data card."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"The folder must be new or empty. {folder} is not empty. Choose another."
        )
    ready = build(description, trust)
    clients = len(ready.data) if clients is None else clients
    card = replace(DataCard.of(ready.data), truth=None, names=())
    description = {key: value for key, value in description.items() if isinstance(value, dict)}
    description.pop("plan", None)
    settings = description.setdefault("run", {})
    settings.setdefault("threads", 1)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # runs and keys are for their owner alone
    (folder / "app").mkdir()
    method = type(ready.algorithm).__name__
    words = {
        "name": f"coterie-{method.lower()}",
        "method": method,
        "folder": str(folder.resolve()),
        "out": json.dumps(str(folder.resolve() / "run")),
        "clients": clients,
        "deadline": f"{deadline:g}",
        "python": sys.executable,
        "user": getpass.getuser(),
        "version": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    files = {
        "pyproject.toml": PROJECT.format(**words),
        "README.md": README.format(**words),
        ".gitignore": GITIGNORE,
        "app/__init__.py": f'"""{method} on a real federation."""\n',
        "app/server_app.py": SERVER,
        "app/client_app.py": CLIENT,
        "service/coterie-server.service": SERVER_UNIT.format(**words),
        "service/coterie-node@.service": NODE_UNIT.format(**words),
        "service/Containerfile": CONTAINER.format(**words),
    }
    (folder / "service").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "app" / "run.json").write_bytes(to_json(description))
    (folder / "app" / "data.json").write_bytes(to_json(card.to_dict()))
    return {"clients": clients, "names": list(ready.data.names), "method": method}
