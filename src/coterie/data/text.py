"""Text as features: weighted words (TF-IDF), then the main directions in which texts differ (SVD).

No text leaves its client. Columns of text are joined, row by row. Fitting takes five
exchanges:

1. Words in lower case are hashed to 65,536 buckets. A client tells for each bucket how many of its
   training texts have a word of it. From the sums the server keeps the 4,096 buckets that most
   texts have, leaves out those of a single text, and weighs rare ones more (`choose_words`).
2. Three times the server sends some directions, 4,096 numbers each, and a client tells how its
   texts vary along them (`vary_along`); the sums turn the directions towards those in which texts
   differ most. A last exchange puts them in order. This is a randomised singular value
   decomposition (Halko, Martinsson, Tropp 2011) of all texts together.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import sparse

BUCKETS = 2**16
KEPT = 4096
FEATURES = 100
"""Directions that are kept, if a user says nothing else."""
SPARE = 10
"""Directions that are followed besides: the last ones are found less exactly."""
TURNS = 3
"""Exchanges that turn the directions; more change little."""

_WORD = re.compile(r"\w+")


class Words(NamedTuple):
    """The buckets that count, and the weight of each."""

    buckets: np.ndarray  # [k]  rising
    weight: np.ndarray  # [k]


def hash_words(texts: Sequence[str | None]) -> sparse.csr_matrix:
    """How often each text has a word of each bucket: [texts, BUCKETS].

    >>> hash_words(["Rain, rain and wind", None]).sum(1).ravel()
    matrix([[4., 0.]])
    """
    found = [[_bucket(word) for word in _WORD.findall((text or "").lower())] for text in texts]
    ends = np.cumsum([0, *map(len, found)])
    places = np.fromiter((bucket for words in found for bucket in words), np.int64, ends[-1])
    counts = sparse.csr_matrix((np.ones(len(places)), places, ends), (len(found), BUCKETS))
    counts.sum_duplicates()
    return counts


def count_texts(counts: sparse.csr_matrix) -> np.ndarray:
    """In how many of its texts a client has a word of each bucket: [BUCKETS]."""
    return np.bincount(counts.indices, minlength=BUCKETS)


def choose_words(having: np.ndarray, n_texts: int) -> Words:
    """The buckets that most texts have, and their weights log((1 + n) / (1 + n_having)) + 1.

    Buckets of one text only are left out, unless all are such.
    """
    order = np.argsort(-having, kind="stable")[:KEPT]
    least = 2 if having.max(initial=0) > 1 else 1
    buckets = np.sort(order[having[order] >= least])
    return Words(buckets, np.log((1 + n_texts) / (1 + having[buckets])) + 1)


def weigh(counts: sparse.csr_matrix, words: Words) -> sparse.csr_matrix:
    """Weighted words of each text, scaled to length one: [texts, k]."""
    kept = counts[:, words.buckets]
    kept.data = 1 + np.log(kept.data)
    kept = kept @ sparse.diags(words.weight)
    length = np.sqrt(np.asarray(kept.multiply(kept).sum(1)).ravel())
    return sparse.diags(1 / np.where(length > 0, length, 1)) @ kept


def vary_along(weighted: sparse.csr_matrix, directions: np.ndarray) -> np.ndarray:
    """What one client tells of its texts along some directions: [k, directions]."""
    return weighted.T @ (weighted @ directions)


def find_directions(clients: Sequence[sparse.csr_matrix], n: int) -> np.ndarray:
    """The n directions in which the texts of all clients differ most: [k, n].

    If there are no more than n buckets, each of them is a direction.
    """
    k = clients[0].shape[1]
    if k <= n:
        return np.eye(k)
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(k, min(k, n + SPARE)))
    for _ in range(TURNS):
        directions = np.linalg.qr(sum(vary_along(own, directions) for own in clients))[0]
    inner = directions.T @ sum(vary_along(own, directions) for own in clients)
    turn = np.linalg.eigh((inner + inner.T) / 2)[1][:, ::-1]
    found = (directions @ turn)[:, :n]
    largest = np.abs(found).argmax(0)  # a direction and its opposite are the same: choose one
    return found * np.sign(found[largest, np.arange(found.shape[1])])


def pack(array: np.ndarray) -> str:
    """Numbers as text for JSON, two bytes each.

    >>> unpack(pack(np.array([[0.5, -2.0]])), 2)
    array([[ 0.5, -2. ]])
    """
    return base64.b64encode(array.astype("<f2").tobytes()).decode()


@lru_cache(maxsize=16)
def unpack(text: str, width: int) -> np.ndarray:
    """The numbers that `pack` wrote, in rows of some width."""
    flat = np.frombuffer(base64.b64decode(text), dtype="<f2").astype(np.float64)
    return flat.reshape(-1, width)


@lru_cache(maxsize=65536)
def _bucket(word: str) -> int:
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % BUCKETS
