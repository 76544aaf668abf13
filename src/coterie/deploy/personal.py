"""A client's own model on the client's machine: copied from its node, used without the server."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core import wire
from coterie.core.algorithm import Algorithm
from coterie.core.client import Client
from coterie.core.errors import ConfigError, DataError
from coterie.core.question import question
from coterie.core.tree import Tree
from coterie.data.card import DataCard
from coterie.predictions import decode, rows_to_predict, tabulate
from coterie.running.build import build_algorithm
from coterie.running.files import blame, read
from coterie.running.folder import read_json, to_json, write

FOLDER, MODEL = "model", "personal.safetensors"


def prepare(home: Path, setup: dict[str, Any]) -> None:
    """Save what a client's own model needs to be used later: the run file and the data card."""
    folder = home / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "data.json", to_json(setup["card"]))
    write(folder / "run.json", to_json(setup["description"]))


@question(stackable=False, phase="deliver", key="deliver", home=True)
def keep_model(
    algorithm: Algorithm, client: Client, given: Tree, *, home: Path
) -> dict[str, Tensor]:
    """Save a client's own model on its disk (`coterie deploy pull`); only "done" is sent."""
    personal = algorithm.personalise(client, given)
    write(home / FOLDER / MODEL, wire.dump({"personal": personal}))
    return {"delivered": torch.tensor(True)}


def pull(home: Path, out: Path, run: str | None = None) -> str:
    """Copy the model of a node from its folder; return the run it comes from."""
    found = sorted(
        home.glob(f"runs/{run or '*'}/{FOLDER}/{MODEL}"), key=lambda p: p.stat().st_mtime
    )
    if not found:
        raise DataError(
            f"{home} must have a model. It has none yet: nodes receive their models at the end of "
            "a run. If the node was not connected then, start the run again to send the model."
        )
    if out.exists():
        raise ConfigError(f"The folder for the model must be new. {out} exists. Choose another.")
    shutil.copytree(found[-1].parent, out)
    return found[-1].parent.parent.name


class Personal:
    """A client's own model, and the rules that prepare its inputs."""

    def __init__(self, folder: Path, trust: Iterable[str] = ()) -> None:
        with blame(folder):
            self.card = DataCard.from_dict(read_json(folder / "data.json"))
            self.algorithm = build_algorithm(read_json(folder / "run.json"), self.card, trust)
            self.personal = wire.load(read(folder / MODEL))["personal"]

    def predict(self, x: Any) -> np.ndarray:
        """Predictions for new rows: a file, a folder of images, a table, or an array."""
        return decode(self._output(rows_to_predict(x, self.card)), self.card, self.algorithm)

    def predict_table(self, x: Any, id: str | None = None) -> Any:
        """Predictions with row or file name and the probability of each class."""
        rows = rows_to_predict(x, self.card)
        return tabulate(rows, self._output(rows), self.card, self.algorithm, id).to_frame()

    def _output(self, rows: Any) -> Tensor:
        with torch.no_grad():
            return self.algorithm.predict(self.personal, self.card.encoder.encode(rows))
