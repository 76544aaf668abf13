"""Should `census` count groups by replication on the losses of its own models?

    python -m coterie_lab.studies.census_rules --seeds 5 --first 501

Five kinds of federations: no groups, four groups, one odd client, ten hospitals of which four flip
labels and one uses other units, and images that are turned or exchanged. Three rules: the noise
ratio of `census`; replication (`evidence/grouping.py`) on the losses of training rows ("train"),
or of a quarter of each client's rows that trains no model ("held"). Each follows a random start,
or a survey with networks that were never trained, which is the default of `coterie.fit`. A result
is exact if the number of groups, every member and every odd client are right. Each fit adds a line
to `benchmarks/figures/census_rules.jsonl`, and what stands there is not run again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

import coterie
from coterie.algorithms import common
from coterie.algorithms.census import Census, State
from coterie.algorithms.census.grouping import measure_losses
from coterie.algorithms.survey.seeded import count_classes
from coterie.clustering.matching import clean_losses, match_clusters
from coterie.core.algorithm import register
from coterie.core.client import Batch, Client, task
from coterie.core.federation import Federation
from coterie.core.random import fold
from coterie.core.tree import Ids, Params, Tree
from coterie.evidence import grouping
from coterie.evidence.summaries import (
    Rows,
    Summary,
    assign_folds,
    average_units,
    select,
    summarise,
)
from coterie_lab.studies import evidence_cases as cases
from coterie_lab.studies.common import options, table
from coterie_lab.studies.evidence_rows import ADVISED, compare_sets, read

FIGURES = Path("benchmarks/figures/census_rules.jsonl")
CASES: dict[str, Callable[[np.random.Generator], cases.Case]] = {
    "null": cases.alike(20, 90),
    "four": cases.turned(20, 90, 4),
    "odd": ADVISED["odd-20"],
    "a2": cases.hospitals,
    "a9": cases.three_and_eight,
}


@register("census_replication")
@dataclass(frozen=True)
class Replication(Census):
    """Census with replication in place of its noise ratio.

    Parameters
    ----------
    n_groups, max_groups, first, guard, stable_after
        As in Census.
    rows
        Rows whose losses are compared: "train", or "held", a quarter that trains no model.
    """

    rows: Literal["train", "held"] = "held"

    def parts(self, client: Client) -> tuple[Batch, Batch]:
        """Rows that are trained on, and rows that are compared."""
        if self.rows == "train":
            return client.train, client.train
        held = fold(client.run_key, "hold", client.train.units()) % 4 == 0
        return client.train.where(~held), client.train.where(held)

    @task(phase="cluster")
    def losses(self, client: Client, shared: Params, models: Params) -> dict[str, Tensor]:
        bank, batch = common.whole_models(shared, models), self.parts(client)[1]
        each, classes = self.model.probe_each(bank, batch), count_classes(self.model, batch)
        label = batch.y if classes > 1 else torch.zeros_like(batch.mask, dtype=torch.int64)
        rows = average_units(Rows(each.double(), label, batch.units(), batch.mask))
        part = assign_folds(fold(client.run_key, "folds"), rows, classes)
        answer = summarise(rows, part, classes)._asdict()
        return {**measure_losses(self.model, bank, client.train), **answer}

    @task
    def update(self, client: Client, shared: Params, own: Params) -> dict[str, Tree]:
        def losses(parts: Tree, batch: Batch, key: Tensor) -> Tensor:
            return self.model.losses({**parts["shared"], **parts["models"]}, batch)

        both = {"shared": shared, "models": own}
        return {
            **self.local(client, both, losses, on=self.parts(client)[0]),
            "n": client.train.size,
        }

    def cluster(
        self, fed: Federation, state: State, cohort: Ids, reply: dict[str, Tensor]
    ) -> State:
        losses = clean_losses(reply["losses"])
        if fed.round == 0:
            return self.assign_first(fed, state, cohort, losses.shape[1])
        answers = Summary(reply["counts"], reply["mean"], reply["scatter"].sum(0))
        key = fold(fed.key("groups"), fed.round)
        found = grouping.find_groups(answers, key, self.n_groups or losses.shape[1])
        odd = torch.zeros(len(cohort), dtype=torch.bool)
        labels = found.labels.clone()
        if found.n_groups is None:
            labels[:] = 0
        else:
            odd[found.odd] = True
        rest = (~odd).nonzero()[:, 0]
        had = state.assignment[cohort][(state.assignment[cohort] >= 0) & (state.aside[cohort] == 0)]
        least = len(had.unique()) if self.first == "survey" else 1
        k = self.n_groups or max(len(labels[rest].unique()), least)
        if k != len(labels[rest].unique()):
            labels[rest] = grouping.divide(select(answers, rest), k)
        own = labels[rest].unique(return_inverse=True)[1]
        group = torch.zeros_like(labels)
        group[rest] = match_clusters(losses[rest], own)[own]
        state, group = self.set_aside(state, cohort, group, odd)
        places = common.count_repeats(state.assignment, state.repeats, cohort, group)
        return state._replace(assignment=places[0], repeats=places[1])


WAYS: dict[str, dict[str, Any]] = {
    "census random": {"algorithm": "census", "first": "random"},
    "census survey": {"algorithm": "census", "first": "survey"},
    "train random": {"algorithm": "census_replication", "first": "random", "rows": "train"},
    "train survey": {"algorithm": "census_replication", "first": "survey", "rows": "train"},
    "held random": {"algorithm": "census_replication", "first": "random"},
    "held survey": {"algorithm": "census_replication", "first": "survey"},
}


def try_one(case: cases.Case, way: dict[str, Any], seed: int) -> dict[str, Any]:
    """What a rule finds in a federation."""
    data = cases.federation(case, 0.2)
    most = max(2, min(10, len(data) - 1))
    fit = coterie.fit(
        data, rounds=15, compare=False, seed=seed, n_groups=None, max_groups=most, quiet=True, **way
    )
    own = {row["client"]: row["group"] for row in fit.rows if row["client"] not in fit.odd}
    exact = compare_sets(own, fit.odd, case.truth)["sets"]
    scores = [row["accuracy"] for row in fit.rows]
    return {
        "n_groups": fit.n_groups,
        "odd": len(fit.odd),
        "exact": exact,
        "accuracy": round(float(np.mean(scores)), 4),
    }


def main() -> None:
    parser = options(__doc__.split("\n")[0], seeds=5)
    parser.add_argument("--first", type=int, default=501, help="first seed")
    given = parser.parse_args()
    path = given.json or FIGURES
    lines = read(path)
    done = {(line["case"], line["seed"], line["way"]) for line in lines}
    for seed in range(given.first, given.first + given.seeds):
        for name, make in CASES.items():
            case = make(np.random.default_rng([seed, crc32(name.encode())]))
            for way, chosen in WAYS.items():
                if (name, seed, way) in done:
                    continue
                line = {"case": name, "seed": seed, "way": way, **try_one(case, chosen, seed)}
                lines.append(line)
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    rows = []
    for way in WAYS:
        mine = [line for line in lines if line["way"] == way]
        exact = [sum(one["exact"] for one in mine if one["case"] == name) for name in CASES]
        score = np.mean([one["accuracy"] for one in mine])
        rows.append([way, len(mine), *exact, sum(exact), f"{score:.1%}"])
    table("Exact results", ["rule", "fits", *CASES, "all", "accuracy"], rows)


if __name__ == "__main__":
    main()
