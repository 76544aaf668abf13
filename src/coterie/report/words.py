"""Results in plain words."""

from typing import Any


def describe_result(
    summary: dict[str, Any], cards: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> str:
    """What a run found and what to use, in a few sentences."""
    if "components" in summary:
        return _components(summary, rows)
    text = _groups(summary, cards, len(rows))
    column = next((name for name in ("accuracy", "error") if name in rows[0]), None)
    own = None if column is None else _mean(line[column] for line in rows)
    if column is None or own is None:  # nothing to predict, or nothing to test on
        return text
    text += f" The mean {column} on the clients' own test data is {_score(own, column)}"
    others = {
        "training alone": summary.get(f"local_only_{column}"),
        "one model for all": summary.get(f"fedavg_{column}"),
    }
    told = {name: value for name, value in others.items() if value is not None}
    if not told:
        return text + "."
    beside = join_words([f"{_score(value, column)} with {name}" for name, value in told.items()])
    better = max if column == "accuracy" else min
    best = better(told, key=lambda name: told[name])
    wins = own > told[best] if column == "accuracy" else own < told[best]
    choice = (summary.get("verdict") or {}).get("choice", "undecided")  # it knows how sure it is
    if choice != "undecided":
        wins = choice == "groups"
        best = {"one": "one model for all", "local": "training alone"}.get(choice, best)
    advice = f"Use {summary['algorithm']}." if wins else f"Groups do not help here: use {best}."
    strange = sum(not line["fits"] for line in rows)
    if strange:
        advice += f" {_number(strange, 'client')} fit{'s' if strange == 1 else ''} no group well."
    return f"{text}, compared with {beside}. {advice}"


def _groups(summary: dict[str, Any], cards: list[dict[str, Any]], n_clients: int) -> str:
    odd = summary.get("odd", [])
    apart = f" {_odd(odd)}" if odd else ""
    sizes = sorted((len(card["clients"]) for card in cards if "odd" not in card), reverse=True)
    if len(sizes) > 1:
        groups = f"{len(sizes)} groups among {n_clients} clients ({join_words(sizes)} clients)."
        return groups + apart
    if odd:
        return f"No groups: one model for {n_clients - len(odd)} of {n_clients} clients.{apart}"
    if summary.get("personal"):
        return f"Each of the {n_clients} clients has its own model."
    return f"No groups: one model for all {n_clients} clients."


def _odd(names: list[str]) -> str:
    """
    >>> _odd(["site-7"])
    'site-7 is unlike all others and has a model of its own.'
    """
    shown = join_words(names[:5]) if len(names) <= 5 else f"{len(names)} clients"
    if len(names) == 1:
        return f"{shown} is unlike all others and has a model of its own."
    return f"{shown} are unlike all others and have models of their own."


def _components(summary: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    text = f"{summary['components']} components in the data of {len(rows)} clients together."
    strange = sum(not line["fits"] for line in rows)
    if strange:
        has = "has" if strange == 1 else "have"
        text += f" {_number(strange, 'client')} {has} samples that fit no component."
    if "agreement" in summary:
        mean = summary["agreement"]["mean"]
        text += f" The mean agreement with the labels of test data (ARI) is {mean:.2f}."
    return text


def _number(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _score(value: float, column: str) -> str:
    return f"{value:.1%}" if column == "accuracy" else f"{value:.4g}"


def _mean(values: Any) -> float | None:
    some = [value for value in values if value is not None and value == value]
    return sum(some) / len(some) if some else None


def join_words(parts: list[Any]) -> str:
    """Parts as a list in a sentence.

    >>> join_words([3, 2, 1])
    '3, 2 and 1'
    """
    words = [str(part) for part in parts]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def describe_quickstart(table: Any) -> str:
    """What the demonstration found, and which way of training to use."""
    scores = dict(zip(table["method"], table["accuracy"], strict=True))
    ari = dict(zip(table["method"], table["ARI"], strict=True))
    grouped = {name: value for name, value in scores.items() if ari[name] is not None}
    exact = [name for name in grouped if ari[name] >= 0.99]
    part = [f"{name} (agreement {ari[name]:.2f} of 1)" for name in grouped if name not in exact]
    text = f"{join_words(exact)} found exactly the four hidden groups. " if exact else ""
    text += f"{join_words(part)} found them in part. " if part else ""
    best = [grouped[name] for name in exact] or list(grouped.values())
    low, high = f"{min(best):.1%}", f"{max(best):.1%}"
    reached = high if low == high else f"{low} to {high}"
    alone, one = scores["local_only"], scores["fedavg"]
    use = "training alone" if alone > one else "one model for all"
    use = "a model per group" if min(best) > max(alone, one) else use
    return (
        f"{text}The mean accuracy of {join_words(exact or list(grouped))} is {reached}, compared "
        f"with {alone:.1%} if every client trains alone and {one:.1%} with one model for all. Use "
        f"{use} here."
    )
