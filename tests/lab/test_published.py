"""The partitions of the published studies: sizes, truth, and what may not be used twice."""

import itertools
import os

import pytest
import torch

from coterie.core.errors import ConfigError, DataError
from coterie.core.random import seed_key
from coterie.data import make
from coterie_lab import sources
from coterie_lab.partitions import pools, published
from coterie_lab.sources import Pool

real = pytest.mark.skipif(
    "COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set: needs MNIST"
)


def small(per_class: int = 60, test: int = 40) -> Pool:
    """Ten classes of tiny images; the pixel is the row number, so that rows can be told apart."""
    y = torch.arange(10).repeat_interleave(per_class)
    y = torch.cat([y, torch.arange(10).repeat_interleave(test)]).to(torch.uint8)
    x = torch.zeros(len(y), 1, 4, 4, dtype=torch.uint8)
    return Pool(x, y, 10 * per_class, tuple("0123456789"))


@pytest.fixture
def pool(monkeypatch):
    made = small()
    monkeypatch.setattr(sources, "load", lambda name, data_dir=None: made)
    return made


def rows_of_group(data, split, group):
    ids = (data.truth == group).nonzero().flatten()
    return data.rows[split].of_clients(ids).index


def nothing_twice(data):
    for split in ("train", "test"):
        for group in data.truth.unique().tolist():
            own = rows_of_group(data, split, group)
            assert len(own) == len(own.unique())


def disjoint(data):
    for split in ("train", "test"):
        assert len(data.rows[split].index) == len(data.rows[split].index.unique())


def test_label_skew_1_gives_each_group_two_classes(pool):
    data = make("published_label_skew", kind=1, clients_per_group=3, n=30)
    assert len(data) == 15
    assert data.truth.tolist() == [g for g in range(5) for _ in range(3)]
    for g in range(5):
        assert set(data.y[rows_of_group(data, "train", g)].tolist()) == {2 * g, 2 * g + 1}
        assert set(data.y[rows_of_group(data, "test", g)].tolist()) == {2 * g, 2 * g + 1}
    assert data.sizes("train").unique().tolist() == [30]  # 120 rows of a group, 40 a client, cap 30
    assert data.sizes("test").unique().tolist() == [26]  # 80 test rows, three clients
    disjoint(data)


@pytest.mark.parametrize("seed", range(20))
def test_any_two_label_sets_share_exactly_two(seed):
    sets = pools.overlapping_sets(10, 5, 4, 2, seed_key(seed))
    assert {len(s) for s in sets} == {4}
    assert {len(set(a) & set(b)) for a, b in itertools.combinations(sets, 2)} == {2}


def test_impossible_sets_are_refused_and_do_not_loop():
    with pytest.raises(ConfigError, match="no 5 sets"):
        pools.overlapping_sets(4, 5, 2, 1, seed_key(0))


