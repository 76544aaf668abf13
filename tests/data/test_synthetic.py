import json

import pytest
import torch

from coterie.core.errors import ConfigError
from coterie.data import digits, linear_coordinates, linear_groups, make
from coterie.data.synthetic import blobs

SMALL = {
    "linear_groups": {"n": 20, "test": 5},
    "linear_coordinates": {"n": 10, "d": 30},
    "blobs": {},
    "digits": {},
    "class_mixture": {"features": 5},
    "mixture_sensitivity": {"n": 30},
    "mixture_tight": {"n_clients": 5, "n": 30},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_problem_is_made_again_from_its_plain_options(name):
    data = make(name, **SMALL[name], seed=3)
    assert data.name == name
    options = json.loads(json.dumps(data.options))
    assert options["seed"] == 3
    again = make(data.name, **options)
    assert again.fingerprint() == data.fingerprint()
    assert data.truth is None or torch.equal(again.truth, data.truth)
    assert make(name, **(options | {"seed": 4})).fingerprint() != data.fingerprint()


@pytest.mark.parametrize("name", [name for name in SMALL if "mixture" not in name])
def test_truth_names_a_group_for_every_client(name):
    data = make(name, **SMALL[name])
    assert data.truth.shape == (len(data),)
    assert data.truth.unique().tolist() == list(range(data.options["n_groups"]))
    assert data.sizes("test").min() >= 1


@pytest.mark.parametrize("name", SMALL)
def test_the_global_generator_is_left_alone(name):
    before = torch.random.get_rng_state()
    make(name, **SMALL[name])
    assert torch.equal(before, torch.random.get_rng_state())


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"Unknown problem 'blob'\. Did you mean 'blobs'"):
        make("blob")
    with pytest.raises(ConfigError, match=r"option of blobs 'n_group'\. Did you mean 'n_groups'"):
        make("blobs", n_group=2)


# Linear regression


@pytest.mark.parametrize("separation", [1.0, 0.1, 0.01, 0.001, 0.0003])
def test_chained_targets_are_unit_vectors_within_bounds(separation):
    data = linear_groups(n=2, test=1, separation=separation, dtype="float64")
    targets = data.extra["targets"]
    assert targets.shape == (5, 20)
    assert torch.allclose(targets.norm(dim=1), torch.ones(5, dtype=torch.float64))
    apart = torch.stack([(targets[i] - targets[j]).norm() for i in range(5) for j in range(i)])
    # Rounding of the last digit of a coordinate, when the distance is summed in another order.
    assert apart.min() >= separation - 1e-15
    assert apart.max() <= 5 * separation


def test_orthonormal_targets():
    targets = linear_groups(n=2, test=1, targets="orthonormal").extra["targets"]
    assert torch.allclose(targets @ targets.T, torch.eye(5), atol=1e-6)


def test_the_numbers_of_the_linear_study():
    data = linear_groups()
    assert len(data) == 25
    assert data.sizes("train").tolist() == [900] * 25
    assert data.sizes("test").tolist() == [100] * 25
    assert data.task == "regression"
    assert data.sample_shape == (20,)
    batch = data.gather("train", torch.arange(25))
    assert abs(float(batch.x.mean())) < 0.01  # 450,000 draws: standard error 0.0015
    assert abs(float(batch.x.std()) - 1) < 0.01
    error = batch.y - torch.einsum("mnd,md->mn", batch.x, data.extra["targets"][data.truth])
    assert 0.9e-4 < float(error.std()) < 1.1e-4


def test_adding_clients_leaves_the_others_as_they_were():
    few, many = (linear_groups(n_groups=1, clients_per_group=m, n=9, test=1) for m in (2, 5))
    assert torch.equal(few.x, many.x[: len(few.x)])
    assert torch.equal(few.y, many.y[: len(few.y)])


def test_square_root_loss_law():
    # sqrt of the mean squared residual of n samples: mean near sqrt(r), variance near r / (2 n),
    # with r = |theta - target|^2 + noise^2.
    n, m, noise = 50, 2000, 0.5
    data = linear_groups(
        n_groups=1, clients_per_group=m, n=n, test=0, d=4, noise=noise, dtype="float64"
    )
    offset = torch.tensor([0.6, 0.0, -0.8, 0.0], dtype=torch.float64)
    batch = data.gather("train", torch.arange(m))
    residual = batch.y - batch.x @ (data.extra["targets"][0] + offset)
    root = residual.square().mean(1).sqrt()
    r = 1.0 + noise**2
    # The bias of the root is r^0.5 / (4 n) = 0.5 %, the standard error of its mean 0.22 %.
    assert abs(float(root.mean()) - r**0.5) < 0.015 * r**0.5
    assert abs(float(root.var()) - r / (2 * n)) < 0.15 * r / (2 * n)


def test_coordinates_of_the_code_are_zero_or_scale():
    data = linear_coordinates(scale=0.25)
    targets = data.extra["targets"]
    assert targets.unique().tolist() == [0.0, 0.25]
    assert 0.4 < float((targets > 0).float().mean()) < 0.6
    assert data.truth.bincount().tolist() == [10, 10]
    assert data.sizes("train").tolist() == [100] * 20


def test_coordinates_of_the_paper_have_norm_scale():
    targets = linear_coordinates(scale=0.25, rule="paper").extra["targets"]
    assert torch.allclose(targets.norm(dim=1), torch.full((2,), 0.25))


