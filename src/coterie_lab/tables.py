"""Tables of published figures and ours: Markdown, CSV, LaTeX and a picture."""

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError
from coterie.running.folder import write
from coterie_lab.recipe import Entry, Figures, Recipe
from coterie_lab.reproduce import Plan, read_summary

DIGITS = {"ari": 2, "ari_round_11": 2, "first_round": 1, "stable_round": 1}
PERCENT = ("accuracy", "best_accuracy", "matched", "gap", "client_local", "client_test", "decoded")
BAR = {"accuracy": 0.5, "ari": 0.05, "ari_round_11": 0.05}
NOT_RUN, NOT_BUILT = "not run yet", "not built yet"
SMALLER = ("loss", "first_round", "stable_round", "share_error", "count_error")
"""Metrics whose best figure is the smallest."""
OURS = ("census", "blend", "mosaic", "survey")


def figures(entry: Entry, recipe: Recipe, plan: Plan) -> tuple[Figures, list[dict[str, Any]]]:
    """The figures of an entry for all finished seeds, and the summaries of these runs."""
    if entry.study is None:
        return Figures(), []
    kept = [read_summary(plan, entry.study.name, seed) for seed in recipe.seeds]
    found = [one for one in kept if one is not None]
    return Figures([one.get(entry.metric) for one in found]), found


def learnt_little(run: dict[str, Any]) -> bool:
    """Whether the accuracy of a run stayed low: below 25 %, and it rose by less than 10 points."""
    by_round = [value for _, value in run.get("accuracy_by_round") or [] if value is not None]
    return len(by_round) > 1 and max(by_round) < 25 and max(by_round) - by_round[0] < 10


LITTLE = (
    "Learnt little: accuracy rose by less than 10 points in all rounds. Where that holds for half "
    "of the methods of a block or more, no method is called the best."
)


def difference(entry: Entry, ours: Figures) -> float | None:
    """Our mean minus the published mean."""
    if entry.published is None or entry.published.mean is None or ours.mean is None:
        return None
    return ours.mean - entry.published.mean


def agrees(entry: Entry, ours: Figures) -> bool | None:
    """Whether our mean is within two published standard deviations or the bar of the metric.

    None if there is nothing to compare.
    """
    if not ours.values or entry.published is None:
        return None
    if entry.published.mean is None or ours.mean is None:
        return entry.published.mean is None and ours.mean is None
    bar = max(2 * (entry.published.std or 0.0), BAR.get(entry.metric, 0.0))
    return abs(ours.mean - entry.published.mean) <= bar + 1e-9


