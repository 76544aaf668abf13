"""Shards as Ray actors, on this machine or on a Ray cluster.

On this machine, Ray listens on the loopback interface only, and every process must know a token
that this process has drawn and that is never written to disk. On a cluster, Ray's own settings
apply: start its nodes with a token (see "Scaling" in the documentation).
"""

import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from coterie.core.client import DataSource
from coterie.core.errors import ConfigError, CoterieError, FederationError, TaskError
from coterie.engines.sharded import Lost, Pool, Shard

STORE = 512 * 2**20
"""Bytes of shared memory for messages between the processes on this machine."""


def connect(address: str | None, shards: int) -> Any:
    """Ray, started on this machine, or connected to the cluster at an address.

    A Ray to which this process is connected already is used as it is.
    """
    early = sys.modules.get("ray")
    if early is not None and early.is_initialized():
        return early
    if address is None:
        if early is not None:
            raise ConfigError(
                "Ray was imported before its settings could be made: it would listen on all "
                "networks. Import ray later, or call ray.init yourself."
            )
        _keep_to_this_machine()
    elif re.fullmatch(r"[^:/]+:\d+", address):
        _knock(address)
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    try:
        import ray
    except ImportError:
        raise ConfigError(
            'engine="ray" needs the package ray. Install it: pip install "coterie[ray]"'
        ) from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    try:
        if address is None:
            # "local": never a Ray that somebody else has started here.
            own: dict[str, Any] = {"num_cpus": shards, "object_store_memory": STORE}
            ray.init("local", include_dashboard=False, **own, **quiet)
        else:
            ray.init(address=address, **quiet)
    except Exception as error:
        where = "on this machine" if address is None else f"at {address}"
        raise FederationError(f"Ray {where} cannot be reached: {_brief(error)}") from error
    return ray


def _knock(address: str) -> None:
    """Find out at once that nobody answers; Ray itself tries for minutes."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise FederationError(
            f"No Ray cluster answers at {address} ({error}). Start one there: ray start --head. Or "
            "leave the address out to use this machine."
        ) from None


def _brief(error: Exception) -> str:
    """The first line of an error of Ray, as a sentence."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".") + "."


def _keep_to_this_machine() -> None:
    """Settings of a Ray on this machine alone; Ray reads them when it is imported."""
    own = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: listen on loopback only
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "120",  # a busy machine is slow
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    for name, value in own.items():
        os.environ.setdefault(name, value)


class Host:
    """A process that holds one shard at a time; starting one takes seconds."""

    def begin(self, *given: Any) -> None:
        """Make a shard here."""
        self.shard: Shard | None = Shard(*given)

    def ask(self, name: str, *given: Any) -> Any:
        """Call a method of the shard."""
        return getattr(self.shard, name)(*given)

    def drop(self) -> None:
        """Forget the shard and its data."""
        self.shard = None


class Actors(Pool):
    """A Ray actor for each shard; each takes one core.

    Parameters
    ----------
    algorithm
        The method.
    loaders
        For each shard, the function that loads its data there.
    options
        For each shard, the options of its simulation.
    threads
        Threads of each shard.
    address
        Address of a Ray cluster; None: this machine.
    """

    idle: ClassVar[list[Any]] = []
    """Processes without a shard, from earlier runs of this process."""

    def __init__(
        self,
        algorithm: Any,
        loaders: Sequence[Callable[[], DataSource]],
        options: Sequence[Mapping[str, Any]],
        threads: int,
        address: str | None = None,
    ) -> None:
        self.ray = connect(address, len(loaders))
        self._host = self.ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Host)
        self._method = self.ray.put(algorithm)
        self._parts = [
            (load, option, threads) for load, option in zip(loaders, options, strict=True)
        ]
        cores = self.ray.cluster_resources().get("CPU", 0)
        if cores < len(loaders):
            raise ConfigError(
                f'engine="ray": each of {len(loaders)} shards needs a core. Ray has {cores:.0f}. '
                "Use fewer shards, or a larger cluster."
            )
        self._hosts: dict[int, Any] = {}
        for shard, begun in enumerate([self._begin(shard) for shard in range(len(loaders))]):
            try:
                self.take(begun)
            except Lost:  # an idle process has ended meanwhile
                self.restart(shard)

    def _begin(self, shard: int) -> Any:
        """Make a shard, in a process that is idle or new."""
        self._hosts[shard] = self.idle.pop() if self.idle else self._host.remote()
        return self._hosts[shard].begin.remote(self._method, *self._parts[shard])

    def share(self, value: Any) -> Any:
        return self.ray.put(value)

    def ask(self, shard: int, name: str, *given: Any) -> Any:
        return self._hosts[shard].ask.remote(name, *given)

    def take(self, ticket: Any) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(ticket)
        except (
            errors.ActorDiedError, errors.ActorUnavailableError, errors.WorkerCrashedError,
            errors.OutOfMemoryError,  # Ray ends the largest process before memory runs out
        ):  # fmt: skip
            raise Lost from None
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, CoterieError):
                raise cause from None
            raise TaskError(f"A shard failed: {cause!r}") from error
        except errors.RayError as error:
            raise FederationError(
                f"Ray has failed: {_brief(error)} The run can be resumed."
            ) from error

    def restart(self, shard: int) -> None:
        if shard in self._hosts:
            self.ray.kill(self._hosts[shard])
        try:
            self.take(self._begin(shard))
        except Lost:
            raise FederationError(
                f"Shard {shard + 1} of {len(self._parts)} could not be started. Most likely memory "
                "is short: every shard needs some for PyTorch and the data; see: coterie plan. Use "
                "fewer shards, or more machines."
            ) from None

    def close(self) -> None:
        for host in self._hosts.values():
            host.drop.remote()
            self.idle.append(host)
        self._hosts = {}
