"""What a user keeps of a run: groups, models, groups for new clients, predictions.

A `Fitted` is read from the files of a finished run. A model that was just trained and one that was
saved and loaded elsewhere are therefore the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from coterie.core import wire
from coterie.core.algorithm import Algorithm, grow, state_type
from coterie.core.client import Batch, Client
from coterie.core.errors import ConfigError, DataError, printable, unknown
from coterie.core.federation import BankRows, Each
from coterie.core.model import Model
from coterie.core.random import seed_key
from coterie.core.tree import Ids, Tree, n_rows, row, take, tree_map
from coterie.data import DataCard, FederatedData, from_arrays
from coterie.data.again import prepare_again
from coterie.data.cells import RawTable
from coterie.data.tables import read
from coterie.data.warnings import DataWarning
from coterie.engines.simulation import Simulation
from coterie.export.cards import Format
from coterie.predictions import decode, open_folder, rows_to_predict, tabulate, to_probabilities
from coterie.report.recheck import Recheck
from coterie.report.table import Table
from coterie.report.verdict import Verdict
from coterie.report.why import Why
from coterie.report.words import UNLIKE, describe_result, join_words
from coterie.running.build import build_algorithm
from coterie.running.files import blame, parse_json
from coterie.running.folder import RunFolder, read_rows
from coterie.running.reference import LEVEL, Reference, describe_changes, look_again

FORMATS = {
    "margin": ".2f",
    "accuracy": ".1%",
    "error": ".4g",
    "gain over alone": "+z.3f",
    "gain over one model": "+z.3f",
}


class Spot(NamedTuple):
    """The group of a new client."""

    group: int
    margin: float  # 0: halfway between two groups, 1: clear
    fits: bool  # False: it resembles no group
    score: float  # distance from the group; up to 1 is usual for members, nan: not known
    candidates: tuple[int, ...] = ()  # without labels: all groups that its inputs fit

    @property
    def needs_labels(self) -> bool:
        """Whether its inputs fit several groups, so that only labels can tell the group."""
        return len(self.candidates) > 1

    def __str__(self) -> str:
        if self.needs_labels:
            return (
                f"labels are needed: its inputs fit groups {join_words(list(self.candidates))}, "
                "which differ in what a label means"
            )
        if not self.fits:
            far = f": {self.score:.1f} times as far from the nearest group as members may be"
            return "fits no group" + (far if self.score > 1 else "")
        # Below .3 placements were right in 32 to 78 of 100 cases, above it in all of 201.
        sure = "clearly" if self.margin >= 0.3 else "but another group is almost as near"
        return f"group {self.group}, {sure} (margin {self.margin:.2f})"


@dataclass(repr=False)
class Fitted:
    """A trained federation. Made by `coterie.fit` and `coterie.load`."""

    algorithm: Algorithm
    files: dict[str, bytes]
    description: dict[str, Any]
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]

    def __post_init__(self) -> None:
        like = {"state": state_type(self.algorithm)}
        self.state = self._tree("state.safetensors", like)["state"]
        kept = self._tree("memory.safetensors") if "memory.safetensors" in self.files else {}
        self.memory = {int(client): tree for client, tree in kept.items()}
        self.card = read_card(self.files)
        self.encoder = self.card.encoder
        self.rows = read_rows(self.files, "clients")
        self.cards = read_rows(self.files, "groups")

    def _tree(self, name: str, like: Tree = None) -> Any:
        try:
            return wire.load(self.files[name], like)
        except DataError as error:
            raise DataError(f"final/{name} is damaged. {error}") from error

    # groups

    @property
    def groups(self) -> Table:
        """A row per client: group, margin, score, and the gain over other strategies."""
        columns = list(self.rows[0])
        return Table(columns, [[line[name] for name in columns] for line in self.rows], FORMATS)

    @property
    def names(self) -> list[str]:
        """Names of the clients."""
        return list(self.card.names)

    @property
    def n_groups(self) -> int:
        """Number of groups that have clients; odd clients are not counted."""
        return sum("odd" not in card for card in self.cards)

    @property
    def odd(self) -> list[str]:
        """Names of the clients that are unlike all others and were trained alone."""
        return list(self.summary.get("odd", []))

    @property
    def aside(self) -> dict[str, str]:
        """Why each odd client, and each whose answers are not believed, was set aside."""
        return {**dict.fromkeys(self.odd, UNLIKE), **self.summary.get("aside", {})}

    @property
    def sentence(self) -> str:
        """What was found, in plain words."""
        return describe_result(self.summary, self.cards, self.rows)

    @property
    def verdict(self) -> Verdict:
        """Whether to use one model, a model per group or a model per client, and who gains."""
        if "verdict.json" not in self.files:
            raise ConfigError(
                "The verdict needs two more runs: one model for all, and every client alone. This "
                "run has neither. Fit with compare=True, or run: coterie verdict FOLDER"
            )
        return read_verdict(self.files)

    @property
    def why(self) -> Why:
        """In what each group and odd client differs from the others, in words and figures."""
        return read_why(self.files)

    @property
    def history(self) -> Any:
        """A row per round: a DataFrame if pandas is installed, else a list of dicts."""
        lines = [{k: v for k, v in line.items() if k != "assignment"} for line in self.rounds]
        try:
            import pandas
        except ImportError:
            return lines
        return pandas.DataFrame(lines)

    @property
    def notes(self) -> list[str]:
        """What was decided automatically, such as the task, the columns and the model."""
        return list(self.card.notes)

    @property
    def warnings(self) -> list[DataWarning]:
        """What may be wrong with the data or the training, each with kind, column and text."""
        told = [DataWarning(**one) for one in self.summary.get("warnings", [])]
        return [*self.card.warnings, *told]

    def __str__(self) -> str:
        with blame("The result"):
            said = [self.card.reading, *(f"Warning: {warning}" for warning in self.warnings)]
            notes = "".join(f"\n{line}" for line in said if line)
            verdict = f"\n{self.verdict.reasons}" if "verdict.json" in self.files else ""
            text = f"{self.sentence}{verdict}\n\n{self.groups}" + (f"\n{notes}" if notes else "")
        return printable(text)

    def __repr__(self) -> str:
        score = self.summary.get("accuracy")
        with blame("The result"):
            scored = f", accuracy {score['mean']:.1%}" if isinstance(score, dict) else ""
        groups = "1 group" if self.n_groups == 1 else f"{self.n_groups} groups"
        return (
            f"Fitted({self.summary.get('algorithm')}, {len(self.names)} clients, {groups}, "
            f"{len(self.rounds)} rounds{scored})"
        )

    def _repr_html_(self) -> str:
        with blame("The result"):
            parts = [f"<p><b>{escape(self.sentence)}</b></p>"]
            if "verdict.json" in self.files:
                parts.append(self.verdict.list_points())
            parts += [f"<p>Warning: {escape(str(warning))}</p>" for warning in self.warnings]
        return "".join(parts) + self.groups._repr_html_()

    # use

    def place(self, x: Any, y: Any = None) -> Spot:
        """Find the group of a new client from its data.

        Parameters
        ----------
        x
            The client's inputs as an array, or its rows as a table, a file or a folder of images.
        y
            The labels. None: they are in a column of the table, under the name used in training. If
            there are none, inputs decide: where they fit several groups, the answer is that labels
            are needed.
        """
        if y is None and not self._has_labels(x):
            return self._place_inputs(x)
        names = (*self.names, "newcomer")
        fed = Simulation(_Newcomer(names, self._as_client(x, y)), stack=False)
        fed.begin(max(len(self.rounds) - 1, 0))
        with fed.aside():
            state, last = grow(self.state, len(names)), torch.tensor([len(names) - 1])
            _, evidence = self.algorithm.place(fed, state, last)
        with blame("final/groups.json"):
            numbers = {int(line["model"]): int(line["group"]) for line in self.cards}
        # A client that prefers a model without clients fits no group.
        group = numbers.get(int(evidence.group[0]), -1)
        fits = bool(evidence.fits[0]) and group >= 0
        return Spot(group, float(evidence.margin[0]), fits, float(evidence.score[0]))

    def recheck(self, data: Any, *, client: str | None = None, **options: Any) -> Recheck:
        """Compare new rows with the groups: who stays, who moved, who fits nowhere any more.

        Clients are known by their names; those with other names are placed as newcomers.

        Parameters
        ----------
        data
            A folder with a file (or a folder of images) per client; one table, with `client`; a
            dict with the rows, or with (x, y), of each client; or data made by `from_folder`,
            `from_table`, `from_arrays`, ... If there are no labels, inputs alone are compared.
        client
            Column with the name of the client, if the data are one table.
        options
            How the data are read, see `Reading`. Of their own the new data have unit, names,
            separator, header, encoding and na_values; the others are those of the run.
        """
        new, labelled = self._new_data(data, client, options)
        labelled = labelled or self.card.task == "reconstruction"
        reference = self._reference()
        place = {name: i for i, name in enumerate(self.names)}
        former = [place.get(name, -1) for name in new.names]
        ids, found, same = look_again(reference, self.algorithm, new, labelled, former)
        names = [new.names[i] for i in ids.tolist()]
        known = {line["client"]: line for line in self.rows}
        before = {name: "apart" if name in self.odd else known[name]["group"] for name in known}
        numbers = reference.groups(labelled).number.tolist()
        lines = describe_changes(found, same, numbers, names, before, labelled)
        for i, line in zip(ids.tolist(), lines, strict=True):
            line["rows"] = int(new.sizes("train")[i])
            if labelled and line["client"] in known:
                line |= self._score(new, i, known[line["client"]])
        silent = [name for name in (*self.names, *new.names) if name not in names]
        return Recheck(lines, labelled, LEVEL, list(dict.fromkeys(silent)))

    def evaluate(self, data: Any, *, client: str | None = None, **options: Any) -> Table:
        """Score each client's model on new rows of this client.

        A row per client: its number of rows, and its accuracy, or error in the unit of the label.
        Clients that the run does not know are left out.

        Parameters
        ----------
        data, client, options
            As in `recheck`. There must be labels.
        """
        new, labelled = self._new_data(data, client, options)
        if not labelled or not self.algorithm.supervised:
            raise DataError(
                "evaluate: the new rows must have labels, and the models must predict them. "
                "They do not. Without labels use recheck."
            )
        known = {line["client"]: line for line in self.rows}
        lines = [
            {"client": name, "rows": int(new.sizes("train")[i])} | self._score(new, i, known[name])
            for i, name in enumerate(new.names)
            if name in known
        ]
        if not lines:
            raise DataError(
                f"evaluate: clients of the run must have new rows. Got '{new.names[0]}', and the "
                f"run has '{self.names[0]}'. Compare their names."
            )
        columns = ["client", "rows", "accuracy" if new.task == "classification" else "error"]
        return Table(columns, [[line.get(name) for name in columns] for line in lines], FORMATS)

    def predict(
        self, x: Any, client: str | None = None, group: int | None = None, raw: bool = False
    ) -> np.ndarray:
        """Predict with the model of a client or of a group.

        Parameters
        ----------
        x
            Inputs as an array, or rows as a table, a file or a folder of images.
        client
            Name of the client whose model is used.
        group
            Number of the group whose model is used, instead of a client.
        raw
            Return the outputs of the network. Otherwise classes have their original names, and
            numbers their original unit.
        """
        output = self._output(x, client, group)
        return np.asarray(output) if raw else decode(output, self.card, self.algorithm)

    def predict_proba(
        self, x: Any, client: str | None = None, group: int | None = None
    ) -> np.ndarray:
        """The probability of each class, in the order of `fit.card.classes`: [n, classes].

        Parameters
        ----------
        x, client, group
            As in `predict`.
        """
        return to_probabilities(self._output(x, client, group), self.card, self.algorithm)

    def predict_table(
        self,
        x: Any,
        client: str | None = None,
        group: int | None = None,
        id: str | None = None,
    ) -> Any:
        """Predictions with row or file name and the probability of each class.

        A DataFrame if pandas is installed, else a table.

        Parameters
        ----------
        x, client, group
            As in `predict`.
        id
            Column of the rows that names them. None: the file of an image, the index of a data
            frame, or the number of the row.
        """
        rows = rows_to_predict(x, self.card)
        output = self._output(rows, client, group)
        return tabulate(rows, output, self.card, self.algorithm, id).to_frame()

    def _output(self, x: Any, client: str | None, group: int | None) -> Tensor:
        """The outputs of the network of a client or a group."""
        with torch.no_grad():
            return self.algorithm.predict(self._personal(client, group), self._inputs(x))

    def model(self, group: int) -> nn.Module:
        """The network of a group as a PyTorch module in evaluation mode."""
        model = getattr(self.algorithm, "model", None)
        if not isinstance(model, Model):
            raise ConfigError(
                f"model: the method must train a network. {type(self.algorithm).__name__} does not."
            )
        return model.plain(self._personal(None, group))

    def report(self, out: str | Path) -> Path:
        """Write a page to hand over: one HTML file that needs no network.

        It has the recommendation, the groups and why they differ, what each client gains, odd
        clients, how the groups formed, curves, the data with warnings, what left the clients, and
        how to run it again.
        """
        from coterie.report.html import contents_of, write_report

        data = self.description.get("data", {})
        name = Path(str(data.get("path", ""))).name or str(data.get("name", "")) or "Federation"
        files = self.description, self.rounds, self.summary, self.files
        return write_report(contents_of(name, *files), out)

    def export(self, to: str | Path, format: Format = "onnx", licence: str = "") -> Path:
        """Write a folder with models to use without Coterie.

        It has a model per group with a model card, the rules that turn rows into inputs, a router
        that finds the group of a new client, a manifest with checksums, and an example.

        Parameters
        ----------
        to
            Folder to write; it must not exist, or be empty.
        format
            "onnx" and "torch" (`torch.export`) hold whole networks, "safetensors" only weights.
        licence
            Licence of the models, for the manifest and the model cards.
        """
        from coterie.export import export

        return export(self, to, format, licence)

    def save(self, path: str | Path) -> None:
        """Save everything to a folder, which must not exist yet."""
        folder = RunFolder(path)
        folder.create(self.description)
        folder.record("copied")
        for line in self.rounds:
            folder.append("rounds.jsonl", line)
        folder.finish(self.files, self.summary)

    # inside

    def _reference(self) -> Reference:
        if "reference.safetensors" not in self.files:
            raise ConfigError(
                "This run did not save the losses that new rows are compared with: it was trained "
                "without a network, on real clients, or by an earlier version. Train again with "
                "coterie.fit or coterie run and a method that trains networks, such as census."
            )
        return Reference.read(self.files["reference.safetensors"])

    def _new_data(
        self, data: Any, client: str | None, options: dict[str, Any]
    ) -> tuple[FederatedData, bool]:
        return prepare_again(data, self.card, client, self.description.get("data", {}), options)

    def _has_labels(self, x: Any) -> bool:
        """Whether new data of one client have labels, or need none."""
        if self.card.task == "reconstruction" or not self.algorithm.supervised:
            return True
        if isinstance(self.card.sample_shape, dict):
            return False
        rows = self._rows(x)
        if isinstance(rows, np.ndarray | Tensor | list):
            return False
        if not isinstance(rows, RawTable):
            rows = read(rows, "the new rows", self.encoder.files)
        return (self.encoder.label or "y") in rows.cells

    def _place_inputs(self, x: Any) -> Spot:
        """The group of a client without labels, if its inputs tell it."""
        reference = self._reference()
        n = n_rows(self._inputs(x))
        whole = self.card.task == "classification"
        nothing = torch.zeros(n, dtype=torch.int64 if whole else torch.get_default_dtype())
        new = self._as_client(x, np.asarray(nothing), coded=True)
        ids, found, _ = look_again(reference, self.algorithm, new, labelled=False)
        if not len(ids):
            raise DataError("place: the losses of the new rows are not numbers. Look for nan.")
        numbers = reference.inputs.number.tolist()
        fitting = tuple(numbers[g] for g in found.candidates[0])
        group = numbers[int(found.group[0])] if len(fitting) == 1 else -1
        figures = float(found.margin[0]), bool(fitting), float(found.score[0])
        return Spot(group, *figures, fitting)

    def _score(self, new: FederatedData, i: int, known: dict[str, Any]) -> dict[str, float]:
        """Accuracy or error of a client's model on its new rows, and in the run."""
        name = "accuracy" if self.card.task == "classification" else "error"
        if name not in known:
            return {}
        batch = new.gather("train", torch.tensor([i]))
        with torch.no_grad():
            personal = self._personal(known["client"], None)
            output = self.algorithm.predict(personal, tree_map(lambda leaf: leaf[0], batch.x))
        if name == "accuracy":
            value = float((output.argmax(1) == batch.y[0]).double().mean())
        else:
            error = (output.reshape(batch.y[0].shape) - batch.y[0]).double().square().mean().sqrt()
            scale = self.encoder.target_scale
            value = float(error) * (scale[0] if len(scale) == 1 else 1.0)
        return {name: value, f"{name} before": known[name]}

    def _as_client(self, x: Any, y: Any, coded: bool = False) -> FederatedData:
        """New data as a federation of one; labels stand in a table's own column if not given.

        `coded`: labels are as the models know them.
        """
        task = self.card.task
        options: dict[str, Any] = {"test_fraction": 0.0, "names": ["newcomer"]}
        x = self._rows(x)
        inputs = self._inputs(x)
        if task == "reconstruction" or not self.algorithm.supervised:
            return from_arrays([inputs], None, **options)
        labels = y if coded else self.encoder.labels(x if y is None else y)
        options |= {"task": task, "n_outputs": self.card.n_outputs}
        return from_arrays([inputs], [labels], **options)

    def _rows(self, x: Any) -> Any:
        """A folder of images (class/image.png) as rows; all else as it is."""
        return open_folder(x, self.card)

    def _inputs(self, x: Any) -> Any:
        """Inputs as the models saw them: new rows go through the rules the data went through."""
        if isinstance(self.card.sample_shape, dict):
            return {name: torch.as_tensor(value) for name, value in x.items()}
        return self.encoder.encode(self._rows(x))

    def _personal(self, client: str | None, group: int | None) -> Tree:
        """The model of a client, or of a group's first member."""
        if client is None:
            with blame("final/groups.json"):
                members = {int(line["group"]): list(line["clients"]) for line in self.cards}
            if group is None and len(members) > 1:
                raise ConfigError("predict: name whose model to use: client='...' or group=...")
            group = next(iter(members)) if group is None else group
            if group not in members:
                raise ConfigError(unknown("group", str(group), map(str, members)))
            client = members[group][0]
        if client not in self.names:
            raise ConfigError(unknown("client", client, self.names))
        number = self.names.index(client)
        given = self.algorithm.deploy(self.state, torch.tensor([number]))
        if isinstance(given, BankRows):
            given = row(take(given.bank, given.index), 0)
        elif isinstance(given, Each):
            given = row(given.tree, 0)
        key, empty = seed_key(0), torch.zeros(0)
        batch = Batch(empty, empty, empty.bool(), empty)
        me = Client(batch, batch, {}, self.memory.get(number, {}), key, key, torch.tensor(0), key)
        return self.algorithm.personalise(me, given)


