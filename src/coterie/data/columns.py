"""Columns as features, by rules that are fitted without any row leaving its client.

1. A client tells of each column what its values can be read as and how many there are, with
   hashes of at most 51 different ones (`profile`). The server decides what it is (`decide`).
2. For numbers a client tells count, mean and sum of squared deviations of its training rows, for
   categories the set of them (`statistics`). The server merges these (`merge`), exactly as if the
   rows had been pooled. A client of one row thereby tells that row.

What the features are is said in `coterie.data.encoder`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from coterie.core.errors import DataError
from coterie.data.cells import Cells, RawTable, as_number
from coterie.data.encoder import CATEGORY_BUCKETS, Rule, check_finite, hash_of, join_texts
from coterie.data.text import (
    FEATURES,
    choose_words,
    count_texts,
    find_directions,
    hash_words,
    pack,
    weigh,
)

MAX_CATEGORIES = 50


class Profile(NamedTuple):
    """What a client tells of a column so that the server can decide what it is."""

    kind: str
    n: int  # values
    n_numbers: int  # values that are numbers
    n_spaced: int  # values with a space
    hashes: frozenset[int]  # of different values, at most 51
    odd: str  # where the first value that is no number stands, for the message


def profile(table: RawTable, name: str) -> Profile:
    """What one client tells of a column."""
    cells = table.cells[name]
    if cells.values.dtype.kind == "f":
        check_finite(table, name)
        n = int((~cells.missing).sum())
        return Profile(cells.kind, n, n if cells.kind == "number" else 0, 0, frozenset(), "")
    words, codes = cells.code()
    count = np.bincount(codes, minlength=len(words))
    present = {word: int(n) for word, n in zip(words, count, strict=True) if word is not None}
    n = sum(present.values())
    odd = [i for i, word in enumerate(words) if word is not None and as_number(word) is None]
    different = sorted(present)[: MAX_CATEGORIES + 1]
    where = ""
    if odd:
        first = int((codes == odd[0]).argmax())
        where = f"{table.at(first)} has {words[odd[0]]!r}"
    return Profile(
        cells.kind,
        n,
        n - sum(int(count[i]) for i in odd),
        sum(times for word, times in present.items() if " " in word),
        frozenset(map(hash_of, different)),
        where,
    )


def decide(name: str, profiles: Sequence[Profile], sources: Sequence[str]) -> str:
    """What a column is: "number", "boolean", "date", "category" or "text"."""
    kinds = {told.kind for told in profiles} - {"nothing"}
    if not kinds:
        raise DataError(
            f"Column '{name}' must have a value somewhere. It is empty in every client's rows. "
            f"Remove it, or leave it out: drop=['{name}']."
        )
    n = sum(told.n for told in profiles)
    numeric = 2 * sum(told.n_numbers for told in profiles) >= n
    if kinds in ({"number"}, {"boolean"}, {"date"}):
        return kinds.pop()
    if "number" in kinds or numeric:
        words = {"boolean": "true and false", "date": "dates"}
        others = [told.odd for told in profiles if told.odd] + [
            f"{source} has {words.get(told.kind, 'text')}"
            for told, source in zip(profiles, sources, strict=True)
            if told.kind not in ("number", "nothing")
        ]
        whole = [s for told, s in zip(profiles, sources, strict=True) if told.kind == "number"]
        where = f" in {whole[0]}" if whole else " mostly"
        raise DataError(
            f"Column '{name}' must hold numbers everywhere or nowhere. It holds numbers{where}, "
            f"but {others[0]}. Correct it, or take all values as categories: "
            f"categorical=['{name}']."
        )
    different = len(frozenset().union(*(told.hashes for told in profiles)))
    spaced = 2 * sum(told.n_spaced for told in profiles) > n
    return "text" if spaced and (different > MAX_CATEGORIES or 2 * different > n) else "category"


class Statistics(NamedTuple):
    """What a client tells of the training rows of a column."""

    n: int
    missing: int
    mean: float = 0.0
    deviations: float = 0.0  # sum of squared differences from the mean
    categories: frozenset[str] | None = frozenset()  # None: more than can be told


def statistics(cells: Cells, kind: str) -> Statistics:
    """What one client tells of a column whose kind is decided."""
    gone = cells.missing
    missing, n = int(gone.sum()), int((~gone).sum())
    if kind in ("number", "boolean"):
        values = cells.values[~gone].astype(np.float64)
        mean = float(values.mean()) if n else 0.0
        return Statistics(n, missing, mean, float(((values - mean) ** 2).sum()))
    if kind == "category":
        found = frozenset(word for word in cells.code()[0] if word is not None)
        return Statistics(n, missing, categories=found if len(found) <= MAX_CATEGORIES else None)
    return Statistics(n, missing)


def merge(told: Sequence[Statistics]) -> Statistics:
    """The statistics of all clients' rows together (Chan, Golub, LeVeque 1979).

    >>> merge([Statistics(2, 0, 1.0, 2.0), Statistics(1, 1, 4.0, 0.0)])
    Statistics(n=3, missing=1, mean=2.0, deviations=8.0, categories=frozenset())
    """
    n = sum(part.n for part in told)
    mean = sum(part.n * part.mean for part in told) / max(n, 1)
    deviations = sum(part.deviations + part.n * (part.mean - mean) ** 2 for part in told)
    sets = [part.categories for part in told]
    union = None if None in sets else frozenset().union(*sets)  # type: ignore[arg-type]
    return Statistics(n, sum(part.missing for part in told), mean, deviations, union)


def fit(
    tables: Sequence[RawTable],
    train: Sequence[np.ndarray],
    columns: Sequence[str],
    *,
    normalise: bool = True,
    categorical: Sequence[str] = (),
    text: Sequence[str] = (),
    text_features: int = FEATURES,
) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """The rules for some columns, from the training rows of each client; and what to say of them.

    Parameters
    ----------
    tables, train
        Rows of each client, and which of them are for training.
    normalise
        Whether numbers are standardised.
    categorical, text
        Columns to take as categories and as text, whatever they look like.
    text_features
        Largest number of features of all columns of text together.
    """
    rules, notes = [], []
    for name in columns:
        profiles = [profile(table, name) for table in tables]
        if name in (*categorical, *text):
            kind = "category" if name in categorical else "text"
        else:
            kind = decide(name, profiles, [table.source for table in tables])
        if kind == "date":
            notes.append(f"Column '{name}' holds dates and is left out.")
            continue
        told = [
            statistics(table.cells[name].take(rows), kind)
            for table, rows in zip(tables, train, strict=True)
        ]
        rule, said = _rule(name, kind, merge(told), normalise)
        rules.append(rule)
        notes += said
    texts = [i for i, rule in enumerate(rules) if rule.kind == "text"]
    if texts:
        names = [rules[i].name for i in texts]
        own = [
            join_texts([table.cells[name].take(rows) for name in names])
            for table, rows in zip(tables, train, strict=True)
        ]
        rules[texts[0]], note = fit_text(rules[texts[0]], names[1:], own, text_features)
        notes.append(note)
    numbers = sum(rule.kind == "number" for rule in rules)
    if numbers and normalise:
        columns = "1 numeric column" if numbers == 1 else f"{numbers} numeric columns"
        notes.insert(0, f"{columns} standardised by the federation's statistics.")
    return tuple(rules), tuple(notes)


def _rule(name: str, kind: str, found: Statistics, normalise: bool) -> tuple[Rule, list[str]]:
    """The rule of one column from the statistics of the federation, and what to say of it."""
    if not found.n:
        raise DataError(
            f"Column '{name}' must have a value in some training row. It has none. Remove it, or "
            f"leave it out: drop=['{name}']."
        )
    notes, missing = [], found.missing > 0
    if kind in ("number", "boolean"):
        mean, scale = found.mean, float(np.sqrt(found.deviations / found.n))
        if missing:
            notes.append(
                f"Column '{name}': {found.missing} of {found.n + found.missing} training values "
                f"missing, filled with the federation's mean and marked by a feature."
            )
        if kind == "boolean" or not normalise:
            return Rule(name, kind, mean, missing=missing), notes
        # A constant column leaves rounding behind, not spread.
        scale = scale if scale > 1e-12 * max(1.0, abs(mean)) else 1.0
        return Rule(name, kind, mean, mean, scale, missing=missing), notes
    if missing:
        notes.append(
            f"Column '{name}': {found.missing} of {found.n + found.missing} training values "
            f"missing, all zeros and marked by a feature."
        )
    if kind == "text":
        return Rule(name, kind, missing=missing), notes
    if found.categories is None or len(found.categories) > MAX_CATEGORIES:
        notes.append(
            f"Column '{name}': more than {MAX_CATEGORIES} categories, hashed to "
            f"{CATEGORY_BUCKETS} features."
        )
        return Rule(name, "hashed", missing=missing), notes
    notes.append(f"Column '{name}': {len(found.categories)} categories, a feature each.")
    return Rule(name, kind, categories=tuple(sorted(found.categories)), missing=missing), notes


def fit_text(
    rule: Rule, others: Sequence[str], clients: Sequence[Sequence[str]], n_features: int
) -> tuple[Rule, str]:
    """Fit the rule for columns of text to the training texts of each client; and what to say of it.

    What a client tells is said in `coterie.data.text`.

    Parameters
    ----------
    rule
        Rule of the first column of text, which gets all features.
    others
        Further columns of text, whose words `clients` has beside those of the first.
    clients
        Training texts of each client.
    n_features
        Largest number of features.
    """
    counts = [hash_words(texts) for texts in clients]
    n_texts = sum(part.shape[0] for part in counts)
    words = choose_words(np.sum([count_texts(part) for part in counts], axis=0), n_texts)
    columns = " and ".join(f"'{name}'" for name in (rule.name, *others))
    if not len(words.buckets):
        raise DataError(
            f"Column {columns} must have words in some training row. It has none. Leave it out: "
            f"drop=['{rule.name}']."
        )
    directions = find_directions([weigh(part, words) for part in counts], n_features)
    rule = replace(
        rule,
        with_columns=tuple(others),
        buckets=tuple(words.buckets.tolist()),
        weights=tuple(words.weight.tolist()),
        n_directions=directions.shape[1],
        directions=pack(directions),
    )
    note = (
        f"Column{'s' if others else ''} {columns}: text as weighted words (TF-IDF of "
        f"{len(words.buckets):,} word hashes, SVD to {rule.n_directions} features), fitted without "
        f"pooling any text."
    )
    return rule, note
