import numpy as np
import pytest
import torch

from coterie.core.errors import ConfigError, DataError
from coterie.core.random import seed_key
from coterie.data import partitions
from coterie.data.cutting import dirichlet_shares, whole
from coterie.data.partitions import (
    concept_shift,
    dirichlet,
    label_skew,
    mixtures,
    quantity_skew,
    rotation,
)

N = 400
Y = np.arange(N) % 10


def pool(n=N, classes=10):
    """Images whose pixels tell the row and the corner."""
    corner = torch.tensor([[0.0, 0.25], [0.5, 0.75]])
    return torch.arange(float(n))[:, None, None, None] + corner, np.arange(n) % classes


RECIPES = [rotation, label_skew, concept_shift, dirichlet, quantity_skew, mixtures]


def used(data):
    return torch.cat([rows.index for rows in data.rows.values()])


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_row_is_used_twice_and_the_seed_decides(recipe):
    x, y = pool()
    data = recipe(x, y, n_clients=12)
    assert len(data) == 12
    index = used(data)
    assert len(index.unique()) == len(index)
    assert data.sizes("train").min() >= 1
    assert recipe(x, y, n_clients=12).fingerprint() == data.fingerprint()
    assert recipe(x, y, n_clients=12, seed=1).fingerprint() != data.fingerprint()
    whole = recipe(x, y, n_clients=12, test_fraction=0.0)
    assert whole.sizes("test").sum() == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_truth_is_attached(recipe):
    x, y = pool()
    data = recipe(x, y, n_clients=12)
    if recipe is dirichlet:
        assert data.truth is None
        assert data.extra["shares"].shape == (12, 10)
        data = dirichlet(x, y, n_clients=12, n_groups=3)
        assert data.truth.unique().tolist() == [0, 1, 2]
    assert data.truth.shape == (12,)


