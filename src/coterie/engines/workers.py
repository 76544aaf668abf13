"""Worker processes with one thread each, which run clients in parallel.

A worker is forked, so it has the method, models and data without a copy. It answers in bytes.
"""

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TypeAlias

import torch

from coterie.core.errors import CoterieError, TaskError

Work: TypeAlias = Callable[[int], bytes]


def available() -> bool:
    """Whether this system can fork processes."""
    return "fork" in multiprocessing.get_all_start_methods()


def in_workers(work: Work, places: Sequence[int], workers: int) -> Iterator[bytes]:
    """Results of `work` for each place, in order; workers take places in turn."""
    context = multiprocessing.get_context("fork")
    workers = min(workers, len(places))
    ends, processes = [], []
    for number in range(workers):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(work, places[number::workers], there))
        with warnings.catch_warnings():  # torch's own threads are idle and not needed in workers
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        for turn in range(len(places)):
            try:
                said = ends[turn % workers].recv_bytes()
            except EOFError:
                raise TaskError(
                    "Simulation: a worker process stopped unexpectedly, perhaps because "
                    "memory ran out. Use workers=1."
                ) from None
            if said[:1] != b"+":
                raise TaskError(said[1:].decode())
            yield said[1:]
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.terminate()
            process.join()


def _serve(work: Work, places: Sequence[int], end: Connection) -> None:
    torch.set_num_threads(1)
    for place in places:
        try:
            said = b"+" + work(place)
        except CoterieError as error:
            said = b"-" + str(error).encode()
        try:
            end.send_bytes(said)
        except BrokenPipeError:  # the answer is no longer needed
            return
