"""Why groups differ: what clients are asked for it, and what the server makes of the answers.

Clients send sums over their rows and nothing about a single row. After training these are rows that
trained nothing, so that a group that was formed by chance does not look like one that is real.

part           what a client sends
columns        count, mean and sum of squared deviations of each feature; nothing with fewer than
               `LEAST` rows. Of images: the same of their brightness and contrast
labels         how many rows have each label; for numbers to predict what is sent of a column
predictions    how many rows have each label and get each answer from the model of each group; for
               numbers to predict, what is sent of a column, of errors and of squared errors
images         the mean image of each class with at least `LEAST` rows; only if asked for

The statistics are in `evidence/why.py`, the words in `report/why.py`.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from coterie.core.client import Batch, Client
from coterie.core.errors import ConfigError, unknown
from coterie.core.federation import Federation
from coterie.core.question import Question, question
from coterie.core.tree import Ids, Tree, n_rows, row
from coterie.data.card import DataCard
from coterie.data.encoder import Rule
from coterie.evidence.gains import LEVEL
from coterie.evidence.why import (
    Sets,
    Statement,
    compare_classes,
    compare_columns,
    compare_errors,
    compare_predictions,
    compare_shares,
    set_intervals,
    share_interval,
)

Part = Literal["columns", "labels", "predictions", "images"]
PARTS: tuple[Part, ...] = get_args(Part)
USUAL: tuple[Part, ...] = ("columns", "labels", "predictions")
"""What simulated clients are asked if a user says nothing; real clients are then asked nothing."""
LEAST = 5
"""Number of rows below which a client sends no means."""
MOST_STATEMENTS = 5
"""Statements about a group."""
MOST_COUNTS = 50_000
"""Numbers that a client sends of predictions at most; with more classes they are not compared."""
MOST_CLIENTS = 20
"""Clients that are compared one by one where there are no groups."""
EXCHANGED = 0.5  # share of rows from which on a label is called another's


def choose_parts(text: Any) -> Any:
    """What clients are asked, from words: "columns,labels", "nothing".

    >>> choose_parts("columns,labels"), choose_parts("nothing"), choose_parts("auto")
    (('columns', 'labels'), (), 'auto')
    """
    if text is None or text == "nothing":
        return ()
    if isinstance(text, str) and text != "auto":
        return tuple(word.strip() for word in text.split(","))
    return tuple(text) if isinstance(text, list) else text


def check_parts(owner: str, wanted: Any, known: tuple[Part, ...]) -> tuple[Part, ...]:
    """What clients are asked, checked; "auto" is all that is known."""
    parts = choose_parts(wanted)
    if parts == "auto":
        return known
    for part in parts:
        if part not in known:
            raise ConfigError(f"{owner}: why: {unknown('part', str(part), known)}")
    return tuple(parts)


# asking


@question(stackable=False, phase="evaluation", key="why")
def sum_columns(
    method: Any, client: Client, rows: Batch, *, markers: Sequence[int], images: bool, least: int
) -> dict[str, Tensor]:
    """Count, mean and sum of squared deviations of each feature.

    Parameters
    ----------
    markers
        For each feature the one that marks its missing values, or -1.
    images
        Take brightness and contrast of each image for features.
    least
        Number of rows (or units) with which nothing is sent.
    """
    x = rows.x[rows.mask].double().flatten(1)
    if images:
        x = torch.stack([x.mean(1), x.std(1, correction=0)], 1)
    present = torch.ones_like(x)
    for j, marker in enumerate(markers):
        if marker >= 0:
            present[:, j] = 1 - x[:, marker]
    return _moments(x, present, _units(rows), least)


@question(stackable=False, phase="evaluation", key="why", reveals="label counts")
def sum_labels(
    method: Any, client: Client, rows: Batch, *, n_classes: int, least: int
) -> dict[str, Tensor]:
    """Count the rows of each label; without classes, what is sent of a column."""
    y, unit = rows.y[rows.mask], _units(rows)
    if n_classes:
        classes = torch.nn.functional.one_hot(y.long(), n_classes).double()
        return {"count": (_weights(unit)[:, None] * classes).sum(0).float()}
    y = y.double().reshape(len(y), -1)
    return _moments(y, torch.ones_like(y), unit, least)


@question(stackable=False, phase="evaluation", key="why", reveals="label counts")
def sum_predictions(
    method: Any, client: Client, models: Tree, rows: Batch, *, n_classes: int, least: int
) -> dict[str, Tensor]:
    """Count the rows of each label by what each model says of them; or sum up its errors."""
    x, y = _take(rows.x, rows.mask), rows.y[rows.mask]
    unit, k = _units(rows), n_rows(models)
    with torch.no_grad():
        outputs = [method.predict(row(models, j), x) for j in range(k)]
    if n_classes:
        table = torch.zeros(k, n_classes * n_classes, dtype=torch.float64)
        for j, output in enumerate(outputs):
            cell = y.long() * n_classes + output.argmax(1)
            table[j].index_add_(0, cell, _weights(unit))
        return {"count": table.reshape(k, n_classes, n_classes).float()}
    wrong = [output.reshape(len(y), -1).double() - y.reshape(len(y), -1) for output in outputs]
    columns = [part.mean(1) for one in wrong for part in (one.square(), one)]  # [2 k][n]
    errors = torch.stack(columns, 1)
    return _moments(errors, torch.ones_like(errors), unit, least)


@question(stackable=False, phase="evaluation", key="why", reveals="label counts")
def average_images(
    method: Any, client: Client, rows: Batch, *, n_classes: int, least: int
) -> dict[str, Tensor]:
    """Count and mean image of each class; zeros for a class with too few."""
    x, y = rows.x[rows.mask].double(), rows.y[rows.mask].long()
    classes = torch.nn.functional.one_hot(y, n_classes).double()
    count = classes.sum(0)
    count = torch.where(count >= least, count, 0.0)
    mean = torch.einsum("nc,n...->c...", classes, x)
    many = count.reshape(-1, *[1] * (x.ndim - 1))
    mean = torch.where(many > 0, mean / many.clamp(min=1), 0.0)
    return {"count": count.float(), "mean": mean.float()}


def _take(x: Any, mask: Tensor) -> Any:
    return {name: part[mask] for name, part in x.items()} if isinstance(x, dict) else x[mask]


def _units(rows: Batch) -> Tensor:
    """Number of the unit of each real row, 0, 1, ...: [n]."""
    return rows.units()[rows.mask].unique(return_inverse=True)[1]


def _weights(unit: Tensor) -> Tensor:
    """Weight of each row, so that a unit counts once."""
    return 1 / unit.bincount().double()[unit]


def _moments(x: Tensor, present: Tensor, unit: Tensor, least: int) -> dict[str, Tensor]:
    """Count, mean and squared deviations of columns, after the rows of a unit are averaged."""
    n = int(unit.max()) + 1 if len(unit) else 0
    size = torch.zeros(n, x.shape[1], dtype=torch.float64).index_add_(0, unit, present)
    total = torch.zeros_like(size).index_add_(0, unit, x * present)
    real = (size > 0).double()
    x = total / torch.where(size > 0, size, 1.0)
    count = real.sum(0)
    real = real * (count >= least)
    count = real.sum(0)
    mean = (x * real).sum(0) / count.clamp(min=1)
    square = ((x - mean).square() * real).sum(0)
    return {"count": count.float(), "mean": mean, "square": square}


# columns as a user knows them


class Column(NamedTuple):
    """A feature of the inputs."""

    name: str
    kind: str  # "number", "true", "category", "missing", "text" or "hashed"
    marker: int = -1  # feature that marks its missing values
    shift: float = 0.0
    scale: float = 1.0
    value: str = ""  # of a category


def list_columns(card: DataCard) -> tuple[list[Column], bool, str]:
    """The features, whether they are those of images, and why there are none."""
    shape = card.sample_shape
    if isinstance(shape, dict):
        return [], False, "Inputs in several parts are not compared column by column."
    if card.encoder.rules:
        out: list[Column] = []
        for rule in card.encoder.rules:
            out += _features(rule, len(out))
        return out, False, ""
    if card.encoder.dtype.startswith("int"):
        return [], False, "Inputs that are whole numbers, such as words, are not compared."
    if len(shape) == 1:
        return [Column(f"feature {j}", "number") for j in range(shape[0])], False, ""
    return [Column("brightness", "number"), Column("contrast", "number")], True, ""


def _features(rule: Rule, first: int) -> list[Column]:
    n = len(rule.features) - rule.missing
    marker = first + n if rule.missing else -1
    kind = {"boolean": "true"}.get(rule.kind, rule.kind)
    if kind == "category":
        out = [Column(rule.name, kind, marker, value=value) for value in rule.categories]
    else:
        out = [Column(rule.name, kind, marker, rule.shift, rule.scale) for _ in range(n)]
    return [*out, Column(rule.name, "missing")] if rule.missing else out


# explaining


class Who(NamedTuple):
    """The clients to compare."""

    ids: Ids
    sets: Sets
    names: list[str]  # of the clients
    single: bool = False  # there are no groups: every client is a set of its own


class Answers(NamedTuple):
    """What was heard about one part."""

    statements: list[Statement]
    sent: dict[str, Any]
    note: str = ""


class Asking(NamedTuple):
    """Which clients to ask, and for what."""

    fed: Federation
    method: Any
    card: DataCard
    who: Who
    split: str

    def ask(self, function: Any, *given: Any, **arguments: Any) -> tuple[Who, dict[str, Tensor]]:
        """The clients that answered, and their replies."""
        task = Question(function, self.method, {"least": LEAST, **arguments}, self.split)
        heard, reply = self.fed.map(task, *given, to=self.who.ids, at_least=0)
        at = torch.isin(self.who.ids, heard).nonzero()[:, 0]
        sets = Sets(self.who.sets.labels[at], self.who.sets.odd[at])
        names = [self.who.names[i] for i in at.tolist()]
        return Who(heard, sets, names, self.who.single), reply

    @property
    def rows(self) -> str:
        """The rows that are compared, in words."""
        return {"train": "training", "validation": "validation", "test": "test"}[self.split]


def explain(
    asking: Asking,
    parts: Sequence[Part],
    models: Tree | None = None,
    survey: Any = None,
) -> tuple[dict[str, Any], Tree]:
    """Ask the clients, and say in what each group differs from those elsewhere.

    Parameters
    ----------
    asking
        Clients, groups and rows.
    parts
        What clients may be asked.
    models
        The model of each group, stacked; None: there are none to compare.
    survey
        Losses by fold and class, of a survey that was made before (`Summary`). Label counts are
        taken from it.

    Returns
    -------
    found, images
        What was found as plain data, and mean images by group if they were asked for.
    """
    sets = asking.who.sets
    found: dict[str, Any] = {
        "split": asking.split,
        "level": LEVEL,
        "compared": 0,
        "sent": [],
        "kept": [part for part in PARTS if part not in parts],
        "notes": [],
        "groups": _list_sets(asking.who),
        "cross": None,
    }
    images: Tree = {}
    if not sets.sides:
        return found, images
    columns, pixels, without = list_columns(asking.card)
    heard: list[Answers] = []
    if "columns" in parts:
        heard.append(_columns(asking, columns, pixels, without))
    if "labels" in parts:
        heard.append(_labels(asking, survey))
    if survey is not None and "labels" in parts:
        heard.append(_classes(asking, survey))
    if "predictions" in parts and models is not None:
        answer, cross = _predictions(asking, models)
        heard.append(answer)
        found["cross"] = cross
    if "images" in parts:
        answer, images = _images(asking, pixels)
        heard.append(answer)
    told = set_intervals([one for answer in heard for one in answer.statements])
    found["compared"] = len(told)
    found["sent"] = [answer.sent for answer in heard if answer.sent]
    found["notes"] = [answer.note for answer in heard if answer.note]
    if told and not sets.knows_clients:
        found["notes"].append(
            "There are too few clients to know how much clients of one group differ. The intervals "
            "speak of the rows of these clients, and not of other clients like them."
        )
    for line in found["groups"]:
        own = [one for one in told if one.group == line["set"]]
        line["statements"] = _choose(own, columns, asking.card, found["groups"])
    return found, images


def _list_sets(who: Who) -> list[dict[str, Any]]:
    """Groups and odd clients, with their names."""
    out = []
    for number in who.sets.labels.unique().tolist():
        member = who.sets.labels == number
        clients = [who.names[i] for i in member.nonzero()[:, 0].tolist()]
        odd = bool(who.sets.odd[member].all())
        name = clients[0] if odd or who.single else f"group {number}"
        line = {"set": number, "name": name, "odd": odd, "clients": clients, "statements": []}
        out.append(line)
    return out


def _sent(part: str, numbers: int, text: str) -> dict[str, Any]:
    return {"part": part, "numbers": numbers, "text": text}


def _columns(asking: Asking, columns: list[Column], pixels: bool, without: str) -> Answers:
    if not columns:
        return Answers([], {}, without)
    markers = [column.marker for column in columns]
    who, reply = asking.ask(sum_columns, markers=markers, images=pixels)
    what = "image brightness and contrast" if pixels else f"each of {len(columns)} features"
    text = (
        f"count, mean and sum of squared deviations of {what}, over its {asking.rows} rows; "
        f"nothing if it has fewer than {LEAST}"
    )
    sent = _sent("columns", 3 * len(columns), text)
    if not len(who.ids):
        return Answers([], sent, "No client told of its columns.")
    few = int((reply["count"].amax(1) == 0).sum())
    note = ""
    if few:
        note = (
            f"{few} of {len(who.ids)} clients have too few {asking.rows} rows to tell of columns."
        )
    count, mean, square = reply["count"].double(), reply["mean"], reply["square"]
    shares = [j for j, c in enumerate(columns) if c.kind in ("true", "category", "missing")]
    others = [j for j in range(len(columns)) if j not in set(shares)]
    out = []
    if others:
        found = compare_columns(count[:, others], mean[:, others], square[:, others], who.sets)
        out += [one._replace(item=(others[one.item[0]],)) for one in found]
    if shares:
        n = count[:, shares]
        found = compare_shares(n * mean[:, shares], n, who.sets)
        out += [one._replace(item=(shares[one.item[0]],)) for one in found]
    return Answers(out, sent, note)


def _labels(asking: Asking, survey: Any) -> Answers:
    card = asking.card
    if card.task == "reconstruction":
        return Answers([], {})
    if card.task == "regression":
        who, reply = asking.ask(sum_labels, n_classes=0)
        text = (
            "count, mean and sum of squared deviations of what is predicted, over its "
            f"{asking.rows} rows; nothing if it has fewer than {LEAST}"
        )
        sent = _sent("labels", 3 * card.n_outputs, text)
        if not len(who.ids):
            return Answers([], sent)
        found = compare_columns(reply["count"], reply["mean"], reply["square"], who.sets)
        return Answers([one._replace(kind="target") for one in found], sent)
    if survey is not None:
        count, who = survey.counts.sum(1), asking.who
        text = "nothing more: the survey has its label counts"
        sent = _sent("labels", 0, text)
        if count.shape[1] != card.n_outputs:  # losses were not divided by class
            return Answers([], {})
    else:
        who, reply = asking.ask(sum_labels, n_classes=card.n_outputs)
        count = reply.get("count", torch.zeros(0, card.n_outputs))
        text = f"number of its {asking.rows} rows with each of {card.n_outputs} labels"
        sent = _sent("labels", card.n_outputs, text)
    if not len(who.ids):
        return Answers([], sent)
    rows = count.sum(1, keepdim=True).expand_as(count)
    return Answers(compare_shares(count, rows, who.sets, "label"), sent)


def _classes(asking: Asking, survey: Any) -> Answers:
    if survey.counts.shape[2] < 2:
        return Answers([], {})
    return Answers(compare_classes(survey, asking.who.sets), {})


def _predictions(asking: Asking, models: Tree) -> tuple[Answers, dict[str, Any] | None]:
    card, k = asking.card, n_rows(models)
    c = card.n_outputs if card.task == "classification" else 0
    if k * c * c > MOST_COUNTS:
        note = f"Predictions are not compared: {k} models and {c} classes are too many."
        return Answers([], {}, note), None
    who, reply = asking.ask(sum_predictions, models, n_classes=c)
    if not c:
        text = (
            f"of the errors and squared errors of {k} models on its {asking.rows} rows: count, "
            f"mean and sum of squared deviations; nothing if it has fewer than {LEAST}"
        )
        sent = _sent("predictions", 6 * k, text)
        if not len(who.ids):
            return Answers([], sent), None
        count, parts = reply["count"][:, 0], [reply[n] for n in ("mean", "square")]
        mean, square = (part.reshape(len(part), k, 2) for part in parts)
        return Answers(compare_errors(count, mean, square, who.sets), sent), None
    text = (
        f"number of its {asking.rows} rows with each of {c} labels that get each answer from each "
        f"of {k} models"
    )
    sent = _sent("predictions", k * c * c, text)
    if not len(who.ids):
        return Answers([], sent), None
    table, labels = reply["count"].double(), who.sets.labels
    groups = labels.unique().tolist()
    counts = [[table[labels == g, model].sum(0) for g in groups] for model in range(k)]
    cross = {
        "labels": list(map(str, card.classes or range(c))),
        "counts": [[_round_all(part.tolist()) for part in line] for line in counts],
    }
    return Answers(compare_predictions(table, who.sets), sent), cross


def _images(asking: Asking, pixels: bool) -> tuple[Answers, Tree]:
    card = asking.card
    if not pixels:
        return Answers([], {}, "Inputs are not images, so there are no mean images."), {}
    c = card.n_outputs if card.task == "classification" else 1
    on = asking._replace(split="train")
    who, reply = on.ask(average_images, n_classes=c)
    text = (
        f"mean image of each of {c} classes, over its training rows; none with fewer than {LEAST}"
    )
    size = math.prod(card.sample_shape)
    sent = _sent("images", c * (size + 1), text)
    if not len(who.ids):
        return Answers([], sent), {}
    count, mean = reply["count"].double(), reply["mean"].double()
    out: dict[str, Tensor] = {}
    for number in who.sets.labels.unique().tolist():
        member = who.sets.labels == number
        n = count[member].sum(0)
        many = count[member].reshape(*count[member].shape, *[1] * (mean.ndim - 2))
        total = (many * mean[member]).sum(0)
        shaped = n.reshape(-1, *[1] * (total.ndim - 1))
        out[str(number)] = torch.where(shaped > 0, total / shaped.clamp(min=1), torch.nan).float()
    return Answers([], sent), out


# choosing


def _choose(
    found: list[Statement], columns: list[Column], card: DataCard, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The most telling statements about one set, as plain data.

    Of the values of a column, and of the features of a text, the strongest one speaks; of labels
    two, or one if there are two labels. What a model says of a set is one statement. A column that
    is known to tell only who the client is says nothing.
    """
    known = {one.column for one in card.warnings if one.kind == "constant"}
    names = {line["set"]: line["name"] for line in groups}
    labels = list(map(str, card.classes or range(max(card.n_outputs, 1))))
    lines: list[dict[str, Any]] = []
    told: dict[Any, int] = {}
    # What the losses of a class say has another scale and tells less: it comes last.
    ordered = sorted(found, key=lambda one: (one.kind == "class", -one.strength))
    for one in [one for one in ordered if one.strength > 0]:
        if one.kind in ("wrong", "confusion", "error", "bias"):
            key: Any = "model", one.item[0]
            most = 1
            line = _prediction(one.item[0], ordered, labels, card, names)
        elif one.kind in ("label", "class"):
            key, most = one.kind, 1 if len(labels) == 2 else 2
            line = _difference(one, labels[one.item[0]])
        elif one.kind == "target":
            key, most, line = "target", 1, _target(one, card)
        else:
            column = columns[one.item[0]]
            key, most = (column.name, column.kind == "missing"), 1
            line = None if column.name in known else _column(one, column)
        if line is not None and told.get(key, 0) < most:
            told[key] = told.get(key, 0) + 1
            lines.append(line)
    return lines[:MOST_STATEMENTS]


