"""Faster relays: one process loads Flower and forks a relay for every message.

A SuperNode starts the command `flwr-clientapp` for each message, and most of its time is spent
loading Flower. The node therefore puts another command with this name first in its search path. It
passes its arguments to a process that has already loaded Flower, and this process forks. If there
is no such process, Flower's own command runs.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

SHIM = """#!{python} -IS
import json, os, socket, sys
try:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect({address!r})
        link.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
        code = link.recv(16)
    sys.exit(int(code))
except (OSError, ValueError):
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""


def listen(folder: Path, real: str) -> None:
    """Write the command to a folder, and fork a relay for each of its calls."""
    from coterie.engines.flower_private import clientapp

    run = clientapp()
    place = Path(tempfile.mkdtemp(prefix="coterie-"))
    address = place / "relays.sock"
    server = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)
    try:
        server.bind(str(address))
    finally:
        os.umask(old)
    server.listen(16)
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "flwr-clientapp"
    text = SHIM.format(python=sys.executable, address=str(address), real=real)
    if len(sys.executable) > 100 or " " in sys.executable:  # not allowed in a script's first line
        text = text.replace(f"#!{sys.executable} -IS", "#!/usr/bin/env python3")
    command.with_suffix(".part").write_text(text)
    command.with_suffix(".part").chmod(0o700)
    os.replace(command.with_suffix(".part"), command)

    def leave(*_: Any) -> None:
        server.close()
        address.unlink(missing_ok=True)
        place.rmdir()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    parent = os.getppid()
    server.settimeout(1.0)
    while os.getppid() == parent:
        _reap()
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        _fork(connection, run)
    leave()


def _fork(connection: socket.socket, run: Any) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("3i", credentials)[1] != os.getuid():
        connection.close()
        return
    if os.fork():
        connection.close()
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code: Any = 1
    try:
        connection.settimeout(10.0)
        words = connection.makefile("rb").readline()
        sys.argv = ["flwr-clientapp", *json.loads(words)]
        # If the command that was called is killed, the relay must end, too.
        threading.Thread(target=_follow, args=(connection,), daemon=True).start()
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            connection.sendall(str(code).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _follow(connection: socket.socket) -> None:
    connection.settimeout(None)
    try:
        gone = not connection.recv(1)
    except OSError:
        gone = True
    if gone:
        os._exit(1)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main(arguments: list[str] | None = None) -> None:
    """Run it: python -m coterie.deploy.relays FOLDER COMMAND."""
    parser = argparse.ArgumentParser(prog="coterie.deploy.relays")
    parser.add_argument("folder", type=Path)
    parser.add_argument("real")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    print("relays: loading Flower", flush=True)
    listen(options.folder, options.real)
    print(f"relays: ended after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