def test_noiseless_targets_solve_their_problem():
    data = linear_coordinates(noise=0.0, n=20, d=10, dtype="float64")
    batch = data.gather("test", torch.arange(20))
    fit = torch.einsum("mnd,md->mn", batch.x, data.extra["targets"][data.truth])
    assert torch.allclose(fit, batch.y)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("linear_groups", {"n": 0}, "linear_groups: n must be at least 1, got 0"),
        ("linear_groups", {"noise": float("nan")}, "noise must be at least 0, got nan"),
        ("linear_groups", {"separation": 3.0}, r"must be in \(0, 2\], got 3"),
        ("linear_groups", {"separation": 1.9, "d": 2}, "Found 2 of them and no further one"),
        ("linear_groups", {"targets": "ortho"}, "Did you mean 'orthonormal'"),
        ("linear_groups", {"targets": "orthonormal", "d": 3}, "n_groups=5, d=3"),
        ("linear_groups", {"dtype": "float"}, "Unknown dtype 'float'"),
        ("linear_coordinates", {"n_clients": 7}, "multiple of n_groups, got 7 and 2"),
        ("linear_coordinates", {"rule": "text"}, "Unknown rule of linear_coordinates 'text'"),
        ("linear_coordinates", {"d": 1}, "targets must differ"),
        ("blobs", {"n_groups": 3, "n_classes": 2}, "2 classes allow 2 ways, n_groups is 3"),
        ("digits", {"n_clients": 3}, "n_clients must be at least 4, got 3"),
        ("digits", {"per_client": 0}, "per_client must be at least 1, got 0"),
        ("digits", {"per_client": 200}, "no image may be used twice"),
        ("digits", {"n_clients": 8000}, "There are 1797 images for 2000 clients"),
    ],
)
def test_impossible_options_are_refused(name, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make(name, **options)


# Blobs


def test_groups_name_the_clouds_differently():
    data = blobs(n_groups=6, clients_per_group=1, n=300, separation=10.0)
    mapping, centres = data.extra["mapping"], data.extra["centres"]
    assert len(mapping.unique(dim=0)) == 6
    assert (mapping.sort(1).values == torch.arange(3)).all()
    batch = data.gather("train", torch.arange(6))
    cloud = torch.cdist(batch.x, centres).argmin(2)  # clouds ten deviations apart never overlap
    assert torch.equal(cloud, mapping[data.truth[:, None], batch.y])


def test_neighbouring_clouds_are_as_far_apart_as_asked():
    for d, n_classes in [(1, 4), (2, 3), (5, 7), (3, 2), (2, 1)]:
        centres = blobs(n_groups=1, d=d, n_classes=n_classes, separation=4.0).extra["centres"]
        apart = torch.cdist(centres, centres) + 1e9 * torch.eye(n_classes)
        if n_classes > 1:
            assert abs(float(apart.min()) - 4.0) < 1e-4


def test_unequal_clients_have_between_a_quarter_and_all():
    sizes = blobs(clients_per_group=100, n=60, unequal=True).sizes("train")
    assert (int(sizes.min()), int(sizes.max())) == (15, 60)
    assert blobs().sizes("train").tolist() == [60] * 18


# Digits


def images() -> torch.Tensor:
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().images).float() / 16


@pytest.mark.parametrize("flat", [True, False])
def test_digits_are_turned_by_the_group(flat):
    data = digits(n_clients=8, n_groups=8, flat=flat)
    assert data.sample_shape == ((64,) if flat else (1, 8, 8))
    for client in range(8):
        batch = data.gather("train", torch.tensor([client]))
        rows = data.rows["train"].of_clients(torch.tensor([client])).index
        upright = images()[rows]
        expected = torch.rot90(upright.flip(2) if client >= 4 else upright, client % 4, (1, 2))
        assert torch.equal(batch.x.reshape(-1, 8, 8), expected)
        assert torch.equal(batch.y[0], data.y[rows].long())


def test_every_view_is_another_order_of_the_pixels():
    table = digits(n_clients=12, n_groups=12).transform.table
    assert table.shape == (12, 64)
    assert len(table.unique(dim=0)) == 12
    assert (table.sort(1).values == torch.arange(64)).all()
    assert not torch.equal(table, digits(n_clients=12, n_groups=12, seed=1).transform.table)


@pytest.mark.parametrize(("n_clients", "n_groups"), [(40, 4), (200, 4), (7, 3), (4, 4)])
def test_a_group_has_every_image_once(n_clients, n_groups):
    data = digits(n_clients=n_clients, n_groups=n_groups)
    assert data.truth.bincount(minlength=n_groups).max() <= -(-n_clients // n_groups)
    for group in range(n_groups):
        ids = (data.truth == group).nonzero().flatten()
        rows = [data.rows[split].of_clients(ids).index for split in ("train", "test")]
        assert torch.cat(rows).sort().values.tolist() == list(range(1797))
    total = data.sizes("train") + data.sizes("test")
    for group in range(n_groups):
        own = total[data.truth == group]
        assert own.max() - own.min() <= 1


def test_fewer_images_on_request():
    data = digits(per_client=30, test_fraction=0.5)
    assert data.sizes("train").tolist() == [15] * 40
    assert data.sizes("test").tolist() == [15] * 40
    data = digits(n_clients=4, n_max=100)
    assert (data.sizes("train") + data.sizes("test")).tolist() == [100] * 4


def test_the_images_are_stored_once_as_bytes():
    data = digits(n_clients=200)
    assert data.x.shape == (1797, 64)
    assert data.x.dtype == torch.uint8
    x = data.gather("train", torch.arange(4)).x
    assert x.dtype == torch.float32
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert data.classes == tuple("0123456789")