@pytest.mark.parametrize(("kind", "least"), [(2, 5100), (3, 6000)])
def test_skewed_groups_have_the_least_they_need(monkeypatch, kind, least):
    big = small(6000, 1000)
    monkeypatch.setattr(sources, "load", lambda name, data_dir=None: big)
    for seed in range(3):
        data = make("published_label_skew", kind=kind, n=5000, partition_seed=seed)
        assert all(len(rows_of_group(data, "train", g)) >= least // 5 * 5 for g in range(5))
        disjoint(data)
        for g in range(5):
            own = set(data.y[rows_of_group(data, "train", g)].tolist())
            assert len(own) == 4 if kind == 2 else own <= set(published.LABEL_SKEW_3[g])


def frequencies(data, split, group):
    labels = data.y[rows_of_group(data, split, group)].long()
    return torch.bincount(labels, minlength=10) / len(labels)


@pytest.mark.parametrize("kind", [2, 3])
def test_test_rows_follow_the_training_rows_or_shares_of_their_own(monkeypatch, kind):
    big = small(6000, 1000)
    monkeypatch.setattr(sources, "load", lambda name, data_dir=None: big)
    options = {"kind": kind, "clients_per_group": 1, "n": 60000}
    for shares, least, most in (("same", 0.0, 0.005), ("own", 0.1, 1.0)):
        data = make("published_label_skew", test_shares=shares, **options)
        disjoint(data)
        apart = [
            (frequencies(data, "train", g) - frequencies(data, "test", g)).abs().max()
            for g in range(5)
        ]
        assert least <= float(max(apart)) <= most
        assert all(len(rows_of_group(data, "test", g)) >= (510, 750)[kind - 2] for g in range(5))
    with pytest.raises(ConfigError, match="test_shares"):
        make("published_label_skew", test_shares="other", **options)


def test_too_few_rows_for_a_skew_are_named(pool):
    with pytest.raises(DataError, match="every group needs 5100"):
        make("published_label_skew", kind=2)


def test_label_skew_4_is_two_thirds_of_one_class(pool):
    data = make("published_label_skew", kind=4, clients_per_group=2, n=500)
    disjoint(data)
    for g in range(10):  # 0.9 * 60 = 54: 35 of class g, (54 - 36) // 9 = 2 of each other
        counts = torch.bincount(data.y[rows_of_group(data, "train", g)].long(), minlength=10)
        assert counts[g] in (34, 35)  # 35 + 18 = 53 rows: an odd one is left over
        assert int(counts.sum()) == 52


def test_the_deal_changes_with_the_seed_and_the_groups_do_not(pool):
    a, b = (make("published_label_skew", kind=4, clients_per_group=1, seed=s) for s in (0, 1))
    assert not torch.equal(a.rows["train"].index, b.rows["train"].index)
    for g in range(10):
        one, other = (set(rows_of_group(d, "train", g).tolist()) for d in (a, b))
        assert one == other


def test_feature_skew_turns_whole_copies(pool):
    data = make("published_feature_skew", clients_per_group=2, n=1000)
    assert data.client_facts["turn"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    nothing_twice(data)
    for g in range(4):
        assert len(rows_of_group(data, "train", g)) == 600
    assert len(data.x) == 1000  # stored once


def test_concept_shift_swaps_labels_of_disjoint_rows(monkeypatch):
    big = small(5000, 800)
    monkeypatch.setattr(sources, "load", lambda name, data_dir=None: big)
    data = make("published_concept_shift", clients_per_group=5, n=1000)
    disjoint(data)
    assert data.sizes("train").unique().tolist() == [1000]
    assert data.sizes("test").unique().tolist() == [400]
    for g, swaps in enumerate(published.CONCEPT_SWAPS):
        called = pools.swap_labels(swaps, 10)
        for split in ("train", "test"):
            rows = rows_of_group(data, split, g)
            assert torch.equal(data.y[rows].long(), called[big.y[rows].long()])
    assert torch.equal(big.y, small(5000, 800).y)  # the pool itself is as it was


def test_no_single_model_can_exceed_sixty_percent_of_swapped_labels():
    # For each true class the most common name over the four groups: right in that share of cases.
    names = torch.stack([pools.swap_labels(s, 10) for s in published.CONCEPT_SWAPS])  # [4, 10]
    best = [torch.bincount(names[:, c]).max().item() / 4 for c in range(10)]
    assert sum(best) / 10 == pytest.approx(0.6)


def test_rotated_clients_share_one_pool(pool):
    data = make("rotated_clients", n_clients=8, n_groups=4)
    assert data.sizes("train").tolist() == [300] * 8
    assert data.sizes("test").tolist() == [200] * 8
    nothing_twice(data)
    assert len(make("rotated_clients", n_clients=8, n_groups=4, keep=1)) == 4


@real
def test_4800_rotated_clients_of_mnist_take_60_megabytes():
    data = make("rotated_clients", n_clients=4800)
    held = [data.x, data.y, *(part for rows in data.rows.values() for part in rows)]
    assert sum(leaf.numel() * leaf.element_size() for leaf in held) <= 60e6
    assert data.sizes("train").unique().tolist() == [50]


@real
@pytest.mark.parametrize("source", ["mnist", "fashion_mnist"])
def test_real_images_have_the_published_sizes(source):
    sizes = {1: 25, 2: 25, 3: 25, 4: 50}
    for kind, clients in sizes.items():
        data = make("published_label_skew", source=source, kind=kind)
        assert len(data) == clients
        assert data.sizes("train").unique().tolist() == [500]
        disjoint(data)
    batch = data.gather("train", torch.tensor([0]))
    assert 0 <= batch.x.min() <= batch.x.max() <= 1


def test_relabelled_groups_see_the_same_images_under_other_names(pool):
    data = make("published_relabelled", source="x", clients_per_group=2, n=20, raw=False)
    nothing_twice(data)
    assert data.sizes("train").tolist() == [20] * 8
    plain = make(
        "published_relabelled", source="x", clients_per_group=2, n=20, shuffle_classes=False
    )
    for g in range(4):
        rows = rows_of_group(data, "train", g)
        pairs = set(zip(plain.y[rows].tolist(), data.y[rows].tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    orders = {tuple(data.y[rows_of_group(data, "train", g)].tolist()) for g in range(4)}
    assert len(orders) == 4


def test_one_class_per_group_is_to_be_reconstructed(pool):
    data = make("published_one_class", clients_per_group=3, n=500)
    assert (data.task, len(data), data.n_outputs) == ("reconstruction", 30, 16)
    assert data.sizes("train").tolist() == [20] * 30  # 60 of a class among three
    for g in range(10):
        assert set(pool.y[rows_of_group(data, "train", g)].tolist()) == {g}
    disjoint(data)


def test_reviews_are_split_nine_to_one_within_their_kind(monkeypatch):
    owner = torch.arange(4).repeat_interleave(3000)
    made = Pool(
        owner[:, None].to(torch.uint8),
        (torch.arange(12_000) % 2).to(torch.uint8),
        12_000,
        ("no", "yes"),
        (),
        owner,
        ("books", "dvd", "electronics", "kitchen"),
    )
    monkeypatch.setattr(sources, "load", lambda name, data_dir=None: made)
    data = make("published_reviews")
    # 2834 books: 283 for testing, 2551 / 5 = 510 a client; 1199, 1883, 1755 likewise.
    assert data.sizes("train").unique().tolist() == [215, 315, 339, 510]
    assert data.sizes("test").unique().tolist() == [24, 35, 37, 56]
    batch = data.gather("train", torch.arange(20))
    assert (batch.x[:, 0, 0].long() == data.truth).all()  # counts are not scaled
    disjoint(data)


def test_news_groups_are_pairs_of_classes(monkeypatch):
    y = torch.arange(4).repeat_interleave(1200)
    made = Pool(
        torch.zeros(9600, 5, dtype=torch.int16), torch.cat([y, y]).byte(), 4800, tuple("abcd")
    )
    monkeypatch.setattr(sources, "load", lambda name, data_dir=None: made)
    data = make("published_news")
    assert len(data) == 30
    assert data.gather("train", torch.tensor([0])).x.dtype == torch.int64
    for g, pair in enumerate(itertools.combinations(range(4), 2)):
        assert set(data.y[rows_of_group(data, "train", g)].tolist()) <= set(pair)
    disjoint(data)


def test_writers_are_clients_and_those_with_most_data_come_first(monkeypatch):
    counts = torch.arange(10, 50)  # forty writers of 10 to 49 characters
    owner = torch.arange(40).repeat_interleave(counts)
    names = tuple(f"w{i}" for i in range(40))
    n = len(owner)
    made = Pool(
        torch.zeros(n, 1, 2, 2).byte(), (owner % 62).byte(), n, ("x",) * 62, (), owner, names
    )
    monkeypatch.setattr(sources, "load", lambda name, data_dir=None: made)
    data = make("published_writers", n_clients=5)
    assert data.names == ("w35", "w36", "w37", "w38", "w39")  # the five with most
    assert data.truth is None
    assert (data.sizes("train") + data.sizes("test")).tolist() == [45, 46, 47, 48, 49]
    assert data.sizes("test").tolist() == [4, 5, 5, 5, 5]  # a tenth, rounded
    every = make("published_writers", n_clients=None, most_data=False, least=30)
    assert len(every) == 20
    with pytest.raises(DataError, match=r"at most 40, .* Got 41"):
        make("published_writers", n_clients=41)


@pytest.mark.parametrize("n_components", [2, 3])
def test_mixtures_have_the_shares_they_say(pool, n_components):
    data = make("component_mixture", n_clients=12, n_components=n_components, sizes=(20, 40))
    assert 20 <= int(data.sizes("train").min()) <= int(data.sizes("train").max()) <= 40
    assert data.sizes("test").tolist() == [100] * 12
    component = data.extra["component"]
    for i in range(12):
        rows = data.rows["train"].of_clients(torch.tensor([i])).index
        got = torch.bincount(component[rows], minlength=n_components) / len(rows)
        assert torch.allclose(got.float(), data.extra["shares"][i])
    again = make("component_mixture", n_clients=12, n_components=n_components, sizes=(20, 40))
    assert again.fingerprint() == data.fingerprint()


def test_linear_shares_rise_with_the_client(pool):
    data = make("component_mixture", n_clients=4, shares="linear", sizes=(80, 80))
    # (i + 0.5) / 4 of 80 rows: 10, 30, 50, 70
    assert (data.extra["shares"][:, 0] * 80).tolist() == [10, 30, 50, 70]
    with pytest.raises(ConfigError, match="linear shares"):
        make("component_mixture", n_components=3, shares="linear")


def test_components_of_a_mixture_are_turned(monkeypatch):
    made = small()
    made.x[:, 0, 0, 3] = 200  # a mark in the upper right corner
    monkeypatch.setattr(sources, "load", lambda name, data_dir=None: made)
    data = make("component_mixture", n_clients=2, n_components=3, sizes=(30, 30))
    component = data.extra["component"]
    # Turned counter-clockwise, upper right goes to upper left, then to lower left.
    for j, (row, column) in enumerate([(0, 3), (0, 0), (3, 0)]):
        assert (data.x[component == j][:, 0, row, column] == 200).all()


def test_letters_of_both_cases_share_their_labels(monkeypatch):
    y = torch.arange(62).repeat_interleave(12)
    made = Pool(torch.zeros(len(y), 1, 2, 2).byte(), y.byte(), 0, tuple(map(str, range(62))))
    made.x[:, 0, 0, 0] = y.byte()
    monkeypatch.setattr(sources, "load", lambda name, data_dir=None: made)
    data = make("component_mixture", source="emnist", n_clients=3, sizes=(50, 60))
    component, letter = data.extra["component"], data.x[:, 0, 0, 0].long()
    assert data.n_outputs == 26
    assert torch.equal(data.y.long(), torch.where(component == 0, letter - 10, letter - 36))
