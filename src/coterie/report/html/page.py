"""The page about a run: one HTML file that needs nothing else."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from coterie.core.errors import ConfigError
from coterie.report import evidence
from coterie.report.cards import mixture_card
from coterie.report.html import figures
from coterie.report.html.contents import OTHERS, Contents
from coterie.report.html.svg import printable, tell_apart
from coterie.report.table import format_value
from coterie.report.verdict import ARMS
from coterie.report.why import Why
from coterie.report.words import describe_result, join_words, name_way
from coterie.running.files import blame, write
from coterie.running.progress import duration, megabytes

HERE = Path(__file__).parent
MOST_ROWS = 300  # clients in the table; of more, those that gain or lose most
MOST_MEMBERS = 40  # names on the card of a group
MOST_LABELS = 6
PHASES = {
    "setup": ("Before the first round", "what the method needs to begin, such as sums and counts"),
    "cluster": ("To form groups", "losses or other summaries, and no rows"),
    "train": ("Training", "the weights of models, and no rows"),
    "evaluation": ("Evaluation", "losses and scores on held-out rows, and no rows"),
    "deliver": ("Delivery", "nothing: every client receives its model"),
}
"""What each kind of exchange is for, and what clients send in it."""


def write_report(contents: Contents, out: str | Path) -> Path:
    """Write the page to a file."""
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"Report: the file must end in .html. Got {out.name!r}.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Report: the folder {out.parent} could not be made ({error.strerror}). Give the path "
            "of a file in a folder that you can write to."
        ) from None
    write(out, render(contents).encode(), 0o666)  # a link there is replaced, not followed
    return out


def render(contents: Contents, part: str = "page.html", **more: Any) -> str:
    """The page, or a part of it, as HTML."""
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    with blame(contents.name):
        return _pages().get_template(part).render(**{**describe(contents), "style": style, **more})


@cache
def _pages() -> Environment:
    return Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )


def _shown(value: Any) -> Any:
    """Values as they are shown; characters that steer a display become spaces."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else printable(str(value))


def describe(contents: Contents) -> dict[str, Any]:
    """Everything that the template shows."""
    verdict = contents.verdict
    done = contents.summary
    cards = contents.groups
    labels = {int(card["model"]): _name_group(card) for card in cards}
    trained = {**contents.others, "groups": contents.rounds}
    series = {way: trained[way] for way in ARMS if trained.get(way)}
    personal = verdict.method if verdict is not None else ""
    own = _call_own(contents, cards)
    mixture = bool(contents.clients) and "share 0" in contents.clients[0]
    best = verdict.rounds if verdict is not None else {}
    curves = {name: figures.curves_figure(series, name, own, best) for name in ("loss", "accuracy")}
    rows, left_out = list_clients(contents)
    short = dict(zip(contents.names, tell_apart(contents.names, 30), strict=True))
    odd = [card["clients"][0] for card in cards if "odd" in card]
    from coterie import __version__

    return {
        "name": contents.name,
        "contents": contents,
        "version": __version__,
        "missing": list_missing(contents),
        "facts": list_facts(contents),
        "headline": _headline(contents),
        "verdict": verdict,
        "points": [] if verdict is None else [p for p in verdict.points if p != verdict.caution],
        "personal": personal,
        "found": describe_result(_no_verdict(done), cards, contents.clients) if done else "",
        "ways": Markup("") if verdict is None else figures.ways_figure(verdict),
        "gains": Markup("") if verdict is None else figures.gains_figure(verdict),
        "groups": [_card(card, short) for card in cards if "odd" not in card],
        "profile": _profile(cards),
        "why": _why(contents),
        "odd": [name for name in odd if name not in done.get("aside", {})],
        "aside": list(done.get("aside", {}).items()),
        "rows": rows,
        "left_out": left_out,
        "better": any(row["better"] for row in rows),
        "score": _score_name(contents),
        "strange": [
            row["client"]
            for row in contents.clients
            if not row["fits"] and row["client"] not in odd
        ],
        "faults": list_faults(contents.rounds),
        "journey": figures.journey_figure(contents.record, contents.names, labels),
        "curves": {name: drawn for name, drawn in curves.items() if drawn},
        "evidence": [
            (evidence.TITLES.get(curve["name"], curve["name"]), figures.evidence_figure(curve))
            for curve in done.get("evidence", [])
        ],
        "evidence_words": evidence.words(done["evidence"]) if done.get("evidence") else "",
        "shares": figures.shares_figure(contents.clients) if mixture else Markup(""),
        "components": figures.key(
            [
                f"component {j}"
                for j in range(sum(n.startswith("share ") for n in contents.clients[0]))
            ]
        )
        if mixture
        else Markup(""),
        "mixture_words": mixture_card(done["mixture"]) if done.get("mixture") else "",
        "data": _data(contents),
        "traffic": list_traffic(contents),
        "simulated": contents.description.get("plan", {}).get("engine") != "flower",
        "run": _run_file(contents),
        "again": _again(contents),
    }