@pytest.mark.parametrize("recipe", RECIPES)
def test_text_labels_and_bytes_are_taken(recipe):
    x = np.zeros((N, 1, 4, 4), dtype=np.uint8) + 255
    data = recipe(x, [f"label-{label}" for label in Y], n_clients=8)
    assert data.x.dtype == torch.uint8
    assert data.classes[0] == "label-0"
    assert data.gather("train", torch.tensor([3])).x.unique().tolist() == [1.0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_too_few_rows_are_refused(recipe):
    x, y = pool(6, 2)
    with pytest.raises(DataError, match=r"There are 6 rows for 20 clients. Use fewer clients"):
        recipe(x, y, n_clients=20)


# Rotation


def test_groups_see_the_images_turned_and_the_pool_is_stored_once():
    x, y = pool()
    data = rotation(x, y, n_clients=8, test_fraction=0.0)
    assert data.truth.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.equal(data.x, x)
    for client in range(8):
        batch = data.gather("train", torch.tensor([client]))
        rows = data.rows["train"].of_clients(torch.tensor([client])).index
        expected = torch.rot90(x[rows], int(data.truth[client]), dims=(-2, -1))
        assert torch.equal(batch.x[0], expected)
        assert batch.y[0].tolist() == y[rows].tolist()


def test_two_groups_are_upside_down_to_each_other():
    x, y = pool()
    data = rotation(x[:, 0], y, n_clients=2, n_groups=2, test_fraction=0.0)
    assert data.sample_shape == (2, 2)
    last = data.gather("train", torch.tensor([1])).x[0, 0]
    assert (last - last.floor()).tolist() == [[0.75, 0.5], [0.25, 0.0]]


def test_every_group_may_have_all_images():
    x, y = pool()
    data = rotation(x, y, n_clients=8, reuse=True, test_fraction=0.0)
    for group in range(4):
        ids = (data.truth == group).nonzero()[:, 0]
        rows = data.rows["train"].of_clients(ids).index
        assert rows.sort().values.tolist() == list(range(N))
    assert "Every group has all images." in data.notes


def test_images_must_be_square_and_turns_quarters():
    with pytest.raises(DataError, match=r"square images. Samples have shape \[4, 2\]"):
        rotation(torch.zeros(20, 4, 2), [0, 1] * 10, n_clients=4)
    with pytest.raises(ConfigError, match="must be 1, 2 or 4, got 3"):
        rotation(*pool(), n_clients=4, n_groups=3)


# Labels


def classes_of(data, client):
    return set(data.y[used(data.subset(torch.tensor([client])))].tolist())


def test_clients_of_a_group_have_its_classes_and_no_others():
    data = label_skew(*pool(), n_clients=15, classes_per_client=2)
    assert data.truth.unique().tolist() == [0, 1, 2, 3, 4]
    has = data.extra["classes"]
    assert (has.sum(0) == 1).all()
    for client in range(15):
        assert classes_of(data, client) == set(has[data.truth[client]].nonzero()[:, 0].tolist())
    assert len(used(data)) == N


def test_overlapping_groups_share_the_samples_of_a_class():
    data = label_skew(*pool(), n_clients=10, classes_per_client=4, n_groups=10)
    has = data.extra["classes"]
    assert (has.sum(1) == 4).all()
    assert len(has.unique(dim=0)) == 10
    assert len(used(data)) == N


def test_impossible_class_sets_are_refused():
    with pytest.raises(ConfigError, match=r"classes_per_client must lie in 1\.\.10, got 11"):
        label_skew(*pool(), classes_per_client=11)
    with pytest.raises(ConfigError, match="groups must differ in their classes"):
        label_skew(*pool(), classes_per_client=10, n_groups=2)
    with pytest.raises(ConfigError, match="groups must differ in their classes"):
        label_skew(*pool(), classes_per_client=1, n_groups=11)
    with pytest.raises(DataError, match="y must hold labels"):
        label_skew(torch.zeros(50, 1), np.linspace(0, 1, 50))


def test_groups_swap_labels():
    x, y = pool()
    data = concept_shift(x, y, n_clients=8, n_groups=4, swaps=2)
    mapping = data.extra["mapping"]
    assert mapping[0].tolist() == list(range(10))
    assert len(mapping.unique(dim=0)) == 4
    assert (mapping[1:] != torch.arange(10)).sum(1).tolist() == [4, 4, 4]
    assert torch.equal(mapping.gather(1, mapping), torch.arange(10).expand(4, 10))  # swaps
    for client in range(8):
        rows = used(data.subset(torch.tensor([client])))
        assert torch.equal(data.y[rows], mapping[data.truth[client], torch.tensor(y)[rows]])


def test_impossible_swaps_are_refused():
    with pytest.raises(ConfigError, match=r"swaps must lie in 1\.\.5 for 10 classes, got 6"):
        concept_shift(*pool(), swaps=6)
    with pytest.raises(ConfigError, match="2 classes do not allow 3 groups with 1 swaps"):
        concept_shift(*pool(classes=2), n_groups=3)


# Dirichlet and sizes


def test_shares_have_the_mean_and_variance_of_the_distribution():
    k, alpha = 4, 0.5
    shares = dirichlet_shares(alpha, (20000, k), seed_key(0))
    torch.testing.assert_close(shares.sum(1), torch.ones(20000, dtype=torch.float64))
    # Means of 20,000 draws: standard error 0.002 and less.
    assert shares.mean(0).tolist() == pytest.approx([0.25] * k, abs=0.008)
    variance = (1 / k) * (1 - 1 / k) / (k * alpha + 1)
    assert shares.var(0).tolist() == pytest.approx([variance] * k, abs=0.004)
    tiny = dirichlet_shares(1e-4, (50, k), seed_key(1))
    assert torch.isfinite(tiny).all()
    assert (tiny.max(1).values > 0.99).all()


def test_whole_counts_add_up():
    for n in (0, 1, 7, 1000):
        counts = whole(dirichlet_shares(0.3, (9,), seed_key(n)), n)
        assert counts.sum() == n
        assert counts.min() >= 0


@pytest.mark.parametrize("alpha", [0.05, 0.001, 100.0])
def test_five_hundred_clients_all_get_rows(alpha):
    rng = np.random.default_rng(0)
    x, y = torch.zeros(20000, 1), rng.integers(0, 10, 20000)
    data = dirichlet(x, y, n_clients=500, alpha=alpha)
    assert len(used(data).unique()) == 20000
    assert (data.sizes("train") + data.sizes("test")).min() >= 2
    assert data.sizes("test").min() >= 1
    assert any("rows were moved" in note for note in data.notes) == (alpha < 1)


def test_a_pool_that_is_just_large_enough_is_dealt_out():
    x, y = pool(100, 10)
    data = dirichlet(x, y, n_clients=50, alpha=0.05)
    assert (data.sizes("train") + data.sizes("test")).tolist() == [2] * 50
    with pytest.raises(DataError, match=r"must have 2 rows. There are 100 rows for 51"):
        dirichlet(x, y, n_clients=51, alpha=0.05)


def test_shares_are_those_of_the_rows():
    x, y = pool()
    data = dirichlet(x, y, n_clients=10, alpha=0.2, test_fraction=0.0)
    for client in range(10):
        labels = data.y[used(data.subset(torch.tensor([client])))]
        mix = torch.bincount(labels, minlength=10) / len(labels)
        torch.testing.assert_close(data.extra["shares"][client], mix)
    part = data.subset(torch.tensor([7, 2]))
    assert torch.equal(part.extra["shares"], data.extra["shares"][[7, 2]])


def test_a_large_alpha_is_even_and_a_small_one_is_not():
    x, y = pool()
    even = dirichlet(x, y, n_clients=10, alpha=1e4).extra["shares"]
    skewed = dirichlet(x, y, n_clients=10, alpha=0.05).extra["shares"]
    assert even.max() < 0.2
    assert skewed.max(1).values.mean() > 0.5


def test_clients_of_a_dirichlet_group_are_alike():
    x, y = pool(4000)
    data = dirichlet(x, y, n_clients=8, alpha=0.2, n_groups=2, test_fraction=0.0)
    shares = data.extra["shares"]
    within = (shares[:4] - shares[:4].mean(0)).abs().max()
    between = (shares[:4].mean(0) - shares[4:].mean(0)).abs().max()
    assert between > 4 * within


def test_sizes_differ_and_the_mix_does_not():
    x, y = pool(4000)
    data = quantity_skew(x, y, n_clients=20, alpha=0.3, least=5)
    sizes = data.sizes("train") + data.sizes("test")
    assert int(sizes.sum()) == 4000
    assert int(sizes.min()) >= 5
    assert int(sizes.max()) > 5 * int(sizes.median())
    assert data.truth.unique().tolist() == [0]
    numbers = quantity_skew(torch.zeros(50, 1), np.linspace(0, 1, 50), n_clients=4)
    assert numbers.task == "regression"


@pytest.mark.parametrize("recipe", [dirichlet, quantity_skew])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"alpha": float("nan")}, "alpha must be positive"),
        ({"least": 0}, "least must be at least 1"),
    ],
)
def test_impossible_cuts_are_refused(recipe, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        recipe(*pool(), n_clients=4, **options)


# Mixtures


@pytest.mark.parametrize("by", ["swaps", "rotation", "labels"])
def test_shares_and_components_agree(by):
    x, y = pool()
    data = mixtures(x, y, n_clients=6, n_components=4, by=by, alpha=2.0, test_fraction=0.0)
    component = data.extra["component"]
    for client in range(6):
        own = component[used(data.subset(torch.tensor([client])))]
        mix = torch.bincount(own, minlength=4) / len(own)
        torch.testing.assert_close(data.extra["shares"][client], mix)
        assert data.truth[client] == mix.argmax()
    unused = torch.ones(N, dtype=torch.bool)
    unused[used(data)] = False
    assert torch.equal(component == -1, unused)


def test_given_shares_are_kept():
    shares = [[0.1, 0.9], [0.5, 0.5], [1.0, 0.0]]
    data = mixtures(*pool(300), n_clients=3, shares=shares)
    torch.testing.assert_close(data.extra["shares"], torch.tensor(shares))
    assert data.truth.tolist() == [1, 0, 0]


def test_components_are_laid_on_the_rows():
    x, y = pool()
    turned = mixtures(x, y, n_clients=4, n_components=4, by="rotation")
    for row in used(turned).tolist():
        expected = torch.rot90(x[row], int(turned.extra["component"][row]), dims=(-2, -1))
        assert torch.equal(turned.x[row], expected)
    swapped = mixtures(x, y, n_clients=4, n_components=3)
    rows = used(swapped)
    names = swapped.extra["mapping"][swapped.extra["component"][rows], torch.tensor(y)[rows]]
    assert torch.equal(swapped.y[rows], names)
    split = mixtures(x, y, n_clients=4, n_components=5, by="labels", alpha=5.0)
    sets = [set(y[split.extra["component"] == j]) for j in range(5)]
    assert sum(map(len, sets)) == len(set().union(*sets))


def test_impossible_mixtures_are_refused():
    x, y = pool()
    with pytest.raises(ConfigError, match=r"Unknown kind of mixtures 'swap'\. Did you mean"):
        mixtures(x, y, by="swap")
    with pytest.raises(ConfigError, match="shares must be 2 rows of 2 numbers"):
        mixtures(x, y, n_clients=2, shares=[[1.0, 0.0]])
    with pytest.raises(ConfigError, match="n_components must be at most the number of classes"):
        mixtures(x, y, n_clients=2, n_components=11, by="labels")
    with pytest.raises(DataError, match="rows enough of every component"):
        mixtures(x, y, n_clients=200, n_components=10, by="labels", alpha=0.01)


def test_recipes_leave_the_pool_alone():
    x, y = pool()
    before, labels = x.clone(), y.copy()
    for recipe in RECIPES:
        recipe(x, y, n_clients=5)
    assert torch.equal(x, before)
    assert (y == labels).all()
    assert partitions.rotation is rotation
