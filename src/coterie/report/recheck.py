"""New data against the groups of a finished run: who stays, who moved, who fits nowhere."""

import json
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from coterie.report.table import Table
from coterie.report.words import join_words, list_names

COLUMNS = ("client", "rows", "before", "now", "change", "p")
FORMATS = {"p": ".2g", "accuracy": ".1%", "accuracy before": ".1%"}
FORMATS |= {"error": ".4g", "error before": ".4g"}
CHANGES = {
    "stays": "fits its group",
    "apart": "still apart",
    "moved": "moved",
    "nowhere": "fits no group",
    "new": "new",
    "labels": "labels are needed",
}


@dataclass(frozen=True)
class Recheck:
    """Whether clients still fit their groups. Made by `Fitted.recheck`.

    Parameters
    ----------
    clients
        A row per client: "client", "rows", the group "before" and "now" (None: none), "change"
        ("stays", "moved", "nowhere", "new" or "labels"), the "groups" that it fits, "p" (the
        p-value of "it fits the group it was in", for newcomers "it fits a group"), and its
        accuracy or error on the new rows and in the run.
    labelled
        Whether the new rows have labels. Without them only inputs are compared.
    level
        Probability that any client that did not change is said to have, or that any newcomer of a
        known kind is refused, for all clients together.
    missing
        Clients of the run that have no new rows.
    """

    clients: list[dict[str, Any]]
    labelled: bool
    level: float
    missing: list[str] = field(default_factory=list)

    def _names(self, change: str) -> list[str]:
        return [line["client"] for line in self.clients if line["change"] == change]

    @property
    def stays(self) -> list[str]:
        """Clients that still fit their group."""
        return self._names("stays")

    @property
    def moved(self) -> dict[str, int | None]:
        """Clients that left their group, and the group they fit now; None: labels would tell."""
        return {line["client"]: line["now"] for line in self.clients if line["change"] == "moved"}

    @property
    def nowhere(self) -> list[str]:
        """Clients that fit no group."""
        return self._names("nowhere")

    @property
    def new(self) -> dict[str, int]:
        """Newcomers, and the group of each."""
        return {line["client"]: line["now"] for line in self.clients if line["change"] == "new"}

    @property
    def need_labels(self) -> list[str]:
        """Newcomers whose inputs fit several groups: only labels can tell these apart."""
        return self._names("labels")

    @property
    def changed(self) -> bool:
        """Whether any client of the run has left its group."""
        known = [line for line in self.clients if line["before"] is not None]
        return any(line["change"] in ("moved", "nowhere") for line in known)

    @property
    def table(self) -> Table:
        """A row per client."""
        scores = [name for name in FORMATS if any(name in line for line in self.clients)]
        columns = [*COLUMNS, *(name for name in scores if name != "p")]
        rows = [
            [CHANGES[_change(line)] if name == "change" else line.get(name) for name in columns]
            for line in self.clients
        ]
        return Table(columns, rows, FORMATS)

    @property
    def sentence(self) -> str:
        """The answer in plain words."""
        known = [line for line in self.clients if line["before"] is not None]
        said = []
        members = [line for line in known if line["before"] != "apart"]
        if members:
            stays = sum(line["change"] == "stays" for line in members)
            verb = "fits" if len(members) == 1 else "fit"
            everyone = "The client" if len(members) == 1 else f"All {len(members)} clients"
            said.append(
                f"{everyone} still {verb} the group of the run."
                if stays == len(members)
                else f"{stays} of {len(members)} clients still fit the group they were in."
            )
        apart = [line["client"] for line in known if _change(line) == "apart"]
        if apart:
            said.append(f"{list_names(apart)} {'is' if len(apart) == 1 else 'are'} still apart.")
        for line in self.clients:
            if line["change"] == "moved":
                said.append(_moved(line))
        gone = [line["client"] for line in known if line["change"] == "nowhere"]
        if gone:
            said.append(f"{list_names(gone)} {_fit(gone)} no group any more.")
        groups: dict[int, list[str]] = {}
        for name, group in self.new.items():
            groups.setdefault(group, []).append(name)
        for group, names in sorted(groups.items()):
            said.append(f"New: {list_names(names)} {_fit(names)} group {group}.")
        strange = [name for name in self.nowhere if name not in gone]
        if strange:
            said.append(f"New: {list_names(strange)} {_fit(strange)} no group.")
        unknown = self.need_labels
        if unknown:
            said.append(
                f"Labels are needed for {list_names(unknown)}: the inputs fit several groups, "
                "which differ in what a label means."
            )
        return " ".join(said)

    @property
    def limits(self) -> str:
        """What the answer rests on."""
        compared = "inputs and labels" if self.labelled else "inputs"
        said = [
            f"Compared: {compared} of the new rows with those of the groups in the run. The chance "
            f"that any client without a change is named is {self.level:.0%} for all clients "
            "together. A client with few rows may have changed unseen."
        ]
        if not self.labelled:
            said.append("Without labels a change in what a label means cannot be seen.")
        if self.missing:
            said.append(f"No new rows: {list_names(self.missing)}.")
        return " ".join(said)

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps({**asdict(self), "text": f"{self.sentence} {self.limits}"})

    def __str__(self) -> str:
        return f"{self.sentence}\n\n{self.table}\n\n{self.limits}"

    def _repr_html_(self) -> str:
        head, foot = escape(self.sentence), escape(self.limits)
        return f"<p>{head}</p>{self.table._repr_html_()}<p>{foot}</p>"


def _change(line: dict[str, Any]) -> str:
    """Its change; "apart" if it had no group and nothing has changed."""
    return "apart" if (line["before"], line["change"]) == ("apart", "stays") else line["change"]


def _fit(names: list[str]) -> str:
    return "fits" if len(names) == 1 else "fit"


def _moved(line: dict[str, Any]) -> str:
    before = "apart" if line["before"] == "apart" else f"in group {line['before']}"
    if line["now"] is not None:
        return f"{line['client']} was {before} and now fits group {line['now']}."
    return (
        f"{line['client']} was {before} and has left it; its inputs fit groups "
        f"{join_words(line['groups'])} alike, and labels would tell which."
    )
