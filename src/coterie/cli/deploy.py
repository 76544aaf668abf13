"""coterie deploy"""

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import Json, parse_sets

app = typer.Typer(
    help="Run a method on real clients, through Flower.",
    epilog="Start here: coterie deploy init trial study.toml",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Deployment = Annotated[Path, typer.Argument(help="A folder made by coterie deploy init.")]
Name = Annotated[str, typer.Option(help="The client's name.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write; must be empty.")],
    file: Annotated[Path, typer.Argument(help="A run file (TOML or JSON), or a run's run.json.")],
    clients: Annotated[
        int | None, typer.Option(help="Clients to wait for; default: those in the run file's data.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds an exchange may take.")] = 60.0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option: run.rounds=6.")
    ] = None,
) -> None:
    """Write a Flower app from a run file.

    The data the run file names show what clients' data look like: columns, classes, scales. Only
    that is kept.

    Example:

      coterie deploy init trial study.toml --clients 4
    """
    from coterie.deploy.app import write_app
    from coterie.running.build import read

    description = {key: value for key, value in read(file).items() if isinstance(value, dict)}
    description.pop("plan", None)
    for table, options in parse_sets(set_ or []).items():
        description.setdefault(table, {}).update(options)
    made = write_app(folder, description, clients, deadline)
    print(f"{made['method']} for {made['clients']} clients, in {folder}.")
    print(f"Try it here: coterie deploy up {folder} --clients {made['clients']}")


@app.command()
def up(
    folder: Deployment,
    clients: Annotated[int, typer.Option(help="Nodes to start; 0: the server alone.")] = 0,
    names: Annotated[
        str | None, typer.Option(help="Their names, with commas; default: from the run file.")
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Their data: a folder with a file per client, package.module:load, or 'run': the "
            "run file's own."
        ),
    ] = "run",
    host: Annotated[
        str, typer.Option(help="Address to listen on; others reach this machine only if told.")
    ] = "127.0.0.1",
    also: Annotated[
        str | None,
        typer.Option(help="Further names of this machine in the certificate, with commas."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the SuperLink; default: any.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A package or module whose code the run may name: your own method's."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and node keys; only on this machine.")
    ] = False,
) -> None:
    """Start a federation on this machine: a SuperLink with TLS, and nodes with keys of their own.

    Examples:

      coterie deploy up trial --clients 4

      coterie deploy up server --host 10.0.0.5 --port 8443 --also server.example.org
    """
    from coterie.core.errors import ConfigError
    from coterie.deploy.local import Deployment as Local
    from coterie.running.build import make_data
    from coterie.running.folder import read_json

    if insecure and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            "--insecure is for this machine only. Leave it out, or listen on 127.0.0.1."
        )
    local = Local(folder)
    chosen = names.split(",") if names else []
    if clients and not chosen:
        chosen = list(make_data(read_json(local.folder / "app" / "run.json")["data"]).names)
        if clients > len(chosen):
            raise ConfigError(f"The run file's data have {len(chosen)} clients. Got {clients}.")
        chosen = chosen[:clients]
    local.also = also.split(",") if also else []
    address = local.up(
        chosen, data, host=host, port=port, insecure=insecure, allow=tuple(allow or ())
    )
    kind = "without TLS" if insecure else "with TLS and node keys"
    print(f"SuperLink at {address['superlink']}, {kind}; {len(chosen)} nodes.")
    print(f"Run: coterie deploy run {folder}")


@app.command()
def run(
    folder: Deployment,
    set_: Annotated[
        list[str] | None,
        typer.Option("--config", help="Change the Flower run's configuration: deadline=30."),
    ] = None,
    attempts: Annotated[int, typer.Option(help="Starts of a server app that dies.")] = 5,
    seconds: Annotated[float, typer.Option(help="Longest time to wait for the end.")] = 86400.0,
) -> None:
    """Run, and wait for the end; a server app that dies is started again from its checkpoint.

    Example:

      coterie deploy run trial --config deadline=30
    """
    from coterie.core.errors import ConfigError, FederationError
    from coterie.deploy.local import Deployment as Local

    config: dict[str, Any] = {}
    for pair in set_ or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--config must look like deadline=30. Got '{pair}'.")
        config |= parse_sets([f"config.{name}={value}"])["config"]
    local = Local(folder)
    whole = local.run(
        config, attempts=attempts, seconds=seconds, say=lambda t: print(t, flush=True)
    )
    if not whole:
        raise FederationError(f"The run did not come to its end. See: coterie deploy logs {folder}")
    print(f"Kept in {local.out}. See: coterie show {local.out}")


