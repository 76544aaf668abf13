import pytest
import torch

from coterie.clustering.evidence import REFUSAL, chance, no_reference, reference, weigh

CENTRES = torch.tensor([[0.2, 1.0, 1.5, 2.0], [1.2, 0.3, 1.5, 2.0], [1.4, 1.1, 0.1, 2.0]])
PER_GROUP = 20


def draw(groups, samples, seed):
    """Loss vectors of clients with `samples` samples: deviation 1 / sqrt(samples), correlated."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(len(groups), 1, generator=generator)
    own = torch.randn(len(groups), 4, generator=generator)
    return CENTRES[groups] + (0.8 * shared + 0.6 * own) / samples**0.5


def members(seed, per_group=PER_GROUP):
    labels = torch.arange(3).repeat(per_group)
    return reference(draw(labels, 400, seed), labels, torch.full(labels.shape, 400), n_groups=3)


@pytest.fixture
def known():
    return members(seed=0)


def test_reference_worked_by_hand():
    # Group 0 holds (0, 0), (2, 0), (1, 3), centroid (1, 1); group 2 holds one; group 1 nobody.
    # Squares 2, 6, products 0; divisor 4 members - 2 groups.
    vectors = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0], [9.0, 9.0]])
    labels = torch.tensor([0, 0, 0, 2])
    known = reference(vectors, labels, torch.tensor([10, 10, 10, 10]), n_groups=3)
    assert known.centroids[[0, 2]].tolist() == [[1.0, 1.0], [9.0, 9.0]]
    assert known.centroids[1].isnan().all()
    assert known.spread.tolist() == [[1.0, 0.0], [0.0, 3.0]]
    assert known.noise.tolist() == [1.0, 3.0]
    assert known.size.item() == 10
    # Without itself: (0, 0) is (-1.5, -1.5) off, q = (2.25 + .75) / 2; (1, 3) is (0, 3) off,
    # q = (0 + 3) / 2. All three are equally far, at 1.5. But chance allows more with two degrees of
    # freedom: A = S, so D = 2, F(2, 2) = .99 / .01 = 99, (1 + 2 / 4) 99 / 1.5.
    assert chance(known, members=4, groups=2) == pytest.approx(1.5 * 99, rel=1e-8)
    assert known.worst.item() == pytest.approx(99, rel=1e-8)


def test_the_worst_member_sets_the_scale_of_long_tails():
    # 99 members at +-1 in turn and one at 12 in a group: the outlier is farther than chance allows.
    vectors = torch.ones(100, 1)
    vectors[::2] = -1
    vectors[0] = 12
    known = reference(vectors, torch.zeros(100, dtype=torch.int64), torch.full((100,), 10), 1)
    mean = 13 / 100  # 12 + 50 - 49
    spread = (144 + 99 - 100 * mean**2) / 99
    worst = ((12 - mean) * 100 / 99) ** 2 / spread
    assert known.worst.item() == pytest.approx(worst, rel=1e-6)
    assert REFUSAL * worst > chance(known, members=100, groups=1)


def test_chance_counts_the_dimensions_in_which_members_differ():
    # S = [[2, 2], [2, 2]]: A has eigenvalue 3.4 along (1, 1), B is 4 / 3.4 there and 0 elsewhere,
    # so D = 1. Three members in a group leave f = 2: F(1, 2) = 98.5025, the square of t = 9.92484.
    vectors = torch.tensor([[2.0, 2.0], [0.0, 0.0], [-2.0, -2.0]]) / 2**0.5
    known = reference(vectors, torch.zeros(3, dtype=torch.int64), torch.full((3,), 10), n_groups=1)
    assert known.spread.flatten().tolist() == pytest.approx([2.0] * 4, rel=1e-6)
    by_hand = (1 + 1 / 3) * (4 / 3.4) / 2 * 9.924843**2
    assert chance(known, members=3, groups=1) == pytest.approx(by_hand, rel=1e-5)


def test_weighing_worked_by_hand():
    vectors = torch.tensor([[0.0], [2.0], [9.0], [11.0]])
    labels = torch.tensor([0, 0, 1, 1])
    known = reference(vectors, labels, torch.full((4,), 100), 2, noise=torch.tensor([1.0]))
    # S = 2. At 3: q = 4 / 2 and 49 / 2. With 25 samples A = 2 + 1 * (4 - 1) = 5. Members lie at 2,
    # but four of them tell little: F(1, 2) = 98.5025, times 1 + 2 / 4, over 1.5.
    group, margin, score = weigh(known, torch.tensor([[3.0], [3.0]]), torch.tensor([100, 25]))
    assert group.tolist() == [0, 0]
    assert margin.tolist() == pytest.approx([45 / 53] * 2, rel=1e-8)
    assert score.tolist() == pytest.approx([2 / 98.5025, 0.8 / 98.5025], rel=1e-6)


def test_correlation_is_shrunk_by_three_tenths():
    # Centroid 0, S = [[2, 2], [2, 2]] (two members, one group): A = [[2, 1.4], [1.4, 2]].
    vectors = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    known = reference(vectors, torch.tensor([0, 0]), torch.tensor([5, 5]), n_groups=1)
    _, margin, score = weigh(known, torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([5, 5]))
    # Eigenvalues .6 and 3.4. Two members leave one degree of freedom: F(1, 1) = 4052.18.
    worst = (1 + 1 / 2) * (4 / 3.4) / 2 * 4052.1807 / REFUSAL
    assert score.tolist() == pytest.approx([2 / 0.6 / 2 / worst, 2 / 3.4 / 2 / worst], rel=1e-6)
    assert margin.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("samples", [50, 100, 400, 1600])
@pytest.mark.parametrize("per_group", [4, 5, 20])
def test_newcomers_of_any_size_are_placed_and_seldom_refused(samples, per_group):
    # Measured: 0-2 % on average. By the worst member alone, four members a group refused 10 %, and
    # the unluckiest federation half of all newcomers.
    groups = torch.arange(3).repeat(100)
    sizes = torch.full(groups.shape, samples)
    refused = []
    for seed in range(40):
        known = members(seed, per_group)
        placed, margin, score = weigh(known, draw(groups, samples, 100 + seed), sizes)
        assert (placed == groups).float().mean() > 0.99
        assert margin.median() > 0.3
        assert ((margin >= 0) & (margin <= 1)).all()
        refused.append((score > REFUSAL).double().mean())
    refused = torch.stack(refused)
    assert refused.mean() <= 0.03
    assert refused.max() <= 0.15


def test_small_newcomers_would_be_refused_without_the_allowance(known):
    groups = torch.arange(3).repeat(100)
    _, _, score = weigh(known, draw(groups, 50, 1), torch.full(groups.shape, 400))
    assert (score > REFUSAL).float().mean() > 0.2


def test_fewer_samples_never_raise_the_score_and_more_than_members_change_nothing(known):
    vector = draw(torch.tensor([0]), 20, 2).repeat(5, 1)
    _, _, score = weigh(known, vector, torch.tensor([10, 50, 200, 400, 4000]))
    assert (score.diff() >= 0).all()
    assert score[3] == score[4]
    assert score[0] < score[3]


@pytest.mark.parametrize(
    "foreign",
    [
        [2.5, 2.5, 2.5, 2.5],  # unlike anything
        [0.7, 0.65, 1.5, 2.0],  # half and half of groups 0 and 1
        [0.2, 1.0, 1.5, 3.0],  # group 0 but for one model that separates nobody
    ],
)
def test_foreign_vectors_are_refused(known, foreign):
    _, _, score = weigh(known, torch.tensor([foreign]), torch.tensor([100]))
    assert score.item() > REFUSAL


def test_halfway_between_groups_has_no_margin(known):
    halfway = known.centroids[:2].mean(0, keepdim=True)
    _, margin, _ = weigh(known, halfway, torch.tensor([400]))
    assert margin.item() == pytest.approx(0, abs=1e-9)


def test_permuting_members_and_models_changes_nothing():
    labels = torch.arange(3).repeat(PER_GROUP)
    vectors, sizes = draw(labels, 400, 0), torch.arange(300, 300 + len(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    models = torch.tensor([2, 0, 3, 1])
    newcomers, samples = draw(torch.tensor([2, 0, 1]), 100, 4), torch.tensor([100, 90, 80])
    plain = weigh(reference(vectors, labels, sizes, 3), newcomers, samples)
    permuted = weigh(
        reference(vectors[order][:, models], labels[order], sizes[order], 3),
        newcomers[:, models],
        samples,
    )
    for one, other in zip(plain, permuted, strict=True):
        assert torch.allclose(one, other)


def test_only_groups_with_members_are_eligible():
    labels = torch.tensor([3, 3, 1, 1])
    vectors = torch.tensor([[0.0], [0.2], [5.0], [5.2]])
    known = reference(vectors, labels, torch.full((4,), 10), n_groups=5)
    group, _, _ = weigh(known, torch.tensor([[0.3], [4.0]]), torch.tensor([10, 10]))
    assert group.tolist() == [3, 1]


@pytest.mark.parametrize("noise", [None, torch.tensor([0.1, 0.1]), torch.zeros(2)])
@pytest.mark.parametrize(
    ("vectors", "labels"),
    [
        ([[0.1, 0.3], [5.0, 5.0]], [0, 1]),  # everyone alone
        ([[0.1, 0.3]] * 3 + [[5.0, 5.0]], [0, 0, 0, 1]),  # equal members
    ],
)
def test_without_scatter_newcomers_are_placed_but_never_refused(vectors, labels, noise):
    labels = torch.tensor(labels)
    known = reference(torch.tensor(vectors), labels, torch.full(labels.shape, 10), 2, noise)
    assert known.worst.isnan()
    newcomers = torch.tensor([[1.0, 1.0], [4.0, 9.0]])
    group, margin, score = weigh(known, newcomers, torch.tensor([10, 3]))
    assert group.tolist() == [0, 1]
    assert margin.isfinite().all()
    assert score.isnan().all()
    assert not (score > REFUSAL).any()


def test_a_model_on_which_all_members_agree_does_not_break_the_metric():
    vectors = torch.tensor([[0.0, 1.0], [2.0, 1.0], [9.0, 1.0], [11.0, 1.0]])
    known = reference(vectors, torch.tensor([0, 0, 1, 1]), torch.full((4,), 10), n_groups=2)
    group, _, score = weigh(known, torch.tensor([[10.5, 1.0]]), torch.tensor([10]))
    assert group.item() == 1
    assert score.item() < 1


def test_without_a_reference_the_smallest_loss_decides():
    losses = torch.tensor([[3.0, 1.0, 2.0], [0.5, 0.5, 4.0], [0.0, 0.0, 0.0]])
    group, margin, score = weigh(no_reference(3, 3), losses, torch.tensor([10, 10, 10]))
    assert group.tolist() == [1, 0, 0]
    assert margin.tolist() == pytest.approx([1 / 3, 0, 0])
    assert score.isnan().all()


def test_without_a_reference_one_model_is_certain():
    group, margin, _ = weigh(no_reference(1, 1), torch.tensor([[3.0]]), torch.tensor([10]))
    assert group.tolist() == [0]
    assert margin.tolist() == [1.0]


def test_every_reference_has_the_same_structure(known):
    for full, empty in zip(known, no_reference(3, 4), strict=True):
        assert full.shape == empty.shape
        assert full.dtype == empty.dtype == torch.float64
        assert empty.isnan().all()


def test_nobody_in_any_group_is_no_reference():
    empty = reference(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), torch.zeros(0), 2)
    group, _, score = weigh(empty, torch.tensor([[2.0, 1.0]]), torch.tensor([10]))
    assert group.tolist() == [1]
    assert score.isnan().all()