def _difference(one: Statement, name: str, **more: Any) -> dict[str, Any]:
    """A statement on shares, or on what has no unit."""
    low, high = share_interval(one) if one.kind != "class" else (one.low, one.high)
    parts = {"here": one.here, "elsewhere": one.elsewhere, "low": low, "high": high}
    return _plain(one, one.kind, name, parts, more)


def _column(one: Statement, column: Column) -> dict[str, Any]:
    if one.kind == "share":
        return _difference(one, column.name, value=column.value) | {"kind": column.kind}
    unit = one.unit * column.scale
    means = (mean * column.scale + column.shift for mean in (one.here, one.elsewhere))
    # Inputs have seven digits: what is left of a zero that was standardised is no number.
    here, elsewhere = (0.0 if abs(mean) < 1e-6 * unit else mean for mean in means)
    parts = {
        "here": here,
        "elsewhere": elsewhere,
        "low": one.low * unit,
        "high": one.high * unit,
    }
    return _plain(one, column.kind, column.name, parts)


def _target(one: Statement, card: DataCard) -> dict[str, Any]:
    mean, scale, j = card.encoder.target_mean, card.encoder.target_scale, one.item[0]
    name = card.encoder.label or "y"
    several = card.n_outputs > 1
    own = Column(
        f"{name} {j}" if several else name,
        "target",
        shift=mean[j] if mean else 0.0,
        scale=scale[j] if scale else 1.0,
    )
    return _column(one, own)


