import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.clustering.labels import centroids, relabel

labellings = st.lists(st.integers(-3, 5), min_size=1, max_size=12).map(torch.tensor)


@given(labellings)
def test_relabel_keeps_the_partition_and_numbers_it_by_first_member(labels):
    new = relabel(labels)
    assert torch.equal(new[:, None] == new, labels[:, None] == labels)
    first = [new.tolist().index(g) for g in range(int(new.max()) + 1)]
    assert first == sorted(first)


@given(labellings)
def test_relabel_twice_changes_nothing_more(labels):
    assert torch.equal(relabel(relabel(labels)), relabel(labels))


def test_the_centroid_of_an_unused_label_is_nan():
    means = centroids(torch.tensor([[1.0], [3.0]]), torch.tensor([2, 2]), n_groups=4)
    assert means[2].item() == 2.0
    assert means[[0, 1, 3]].isnan().all()


def test_centroids_are_summed_in_double_precision():
    # In float32 the sum 2**24 + 1 rounds back to 2**24.
    points = torch.tensor([[2.0**24], [1.0]])
    assert centroids(points, torch.tensor([0, 0])).item() == (2**24 + 1) / 2
