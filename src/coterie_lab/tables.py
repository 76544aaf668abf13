"""Tables of published figures and ours: Markdown, CSV, LaTeX and a picture."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError
from coterie.running.folder import write
from coterie_lab.recipe import Entry, Figures, Recipe
from coterie_lab.reproduce import Plan, read_summary

DIGITS = {"accuracy": 1, "ari": 2, "ari_round_11": 2, "first_round": 1, "stable_round": 1}
BAR = {"accuracy": 0.5, "ari": 0.05, "ari_round_11": 0.05}
NOT_RUN, NOT_BUILT = "not run yet", "not built yet"


def figures(entry: Entry, recipe: Recipe, plan: Plan) -> tuple[Figures, list[dict[str, Any]]]:
    """The figures of an entry for all finished seeds, and the summaries of these runs."""
    if entry.study is None:
        return Figures(), []
    kept = [read_summary(plan, entry.study.name, seed) for seed in recipe.seeds]
    found = [one for one in kept if one is not None]
    return Figures([one.get(entry.metric) for one in found]), found


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
        if compares and len(found) < len(recipe.seeds):
            own.append(f"{len(found)} of {len(recipe.seeds)} seeds.")
    remarks = list(dict.fromkeys(one["remark"] for one in found if one.get("remark")))
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
    return DIGITS.get(entry.metric, 3)


def markdown(recipe: Recipe, plan: Plan) -> str:
    """The table in Markdown: three columns per data set, with footnotes below."""
    notes = Notes()
    lines = [line(entry, recipe, plan, notes) for entry in recipe.entries]
    columns = list(dict.fromkeys(one["column"] for one in lines))
    head = ["", "method", *(f"{c}: published | ours | diff." for c in columns)]
    text = ["| " + " | ".join(head) + " |"]
    text.append("|" + "---|" * (2 + 3 * len(columns)))
    keys = list(dict.fromkeys((one["part"], one["row"]) for one in lines))
    places = {(one["part"], one["row"], one["column"]): one for one in lines}
    previous = None
    for part, row in keys:
        cells = [part if part != previous else "", row]
        for column in columns:
            one = places.get((part, row, column))
            cells += ["", "", ""] if one is None else _cells(one)
        text.append("| " + " | ".join(cells) + " |")
        previous = part
    text += ["", *(f"{i}. {note}" for i, note in enumerate(notes.texts, start=1))]
    return "\n".join(text).rstrip() + "\n"


def _cells(one: dict[str, str]) -> list[str]:
    ours = one["ours"]
    if one["agrees"] == "no":
        ours = f"**{ours}**"
    if one["notes"]:
        ours += f" [{one['notes']}]"
    return [one["published"], ours, one["difference"]]


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
        else "Quick scale: the figures are not comparable with the published ones.\n\n"
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
