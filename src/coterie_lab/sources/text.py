"""Text: AG News as tokens, Amazon reviews as word counts.

Zhang, Zhao, LeCun: Character-level convolutional networks for text classification, NIPS 2015,
arXiv:1509.01626 (AG News). Blitzer, Dredze, Pereira: Biographies, Bollywood, boom-boxes and
blenders, ACL 2007, with the 5,000 features of Chen, Xu, Weinberger, Sha, ICML 2012 (Amazon).
"""

import csv
import io
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from coterie.core.errors import DataError
from coterie_lab.sources.files import File, Layout, Pool, Source, content

WORDS, LENGTH = 20_000, 200  # as in the released code of CLoVE
PAD, UNKNOWN = 0, 1
_WORD = re.compile(r"[a-z0-9']+")
_NEWS = ("World", "Sports", "Business", "Sci/Tech")
DOMAINS = ("books", "dvd", "electronics", "kitchen")
FEATURES = 5000


def tokens(text: str) -> list[str]:
    """Split a text into lower-case words.

    >>> tokens("Oil up, again!")
    ['oil', 'up', 'again']
    """
    return _WORD.findall(text.lower())


def _rows(folder: Path, path: str) -> tuple[list[list[str]], list[int]]:
    text = content(folder, path).decode("utf-8", errors="replace")
    words, labels = [], []
    for number, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
            raise DataError(
                f"{folder / path}: line {number} must have a class, a title and a description. "
                "Get it again."
            )
        words.append(tokens(f"{row[1]} {row[2]}"))
        labels.append(int(row[0]) - 1)
    return words, labels


def _news(folder: Path, train: str) -> Pool:
    """Number the most frequent words of the training rows; pad or cut rows to one length."""
    own, labels = _rows(folder, train)
    tested, test_labels = _rows(folder, "ag_news_csv/test.csv.gz")
    counts = Counter(word for words in own for word in words)
    known = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    number = {word: i + 2 for i, word in enumerate(known)}
    table = np.zeros((len(own) + len(tested), LENGTH), dtype=np.int16)  # 20,002 fit
    for place, words in enumerate([*own, *tested]):
        row = [number.get(word, UNKNOWN) for word in words[:LENGTH]]
        table[place, : len(row)] = row
    y = torch.tensor([*labels, *test_labels], dtype=torch.uint8)
    return Pool(torch.from_numpy(table), y, len(own), _NEWS)


_BASE = (
    "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"  # a copy
)
_TEST = File(
    "ag_news_csv/test.csv.gz",
    "42c3c93637b67784a3d9f3eecdf895ab",
    f"{_BASE}/test.csv",
    inner="d52ea96a97a2d943681189a97654912d",
)
AG_NEWS = Source(
    "ag_news",
    "AG News",
    "the AG corpus of news articles, selected by Zhang et al.",
    "research only, not commercial",
    (
        Layout(
            (
                File(
                    "ag_news_csv/train.csv.gz",
                    None,
                    f"{_BASE}/train.csv",
                    inner="b1a00f826fdfbd249f79597b59e1dc12",
                ),
                _TEST,
            ),
            lambda folder: _news(folder, "ag_news_csv/train.csv.gz"),
        ),
        Layout(
            (
                File("ag_news_csv/train_subset.csv.gz", "908ac604947df3b77c60cdee11096511"),
                _TEST,
            ),
            lambda folder: _news(folder, "ag_news_csv/train_subset.csv.gz"),
            "AG News: only 38,678 of 120,000 training rows were found.",
        ),
    ),
)


def _reviews(counts: np.ndarray, y: np.ndarray, domain: np.ndarray) -> Pool:
    label = torch.from_numpy((y > 0).astype(np.uint8))
    owner = torch.from_numpy(domain.astype(np.int64))
    names = ("negative", "positive")
    return Pool(torch.from_numpy(counts), label, len(label), names, (), owner, DOMAINS)


def _npz(folder: Path) -> Pool:
    """Read sparse counts of all domains; `offset` is the first review of each domain."""
    path = folder / "amazon/amazon.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            data, row, col = file["xx_data"], file["xx_row"], file["xx_col"]
            n = int(file["xx_shape"][1])
            y, offset = file["yy"].ravel(), file["offset"].ravel()
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error}). Get it again.") from error
    kept = row < FEATURES
    counts = np.zeros((n, FEATURES), dtype=np.uint8)
    counts[col[kept], row[kept]] = np.minimum(data[kept], 255)
    return _reviews(counts, y, np.repeat(np.arange(4), np.diff(offset)))


def _svmlight(folder: Path) -> Pool:
    """Read one file per domain and split: a label, then feature:count, counted from 0."""
    rows: list[np.ndarray] = []
    labels: list[float] = []
    domain: list[int] = []
    for number, name in enumerate(DOMAINS):
        for part in ("train", "test"):
            path = f"amazon/{name}_{part}.svmlight.gz"
            for line in content(folder, path).decode().splitlines():
                label, *pairs = line.split()
                row = np.zeros(FEATURES, dtype=np.uint8)
                for pair in pairs:
                    feature, _, count = pair.partition(":")
                    if int(feature) < FEATURES:
                        row[int(feature)] = min(int(float(count)), 255)
                rows.append(row)
                labels.append(float(label))
                domain.append(number)
    return _reviews(np.stack(rows), np.array(labels), np.array(domain))


_DANN = (
    "https://raw.githubusercontent.com/GRAAL-Research/domain_adversarial_neural_network/master/data"
)
_SUMS = {
    "books_train": ("ec56c539d8ee6a1e9d5e4be0afa86212", "83789c2eee7b75ae04716547500f939a"),
    "books_test": ("b51226bdd2b1ea63476d24c61d9550e9", "c935cc917e347cdfe4d10b4658901b08"),
    "dvd_train": ("63e1e18a8c8a2af56780a7895730385b", "324c4f3d50a624cc6de38eb84ca203e3"),
    "dvd_test": ("60ba63ec8ef29412778aeb2c71d55a7f", "303f077777487e4e7c9af0abb9b016c3"),
    "electronics_train": ("e74bfcb234fed64c94bcf90305dee45a", "e1f0ecf59f556969ce20271fb113a522"),
    "electronics_test": ("b57b9a9657d68f97041e65c6c94fa754", "8a55e9844afcbac73fa3dd7614a4175b"),
    "kitchen_train": ("25706405e36a93b369caca0da6b72dbb", "352cacc8daa5ef7fa611f6cbcca65168"),
    "kitchen_test": ("b841db710bdded5b0600071c2d117428", "4b60270b3be2f27563179df4f0068fb1"),
}
AMAZON = Source(
    "amazon",
    "Amazon reviews of four product categories",
    "github.com/GRAAL-Research/domain_adversarial_neural_network",
    "none stated",
    (
        Layout((File("amazon/amazon.npz"),), _npz),
        Layout(
            tuple(
                File(f"amazon/{name}.svmlight.gz", packed, f"{_DANN}/{name}.svmlight", unpacked)
                for name, (packed, unpacked) in _SUMS.items()
            ),
            _svmlight,
        ),
    ),
)
