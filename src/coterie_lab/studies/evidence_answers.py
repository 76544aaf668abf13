"""Rows of `evidence_rows.py` about answers: is there one, is it always the same, and is it true?

Federations are tables of scikit-learn, heart disease and Beijing air of the data folder, images and
formulas. Parkinson's telemonitoring is not among them: its situation (42 patients, each with a
level of his or her own, and measurements that say nothing about it) is drawn.
"""

import csv
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy.ndimage import rotate

import coterie
from coterie.advice import Advice
from coterie.data import FederatedData
from coterie.fitted import Fitted
from coterie_lab.studies import evidence_cases as cases
from coterie_lab.studies import real_federations as real
from coterie_lab.studies.evidence_cases import Case, federation

Line = dict[str, Any]
Judge = Callable[[np.random.Generator, int], Line]

SHORT, LONG = 4, 30
"""Numbers of rounds that must lead to one answer."""
POINTS = 0.02
"""Accuracy by which another way must be ahead to contradict a recommendation."""


# federations


def two_kinds_of_hospitals(rng: np.random.Generator) -> Case:
    """Breast cancer in ten hospitals, four of which write the outcome the other way round."""
    x, y, client = cases.breast(10, rng)
    truth = rng.permutation([0] * 6 + [1] * 4)
    flipped = truth[client] == 1
    y[flipped] = 1 - y[flipped]
    return Case(cases.scaled(x), y, client, truth)


def few_clients(rng: np.random.Generator, kind: int) -> Case:
    """Images of three clients alike, of one client, or of large clients and very small ones."""
    sizes = ([150] * 3, [300], [600] * 4 + [6] * 4)[kind]
    x, y, client = cases.cut("mnist", sizes, rng)
    return Case(cases.flat(x), y, client, np.zeros(len(sizes), int))


def levels(rng: np.random.Generator) -> Case:
    """42 patients with a level each; age, sex and 16 measurements do not tell it."""
    m, n = 42, 40
    client = np.repeat(np.arange(m), n)
    level = 29 + 10 * rng.normal(size=m)
    age, sex = rng.uniform(40, 85, m), rng.integers(0, 2, m)
    x = np.column_stack([age[client], sex[client], rng.normal(size=(m * n, 16))])
    y = level[client] + 4 * rng.normal(size=m * n)
    return Case(cases.scaled(x), y, client, np.zeros(m, int))


