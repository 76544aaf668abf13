"""Data of many clients as one pool of arrays and, for each client, the rows that are its own.

A chunk of clients is gathered on demand: rows are looked up, padded to one length and passed
through the transform, so floats and rotated copies exist for that chunk alone.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.client import Batch
from coterie.core.errors import ConfigError, DataError, unknown
from coterie.core.random import codes, fold, seed_key
from coterie.core.tree import Ids, Tree, leaves, named_leaves, take, tree_map
from coterie.data.cells import SPLITS
from coterie.data.encoder import Encoder
from coterie.data.warnings import DataWarning

TASKS = ("classification", "regression", "reconstruction")


class RowIndex(NamedTuple):
    """Which pool rows belong to which client, one client after the other.

    >>> rows = RowIndex.of([[4, 5], [], [0]])
    >>> rows.sizes
    tensor([2, 0, 1])
    """

    index: Tensor  # type: ignore[assignment]  # [rows]  int64, places in the pool
    offsets: Tensor  # [clients + 1]  where each client's rows begin and end in `index`

    @classmethod
    def of(cls, lists: Sequence[Sequence[int] | Tensor]) -> "RowIndex":
        """From a list of pool rows for each client."""
        parts = [torch.as_tensor(rows, dtype=torch.int64) for rows in lists]
        sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        return cls(torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64), _ends(sizes))

    @classmethod
    def blocks(cls, sizes: Tensor | Sequence[int], start: int = 0) -> "RowIndex":
        """For a pool that holds one client after the other, beginning at row `start`.

        >>> RowIndex.blocks([2, 1], start=10).index
        tensor([10, 11, 12])
        """
        offsets = _ends(torch.as_tensor(sizes, dtype=torch.int64))
        return cls(torch.arange(start, start + int(offsets[-1])), offsets)

    @classmethod
    def none(cls, n_clients: int) -> "RowIndex":
        """No row for anybody."""
        return cls.blocks(torch.zeros(n_clients, dtype=torch.int64))

    @property
    def sizes(self) -> Tensor:
        """Number of rows of each client."""
        return self.offsets.diff()

    @property
    def owner(self) -> Tensor:
        """Client of each entry of `index`."""
        return torch.arange(len(self.offsets) - 1).repeat_interleave(self.sizes)

    @property
    def position(self) -> Tensor:
        """Number of each entry of `index` among the rows of its client."""
        return torch.arange(len(self.index)) - self.offsets[self.owner]

    def where(self, chosen: Tensor) -> "RowIndex":
        """The entries of `index` for which a condition holds."""
        return RowIndex(self.index[chosen], _ends(chosen.long())[self.offsets])

    def of_clients(self, ids: Ids) -> "RowIndex":
        """The rows of some clients, in the order of their ids."""
        blocks = RowIndex.blocks(self.sizes[ids])
        return RowIndex(
            self.index[blocks.position + self.offsets[ids][blocks.owner]], blocks.offsets
        )

    def of_units(self, unit: Tensor) -> tuple["RowIndex", Tensor]:
        """The units of every client, and which of them each entry of `index` belongs to.

        Parameters
        ----------
        unit
            Number of the unit of each entry of `index`. Units of different clients are different.

        Returns
        -------
        units
            One entry per unit: the place in `index` of its first row.
        member
            Number of its unit, for each entry of `index`. A client's units are numbered in the
            order in which they first occur.

        Examples
        --------
        >>> units, member = RowIndex.blocks([3, 1]).of_units(torch.tensor([7, 4, 7, 7]))
        >>> units.index.tolist(), units.sizes.tolist(), member.tolist()
        ([0, 1, 3], [2, 1], [0, 1, 0, 2])
        """
        found, code = unit.unique(return_inverse=True)
        _, code = (self.owner * len(found) + code).unique(return_inverse=True)
        n, place = int(code.max()) + 1 if len(code) else 0, torch.arange(len(code))
        first = torch.full((n,), len(code)).scatter_reduce(0, code, place, "amin")
        order = first.argsort()
        starts = first[order]
        sizes = torch.bincount(self.owner[starts], minlength=len(self.offsets) - 1)
        return RowIndex(starts, _ends(sizes)), order.argsort()[code]

    def divide(
        self,
        names: Sequence[str],
        fraction: float,
        key: Tensor,
        unit: Tensor | None = None,
        time: Tensor | None = None,
    ) -> tuple["RowIndex", "RowIndex"]:
        """Part a fraction of every client's units from the rest: (rest, part).

        With two units or more, a client has at least one on either side.

        Parameters
        ----------
        names, key
            Which units are drawn depends on the key, the client's name and the number of its
            units, and on no other client.
        unit
            Number of the unit of each pool row; None: every row is a unit.
        time
            Time of each pool row. The part then consists of the units whose last row is latest,
            and nothing is drawn.
        """
        if not 0.0 <= fraction < 1.0:
            raise ConfigError(
                f"FederatedData: a fraction to hold out must be in [0, 1). Got {fraction}."
            )
        if fraction == 0.0:
            return self, RowIndex.none(len(names))
        units, member = self, torch.arange(len(self.index))
        if unit is not None:
            units, member = self.of_units(unit[self.index])
        owner, position = units.owner, units.position
        if time is None:
            order = fold(key, codes(names)[owner], position).argsort(stable=True)
        else:
            last = torch.full((len(owner),), -torch.inf, dtype=torch.float64)
            last = last.scatter_reduce(0, member, time[self.index].double(), "amax")
            order = last.argsort(stable=True).flip(0)  # of equal times, the later row first
        order = order[owner[order].argsort(stable=True)]
        rank = torch.empty_like(position)
        rank[order] = position  # sorted by client, an entry's place is its rank
        count = (units.sizes * fraction).round().long().clamp(min=1)
        part = (rank < torch.minimum(count, units.sizes - 1)[owner])[member]
        return self.where(~part), self.where(part)


def _ends(sizes: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """The data of all clients, with the truth that only an evaluation may use.

    Parameters
    ----------
    x
        Pool of inputs, one row per sample, in whatever type is compact; or a dict of such pools.
    y
        Pool of targets, a row per row of `x`; zeros where there are none. Integers leave as int64.
    rows
        Rows of every client for "train" and, where there are any, "validation" and "test". A row
        may serve several clients.
    names
        One per client, all different.
    task
        "classification", "regression" or "reconstruction".
    n_outputs
        Classes, or numbers to predict.
    client_facts
        What each client knows of itself: a tree whose leaves have a row per client.
    transform
        `transform(x, facts) -> x` for one client's rows `[n, ...]`, stacked over clients by
        `torch.vmap`. One that has a true attribute `batched` takes `[m, n, ...]` and facts
        `[m, ...]` instead.
    truth
        Group of each client. For metrics alone, like `extra`.
    extra
        More of the truth by name, as "targets": the parameters behind each group's data; or
        "shares": the mixture of each client, a row per client.
    classes
        Names of the labels.
    name, options
        Which problem this is and the plain options that make it again; None for data that came
        from memory or were altered since.
    notes
        What a reader of results ought to know about these data.
    reading
        What was read, in one line.
    warnings
        What may be wrong with these data, each with kind, column and text.
    encoder
        How rows as the user has them become these inputs and targets; None where there is no rule.
    unit
        Number of the unit of each row of the pool (a patient, a device, a day): rows of a unit are
        not independent, stay together in every split, and count once where noise is estimated.
        Numbers are compared within a client only. None: every row is a unit. Clients see them as
        `batch.units()`.
    time
        Time of each row of the pool, in any unit. If given, `hold_out` takes the latest rows.

    >>> x, y = torch.arange(6.0)[:, None], torch.tensor([0, 1, 0, 1, 0, 1])
    >>> data = FederatedData(
    ...     x, y, {"train": RowIndex.of([[0, 1, 2], [3]])},
    ...     names=("ann", "bob"), task="classification", n_outputs=2,
    ... )
    >>> data
    FederatedData(2 clients, 4 train + 0 test samples, classification, x [1], 2 outputs)
    >>> batch = data.gather("train", torch.tensor([1, 0]))
    >>> batch.x.squeeze(-1)
    tensor([[3., 3., 3.],
            [0., 1., 2.]])
    >>> batch.mask
    tensor([[ True, False, False],
            [ True,  True,  True]])
    """

    x: Tree  # [rows, ...]
    y: Tensor  # [rows, ...]
    rows: Mapping[str, RowIndex]
    names: tuple[str, ...]
    task: str
    n_outputs: int
    client_facts: Tree = field(default_factory=dict)  # [clients, ...]
    transform: Callable[[Tree, Tree], Tree] | None = None
    truth: Tensor | None = None  # [clients]
    extra: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    name: str | None = None
    options: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    reading: str = ""
    warnings: tuple[DataWarning, ...] = ()
    encoder: Encoder | None = None
    unit: Tensor | None = None  # [rows]
    time: Tensor | None = None  # [rows]

    def __post_init__(self) -> None:
        for split in self.rows:
            if split not in SPLITS:
                raise DataError(unknown("split", split, SPLITS))
        if self.task not in TASKS:
            raise DataError(unknown("task", self.task, TASKS))
        filled = {s: self.rows.get(s) or RowIndex.none(len(self.names)) for s in SPLITS}
        object.__setattr__(self, "rows", filled)
        object.__setattr__(self, "names", tuple(self.names))
        self._check_clients()
        self._check_pool()

    def _check_clients(self) -> None:
        n_clients = len(self.names)
        if not n_clients:
            raise DataError("FederatedData: there must be at least one client. Got none.")
        seen: set[str] = set()
        for name in self.names:
            if name in seen:
                raise DataError(
                    f"FederatedData: client names must be unique. '{name}' occurs more than once. "
                    f"Rename or merge these clients."
                )
            seen.add(name)
        for split, rows in self.rows.items():
            if len(rows.offsets) != n_clients + 1:
                raise DataError(
                    f"FederatedData: '{split}' rows must cover all {n_clients} clients. "
                    f"They cover {len(rows.offsets) - 1}."
                )
        empty = (self.rows["train"].sizes == 0).nonzero()
        if len(empty):
            raise DataError(
                f"FederatedData: every client must have a training row. Client "
                f"'{self.names[int(empty[0])]}' has none. Leave it out or give it data."
            )
        per_client = [("/".join(path), leaf) for path, leaf in named_leaves(self.client_facts)]
        for what, leaf in [*per_client, *([] if self.truth is None else [("truth", self.truth)])]:
            if len(leaf) != n_clients:
                raise DataError(
                    f"FederatedData: '{what}' must have a row for each of {n_clients} clients. "
                    f"It has {len(leaf)}."
                )

    def _check_pool(self) -> None:
        n_rows = len(self.y)
        for leaf in leaves(self.x):
            if len(leaf) != n_rows:
                raise DataError(
                    f"FederatedData: x and y must have one row per sample each. "
                    f"x has {len(leaf)} rows, y has {n_rows}."
                )
        for what, column in (("unit", self.unit), ("time", self.time)):
            if column is not None and column.shape != (n_rows,):
                raise DataError(
                    f"FederatedData: {what} must have one number for each of {n_rows} rows. Got "
                    f"shape {list(column.shape)}."
                )
        for split, rows in self.rows.items():
            wild = (rows.index < 0) | (rows.index >= n_rows)
            if wild.any():
                client, row = self._locate(rows, wild)
                raise DataError(
                    f"FederatedData: rows must lie in the pool of {n_rows}. Client '{client}', "
                    f"{split} row {row} points elsewhere."
                )
        for what, leaf in [*(("x", leaf) for leaf in leaves(self.x)), ("y", self.y)]:
            if leaf.is_floating_point():
                if bool(torch.isfinite(leaf.sum())):  # then every value is
                    continue
                bad = ~torch.isfinite(leaf).reshape(n_rows, -1).all(1)
                problem = "every value must be finite", "is nan or infinite. Remove or fill it."
            elif what == "y" and self.task == "classification":
                bad = ((leaf < 0) | (leaf >= self.n_outputs)).reshape(n_rows, -1).any(1)
                problem = f"labels must lie in 0..{self.n_outputs - 1}", "does not."
            else:
                continue
            for split, rows in self.rows.items() if bad.any() else ():
                if bad[rows.index].any():
                    client, row = self._locate(rows, bad[rows.index])
                    raise DataError(
                        f"FederatedData: {problem[0]}. Client '{client}', {split} row {row} "
                        f"of {what} {problem[1]}"
                    )

    def _locate(self, rows: RowIndex, bad: Tensor) -> tuple[str, int]:
        """Client and row number of the first bad entry."""
        first = int(bad.nonzero()[0])
        return self.names[int(rows.owner[first])], int(rows.position[first])

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        name = f"'{self.name}', " if self.name else ""
        count = {split: len(rows.index) for split, rows in self.rows.items()}
        held = f" + {count['validation']} validation" if count["validation"] else ""
        shape = self.sample_shape
        shape = {k: list(v) for k, v in shape.items()} if isinstance(shape, dict) else list(shape)
        return (
            f"FederatedData({name}{len(self)} clients, {count['train']} train{held} + "
            f"{count['test']} test samples, {self.task}, x {shape}, {self.n_outputs} outputs)"
        )

    def _repr_html_(self) -> str:
        head = self.reading or repr(self)
        parts = [f"<p>{escape(head)}</p>"]
        parts += [f"<p>Warning: {escape(str(warning))}</p>" for warning in self.warnings]
        used = [split for split in SPLITS if len(self.rows[split].index)]
        cell = '<td style="text-align:right;padding:2px 12px">'
        lines = [
            f"<tr><td>{escape(name)}</td>"
            + "".join(f"{cell}{int(self.rows[split].sizes[i]):,}</td>" for split in used)
            + "</tr>"
            for i, name in enumerate(self.names[:20])
        ]
        if len(self) > len(lines):
            lines.append(f"<tr><td>and {len(self) - len(lines):,} more</td></tr>")
        titles = "".join(f"<th>{title}</th>" for title in ("client", *used))
        return "".join(parts) + f"<table><tr>{titles}</tr>{''.join(lines)}</table>"

    def sizes(self, split: str) -> Tensor:
        """Number of samples of every client."""
        return self._split(split).sizes

    def facts(self, ids: Ids) -> Tree:
        """What some clients know of themselves, stacked."""
        return take(self.client_facts, torch.as_tensor(ids, dtype=torch.int64))

    def gather(self, split: str, ids: Ids) -> Batch:
        """The samples of some clients, stacked and padded to the largest of them.

        Padding repeats the client's first row; a client without rows in this split is padded
        with its first training row and an empty mask.
        """
        ids = torch.as_tensor(ids, dtype=torch.int64)
        if not len(ids):
            return tree_map(lambda leaf: leaf[:0], self.gather(split, torch.zeros(1).long()))
        rows, train = self._split(split), self.rows["train"]
        start, size = rows.offsets[ids], rows.sizes[ids]
        position = torch.arange(max(1, int(size.max())))
        mask = position < size[:, None]  # [m, n]
        first = train.index[train.offsets[ids]]  # [m]
        first[size > 0] = rows.index[start[size > 0]]
        index = first[:, None].repeat(1, len(position))  # [m, n]
        index[mask] = rows.index[(start[:, None] + position)[mask]]
        y = self.y[index]
        return Batch(
            x=self._inputs(index, ids),
            y=y if y.is_floating_point() else y.long(),
            mask=mask,
            weight=torch.ones(mask.shape),
            unit=() if self.unit is None else self.unit[index],
        )

    def _inputs(self, index: Tensor, ids: Ids) -> Tree:
        """Inputs of some clients at pool rows [m, n]."""
        x = tree_map(lambda leaf: leaf[index], self.x)
        if self.transform is None:
            return x
        if getattr(self.transform, "batched", False):
            return self.transform(x, self.facts(ids))
        return torch.vmap(self.transform)(x, self.facts(ids))

    def _split(self, split: str) -> RowIndex:
        if split not in SPLITS:
            raise DataError(unknown("split", split, SPLITS))
        return self.rows[split]

    def _sample(self) -> Tree:
        ids = torch.zeros(1, dtype=torch.int64)
        return self._inputs(self.rows["train"].index[:1, None], ids)

    @property
    def sample_shape(self) -> Any:
        """Shape of one input as a model meets it; for a dict of inputs, a dict of shapes."""
        return tree_map(lambda leaf: tuple(leaf.shape[2:]), self._sample())

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the inputs; torch's default where none of them is floating."""
        floating = [leaf.dtype for leaf in leaves(self._sample()) if leaf.is_floating_point()]
        return floating[0] if floating else torch.get_default_dtype()

    def subset(self, ids: Ids) -> "FederatedData":
        """Some of the clients, on the same pool."""
        ids = torch.as_tensor(ids, dtype=torch.int64)
        wild = ids[(ids < 0) | (ids >= len(self))]
        if len(wild):
            raise DataError(
                f"FederatedData: ids must lie in 0..{len(self) - 1}. Got {int(wild[0])}."
            )
        return replace(
            self,
            rows={split: rows.of_clients(ids) for split, rows in self.rows.items()},
            names=tuple(self.names[i] for i in ids.tolist()),
            client_facts=self.facts(ids),
            truth=None if self.truth is None else self.truth[ids],
            extra={k: v[ids] if k == "shares" else v for k, v in self.extra.items()},
            options=None,
            notes=(*self.notes, f"{len(ids)} of {len(self)} clients."),
        )

    def compact(self) -> "FederatedData":
        """The same clients on a pool that has no other rows than theirs.

        >>> from coterie.data import from_arrays
        >>> data = from_arrays([torch.ones(4, 1), torch.ones(6, 1)], None, test_fraction=0.0)
        >>> len(data.subset([1]).y), len(data.subset([1]).compact().y)
        (10, 6)
        """
        used = torch.cat([rows.index for rows in self.rows.values()]).unique()
        return replace(
            self,
            x=tree_map(lambda leaf: leaf[used], self.x),
            y=self.y[used],
            rows={
                split: RowIndex(torch.searchsorted(used, rows.index), rows.offsets)
                for split, rows in self.rows.items()
            },
            unit=None if self.unit is None else self.unit[used],
            time=None if self.time is None else self.time[used],
            options=None,
        )

    def hold_out(self, fraction: float, seed: int) -> "FederatedData":
        """Move a fraction of every client's training rows to "validation".

        Rows of a unit move together. If the data have times, the latest move, otherwise a client's
        draw depends on the seed, its name and its number of units. A client that has a single
        unit keeps it.

        >>> from coterie.data import from_arrays
        >>> data = from_arrays([torch.ones(10, 1)], [torch.zeros(10)], test_fraction=0.0)
        >>> held = data.hold_out(0.3, seed=0)
        >>> held.sizes("train"), held.sizes("validation")
        (tensor([7]), tensor([3]))
        """
        if len(self.rows["validation"].index):
            raise DataError(
                "FederatedData: hold_out must start from data without validation rows. "
                f"There are {len(self.rows['validation'].index)} already."
            )
        key = fold(seed_key(seed), "validation")
        train, validation = self.rows["train"].divide(
            self.names, fraction, key, self.unit, self.time
        )
        return replace(
            self,
            rows={**self.rows, "train": train, "validation": validation},
            options=None,
            notes=(*self.notes, self._hold_out_note(fraction, seed)),
        )

    def _hold_out_note(self, fraction: float, seed: int) -> str:
        what = "rows" if self.unit is None else "units"
        if self.time is None:
            return f"{fraction:g} of the training {what} held out, seed {seed}."
        return f"The latest {fraction:g} of the training {what} held out."

    def fingerprint(self) -> str:
        """Hash of arrays, rows, names and facts: equal data give it in any process.

        Of the transform only its name enters.
        """
        digest = hashlib.sha256()
        kind = self.transform if hasattr(self.transform, "__qualname__") else type(self.transform)
        digest.update(f"{self.task} {self.n_outputs} {kind.__qualname__}\0".encode())  # type: ignore[union-attr]
        digest.update("\0".join(self.names).encode())
        tree = {"x": self.x, "y": self.y, "rows": self.rows, "facts": self.client_facts}
        named = {"unit": self.unit, "time": self.time}
        tree |= {name: column for name, column in named.items() if column is not None}
        for path, leaf in named_leaves(tree):
            digest.update(f"\0{'/'.join(path)} {leaf.dtype} {tuple(leaf.shape)}\0".encode())
            digest.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()