def list_missing(contents: Contents) -> list[str]:
    """What an unfinished run, or one without a comparison, does not have."""
    said = []
    if not contents.finished:
        done = contents.rounds[-1]["round"] if contents.rounds else 0
        said.append(
            f"The run is not finished: {done} of {contents.wanted} rounds are done. Missing are "
            "the recommendation, the final groups and scores, and the benefit of each client. "
            f"Continue with: coterie resume {contents.name}"
        )
    elif contents.comparing:
        done = sum(lines[-1]["round"] for lines in contents.others.values() if lines)
        said.append(
            "There is no recommendation yet: one model for all and training alone, which the "
            f"groups are compared with, are still to be trained ({done} of "
            f"{len(OTHERS) * contents.wanted} rounds are done). If that was stopped, continue "
            f"with: coterie resume {contents.name}"
        )
    elif contents.verdict is None and not contents.comparable:
        said.append(
            "There is no recommendation: only methods that train a network per group or client are "
            "compared with one model for all and with training alone."
        )
    elif contents.verdict is None:
        said.append(
            "There is no recommendation: the run was not compared with one model for all and with "
            f"training alone. To add it: coterie verdict {contents.name}"
        )
    return said


def list_facts(contents: Contents) -> list[tuple[str, str]]:
    """The main figures."""
    done = contents.summary
    n = done.get("clients") or len(contents.names)
    facts = [("clients", f"{n:,}")] if n else []
    trained = contents.final.get("held_out", {}).get("trained_on", [])
    if trained:
        facts.append(("rows that trained", f"{sum(trained):,}"))
    cards = [card for card in contents.groups if "odd" not in card]
    odd = len(done.get("odd", []))
    lone = len(cards) > 1 and len(cards) + odd == n  # no two clients share a model
    if "components" in done:
        facts.append(("components", str(done["components"])))
    elif cards and not done.get("personal"):
        groups = 0 if lone else len(cards)
        facts.append(("group" if groups == 1 else "groups", str(groups)))
    if odd and not lone:
        facts.append(("odd clients", str(odd)))
    if "accuracy" in done:
        facts.append(("mean accuracy", f"{done['accuracy']['mean']:.1%}"))
        if "worst_decile" in done["accuracy"]:
            facts.append(("worst tenth", f"{done['accuracy']['worst_decile']:.1%}"))
    elif contents.clients and "error" in contents.clients[0]:
        errors = [row["error"] for row in contents.clients if row["error"] is not None]
        if errors:
            facts.append(("mean error", f"{sum(errors) / len(errors):.4g}"))
    if contents.rounds:
        rounds = contents.rounds[-1]["round"]
        whole = "" if contents.finished else f" of {contents.wanted}"
        facts.append(("rounds", f"{rounds}{whole}"))
        facts.append(("sent", megabytes(contents.rounds[-1].get("bytes", 0))))
    if contents.seconds:
        facts.append(("training time", duration(sum(contents.seconds))))
    return facts


