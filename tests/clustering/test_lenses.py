import math
import warnings

import pytest
import torch

from coterie.clustering.lenses import (
    Block,
    View,
    class_moments,
    class_sums,
    conditional,
    curves,
    evidence,
    joint,
    look,
    sound,
    weigh,
    yardstick,
)
from coterie.clustering.noise import weighted_ward

REAL = torch.tensor([True, True, True, False])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_moments_by_hand():
    # Class 0: losses 1 and 3, mean 2, variance 1; class 1: one loss of 5; a padded row counts
    # nowhere, whatever it holds.
    losses = torch.tensor([[1.0, 3.0, 5.0, math.nan]])
    block = class_moments(losses, torch.tensor([0, 0, 1, 1]), REAL, 3)
    assert block.counts.tolist() == [2, 1, 0]
    assert block.mean[0].tolist() == pytest.approx([2, 5, 0])
    assert block.variance[0].tolist() == pytest.approx([1, 0, 0])


def test_a_real_nan_is_seen():
    losses = torch.tensor([[1.0, math.nan, 5.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    block = class_moments(losses, torch.tensor([0, 0, 1, 1]), REAL, 2)
    two = Block(*(torch.stack([part, torch.ones_like(part)]) for part in block))
    with pytest.warns(UserWarning, match="1 of 2 clients answered the survey"):
        assert sound(two).tolist() == [False, True]


def test_sums_see_what_the_mean_loss_does_not():
    # One sample of class 0 with loss log 2 + .3, one of class 1 with log 2 - .3: the mean loss is
    # log 2, the sums over classes are .15 and -.15.
    losses = torch.tensor([[math.log(2) + 0.3, math.log(2) - 0.3]]).double()
    block = class_moments(losses, torch.tensor([0, 1]), torch.tensor([True, True]), 2)
    sums = class_sums(block, math.log(2))
    assert sums.mean[0].tolist() == pytest.approx([0.15, -0.15])
    # .5 * .09 - .15^2
    assert sums.variance[0].tolist() == pytest.approx([0.0225, 0.0225])
    assert sums.n == 2


def test_conditional_units_by_hand():
    # Two clients, one network, one class of 3 samples each: means 1 and 3, variances 2 and 4.
    # t2 = (3 * 2 + 3 * 4) / (2 + 2) = 4.5; centre 2; rows -+1 / sqrt 4.5, weight 3.
    counts, ones = torch.tensor([[3.0], [3.0]]), torch.ones(2, 1, 1)
    view = conditional(
        Block(counts, torch.tensor([[[1.0]], [[3.0]]]), ones * 2 + ones.cumsum(0) * 0)
    )
    assert view.weight.flatten().tolist() == [3, 3]
    two = Block(counts, torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[[2.0]], [[4.0]]]))
    view = conditional(two)
    assert view.x.flatten().tolist() == pytest.approx([-1 / math.sqrt(4.5), 1 / math.sqrt(4.5)])
    # A newcomer in the same units: mean 5 lies 3 from the centre.
    new = Block(torch.tensor([[1.0]]), torch.tensor([[[5.0]]]), torch.tensor([[[99.0]]]))
    assert conditional(new, view.scale).x.item() == pytest.approx(3 / math.sqrt(4.5))


def test_missing_classes_and_columns_without_variance_do_not_count():
    counts = torch.tensor([[5.0, 0.0], [5.0, 5.0], [5.0, 5.0]])
    mean = torch.tensor([[[1.0, 0.0]], [[1.0, 2.0]], [[1.0, 4.0]]])
    variance = torch.tensor([[[0.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]]])
    view = conditional(Block(counts, mean, variance))
    assert view.weight.tolist() == [[0, 0], [0, 5], [0, 5]]


def made(share, shift, n, seed, r=4):
    """Blocks of clients whose losses depend on class and client, from samples drawn one by one."""
    draw, blocks = generator(seed), []
    c = share.shape[1]
    base = torch.randn(r, c, generator=generator(99)).double()
    for i in range(len(share)):
        label = torch.multinomial(share[i], int(n[i]), replacement=True, generator=draw)
        noise = torch.randn(r, int(n[i]), generator=draw).double()
        losses = base[:, label] + shift[i][:, label] + noise
        blocks.append(class_moments(losses, label, torch.ones(int(n[i])).bool(), c))
    return Block(*(torch.stack(parts) for parts in zip(*blocks, strict=True)))


def both(block):
    return {"conditional": conditional(block), "joint": joint(class_sums(block, 0.0))}


def sizes(m, seed):
    return torch.randint(50, 501, (m,), generator=generator(seed))


def test_label_shares_are_seen_by_the_joint_lens_alone():
    # The same losses within a class for everybody, label shares from Dirichlet(1).
    draw = torch.distributions.Dirichlet(torch.ones(6))
    torch.manual_seed(3)
    share = draw.sample((40,))
    views = both(made(share, torch.zeros(40, 4, 6), sizes(40, 1), 5))
    ratio = {lens: float(weighted_ward(v.x, v.weight).ratio[0]) for lens, v in views.items()}
    assert ratio["conditional"] == pytest.approx(1.0, abs=0.15)
    assert ratio["joint"] > 10
    seen = look(views, limit=10)
    assert (seen.kind, seen.k, seen.loose, seen.lens) == (
        "client by client",
        1,
        True,
        "conditional",
    )


def test_kinds_and_numbers():
    even, m = torch.full((24, 6), 1 / 6), 24
    group = torch.arange(m) % 3
    shift = torch.randn(3, 4, 6, generator=generator(2)).double()[group]
    zero = torch.zeros(m, 4, 6)
    seen = look(both(made(even, zero, sizes(m, 2), 6)), limit=8)
    assert (seen.kind, seen.k, seen.labels.tolist()) == ("one", 1, [0] * m)
    seen = look(both(made(even, shift, sizes(m, 3), 7)), limit=8)
    assert (seen.kind, seen.k, seen.lens) == ("meaning", 3, "conditional")
    assert torch.equal(seen.labels, group)
    skew = torch.eye(6)[:3][group] * 0.6 + 0.4 / 6
    seen = look(both(made(skew, zero, sizes(m, 4), 8)), limit=8)
    assert (seen.kind, seen.k, seen.lens) == ("labels", 3, "joint")
    assert torch.equal(seen.labels, group)
    # Groups that differ within classes count, whatever shares clients have in them.
    seen = look(
        both(made(skew[torch.randperm(m, generator=generator(1))], shift, sizes(m, 5), 9)), 8
    )
    assert (seen.kind, seen.k) == ("meaning", 3)
    # Everybody differs: no number fits, and the silhouette's proposal is flagged.
    own = torch.randn(m, 4, 6, generator=generator(4)).double()
    seen = look(both(made(even, own, sizes(m, 6), 10)), limit=8)
    assert (seen.kind, seen.loose) == ("client by client", True)
    assert 2 <= seen.k <= 8


def test_a_known_number_keeps_the_lens():
    even, group = torch.full((12, 6), 1 / 6), torch.arange(12) % 3
    shift = torch.randn(3, 4, 6, generator=generator(2)).double()[group]
    seen = look(both(made(even, shift, torch.full((12,), 300), 1)), limit=2, n_groups=3)
    assert (seen.k, seen.lens) == (3, "conditional")
    assert torch.equal(seen.labels, group)
    assert look(both(made(even, shift, torch.full((12,), 300), 1)), 10, n_groups=99).k == 12


def test_without_classes_the_joint_lens_stands_alone():
    group = torch.arange(12) % 2
    shift = torch.tensor([0.0, 2.0])[group][:, None, None].expand(12, 4, 1)
    block = made(torch.ones(12, 1), shift, torch.full((12,), 100), 3)
    seen = look({"joint": joint(class_sums(block, 0.0))}, limit=6)
    assert (seen.kind, seen.k, seen.lens) == ("meaning", 2, "joint")


def test_newcomers_are_placed_and_strangers_refused():
    even, group = torch.full((18, 6), 1 / 6), torch.arange(18) % 3
    centre = torch.randn(4, 4, 6, generator=generator(2)).double()
    views = both(made(even, centre[group], sizes(18, 1), 11))
    seen = look(views, limit=8)
    known = yardstick(seen.view, seen.labels)
    assert known.worst >= 1
    home = torch.tensor([2, 0, 1, 3])  # the last is of a group nobody has met
    new = made(even[:4], centre[home], torch.tensor([50, 100, 500, 100]), 12)
    place, margin, score = weigh(known, conditional(new, known.scale))
    assert place[:3].tolist() == [2, 0, 1]
    assert margin[:3].min() > 0.3
    assert (score > 1.5).tolist() == [False, False, False, True]
    # The newcomer's own scatter changes neither: only its means are used.
    wide = conditional(new._replace(variance=100 * new.variance), known.scale)
    assert torch.equal(weigh(known, wide)[0], place)
    assert torch.equal(weigh(known, wide)[2], score)


def test_a_newcomer_without_a_common_class_is_not_judged():
    view = View(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [1.0, 0.0]]), None)
    known = yardstick(view, torch.tensor([0, 0]))
    new = View(torch.ones(1, 2), torch.tensor([[0.0, 4.0]]), None)
    place, margin, score = weigh(known, new)
    assert (place.item(), margin.item()) == (0, 0)
    assert score.isnan().all()


def test_evidence_is_what_the_look_saw():
    even, group = torch.full((12, 6), 1 / 6), torch.arange(12) % 3
    shift = torch.randn(3, 4, 6, generator=generator(2)).double()[group]
    seen = look(both(made(even, shift, torch.full((12,), 300), 1)), limit=6)
    lines = evidence(curves(seen, 9), seen.kind, seen.lens)
    assert [line.name for line in lines] == ["conditional", "joint"]
    assert lines[0].decides
    assert not lines[1].decides
    assert lines[0].chosen == 3
    assert lines[0].ks == (1, 2, 3, 4, 5, 6)
    assert lines[0].values == pytest.approx(seen.choices["conditional"].ratio)


def test_sound_answers_raise_no_warning():
    block = made(torch.ones(2, 1), torch.zeros(2, 4, 1), torch.tensor([5, 5]), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sound(block).all()
