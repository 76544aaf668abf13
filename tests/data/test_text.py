"""Columns of text: weighted words and their main directions, fitted without pooling any text."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import TruncatedSVD

from coterie.core.errors import ConfigError
from coterie.data import DataCard, Encoder, from_table
from coterie.data.text import (
    BUCKETS,
    KEPT,
    choose_words,
    count_texts,
    find_directions,
    hash_words,
    pack,
    unpack,
    weigh,
)

WORDS = [f"word{i}" for i in range(60)]


def texts(n, seed=0):
    """Texts of two topics, each of which prefers half of the words."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(0, 2, n)
    return [" ".join(rng.choice(WORDS[30 * t : 30 * t + 35], 8)) for t in topic], topic


def test_words_are_counted_without_case_and_marks():
    counts = hash_words(["Rain, rain!", "the RAIN", None, ""])
    assert counts.shape == (4, BUCKETS)
    assert counts.sum(1).ravel().tolist() == [[2, 2, 0, 0]]
    rain = int(counts[0].indices[0])
    assert count_texts(counts)[rain] == 2


def test_weights_by_hand():
    having = np.zeros(BUCKETS, dtype=int)
    having[[5, 3, 9]] = [1, 4, 2]
    words = choose_words(having, n_texts=9)
    assert words.buckets.tolist() == [3, 9]  # bucket 5 is of a single text
    np.testing.assert_allclose(words.weight, [np.log(10 / 5) + 1, np.log(10 / 3) + 1])
    assert choose_words(np.minimum(having, 1), 9).buckets.tolist() == [3, 5, 9]
    assert len(choose_words(np.full(BUCKETS, 2), 9).buckets) == KEPT


def test_weighted_texts_have_length_one():
    counts = hash_words(["a a b", "b c", "c", "unknown"])
    words = choose_words(count_texts(counts[:3]), 3)
    weighted = weigh(counts, words).toarray()
    np.testing.assert_allclose(np.linalg.norm(weighted, axis=1), [1, 1, 1, 0])


def test_directions_of_clients_are_those_of_all_texts_together():
    counts = hash_words(texts(300)[0])
    words = choose_words(count_texts(counts), 300)
    whole = weigh(counts, words)
    parts = [whole[:50], whole[50:60], whole[60:]]
    found = find_directions(parts, 5)
    assert found.shape == (len(words.buckets), 5)
    np.testing.assert_allclose(found.T @ found, np.eye(5), atol=1e-10)
    np.testing.assert_allclose(found, find_directions([whole], 5), atol=1e-6)
    reference = TruncatedSVD(5, algorithm="arpack").fit(whole).components_
    explained = np.linalg.norm(whole @ found) / np.linalg.norm(whole @ reference.T)
    assert explained > 0.995


def test_packed_numbers_come_back():
    array = np.random.default_rng(0).normal(size=(7, 3))
    np.testing.assert_allclose(unpack(pack(array), 3), array, rtol=1e-3, atol=1e-7)


def table(n=200):
    first, topic = texts(n)
    second = texts(n, seed=1)[0]
    return {
        "desk": ["a", "b"] * (n // 2),
        "title": first,
        "body": [None if i % 7 == 0 else text for i, text in enumerate(second)],
        "y": topic.tolist(),
    }


def test_columns_of_text_are_one_text():
    data = from_table(table(), "desk", "y", text_features=10)
    assert data.sample_shape == (11,)  # and one that marks missing bodies
    assert data.encoder.features[-2:] == ["title#9", "body is missing"]
    assert data.notes[-1].startswith("Columns 'title' and 'body': text as weighted words (TF-IDF")
    moved = {**table(), "title": table()["body"], "body": table()["title"]}
    swapped = from_table(moved, "desk", "y", text_features=10)
    torch.testing.assert_close(swapped.x.norm(dim=1), data.x.norm(dim=1))


def test_new_texts_are_encoded_in_the_same_way():
    data = from_table(table(), "desk", "y", text_features=10)
    again = Encoder.from_dict(DataCard.of(data).to_dict()["encoder"])
    assert again == data.encoder
    rows = {name: table()[name] for name in ("title", "body")}
    encoded = again.encode(rows)
    north = [i for i in range(200) if i % 2 == 0]
    torch.testing.assert_close(encoded[north], data.x[:100])
    assert again.encode({"title": ["never seen"], "body": [None]})[0, :10].abs().sum() == 0


def test_topics_can_be_told_from_the_features():
    data = from_table(table(400), "desk", "y", drop=["body"])
    batch = data.gather("train", torch.tensor([0]))
    x, y = batch.x[0].double(), batch.y[0]
    gap = x[y == 1].mean(0) - x[y == 0].mean(0)
    score = x @ gap
    middle = (score[y == 1].mean() + score[y == 0].mean()) / 2
    assert ((score > middle).long() == y).double().mean() > 0.9


def test_the_number_of_features_must_be_positive():
    with pytest.raises(ConfigError, match="text_features must be greater than or equal to 1"):
        from_table(table(), "desk", "y", text_features=0)