def _prediction(
    model: int,
    found: list[Statement],
    labels: list[str],
    card: DataCard,
    names: dict[int, str],
) -> dict[str, Any] | None:
    """What a group's model says of a set; None if it does there as well as at home."""
    kinds = ("wrong", "error", "bias", "confusion")
    every = [one for one in found if one.kind in kinds and one.item[0] == model]
    own = [one for one in every if one.strength > 0 and one.effect > 0]
    lead = next((one for one in own if one.kind in ("wrong", "error")), None)
    confusions = [one for one in own if one.kind == "confusion"]
    if lead is None and not confusions:
        return None
    first = lead or confusions[0]
    if first.kind == "error":
        scale = card.encoder.target_scale[0] if len(card.encoder.target_scale) == 1 else 1.0
        bias = next((one for one in every if one.kind == "bias" and one.strength > 0), None)
        ends = (first.elsewhere + end * first.unit for end in (first.low, first.high))
        low, high = (math.sqrt(max(end, 0.0)) * scale for end in ends)
        parts = {
            "here": math.sqrt(max(first.here, 0.0)) * scale,
            "elsewhere": math.sqrt(max(first.elsewhere, 0.0)) * scale,
            "low": low,
            "high": high,
        }
        more = {"model": names[model], "bias": None if bias is None else _round(bias.here * scale)}
        return _plain(first, "error", card.encoder.label or "y", parts, more)
    called: list[dict[str, Any]] = [
        {
            "label": labels[one.item[1]],
            "says": labels[one.item[2]],
            "here": _round(one.here),
            "elsewhere": _round(one.elsewhere),
        }
        for one in confusions
    ]
    swapped = [one for one in every if one.kind == "confusion" and one.here > EXCHANGED]
    said: dict[str, Any] = {
        "model": names[model],
        "called": called[:4],
        "more": max(len(called) - 4, 0),
        "inverted": len(labels) == 2 and len(swapped) == 2,
        "lead": "wrong" if lead is not None else "confusion",
    }
    return _difference(first, names[model], **said) | {"kind": "prediction"}


def _plain(
    one: Statement, kind: str, name: str, parts: dict[str, float], more: Any = None
) -> dict[str, Any]:
    """A statement as plain data: in its own unit, and as an effect that can be ranked."""
    effect = {"effect": one.effect, "effect_low": one.low, "effect_high": one.high}
    figures = {key: _round(value) for key, value in (parts | effect).items()}
    return {"kind": kind, "name": name, **figures, **(more or {})}


def _round(value: float) -> float | None:
    """Six digits: the order in which clients were added up changes later ones."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _round_all(values: Any) -> Any:
    return [_round_all(part) for part in values] if isinstance(values, list) else _round(values)
