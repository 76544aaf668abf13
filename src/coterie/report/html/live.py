"""A page on this machine that shows a run while it goes on. It can be read and nothing else."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError, CoterieError
from coterie.report.html.contents import Contents, read_contents
from coterie.report.html.page import HERE, list_faults, render
from coterie.running.files import blame
from coterie.running.progress import duration

HOST = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Nothing from elsewhere, no inline code, no forms, no frames."""
PATIENCE = 3.0  # seconds after which a client that has not answered is named
RECENT = 20  # rounds in which late clients are counted
STALLED = 120.0  # seconds without a sign of life after which a run may have been stopped


def make_app(folder: Path) -> Any:
    """The application that shows a run folder: four addresses, GET only."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import Response
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError(
            "watch: starlette and uvicorn are needed and not installed. Install them with: pip "
            "install 'coterie[live]'"
        ) from error

    def serve(kind: str, make: Callable[[], str]) -> Callable[[Any], Any]:
        def answer(request: Any) -> Any:
            content = make().encode()
            mark = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            headers = {**HEADERS, "ETag": mark}
            if request.headers.get("if-none-match") == mark:
                return Response(status_code=304, headers=headers)
            return Response(content, media_type=kind, headers=headers)

        return answer

    page = (HERE / "live.html").read_text(encoding="utf-8")
    files = {
        "/": serve("text/html", lambda: page),
        "/run": serve("text/html", lambda: show(folder)),
        "/style.css": serve("text/css", lambda: (HERE / "style.css").read_text("utf-8")),
        "/live.js": serve("text/javascript", lambda: (HERE / "live.js").read_text("utf-8")),
    }
    # A page elsewhere that calls itself 127.0.0.1 by name must not read this one.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    routes = [Route(path, answer, methods=["GET"]) for path, answer in files.items()]
    return Starlette(routes=routes, middleware=[hosts])


def show(folder: Path) -> str:
    """The run as it is now, as a piece of HTML."""
    if not (folder / "run.json").exists():
        return (
            "<main><p class='notice'>There is no run here yet. This page waits for it.</p></main>"
        )
    try:
        contents = read_contents(folder)
        with blame(folder):
            live = describe_progress(contents)
            # Late clients stand at the top of this page; that a run goes on is said there, too.
            more = {"live": live, "faults": []} | ({"missing": []} if live["going"] else {})
            return render(contents, "live_body.html", **more)
    except (CoterieError, OSError):  # a file is being written
        return "<main><p class='notice'>The run folder cannot be read at the moment.</p></main>"


def describe_progress(contents: Contents) -> dict[str, Any]:
    """How far the run is, how long it will take, and who does not answer."""
    trainings = list_trainings(contents)
    left = seconds_left(contents, trainings)
    done, quiet = contents.finished, contents.quiet or 0.0
    going = next((one for one in trainings if one["done"] < one["wanted"]), None)
    if done and not contents.comparing:
        state = "finished"
    elif quiet > STALLED:
        state = f"no sign of life for {duration(quiet)}: the run may have been stopped"
    elif going is None:
        state = "finishing"
    else:
        state = f"running ({going['title']})"
    last = contents.rounds[-1] if contents.rounds else {}
    return {
        "state": state,
        "over": state == "finished",
        "going": state != "finished" and quiet <= STALLED,
        "trainings": trainings,
        "left": "" if state == "finished" or left is None else duration(left),
        "waiting": [
            (name, duration(seconds)) for name, seconds in contents.waiting if seconds > PATIENCE
        ],
        "late": list_faults(contents.rounds if done else contents.rounds[-RECENT:]),
        "recent": len(contents.rounds) if done else min(RECENT, len(contents.rounds)),
        "abandoned": [
            (line["round"], line["abandoned"])
            for line in contents.rounds[-50:]
            if "abandoned" in line
        ],
        "members": [] if contents.groups else list_members(contents, last),
    }


def list_trainings(contents: Contents) -> list[dict[str, Any]]:
    """The trainings of a run: rounds done and wanted of each."""
    done = int(contents.rounds[-1]["round"]) if contents.rounds else 0
    # A run may end early, when its method is done or its loss does not fall any more.
    wanted = done if contents.finished and done else contents.wanted
    out = [{"title": contents.method, "way": "groups", "done": done, "wanted": wanted}]
    if contents.compares:
        for way, title in (("alone", "training alone"), ("one", "one model for all")):
            lines = contents.others.get(way, [])
            rounds = int(lines[-1]["round"]) if lines else 0
            wanted = rounds if contents.verdict is not None else contents.wanted
            out.append({"title": title, "way": way, "done": rounds, "wanted": wanted})
    return out


def seconds_left(contents: Contents, trainings: list[dict[str, Any]]) -> float | None:
    """Seconds until all trainings are done, at the pace of the last rounds."""
    pace = contents.seconds[-5:]
    if not pace:
        return None
    rounds = sum(max(one["wanted"] - one["done"], 0) for one in trainings)
    return rounds * sum(pace) / len(pace)


def list_members(contents: Contents, last: dict[str, Any]) -> list[tuple[int, list[str]]]:
    """The clients of each group after the last round."""
    members: dict[int, list[str]] = {}
    for client, group in enumerate(last.get("assignment", [])):
        name = contents.names[client] if client < len(contents.names) else f"client {client}"
        members.setdefault(int(group), []).append(name)
    return sorted(members.items())


def serve(folder: Path, port: int = 8765) -> None:
    """Show a run folder on this machine until Ctrl-C."""
    app = make_app(folder)
    import socket

    import uvicorn

    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"watch: port {port} cannot be used ({error.strerror}). Choose another one with "
                "--port, or 0 for any."
            ) from None
        print(f"Watching {folder}: http://{HOST}:{door.getsockname()[1]} (end with Ctrl-C)")
        config = uvicorn.Config(app, log_level="warning", server_header=False, ws="none")
        uvicorn.Server(config).run(sockets=[door])