def unreadable(rng: np.random.Generator) -> Case:
    """Twelve clients, four of which exchange topics, and features that say nothing of them."""
    m, n = 12, 100
    client, truth = np.repeat(np.arange(m), n), rng.permutation([0] * 8 + [1] * 4)
    y = np.tile(np.arange(4), m * n // 4)
    cases.relabel(y, truth[client] == 1, cases.derangement(4, rng))
    return Case(rng.normal(size=(m * n, 16)), y, client, truth)


def shifted(rng: np.random.Generator, m: int, n: int) -> Case:
    """Three groups whose inputs lie elsewhere, and one rule for all of them."""
    client, truth = np.repeat(np.arange(m), n), np.arange(m) % 3
    centre, rule = 1.5 * rng.normal(size=(3, 8)), rng.normal(size=8)
    x = rng.normal(size=(m * n, 8)) + centre[truth[client]]
    score = (x - centre.mean(0)) @ rule
    return Case(x, (score + 0.5 * rng.normal(size=m * n) > 0).astype(int), client, truth)


def tilted(rng: np.random.Generator, m: int, n: int) -> Case:
    """MNIST in two groups, one of which sees its images turned by 45 degrees."""
    x, y, client = cases.cut("mnist", [n] * m, rng)
    truth = np.arange(m) % 2
    rows = truth[client] == 1
    x[rows] = rotate(x[rows], 45, axes=(1, 2), reshape=False, order=1)
    return Case(cases.flat(x), y, client, truth)


def turned_halves(rng: np.random.Generator) -> Case:
    """Ten clients of 8 x 8 digits, half of them turned by 90 degrees."""
    x, y, client = cases.cut("digits", [89] * 10, rng)
    truth = np.arange(10) % 2
    rows = truth[client] == 1
    x[rows] = np.rot90(x[rows], 1, axes=(1, 2))
    return Case(cases.flat(x), y, client, truth)


@cache
def _written(name: str) -> tuple[TemporaryDirectory[str], Path]:
    """A folder with the files of a federation, and what keeps it."""
    folder = TemporaryDirectory()
    {"heart": real.heart, "beijing": real.beijing}[name](real.find_data(), Path(folder.name))
    return folder, Path(folder.name) / name


def hospitals_of_heart(seed: int) -> FederatedData:
    """The four hospitals, their test rows drawn by a seed."""
    return coterie.from_folder(_written("heart")[1], label="disease", seed=seed)


@cache
def _air() -> dict[str, np.ndarray]:
    table: dict[str, list[str]] = {}
    for path in sorted(_written("beijing")[1].glob("*.csv")):
        with path.open() as file:
            for line in csv.DictReader(file):
                for name, value in {**line, "station": path.stem}.items():
                    table.setdefault(name, []).append(value)
    return {name: np.array(values) for name, values in table.items()}


def stations(rng: np.random.Generator) -> FederatedData:
    """Beijing's twelve stations on a random third of the days; the latest are held out."""
    table = _air()
    days = np.unique(table["day"])
    some = np.isin(table["day"], rng.permutation(days)[: len(days) // 3])
    own = {name: values[some] for name, values in table.items()}
    return coterie.from_table(
        own, client="station", label="air", unit="day", time="day", test_fraction=0.25
    )


# judging


def answer(fit: Fitted) -> Line:
    """What a fit says, in words and figures."""
    verdict = fit.verdict
    line: Line = {
        "recommendation": verdict.recommendation,
        "most": verdict.most,
        "exceptions": [one["client"] for one in verdict.exceptions],
        "marked": [one["client"] for one in verdict.clients if one["better"]],
        "learnt": verdict.learnt,
        "provisional": verdict.provisional,
        "n_groups": fit.n_groups,
        "odd": fit.odd,
        "ways": {way: _round(losses) for way, losses in verdict.ways.items()},
        "one answer": verdict.headline in fit.sentence and fit.sentence.count("Recommend") == 1,
        "headline": fit.sentence.split(" The mean ")[0],
    }
    line["contradicts"] = contradicts(line, _scores(fit), verdict.matters or 0.0)
    line["nothing said"] = "Nothing was learnt yet" in verdict.sentence
    return line


def contradicts(line: Line, scores: Mapping[str, float], matters: float) -> bool:
    """Whether figures speak against the recommended way: a loss that matters, or an accuracy."""
    most, ways = line["most"], line["ways"]
    if most is None:
        return False
    others = [way for way in ("one", "groups", "alone") if way in ways and way != most]
    less = any(
        all(b < a - matters for a, b in zip(ways[most], ways[way], strict=True)) for way in others
    )
    behind = any(scores.get(way, 0.0) > scores.get(most, 1.0) + POINTS for way in others)
    return bool(less or behind)


def _scores(fit: Fitted) -> dict[str, float]:
    """Mean accuracy of each way, as the headline has it."""
    own = [row["accuracy"] for row in fit.rows if row.get("accuracy") is not None]
    found = {
        "groups": float(np.mean(own)) if own else None,
        "one": fit.summary.get("fedavg_accuracy"),
        "alone": fit.summary.get("local_only_accuracy"),
    }
    return {way: value for way, value in found.items() if value is not None}


def _round(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else round(value, 5) for value in values]


def best_rounds(rng: np.random.Generator, seed: int) -> Line:
    """Which rounds are compared, and the losses of all strategies there and at the end."""
    with TemporaryDirectory() as folder:
        data = federation(two_kinds_of_hospitals(rng), 0.2)
        fit = coterie.fit(data, rounds=30, seed=seed, out=f"{folder}/run")
        line, verdict = answer(fit), fit.verdict
        places = {"one": "baselines/fedavg/", "groups": "", "alone": "baselines/local_only/"}
        for way, place in places.items():
            text = Path(f"{folder}/run/{place}final/held_out.json").read_text()
            losses = dict(json.loads(text)["by_round"])
            best = min(losses, key=lambda number: losses[number])
            line[way] = [verdict.rounds[way], best, losses[best], losses[max(losses)]]
        line["gain"] = verdict.per_client.get("alone over groups", [None])[0]
    return line


def is_best(line: Line) -> bool | None:
    """Whether best rounds were compared: the same rounds, and a gain like theirs."""
    if line["gain"] is None:
        return None
    ways = [line[way] for way in ("one", "groups", "alone")]
    best, last = (line["groups"][i] - line["alone"][i] for i in (2, 3))
    near = abs(line["gain"] - best) <= max(0.05, abs(line["gain"] - last))
    return bool(near and all(used == least for used, least, *_ in ways))


def few(rng: np.random.Generator, seed: int) -> Line:
    """The headline of federations that decide little."""
    return answer(coterie.fit(federation(few_clients(rng, seed % 3), 0.2), rounds=15, seed=seed))


def again(
    make: Callable[[np.random.Generator, int], FederatedData], short: int, long: int
) -> Judge:
    """The answers of advice and of a short and a long training."""

    def judge(rng: np.random.Generator, seed: int) -> Line:
        data = make(rng, seed)
        line: Line = {"advice": said(coterie.advise(data, seed=seed))}
        for name, rounds in (("short", short), ("long", long)):
            line[name] = answer(coterie.fit(data, rounds=rounds, seed=seed))
        return line

    return judge


def said(advice: Advice) -> Line:
    """What advice says: its words but those about evidence, costs and limits."""
    text = str(advice).partition("\n\nEvidence:")[0]
    odd = list(advice.odd)
    return {"kind": advice.kind, "n_groups": advice.n_groups, "odd": odd, "text": text}


def orders(advice: Line) -> bool:
    """Whether advice names a strategy other than one model without asking to compare."""
    asks = ("and compare", "training will tell")  # now, and in stored figures
    return advice["kind"] != "one" and not any(words in advice["text"] for words in asks)


def agree(line: Line) -> bool:
    """Advice, headline, verdict and its table give no two answers."""
    parts = line["short"], line["long"]
    same = all(one["one answer"] and one["marked"] == one["exceptions"] for one in parts)
    return bool(same and not orders(line["advice"]))


def same_answer(line: Line) -> bool:
    """The number of rounds does not change the recommendation."""
    return bool(line["short"]["recommendation"] == line["long"]["recommendation"])


def two_answers(line: Line) -> bool:
    """Two numbers of rounds lead to two different recommendations, "undecided" aside."""
    both = line["short"]["most"], line["long"]["most"]
    return None not in both and both[0] != both[1]


def shift(make: Callable[[np.random.Generator, int, int], Case], m: int, n: int) -> Judge:
    """Advice, verdict, and how good each strategy is on fresh rows of the same clients."""

    def judge(rng: np.random.Generator, seed: int) -> Line:
        whole = make(rng, m, n + 400)
        known = np.arange(len(whole.y)) % (n + 400) < n
        x, y, client = (part[known] for part in (whole.x, whole.y, whole.client))
        data = federation(Case(x, y, client, whole.truth), 0.2)
        fit = coterie.fit(data, rounds=15, seed=seed)
        one = coterie.fit(data, "fedavg", rounds=15, seed=seed, compare=False)
        alone = coterie.fit(data, "local_only", rounds=15, seed=seed, compare=False)
        line = {"advice": said(coterie.advise(data, seed=seed)), **answer(fit)}
        for way, trained in (("groups", fit), ("one", one), ("alone", alone)):
            right = []
            for c in range(m):
                rows = ~known & (whole.client == c)
                guess = trained.predict(whole.x[rows].astype(np.float32), client=f"client-{c}")
                right.append(float((guess == whole.y[rows]).mean()))
            line[f"fresh {way}"] = round(float(np.mean(right)), 4)
        return line

    return judge


def overclaims(line: Line) -> bool:
    """Whether it says "cannot serve" or recommends a strategy that is worse on fresh rows."""
    most = line["most"]
    worse = most in ("groups", "alone") and line[f"fresh {most}"] <= line["fresh one"]
    return bool("cannot serve" in line["advice"]["text"] or orders(line["advice"]) or worse)


def floor(make: Callable[[np.random.Generator], Case]) -> Judge:
    """What is said where nothing can be learnt."""

    def judge(rng: np.random.Generator, seed: int) -> Line:
        return answer(coterie.fit(federation(make(rng), 0.2), rounds=15, seed=seed))

    return judge


def says_nothing(line: Line) -> bool:
    """Rivals are in the table, and nothing is said about groups but that nothing was learnt."""
    rivals = {"constant", "own constant"} <= set(line["ways"])
    silent = line["most"] is None and line["learnt"] is False and line["nothing said"]
    return bool(rivals and silent and "No groups" not in line["headline"])


def air(rng: np.random.Generator, seed: int) -> Line:
    """Advice and verdict for Beijing's stations."""
    data = stations(rng)
    fit = coterie.fit(data, rounds=20, seed=seed)
    return {"advice": said(coterie.advise(data, seed=seed)), **answer(fit)}


def speaks_of_size(line: Line) -> bool:
    """Advice gives the size of the differences, and leaves the strategy to a comparison."""
    advice = line["advice"]
    return "explain" in advice["text"] and not orders(advice)


# rows and lines of the table, as `evidence_rows.py` wants them


def _four_hospitals(rng: np.random.Generator, seed: int) -> FederatedData:
    return hospitals_of_heart(seed)


def _halves(rng: np.random.Generator, seed: int) -> FederatedData:
    return federation(turned_halves(rng), 0.2)


ROWS: dict[str, tuple[Judge, int]] = {
    "best-rounds": (best_rounds, 20),
    "few-clients": (few, 30),
    "heart-rounds": (again(_four_hospitals, SHORT, LONG), 20),
    "digits-rounds": (again(_halves, 15, 60), 20),
    "levels": (floor(levels), 20),
    "shifted": (shift(shifted, 12, 100), 20),
    "tilted": (shift(tilted, 10, 90), 20),
    "unreadable": (floor(unreadable), 20),
    "stations": (air, 20),
}
AGAIN = ("heart-rounds", "digits-rounds")
Hit = Callable[[Line], bool | None]
# what, must, before, rows, hit, least, most
GOALS: tuple[tuple[str, str, str, tuple[str, ...], Hit, float, float], ...] = (
    ("ten hospitals, 30 rounds: the best rounds are compared", "always", "never",
     ("best-rounds",), is_best, 0.95, 1.0),
    ("very few or very small clients: headline and verdict agree", "always",
     "not so", ("few-clients",), lambda line: line["one answer"], 1.0, 1.0),
    ("the same: figures contradict the recommendation", "never", "3 cases", ("few-clients",),
     lambda line: line["contradicts"], 0.0, 0.0),
    ("heart disease and digits: advice, headline and verdict agree", "always", "four answers",
     AGAIN, agree, 1.0, 1.0),
    ("heart disease, 4 and 30 rounds: the same answer", "the same", "0 of 8", AGAIN[:1],
     same_answer, 0.95, 1.0),
    ("digits, 15 and 60 rounds: the same answer", "the same", "another", AGAIN[1:],
     same_answer, 0.95, 1.0),
    ("both: two recommendations that contradict each other", "never", "", AGAIN, two_answers, 0.0,
     0.05),
    ("clients that differ in a level only: only 'nothing was learnt' is said", "always",
     "never", ("levels",), says_nothing, 0.95, 1.0),
    ("inputs shifted or images tilted: too much is claimed", "at most 5 %", "5 of 5",
     ("shifted", "tilted"), overclaims, 0.0, 0.05),
    ("features unrelated to the label: only 'nothing was learnt' is said", "always",
     "groups denied", ("unreadable",), says_nothing, 0.95, 1.0),
    ("Beijing: advice gives sizes and recommends no training", "always",
     '"cannot serve all"', ("stations",), speaks_of_size, 1.0, 1.0),
    ("Beijing: the verdict is one model", "one model", "one model", ("stations",),
     lambda line: line["most"] == "one", 0.95, 1.0),
)  # fmt: skip
