"""Results in plain words."""

from collections.abc import Mapping, Sequence
from typing import Any

NAMES = {
    "one": "one model for all",
    "groups": "a model per group",
    "alone": "training alone",
    "constant": "one constant prediction for all",
    "own constant": "a constant prediction per client",
    "last value": "the client's last known value",
    "linear": "a linear model for all",
}
"""Strategies."""
MOST_NAMED = 5  # clients in a sentence


DOES = {
    "one": ("uses the model of all clients", "use the model of all clients"),
    "groups": ("uses the model of its group", "use the models of their groups"),
    "alone": ("trains alone", "train alone"),
}
"""What clients do that are better off with a strategy: one of them, several."""


def name_way(way: str, method: str = "") -> str:
    """A strategy in words; `method` says what takes the place of groups, if anything."""
    return method if way == "groups" and method else NAMES[way]


def describe_recommendation(
    recommendation: str,
    most: str | None = None,
    exceptions: Sequence[Mapping[str, Any]] = (),
    method: str = "",
    odd: Sequence[str] = (),
) -> str:
    """The recommendation as one sentence.

    Parameters
    ----------
    method
        What takes the place of groups, if anything.
    odd
        If there is one group: clients that were kept apart from it.

    Examples
    --------
    >>> describe_recommendation("mixed", "groups", [{"client": "site-7", "instead": "alone"}])
    'Recommendation: mixed. A model per group for most clients; site-7 trains alone.'
    >>> describe_recommendation("groups", "groups", odd=["a", "b"])
    'Recommendation: one model for all but a and b, which train alone.'
    """
    if recommendation == "undecided" or most is None:
        return "Recommendation: undecided."
    if recommendation != "mixed" and most == "groups" and odd:
        does = "train" if len(odd) > 1 else "trains"
        return f"Recommendation: one model for all but {list_names(odd)}, which {does} alone."
    if recommendation != "mixed":
        return f"Recommendation: {name_way(most, method)}."
    by_way: dict[str, list[str]] = {"alone": list(odd) if most == "groups" else []}
    for one in exceptions:
        by_way.setdefault(way_instead(one, odd), []).append(one["client"])
    usual = "one model" if odd and most == "groups" else name_way(most, method)
    usual = "one model" if most == "one" else usual
    parts = [f"{usual} for most clients"]
    parts += [
        f"{list_names(who)} {_does(way, len(who), method, odd)}"
        for way, who in by_way.items()
        if who
    ]
    text = "; ".join(parts)
    return f"Recommendation: mixed. {text[0].upper()}{text[1:]}."


def way_instead(one: Mapping[str, Any], odd: Sequence[str]) -> str:
    """The strategy that is better for a client; an odd one that is kept apart trains alone."""
    way = str(one["instead"])
    return "alone" if way == "groups" and one["client"] in odd else way


def _does(way: str, count: int, method: str, odd: Sequence[str]) -> str:
    """
    >>> _does("groups", 2, "", [])
    'use the models of their groups'
    """
    if way == "groups" and method:
        model = "a model without the odd clients" if odd else method
        return f"{'use' if count > 1 else 'uses'} {model}"
    return DOES[way][count > 1]


def list_names(names: Sequence[str]) -> str:
    """Names in a sentence; only the first few of many.

    >>> list_names(["a", "b"])
    'a and b'
    """
    more = len(names) - MOST_NAMED
    return join_words([*names[:MOST_NAMED], f"{more} more"] if more > 0 else list(names))


