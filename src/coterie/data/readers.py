"""Read your own data from tables, folders, partitions or functions into a federation.

All of these functions take the options of `Reading`. Notes on what was inferred or left out are in
`data.notes`; `data.encoder` prepares new rows in the same way.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.core.client import natural
from coterie.core.config import construct
from coterie.core.errors import ConfigError, DataError, unknown
from coterie.data.assemble import Reading, assemble
from coterie.data.cells import RawTable
from coterie.data.federated import FederatedData
from coterie.data.formats import ENDINGS, Format, ending_of, stem_of
from coterie.data.frames import from_arrays
from coterie.data.images import read_client
from coterie.data.limits import refuse_links_out
from coterie.data.tables import read, read_file
from coterie.data.waiting import read_each


def from_table(table: Any, client: str, label: str | None = None, **options: Any) -> FederatedData:
    """One table for all clients: a data frame (pandas, polars), a Hugging Face dataset, or a file.

    Parameters
    ----------
    client
        Column with the name of the client.
    label
        Column to predict; None: the inputs are reconstructed.
    options
        See `Reading`: task, test_fraction, validation_fraction, split, unit, time, seed,
        normalise, names, categorical, text, text_features, drop, separator, header, encoding,
        na_values.

    >>> rows = {"site": ["a", "a", "b", "b"], "age": [1.0, 2.0, 3.0, 6.0], "ill": [0, 1, 1, 0]}
    >>> data = from_table(rows, client="site", label="ill", test_fraction=0)
    >>> data
    FederatedData('table', 2 clients, 4 train + 0 test samples, classification, x [1], 2 outputs)
    >>> data.names, data.encoder.encode({"age": [3.0]})
    (('a', 'b'), tensor([[0.]]))
    """
    chosen = construct(Reading, options)
    if client == label:
        raise ConfigError(
            f"from_table: client and label must be different columns. Both are '{client}'."
        )
    tables, names = split_table(table, client, chosen.format)
    record = None
    if isinstance(table, str | Path):
        record = {"table": str(Path(table).resolve()), "client": client, "label": label}
    return assemble(
        "from_table",
        tables,
        names,
        label,
        chosen,
        name="table",
        record=record,
    )


def split_table(table: Any, client: str, how: Format) -> tuple[list[RawTable], list[str]]:
    """The rows of each client in one table, without the column of names; and the names."""
    whole = read(table, how=how)
    if client not in whole.cells:
        raise DataError(
            f"from_table: {whole.source} must have the client column. "
            + unknown("column", client, whole.cells)
        )
    cells = whole.cells[client]
    if cells.missing.any():
        raise DataError(
            f"from_table: every row must name its client. {whole.at(int(cells.missing.argmax()))} "
            f"has none in column '{client}'. Fill it or remove the row."
        )
    if not len(whole.rows):
        raise DataError(f"from_table: {whole.source} must have rows. It has none.")
    names, first, owner = np.unique(
        np.array(cells.words, dtype=str), return_index=True, return_inverse=True
    )
    said = f"Names in column '{client}' that differ in spaces around them are one client."
    notes = (*whole.notes, said) if cells.trimmed else whole.notes
    rest = whole._replace(cells={k: v for k, v in whole.cells.items() if k != client}, notes=notes)
    # One sort instead of a search per client; a stable one keeps the order of rows.
    order = np.argsort(owner, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(owner))[:-1])
    seen = np.argsort(first)
    return [rest.take(parts[i]) for i in seen], [str(names[i]) for i in seen]


def from_folder(
    path: str | Path,
    label: str | None = None,
    *,
    size: tuple[int, int] | int | None = None,
    **options: Any,
) -> FederatedData:
    """One file per client, or one folder of images per client.

    Files end in .csv, .tsv, .data, .txt, .jsonl, .parquet, .feather, .xlsx or .npz, and may be
    compressed (.gz, .zip). The name of a file without its ending is the name of the client. NPZ
    files hold x and y, or x_train, y_train, x_test and y_test. Images are in
    client/class/image.png and become floats in [0, 1] of shape [channels, height, width].

    Parameters
    ----------
    label
        Column to predict; None: the inputs are reconstructed. NPZ files and images contain their
        labels.
    size
        Height and width to scale images to; without it they must agree.
    options
        See `Reading`: task, test_fraction, validation_fraction, split, unit, time, seed,
        normalise, names, categorical, text, text_features, drop, separator, header, encoding,
        na_values.
    """
    chosen = construct(Reading, options)
    record: dict[str, Any] = {"path": str(Path(path).resolve()), "label": label}
    if isinstance(size, int):
        size = (size, size)
    found = read_folder(path, size, chosen.format, chosen.names)
    if size is not None and not found.images:
        raise ConfigError(
            f"from_folder: size is for folders of images. {path} holds files. Leave it out."
        )
    if size is not None:
        record["size"] = list(size)
    if found.images or (label is None and found.typed and found.labelled):
        label = "class" if found.images else "y"
    return assemble(
        "from_folder",
        found.tables,
        found.names,
        label,
        chosen,
        typed=found.typed,
        name="folder",
        record=record,
    )


class Folder(NamedTuple):
    """The contents of a folder with a file, or a folder of images, per client."""

    tables: list[RawTable]
    names: list[str]
    images: bool
    typed: bool  # arrays, whose integers are labels

    @property
    def labelled(self) -> bool:
        """Whether all arrays have targets."""
        return all("y" in table.cells for table in self.tables)


def read_folder(
    path: str | Path,
    size: tuple[int, int] | None,
    how: Format,
    wanted: Sequence[str] | None = None,
) -> Folder:
    """Read a folder; files of clients that are not wanted are not opened."""
    folder = Path(path)
    if not folder.is_dir():
        what = "It is a file; use from_table." if folder.exists() else "It does not exist."
        raise DataError(f"from_folder: {folder} must be a folder. {what}")
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    entries.sort(key=lambda entry: natural(entry.name))
    if not entries:
        raise DataError(
            f"from_folder: {folder} must hold a file or a folder per client. It is empty."
        )
    refuse_links_out(folder, entries)
    folders = [entry for entry in entries if entry.is_dir()]
    if folders and len(folders) < len(entries):
        file = next(entry for entry in entries if not entry.is_dir())
        raise DataError(
            f"from_folder: {folder} must hold files or folders of images, not both. '{file.name}' "
            f"is beside the folder '{folders[0].name}'. Move one of them."
        )
    if folders:
        _refuse_unknown(wanted, [entry.name for entry in folders])
        folders = [entry for entry in folders if wanted is None or entry.name in wanted]
        tables = _one_depth(read_each(lambda entry: read_client(entry, size), folders, "clients"))
        return Folder(tables, [entry.name for entry in folders], True, False)
    for entry in entries:
        if ending_of(entry) not in ENDINGS:
            raise DataError(
                f"from_folder: client files must end in {', '.join(ENDINGS)}. Got '{entry.name}'. "
                f"Convert or remove it."
            )
    _refuse_unknown(wanted, [stem_of(entry) for entry in entries])
    files = [entry for entry in entries if wanted is None or stem_of(entry) in wanted]
    tables = read_each(lambda entry: read_file(entry, how), files, "files")
    typed = all(ending_of(entry) == ".npz" for entry in files)
    return Folder(tables, [stem_of(entry) for entry in files], False, typed)


def _refuse_unknown(wanted: Sequence[str] | None, names: Sequence[str]) -> None:
    for name in wanted or ():
        if name not in names:
            raise DataError("from_folder: " + unknown("client", name, names))


def from_partitions(partitioner: Any, label: str | None = None, **options: Any) -> FederatedData:
    """Partitions in the manner of flwr-datasets: `num_partitions` and `load_partition(i)`.

    Parameters
    ----------
    partitioner
        `load_partition(i)` gives a Hugging Face dataset, a data frame, or a dict of columns. One
        column may hold an image or an array per row; it is then the only input.
    label
        Column to predict; None: the inputs are reconstructed.
    options
        See `Reading`; `names` are given to the partitions.
    """
    for wanted in ("num_partitions", "load_partition"):
        if not hasattr(partitioner, wanted):
            raise DataError(
                f"from_partitions: there must be num_partitions and load_partition(i). "
                f"{type(partitioner).__name__} has no {wanted}."
            )
    chosen = construct(Reading, options)
    n = partitioner.num_partitions
    n = int(n() if callable(n) else n)
    names = chosen.names or tuple(f"client-{i}" for i in range(n))
    if len(names) != n:
        raise DataError(f"from_partitions: names must be {n}, one per partition. Got {len(names)}.")
    tables = [read(partitioner.load_partition(i), f"partition {i}") for i in range(n)]
    return assemble("from_partitions", tables, names, label, chosen)


def from_function(
    load: Callable[[str], Any], names: Sequence[str], label: str | None = None, **options: Any
) -> FederatedData:
    """A function that gives the data of the client it is asked for.

    Parameters
    ----------
    load
        `load(name)` gives (x, y), or (x_train, y_train, x_test, y_test), or a dict of these by
        name, or a table (a data frame, a dict of columns, a file).
    names
        The clients.
    label
        Column to predict, if `load` gives tables.
    options
        See `Reading`.

    >>> data = from_function(lambda name: ([[1.0], [3.0]], ["no", "yes"]), names=["ann", "bob"])
    >>> data.names, data.classes, data.encoder.encode([[2.0]])
    (('ann', 'bob'), ('no', 'yes'), ...)
    """
    chosen = construct(Reading, options)
    names = [str(name) for name in names]
    tables = [as_table(load(name), f"client '{name}'", chosen.format) for name in names]
    typed = label is None and bool(tables) and all("y" in table.cells for table in tables)
    return assemble("from_function", tables, names, "y" if typed else label, chosen, typed=typed)


def as_table(value: Any, source: str, how: Format) -> RawTable:
    """Read what a user's function returns: a table, or two or four arrays."""
    if not isinstance(value, tuple):
        return read(value, source, how)
    if len(value) == 2:
        return from_arrays(*value, source)
    if len(value) == 4:
        parts = zip(("x_train", "y_train", "x_test", "y_test"), value, strict=True)
        return read({name: part for name, part in parts if part is not None}, source)
    raise DataError(
        f"from_function: load must return (x, y) or (x_train, y_train, x_test, y_test). Got "
        f"{len(value)} values for {source}."
    )


def _one_depth(tables: list[RawTable]) -> list[RawTable]:
    """Turn grey images into colour images if another client has colour images."""
    depth = max((table.x.shape[1] for table in tables if table.x is not None), default=1)
    return [
        table
        if table.x is None or table.x.shape[1] == depth
        else table._replace(x=np.repeat(table.x, depth, axis=1))
        for table in tables
    ]