def _no_verdict(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without the recommendation, which has a place of its own."""
    return {name: value for name, value in summary.items() if name != "verdict"}


def _headline(contents: Contents) -> str:
    verdict = contents.verdict
    if verdict is not None:
        said = verdict.headline.removeprefix("Recommendation: ")
        return said[0].upper() + said[1:]
    if contents.comparing:
        return "No recommendation yet"
    return "No recommendation" if contents.finished else "Not finished"


def _call_own(contents: Contents, cards: Sequence[dict[str, Any]]) -> str:
    """What the run itself is called in the key of curves; empty: groups."""
    grouped = sum("odd" not in card for card in cards) > 1 or (
        not contents.finished and any(len(line.get("sizes", [])) > 1 for line in contents.rounds)
    )
    if contents.summary.get("personal") or not grouped:
        return contents.method
    return ""


def _name_group(card: dict[str, Any]) -> str:
    return "odd" if "odd" in card else f"group {card['group']}"


def _card(card: dict[str, Any], short: Mapping[str, str]) -> dict[str, Any]:
    """A group as its card shows it; `short` has names without what all of them share."""
    labels = list(card.get("labels", {}).items())
    if len(labels) > MOST_LABELS:
        labels.sort(key=lambda pair: -pair[1])
    clients = card["clients"]
    return {
        "number": card["group"],
        "colour": int(card["model"]) % 8,
        "clients": [short.get(name, name) for name in clients[:MOST_MEMBERS]],
        "more": max(len(clients) - MOST_MEMBERS, 0),
        "size": len(clients),
        "accuracy": card.get("accuracy"),
        "loss": card.get("loss"),
        "margin": card.get("margin"),
        "labels": [
            (name, share, figures.bar(share, int(card["model"]) % 8))
            for name, share in labels[:MOST_LABELS]
        ],
        "other_labels": max(len(labels) - MOST_LABELS, 0),
    }


def _profile(cards: Sequence[dict[str, Any]]) -> list[tuple[int, list[float]]]:
    """Mean loss of each group's clients on each group's model; empty if unknown or too large."""
    own = [(card["group"], card["loss_profile"]) for card in cards if "loss_profile" in card]
    square = all(len(losses) == len(own) for _, losses in own)
    return own if 2 <= len(own) <= 10 and square else []


def _why(contents: Contents) -> dict[str, Any]:
    """In what groups differ: sentences by group, and what clients sent for it."""
    if "why" not in contents.final:
        return {"groups": [], "sent": []}
    why = Why.of(contents.final["why"]).to_json()
    groups = [
        {**line, "said": [one["text"].replace(" %", "\u00a0%") for one in line["statements"]]}
        for line in why["groups"]
    ]
    return {**why, "groups": groups if why["compared"] else []}


def _score_name(contents: Contents) -> str:
    """The column with each client's score."""
    columns = contents.clients[0] if contents.clients else {}
    return next((name for name in ("accuracy", "error", "surprise") if name in columns), "")


def list_clients(contents: Contents) -> tuple[list[dict[str, Any]], int]:
    """A row per client with its benefit, largest first; and how many are left out."""
    verdict = contents.verdict
    of_verdict = {} if verdict is None else {row["client"]: row for row in verdict.clients}
    arm = "groups" if verdict is None or not verdict._one_group else "alone"
    gains = {name: row["gains"][arm] for name, row in of_verdict.items() if row.get("gains")}
    pictures = figures.ClientGains(list(gains.values())) if gains else None
    score = _score_name(contents)
    shape = {"accuracy": ".1%", "error": ".4g", "surprise": ".3g"}.get(score, "")
    trained = contents.final.get("held_out", {})
    rows_of = dict(zip(trained.get("clients", []), trained.get("trained_on", []), strict=False))
    odd = set(contents.summary.get("odd", []))

    def benefit(row: dict[str, Any]) -> tuple[bool, float]:
        mean = (gains.get(row["client"]) or [None])[0]
        return mean is None, -(mean or 0.0)

    shown = sorted(contents.clients, key=benefit)
    half, left_out = MOST_ROWS // 2, max(len(shown) - MOST_ROWS, 0)
    shown = shown[:half] + shown[-half:] if left_out else shown
    out = []
    for row in shown:
        name = row["client"]
        gain = gains.get(name)
        mean = gain[0] if gain else None
        better = of_verdict.get(name, {}).get("better", "")
        out.append(
            {
                "client": name,
                "group": "odd" if name in odd else "" if row["group"] < 0 else str(row["group"]),
                "rows": f"{rows_of[name]:,}" if name in rows_of else "",
                "score": format_value(row.get(score), shape),
                "gain": mean,
                "gain_text": "" if mean is None else f"{mean:+z.3f}",
                "bounds": _bounds(gain),
                "picture": pictures.draw(gain) if pictures and gain else Markup(""),
                "better": "" if not better else name_way(better, verdict.method if verdict else ""),
                "margin": format_value(row["margin"], ".2f"),
                "fits": row["fits"],
            }
        )
    return out, left_out


def _bounds(gain: Sequence[float | None] | None) -> str:
    if not gain or gain[1] is None or gain[2] is None:
        return ""
    low, high = gain[1], gain[2]
    return f"{low:+z.3f} to {high:+z.3f}" if math.isfinite(low) and math.isfinite(high) else ""


def _data(contents: Contents) -> dict[str, Any]:
    card = contents.data
    if not card:
        return {}
    rules = card.get("encoder", {}).get("rules", [])
    kinds: dict[str, list[str]] = {}
    for rule in rules:
        kinds.setdefault(rule["kind"], []).append(rule["name"])
    trained = contents.final.get("held_out", {}).get("trained_on", [])
    verdict = contents.verdict
    held = verdict.cost.get("held") if verdict is not None else None
    facts = [("Task", card["task"])]
    label = card.get("encoder", {}).get("label")
    if label:
        facts.append(("Column to predict", label))
    classes = card.get("classes") or []
    if classes:
        shown = join_words([str(name) for name in classes[:12]])
        more = f" and {len(classes) - 12} more" if len(classes) > 12 else ""
        facts.append(("Classes", shown + more))
    elif card["task"] == "classification":
        facts.append(("Number of classes", str(card["n_outputs"])))
    if trained:
        each = f"{min(trained):,} to {max(trained):,} per client"
        facts.append(("Training rows", f"{sum(trained):,} ({each})"))
    if held:
        facts.append(("Held-out rows compared", f"{held:,}"))
    if not rules:
        shape = card.get("sample_shape")
        facts.append(
            (
                "One input",
                " x ".join(map(str, shape)) if isinstance(shape, list) else "several parts",
            )
        )
    for kind, names in kinds.items():
        word = {"category": "categories", "hashed": "many categories", "boolean": "yes or no"}
        shown = join_words(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")
        facts.append(
            (f"Columns ({word.get(kind, kind + 's' if kind == 'number' else kind)})", shown)
        )
    return {
        "facts": facts,
        "warnings": [str(one["text"]) for one in card.get("warnings", [])],
        "notes": [str(note) for note in card.get("notes", [])],
    }


def list_faults(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Clients that did not answer, or whose replies were left out, the most often first."""
    found: dict[str, dict[str, Any]] = {}
    for line in rounds:
        missing = [(name, "did not answer in time") for name in line.get("missing", [])]
        wrong = [(one["client"], one["why"]) for one in line.get("faults", [])]
        for name, why in [*missing, *wrong]:
            of_client = found.setdefault(str(name), {"client": str(name), "rounds": set()})
            of_client["rounds"].add(int(line["round"]))
            of_client["why"] = str(why)  # the latest
    worst = sorted(found.values(), key=lambda one: (-len(one["rounds"]), one["client"]))
    return [{**one, "times": len(one["rounds"]), "last": max(one["rounds"])} for one in worst[:30]]


def list_traffic(contents: Contents) -> list[dict[str, str]]:
    """Bytes that were sent, by purpose."""
    clients = contents.summary.get("clients") or 1
    out = []
    for phase, amount in contents.summary.get("traffic", {}).items():
        title, sent = PHASES.get(phase, (phase, "see the documentation of the method"))
        up, down = amount.get("up", 0), amount.get("down", 0)
        out.append(
            {
                "title": title,
                "sent": sent,
                "up": megabytes(up),
                "each": megabytes(up / clients),
                "down": megabytes(down),
            }
        )
    return out


def _run_file(contents: Contents) -> str:
    """The run file, without the numeric plan."""
    tables = {
        key: value
        for key, value in contents.description.items()
        if isinstance(value, dict) and key != "plan"
    }
    return json.dumps(tables, indent=2, ensure_ascii=False)


def _again(contents: Contents) -> dict[str, Any]:
    description = contents.description
    return {
        "fingerprint": description.get("fingerprint", ""),
        "seed": description.get("run", {}).get("seed", 0),
        "named": "name" in description.get("data", {}),
        "engine": description.get("plan", {}).get("engine", ""),
    }