def describe_result(
    summary: dict[str, Any], cards: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> str:
    """What a run found, in a few sentences; with the recommendation of the verdict."""
    if "components" in summary:
        return _components(summary, rows)
    verdict = summary.get("verdict", {})
    unknown = verdict.get("learnt") is False
    text = _groups(summary, cards, len(rows))
    if unknown:
        clients = _number(len(rows), "client")
        text = f"{clients}. Nothing was learnt yet, so nothing can be said about groups."
    single = not summary.get("personal") and not summary.get("odd") and _count(cards) == 1
    column = next((name for name in ("accuracy", "error") if name in rows[0]), None)
    own = None if column is None else _mean(line[column] for line in rows)
    if column is not None and own is not None:  # there is something to predict and to test on
        text += f" The mean {column} on the clients' own test data is {_score(own, column)}"
        others = {
            "training alone": summary.get(f"local_only_{column}"),
            # With one group this would be one model against one model.
            "one model for all": None if single else summary.get(f"fedavg_{column}"),
        }
        told = [
            f"{_score(value, column)} with {name}"
            for name, value in others.items()
            if value is not None
        ]
        text += f", compared with {join_words(told)}." if told else "."
    named = summary.get("odd", [])
    strange = sum(not line["fits"] for line in rows if line["client"] not in named)
    if strange and not unknown:
        text += f" {_number(strange, 'client')} fit{'s' if strange == 1 else ''} no group well."
    if verdict:
        said = {name: value for name, value in verdict.items() if name != "learnt"}
        text += f" {describe_recommendation(**said)}"
    return text


def _count(cards: list[dict[str, Any]]) -> int:
    """Number of groups."""
    return sum("odd" not in card for card in cards)


def _groups(summary: dict[str, Any], cards: list[dict[str, Any]], n_clients: int) -> str:
    odd = summary.get("odd", [])
    apart = f" {_odd(odd, summary.get('aside', {}))}" if odd else ""
    sizes = sorted((len(card["clients"]) for card in cards if "odd" not in card), reverse=True)
    if len(sizes) > 1 and len(sizes) + len(odd) == n_clients and not summary.get("aside"):
        return (
            f"No groups: each of the {n_clients} clients differs from all others and has a model "
            "of its own."
        )
    if len(sizes) > 1:
        members = "one client each" if max(sizes) == 1 else f"{join_words(sizes)} clients"
        groups = f"{len(sizes)} groups among {n_clients} clients ({members})."
        curves = summary.get("evidence")
        if curves and curves[0]["chosen"] is None:
            groups += " No number of groups describes them well: clients differ one by one."
        return groups + apart
    if odd:
        return f"No groups: one model for {n_clients - len(odd)} of {n_clients} clients.{apart}"
    if summary.get("personal"):
        return f"Each of the {n_clients} clients has its own model."
    if n_clients == 1:
        return "No groups: there is one client."
    return f"No groups: one model for all {n_clients} clients."


UNLIKE = "its losses are unlike those of all others"
"""Why an odd client is odd, if its answers are believed."""


def _odd(names: list[str], aside: Mapping[str, str] | None = None) -> str:
    """Who is odd; `aside` says whose answers are not believed, and why.

    >>> _odd(["site-7"])
    'site-7 is unlike all others and has a model of its own.'
    >>> _odd(["site-2", "site-7", "site-9"], {"site-7": "it repeats itself", "site-9": "it does"})
    'site-2 is unlike all others and has a model of its own. site-7 and site-9 gave answers that \
cannot be true and have models of their own.'
    """
    false = [name for name in names if name in (aside or {})]
    odd = [name for name in names if name not in false]
    said = [_apart(odd, "is unlike all others", "are unlike all others")] if odd else []
    if false:
        said.append(_apart(false, *["gave answers that cannot be true"] * 2))
    return " ".join(said)


def _apart(names: list[str], one: str, many: str) -> str:
    shown = join_words(names[:5]) if len(names) <= 5 else f"{len(names)} clients"
    if len(names) == 1:
        return f"{shown} {one} and has a model of its own."
    return f"{shown} {many} and have models of their own."


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
    """What the demonstration found."""
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
    return (
        f"{text}The mean accuracy of {join_words(exact or list(grouped))} is {reached}, compared "
        f"with {alone:.1%} if every client trains alone and {one:.1%} with one model for all."
    )
