"""Results in plain words."""

from typing import Any


def found(summary: dict[str, Any], cards: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """What a run found and what to use, in a few sentences."""
    sizes = sorted((len(card["clients"]) for card in cards), reverse=True)
    if "components" in summary:
        return _components(summary, rows)
    if len(cards) == 1 and summary.get("personal"):
        text = f"Every one of the {len(rows)} clients has a model of its own."
    elif len(cards) == 1:
        text = f"No groups: one model for all {len(rows)} clients."
    else:
        text = f"{len(cards)} groups among {len(rows)} clients ({listed(sizes)} clients)."
    column = next((name for name in ("accuracy", "error") if name in rows[0]), None)
    if column is None:  # nothing to predict
        return text
    own = _mean(line[column] for line in rows)
    if own is None:
        return text
    text += f" On their own test data {_score(own, column)} on average"
    others = {
        "training alone": summary.get(f"local_only_{column}"),
        "one model for all": summary.get(f"fedavg_{column}"),
    }
    told = {name: value for name, value in others.items() if value is not None}
    if not told:
        return text + "."
    beside = listed([f"{_score(value, column)} by {name}" for name, value in told.items()])
    better = max if column == "accuracy" else min
    best = better(told, key=lambda name: told[name])
    wins = own > told[best] if column == "accuracy" else own < told[best]
    name = summary["algorithm"]
    judged = (summary.get("verdict") or {}).get("choice", "undecided")  # it knows how sure it is
    if judged != "undecided":
        wins = judged == "groups"
        best = {"one": "one model for all", "local": "training alone"}.get(judged, best)
    advice = f"Use {name}." if wins else f"Grouping does not pay here: use {best}."
    strange = sum(not line["fits"] for line in rows)
    if strange:
        advice += f" {strange} of the clients look like no group."
    return f"{text}, against {beside}. {advice}"


def _components(summary: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    text = f"{summary['components']} components in the data of {len(rows)} clients together."
    strange = sum(not line["fits"] for line in rows)
    if strange:
        text += f" {strange} of the clients have samples that fit none of them."
    if "agreement" in summary:
        text += f" Agreement with the labels of test data (ARI): {summary['agreement']['mean']:.2f}"
        text += " on average over clients."
    return text


def _score(value: float, column: str) -> str:
    return f"{value:.1%} right" if column == "accuracy" else f"an error of {value:.4g}"


def _mean(values: Any) -> float | None:
    some = [value for value in values if value is not None and value == value]
    return sum(some) / len(some) if some else None


def listed(parts: list[Any]) -> str:
    """Parts as a list in a sentence.

    >>> listed([3, 2, 1])
    '3, 2 and 1'
    """
    words = [str(part) for part in parts]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def quickstart_words(table: Any) -> str:
    """What the demonstration found, and which method to use."""
    scores = dict(zip(table["method"], table["accuracy"], strict=True))
    ari = dict(zip(table["method"], table["ARI"], strict=True))
    grouped = {name: value for name, value in scores.items() if ari[name] is not None}
    best = max(grouped, key=lambda name: grouped[name])
    alone, one = scores["local_only"], scores["fedavg"]
    others = [
        f"{name} found them too"
        if ari[name] >= 0.99
        else f"{name} only in part (ARI {ari[name]:.2f})"
        for name in grouped
        if name != best
    ]
    how = "found all four groups" if ari[best] >= 0.99 else f"found groups (ARI {ari[best]:.2f})"
    return (
        f"{best} {how}: {scores[best]:.1%} right, against {alone:.1%} when every client trains "
        f"alone and {one:.1%} with one model for all; {listed(others)}. Use {best} here."
    )
