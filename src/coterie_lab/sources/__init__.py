"""Public data sets, read from the files that their authors published."""

import functools
from pathlib import Path

from coterie.core.errors import ConfigError, unknown
from coterie_lab.sources.cifar import CIFAR10
from coterie_lab.sources.femnist import FEMNIST
from coterie_lab.sources.files import Pool, Source
from coterie_lab.sources.idx import EMNIST, FASHION_MNIST, MNIST
from coterie_lab.sources.text import AG_NEWS, AMAZON
from coterie_lab.sources.uci import ABALONE, ANURAN_GENUS, ANURAN_SPECIES, WAVEFORM

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        MNIST,
        FASHION_MNIST,
        CIFAR10,
        EMNIST,
        FEMNIST,
        AG_NEWS,
        AMAZON,
        ABALONE,
        WAVEFORM,
        ANURAN_SPECIES,
        ANURAN_GENUS,
    )
}
"""The data sets by name."""


def source(name: str) -> Source:
    """Find a data set by name."""
    if name not in SOURCES:
        raise ConfigError(unknown("data set", name, SOURCES))
    return SOURCES[name]


def load(name: str, data_dir: str | Path | None = None) -> Pool:
    """Load a data set into memory; the last one is cached."""
    found = source(name).find(data_dir)
    return source(name).load(data_dir) if found is None else _load(name, found[0])


@functools.lru_cache(maxsize=1)
def _load(name: str, folder: Path) -> Pool:
    return source(name).load(folder)


__all__ = ["SOURCES", "Pool", "Source", "load", "source"]