class Notes:
    """Footnotes, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, texts: list[str]) -> str:
        """Add notes and return their numbers."""
        for text in texts:
            if text not in self.texts:
                self.texts.append(text)
        return ",".join(str(self.texts.index(text) + 1) for text in texts)


def line(entry: Entry, recipe: Recipe, plan: Plan, notes: Notes) -> dict[str, str]:
    """The cells of one entry, as text."""
    ours, found = figures(entry, recipe, plan)
    own = list(entry.notes)
    digits = _digits(entry)
    text = NOT_BUILT if entry.study is None else ours.text(digits)
    compares = plan.scale == "paper"
    short = False
    if found:
        rounds, whole = {one["rounds"] for one in found}, found[0]["published_rounds"]
        if short := min(rounds) < whole:
            own.append(f"{'/'.join(map(str, sorted(rounds)))} of {whole} rounds.")
        if compares and 1 < len(found) < len(recipe.seeds):  # one seed has no deviation: it shows
            own.append(f"{len(found)} of {len(recipe.seeds)} seeds.")
    remarks = list(dict.fromkeys(one["remark"] for one in found if one.get("remark")))
    if any(map(learnt_little, found)):
        own.append(LITTLE)
    own += remarks  # for example that the run is older than a correction of the method
    gap = difference(entry, ours) if compares else None
    good = agrees(entry, ours) if compares and not short and not remarks else None
    return {
        "part": entry.part,
        "row": entry.row,
        "column": entry.column,
        "published": entry.published.text if entry.published is not None else "",
        "ours": text,
        "difference": "" if gap is None else f"{gap:+.{digits}f}",
        "agrees": {True: "yes", False: "no", None: ""}[good],
        "notes": notes.mark(own),
        "seeds": str(len(found)),
        "seconds": f"{sum(one['seconds'] for one in found):.0f}" if found else "",
    }


def _digits(entry: Entry) -> int:
    printed = entry.published.text if entry.published is not None else ""
    number = printed.split("±")[0].strip()
    if "." in number:
        return len(number.split(".")[1])
    return 1 if entry.metric in PERCENT else DIGITS.get(entry.metric, 3)


def markdown(recipe: Recipe, plan: Plan) -> str:
    """The table as HTML in Markdown: data sets as groups of columns, with footnotes below.

    At paper scale, the figures of the reduced scale stand beside those of the paper scale.
    """
    notes = Notes()
    columns = list(dict.fromkeys(entry.column for entry in recipe.entries))
    heads = {column: _heads(recipe, plan, column) for column in columns}
    text = ['<table class="figures">', "<thead>"]
    wide = "".join(
        f'<th colspan="{len(heads[c])}" scope="colgroup">{escape(c)}</th>' for c in columns
    )
    text.append(f'<tr><th colspan="2"></th>{wide}</tr>')
    names = "".join(f"<th>{name}</th>" for c in columns for name in heads[c])
    text += [f"<tr><th></th><th>method</th>{names}</tr>", "</thead>", "<tbody>"]
    places = {(e.part, e.row, e.column): e for e in recipe.entries}
    best = {key: _best(recipe, plan, *key) for key in _blocks(recipe, plan)}
    previous = None
    for part, row in dict.fromkeys((e.part, e.row) for e in recipe.entries):
        ours = row.split(",")[0] in OURS
        label = f"<b>{escape(row)}</b> (ours)" if ours else escape(row)
        cells = []
        for column in columns:
            entry = places.get((part, row, column))
            for name in heads[column]:
                if entry is None:
                    cells.append("<td></td>")
                elif name == "published":
                    cells.append(
                        f"<td>{_tight(entry.published.text if entry.published else '')}</td>"
                    )
                else:
                    first = best.get((part, column, name), frozenset())
                    cells.append(_cell(entry, recipe, replace(plan, scale=name), notes, first))
        classes = " ".join(
            word for word, holds in (("own", ours), ("first", part != previous)) if holds
        )
        shown = f"<th>{escape(part) if part != previous else ''}</th><th>{label}</th>"
        text.append(f'<tr class="{classes}">{shown}{"".join(cells)}</tr>')
        previous = part
    text += ["</tbody>", "</table>", ""]
    text += [f"{i}. {note}" for i, note in enumerate(notes.texts, start=1)]
    return "\n".join(text).rstrip() + "\n"


def scales(plan: Plan) -> tuple[str, ...]:
    """The scales that a table shows."""
    return ("paper", "reduced") if plan.scale == "paper" else (plan.scale,)


def _heads(recipe: Recipe, plan: Plan, column: str) -> list[str]:
    """The columns of a group: published figures and the scales, if there is anything to show."""
    own = [entry for entry in recipe.entries if entry.column == column]
    printed = ["published"] if any(entry.published is not None for entry in own) else []
    ran = [
        scale
        for scale in scales(plan)
        if any(figures(entry, recipe, replace(plan, scale=scale))[1] for entry in own)
    ]
    return printed + (ran or [plan.scale])


def _blocks(recipe: Recipe, plan: Plan) -> list[tuple[str, str, str]]:
    pairs = dict.fromkeys((e.part, e.column) for e in recipe.entries)
    return [(part, column, scale) for part, column in pairs for scale in scales(plan)]


def ours_by_row(recipe: Recipe, plan: Plan, part: str, column: str, scale: str) -> dict[str, float]:
    """Our figure for each method of a block of the table, at one scale.

    Runs with fewer rounds than planned or older than a correction are left out. There is no figure
    at all if half of the methods or more learnt little, because chance decides their order.
    """
    out, little = {}, 0
    for entry in recipe.entries:
        if (entry.part, entry.column) == (part, column):
            ours, found = figures(entry, recipe, replace(plan, scale=scale))
            whole = all(
                one["rounds"] >= one["published_rounds"] and "remark" not in one for one in found
            )
            if ours.mean is not None and whole:
                out[entry.row] = ours.mean
                little += any(map(learnt_little, found))
    return {} if 2 * little >= max(1, len(out)) else out


def is_better(metric: str) -> Callable[[float], float] | None:
    """A key by which the best figure is the largest; None if there is no best."""
    if metric in ("slope", "count_slope"):
        return lambda value: -abs(value - 1)
    if metric.endswith("components"):
        return None
    return (lambda value: -value) if metric in SMALLER else (lambda value: value)


def _best(recipe: Recipe, plan: Plan, part: str, column: str, scale: str) -> frozenset[str]:
    """The methods with the best figure of a block, as far as it is shown; none if all are equal."""
    key = is_better(next(e.metric for e in recipe.entries if e.column == column))
    own = ours_by_row(recipe, plan, part, column, scale)
    if key is None or len(own) < 2:
        return frozenset()
    shown = {row: round(key(value), 3) for row, value in own.items()}
    top = frozenset(row for row, value in shown.items() if value == max(shown.values()))
    return top if len(top) < len(shown) else frozenset()


def _cell(entry: Entry, recipe: Recipe, plan: Plan, notes: Notes, best: frozenset[str]) -> str:
    one = line(entry, recipe, plan, notes)
    text = "" if one["ours"] in (NOT_RUN, NOT_BUILT) else _tight(one["ours"])
    if not text:
        return f'<td class="missing">{one["ours"] if one["ours"] == NOT_BUILT else ""}</td>'
    if entry.row in best:
        text = f"<b>{text}</b>"
    if one["agrees"] == "no":
        text += " ≠"
    if one["notes"]:
        text += f"<sup>{one['notes']}</sup>"
    return f"<td>{text}</td>"


def _tight(text: str) -> str:
    """A figure that is never broken over two lines."""
    return escape(text).replace(" ", "\u00a0")


def comma_separated(recipe: Recipe, plan: Plan) -> str:
    """The table as CSV: one line per entry, with further figures of the runs."""
    notes = Notes()
    text = io.StringIO()
    more = ["ari_round_10", "train_accuracy", "worst_decile", "loss", "rounds"]
    fields = ["part", "row", "column", "published", "ours", "difference", "agrees", "seeds"]
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*fields, "seconds", *more, "notes"])
    for entry in recipe.entries:
        one = line(entry, recipe, plan, notes)
        _, found = figures(entry, recipe, plan)
        extra = [_mean([summary.get(name) for summary in found]) for name in more]
        words = [notes.texts[int(i) - 1] for i in one["notes"].split(",") if i]
        out.writerow([*(one[f] for f in fields), one["seconds"], *extra, " ".join(words)])
    return text.getvalue()


def _mean(values: list[Any]) -> str:
    numbers = [v for v in values if v is not None]
    return f"{sum(numbers) / len(numbers):.6g}" if numbers else ""


def latex(recipe: Recipe, plan: Plan) -> str:
    """The table in LaTeX: a tabular with published figures and ours side by side."""
    notes = Notes()
    lines = [line(entry, recipe, plan, notes) for entry in recipe.entries]
    columns = list(dict.fromkeys(one["column"] for one in lines))
    places = {(one["part"], one["row"], one["column"]): one for one in lines}
    text = [f"% {recipe.paper}, {recipe.title}: published and ours"]
    text.append(r"\begin{tabular}{ll" + "rr" * len(columns) + "}")
    heads = [rf"\multicolumn{{2}}{{c}}{{{_tex(c)}}}" for c in columns]
    text += [r"\hline", " & ".join(["", "", *heads]) + r" \\"]
    text += [" & ".join(["", "", *["published", "ours"] * len(columns)]) + r" \\", r"\hline"]
    for part, row in dict.fromkeys((one["part"], one["row"]) for one in lines):
        cells = [_tex(part), _tex(row)]
        for column in columns:
            found = places.get((part, row, column))
            cells += ["", ""] if found is None else [_tex(found["published"]), _tex(found["ours"])]
        text.append(" & ".join(cells) + r" \\")
    return "\n".join([*text, r"\hline", r"\end{tabular}", ""])


def _tex(text: str) -> str:
    text = text.replace("&", r"\&").replace("%", r"\%").replace("_", r"\_")
    return text.replace("±", r"$\pm$").replace("—", "---").replace(">=", r"$\geq$")


def write_tables(recipe: Recipe, plan: Plan) -> list[Path]:
    """Write a table in all formats; the picture needs matplotlib."""
    folder = plan.out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    stem = recipe.name + ("" if plan.scale == "paper" else f"-{plan.scale}")
    head = f"# {recipe.paper}, {recipe.title}\n\n"
    scale = (
        ""
        if plan.scale == "paper"
        else f"{plan.scale.capitalize()} scale: the figures are not comparable with the published "
        "ones.\n\n"
    )
    forms: dict[str, Callable[[], str]] = {
        "md": lambda: head + scale + markdown(recipe, plan),
        "csv": lambda: comma_separated(recipe, plan),
        "tex": lambda: latex(recipe, plan),
    }
    paths = []
    for suffix, make in forms.items():
        paths.append(folder / f"{stem}.{suffix}")
        write(paths[-1], make().encode())
    from coterie_lab.drawing import picture

    try:
        picture(recipe, plan, folder / f"{stem}.png")
        paths.append(folder / f"{stem}.png")
    except ConfigError as error:
        print(f"No picture: {error}")
    return paths