class _Newcomer:
    """The data of one new client, who comes after the known clients; those have none here."""

    def __init__(self, names: tuple[str, ...], data: FederatedData) -> None:
        self.names, self.data = names, data

    def sizes(self, split: str) -> Tensor:
        missing = torch.zeros(len(self.names) - 1, dtype=torch.int64)
        return torch.cat([missing, self.data.sizes(split)])

    def gather(self, split: str, ids: Ids) -> Batch:
        return self.data.gather(split, torch.zeros_like(ids))

    def facts(self, ids: Ids) -> Tree:
        return self.data.facts(torch.zeros_like(ids))


def read_card(files: dict[str, bytes]) -> DataCard:
    """The data card, from the files of a finished run."""
    plain = parse_json(files["data.json"], "final/data.json")
    with blame("final/data.json"):
        try:
            return DataCard.from_dict(plain)
        except ConfigError as error:
            raise DataError(f"final/data.json is damaged. {error}") from None


def read_why(files: dict[str, bytes], folder: str | Path = "FOLDER") -> Why:
    """Why groups differ, from the files of a finished run."""
    if "why.json" not in files:
        raise ConfigError(
            "Why groups differ is not known, because this run did not ask its clients. If it is a "
            f"simulation of this version, run: coterie resume {folder}. If it has "
            'why="nothing", or its clients are real, run it again with --why columns,labels,'
            "predictions or fewer of these. Runs with a group below min_group never say why."
        )
    with blame("final/why.json"):
        found = Why.of(files["why.json"], files.get("why_images.safetensors"))
        str(found).encode()  # or the damage would show when it is printed
    return found


def read_verdict(files: dict[str, bytes]) -> Verdict:
    """The verdict, from the files of a finished run."""
    with blame("final/verdict.json"):
        found = Verdict.of(files["verdict.json"])
        str(found).encode()  # or the damage would show when it is printed
    return found


def load(
    path: str | Path, model: Model | nn.Module | None = None, *, trust: Iterable[str] = ()
) -> Fitted:
    """Load the result of a run.

    Parameters
    ----------
    path
        A run folder, or a folder written by `Fitted.save`.
    model
        The network, needed only if it was given as a module, which a file cannot name.
    trust
        Code of your own that the run uses, as "package.module:Name". Nothing else is imported.
    """
    folder = RunFolder(path)
    description, files = folder.description(), folder.final_files()
    summary, lines = folder.summary(), folder.lines()
    card = read_card(files)
    with blame(folder.path / "run.json"):
        given = {} if model is None else {"model": model}
        algorithm = build_algorithm(description, card, trust, **given)
    with blame(folder.final):
        return Fitted(algorithm, files, description, summary, lines)
