"""coterie deploy"""

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import Json, Trust, parse_sets

app = typer.Typer(
    help="Run a method on real clients, through Flower.",
    epilog="Start here: coterie deploy init trial study.toml",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Deployment = Annotated[Path, typer.Argument(help="A folder made by coterie deploy init.")]
Answer = Annotated[
    list[str] | None,
    typer.Option(
        help="A task or question that nodes answer, or 'all'. May be repeated. Default: all whose "
        "replies reveal nothing about single classes or rows."
    ),
]
Name = Annotated[str, typer.Option(help="The client's name.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write. It must be empty.")],
    file: Annotated[
        Path, typer.Argument(help="A run file (TOML or JSON), or the run.json of a run folder.")
    ],
    clients: Annotated[
        int | None, typer.Option(help="Clients to wait for. Default: all in the run file's data.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds an exchange may take.")] = 60.0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change one option, e.g. run.rounds=6.")
    ] = None,
    trust: Trust = None,
) -> None:
    """Write a Flower app from a run file.

    The data named in the run file show what the clients' data look like: columns, classes and
    scales. The app contains this description, and no data.

    Example:

      coterie deploy init trial study.toml --clients 4
    """
    from coterie.core.config import find_imports
    from coterie.deploy.app import write_app
    from coterie.running.build import read

    description = {key: value for key, value in read(file).items() if isinstance(value, dict)}
    description.pop("plan", None)
    changes = parse_sets(set_ or [])
    for table, options in changes.items():
        description.setdefault(table, {}).update(options)
    named = {*(trust or ()), *find_imports(changes)}
    made = write_app(folder, description, clients, deadline, named)
    print(f"{made['method']} for {made['clients']} clients, in {folder}.")
    print(f"Try it here: coterie deploy up {folder} --clients {made['clients']}")