@app.command()
def status(folder: Deployment, json: Json = False) -> None:
    """Show the processes of a deployment and how far its run is."""
    from coterie.deploy.local import Deployment as Local
    from coterie.running.folder import RunFolder

    local = Local(folder)
    lines = RunFolder(local.out).lines()
    done = {"rounds": len(lines), "finished": (local.out / "summary.json").exists()}
    if json:
        import json as json_

        print(json_.dumps({"processes": local.status(), **done}))
        return
    for entry in local.status():
        word = "up" if entry["alive"] else "down"
        print(f"{entry['role']:20} {word:5} process {entry['pid']:<8} {entry.get('listens', '')}")
    print(f"{done['rounds']} rounds done" + (", finished" if done["finished"] else ""))


@app.command()
def logs(
    folder: Deployment,
    role: Annotated[
        str | None, typer.Argument(help="superlink, server, or node-NAME; default: all.")
    ] = None,
    lines: Annotated[int, typer.Option(help="Lines of each.")] = 20,
) -> None:
    """Show the last words of a deployment's processes."""
    from coterie.core.errors import ConfigError, unknown
    from coterie.deploy.local import Deployment as Local

    found = {path.stem: path for path in sorted(Local(folder).state.glob("logs/*.log"))}
    if role is not None and role not in found:
        raise ConfigError(unknown("log", role, found))
    for name, path in found.items():
        if role in (None, name):
            print(f"== {name}")
            print("\n".join(path.read_text(errors="replace").splitlines()[-lines:]))


@app.command()
def down(folder: Deployment) -> None:
    """Stop the processes of a deployment. Runs, memory and keys stay."""
    from coterie.deploy.local import Deployment as Local

    local = Local(folder)
    count = len(local.book.read())
    hard = local.book.stop()
    print(f"{count} processes stopped" + (f", by force: {', '.join(hard)}" if hard else "") + ".")


@app.command()
def key(
    path: Annotated[Path, typer.Argument(help="File to write; the public half gets .pub.")],
) -> None:
    """Make a node's key pair. The public half goes to the server, the other stays.

    Example:

      coterie deploy key ~/site-3
    """
    from coterie.core.errors import ConfigError
    from coterie.deploy.processes import tool

    tool("flwr")  # says what to install, if it is not there
    from coterie.deploy.keys import node_key

    if path.exists():
        raise ConfigError(f"{path} exists. A key is not overwritten.")
    print(f"Register {node_key(path)} with the server: coterie deploy register")


@app.command()
def register(
    folder: Deployment,
    public: Annotated[Path, typer.Argument(help="A node's public key, .pub.")],
    name: Name,
) -> None:
    """Admit a node by its public key, under the name of its client.

    Example:

      coterie deploy register server site-3.pub --name site-3
    """
    from coterie.deploy.local import Deployment as Local

    Local(folder).register(name, public)
    print(f"'{name}' may connect.")


@app.command()
def node(
    home: Annotated[Path, typer.Argument(help="The node's folder: memory, models, the worker.")],
    name: Name,
    data: Annotated[
        str, typer.Option(help="The client's data: a file or folder, or package.module:load.")
    ],
    superlink: Annotated[str, typer.Option(help="The SuperLink, host:port.")],
    certificate: Annotated[
        Path | None, typer.Option(help="The server's ca.crt; without it there is no TLS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The node's private key.")] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="A package or module whose code the run may name.")
    ] = None,
) -> None:
    """Run a node on a client's machine, until Ctrl-C: a SuperNode and its worker.

    Example:

      coterie deploy node ~/node --name site-3 --data /data/site-3.csv
      --superlink server:8443 --certificate ca.crt --key ~/site-3
    """
    from coterie.deploy.node import run_node

    run_node(
        home, name, data, superlink, certificate=certificate, key=key, allow=tuple(allow or ())
    )


@app.command()
def pull(
    folder: Annotated[Path, typer.Argument(help="The node's folder, or a deployment's.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    client: Annotated[str | None, typer.Option(help="Whose, if a deployment is named.")] = None,
) -> None:
    """Fetch a client's own model from its node, to predict with.

    Example:

      coterie deploy pull ~/node --out my-model

      coterie predict my-model --data today.csv
    """
    from coterie.core.errors import ConfigError
    from coterie.deploy.personal import pull as fetch

    if (folder / "app" / "run.json").exists():
        from coterie.deploy.local import Deployment as Local

        if client is None:
            raise ConfigError("Say whose model: --client NAME.")
        folder = Local(folder).node_home(client)
    fetch(folder, out)
    print(f"Kept in {out}. Use: coterie predict {out} --data FILE")