@app.command()
def up(
    folder: Deployment,
    clients: Annotated[
        int, typer.Option(help="Number of clients to start; 0: only the server.")
    ] = 0,
    names: Annotated[
        str | None,
        typer.Option(help="Names of the clients, separated by commas. Default: from the run file."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Data of the clients: a folder with a file per client, package.module:load, or "
            "'run' for the data of the run file."
        ),
    ] = "run",
    host: Annotated[
        str, typer.Option(help="Address to listen on. By default only this machine can connect.")
    ] = "127.0.0.1",
    also: Annotated[
        str | None,
        typer.Option(
            help="Further names of this machine for the certificate, separated by commas."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the SuperLink. Default: any free port.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A package or module of your own that the run uses. May be repeated."),
    ] = None,
    answer: Answer = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use no TLS and no node keys. Only for this machine.")
    ] = False,
    per_node: Annotated[
        int, typer.Option(min=1, help="Number of clients that share a node, and its memory.")
    ] = 1,
    database: Annotated[
        bool,
        typer.Option(
            "--database",
            help="Keep the SuperLink's state in a file. This is slower. Without it, a SuperLink "
            "that is restarted loses the Flower run, and the round begins again.",
        ),
    ] = False,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="Use Flower's own SuperNodes. Slower, and they run apps."),
    ] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Supervise until Ctrl-C, for a system service.")
    ] = False,
) -> None:
    """Start a federation on this machine: a SuperLink with TLS, and nodes with their own keys.

    A supervisor restarts a process that stops.

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
            f"--insecure needs a local address, such as 127.0.0.1. Got {host}. Leave --insecure "
            "out, or leave --host out."
        )
    local = Local(folder)
    chosen = names.split(",") if names else []
    if clients and not chosen:
        chosen = list(make_data(read_json(local.folder / "app" / "run.json")["data"]).names)
        if clients > len(chosen):
            raise ConfigError(f"The run file's data have {len(chosen)} clients. Got {clients}.")
        chosen = chosen[:clients]
    if stock and per_node > 1:
        raise ConfigError("--stock has one client per node. Leave --per-node or --stock out.")
    address = local.up(
        chosen,
        data,
        host=host,
        port=port,
        insecure=insecure,
        allow=tuple(allow or ()),
        answers=tuple(answer or ()),
        also=tuple(also.split(",")) if also else (),
        database=database,
        stock=stock,
        per_node=per_node,
        foreground=foreground,
    )
    if foreground:
        return
    kind = "without TLS" if insecure else "with TLS and node keys"
    nodes = -(-len(chosen) // per_node)
    print(f"SuperLink at {address['superlink']}, {kind}; {len(chosen)} clients on {nodes} nodes.")
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(
            f"WARNING: other machines can reach {host}. Flower's control interface asks for a "
            "token; still, let a firewall admit only the nodes (see docs/deploying.md)."
        )
    print(f"Run: coterie deploy run {folder}")


@app.command()
def run(
    folder: Deployment,
    set_: Annotated[
        list[str] | None,
        typer.Option("--config", help="Change one option of the Flower run, e.g. deadline=30."),
    ] = None,
    attempts: Annotated[
        int, typer.Option(help="How often the server app is started if it stops early.")
    ] = 5,
    seconds: Annotated[
        float, typer.Option(help="Longest time to wait for the end, in seconds.")
    ] = 86400.0,
) -> None:
    """Run the app and wait for the end.

    If the server app stops early, it is started again and continues from its checkpoint.

    Example:

      coterie deploy run trial --config deadline=30
    """
    from coterie.core.errors import ConfigError, FederationError
    from coterie.deploy.local import Deployment as Local

    config: dict[str, Any] = {}
    for pair in set_ or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(
                f"--config must have the form option=value, such as deadline=30. Got '{pair}'."
            )
        config |= parse_sets([f"config.{name}={value}"])["config"]
    local = Local(folder)
    whole = local.run(
        config, attempts=attempts, seconds=seconds, say=lambda t: print(t, flush=True)
    )
    if not whole:
        raise FederationError(
            f"The run did not finish. For the reason: coterie deploy logs {folder}"
        )
    print(f"Saved to {local.out}. For details: coterie show {local.out}")


@app.command()
def status(folder: Deployment, json: Json = False) -> None:
    """Show the processes of a deployment, how far its run is, and whose answers are missing."""
    from coterie.deploy.local import Deployment as Local
    from coterie.deploy.status import describe_status, read_status

    found = read_status(Local(folder))
    if json:
        import json as json_

        print(json_.dumps(found))
        return
    for line in describe_status(found):
        print(line)


@app.command()
def logs(
    folder: Deployment,
    role: Annotated[
        str | None,
        typer.Argument(help="supervisor, superlink, server or node-NAME. Default: all."),
    ] = None,
    lines: Annotated[int, typer.Option(help="Number of lines of each.")] = 20,
) -> None:
    """Show the last lines that the processes of a deployment wrote."""
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
    """Stop the processes of a deployment. Runs, client memory and keys are kept."""
    from coterie.deploy.local import Deployment as Local

    local = Local(folder)
    count = len(local.book.read())
    hard = local.down()
    print(f"{count} processes stopped" + (f", by force: {', '.join(hard)}" if hard else "") + ".")


@app.command()
def key(
    path: Annotated[
        Path, typer.Argument(help="File to write. The public key is written beside it, with .pub.")
    ],
) -> None:
    """Make a key pair for a node. Send the public key to the server; keep the private key.

    Example:

      coterie deploy key ~/site-3
    """
    from coterie.core.errors import ConfigError
    from coterie.deploy.processes import tool

    tool("flwr")  # says what to install, if it is not there
    from coterie.deploy.keys import node_key

    if path.exists():
        raise ConfigError(f"{path} exists, and a key is never overwritten. Choose another file.")
    print(f"Register {node_key(path)} with the server: coterie deploy register")


@app.command()
def register(
    folder: Deployment,
    public: Annotated[Path, typer.Argument(help="Public key of the node (.pub).")],
    name: Name,
) -> None:
    """Allow a node to connect, by its public key and the name of its client.

    Example:

      coterie deploy register server site-3.pub --name site-3
    """
    from coterie.deploy.local import Deployment as Local

    Local(folder).register(name, public)
    print(f"'{name}' may connect.")


@app.command()
def node(
    home: Annotated[Path, typer.Argument(help="Folder of the node, for client memory and models.")],
    name: Name,
    data: Annotated[
        str, typer.Option(help="Data of the client: a file, a folder, or package.module:load.")
    ],
    superlink: Annotated[str, typer.Option(help="Address of the SuperLink, host:port.")],
    certificate: Annotated[
        Path | None, typer.Option(help="The ca.crt of the server. Without it there is no TLS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of the node.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A package or module whose code the run may use. May be repeated."),
    ] = None,
    answer: Answer = None,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="Use Flower's own SuperNode. Slower, and it runs apps."),
    ] = False,
) -> None:
    """Run a node on a client's machine until Ctrl-C, and restart it if it stops.

    A node can serve several clients. Give their names to --name, separated by commas, and give
    --data and --key a folder with one file per client.

    Example:

      coterie deploy node ~/node --name site-3 --data /data/site-3.csv
      --superlink server:8443 --certificate ca.crt --key ~/site-3
    """
    from coterie.deploy.node import run_node

    run_node(
        home,
        name,
        data,
        superlink,
        certificate=certificate,
        key=key,
        allow=tuple(allow or ()),
        answers=tuple(answer or ()),
        stock=stock,
    )


@app.command()
def pull(
    folder: Annotated[Path, typer.Argument(help="Folder of a node, or of a deployment.")],
    out: Annotated[Path, typer.Option(help="Folder to write. It must not exist.")],
    client: Annotated[
        str | None, typer.Option(help="Name of the client, if the folder is a deployment.")
    ] = None,
) -> None:
    """Copy a client's own model from its node, to predict with it.

    Example:

      coterie deploy pull ~/node --out my-model

      coterie predict my-model --data today.csv
    """
    from coterie.core.errors import ConfigError
    from coterie.deploy.personal import pull as fetch

    if (folder / "app" / "run.json").exists():
        from coterie.deploy.local import Deployment as Local

        if client is None:
            raise ConfigError("deploy pull: name the client whose model to copy: --client NAME.")
        folder = Local(folder).node_home(client)
    fetch(folder, out)
    print(f"Saved to {out}. To use it: coterie predict {out} --data FILE")
