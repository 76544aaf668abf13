import json
import math

import pytest
import torch
from torch import nn

import coterie
from coterie.data import blobs, from_arrays


def labelled(share, n=120, seed=0, classes=4, shift=None):
    """Clients with given label shares and one cloud per class, the same for all unless shifted."""
    draw = torch.Generator().manual_seed(seed)
    clouds = 3 * torch.randn(classes, 2, generator=torch.Generator().manual_seed(9))
    xs, ys = [], []
    for i, row in enumerate(share):
        y = torch.multinomial(row, n, replacement=True, generator=draw)
        x = clouds[y] + torch.randn(n, 2, generator=draw)
        xs.append(x if shift is None else x + shift[i])
        ys.append(y)
    return from_arrays(xs, ys, n_outputs=classes, test_fraction=0.0)


EVEN = torch.full((12, 4), 0.25)


def test_one_model():
    advice = coterie.advise(labelled(EVEN))
    assert (advice.kind, advice.n_groups) == ("one", 1)
    assert set(advice.assignment.values()) == {0}
    assert str(advice).startswith("One model: the 12 clients differ by no more than chance.")


def test_groups_of_meaning():
    data = blobs(n_groups=3, clients_per_group=5, n=80)
    advice = coterie.advise(data)
    assert (advice.kind, advice.n_groups) == ("meaning", 3)
    assert list(advice.assignment) == list(data.names)
    assert [advice.assignment[name] for name in data.names] == data.truth.tolist()
    text = str(advice)
    assert text.startswith("3 groups (5, 5 and 5 clients). They differ in which inputs have which")
    assert "Cost: 3 exchanges, 32 B to" in text
    assert "Limits: a random network" in text


@pytest.mark.parametrize("seed", [6, 9])  # advice is uncertain: other folds find other odd clients
def test_training_begins_with_the_groups_of_the_advice(seed):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (10, 40), generator=draw)
    x = torch.randn(10, 40, 3, generator=draw) + y[..., None]
    x[::2, :, 0] += 0.7
    data = from_arrays(list(x), list(y))
    advice = coterie.advise(data, seed=seed)
    fit = coterie.fit(data, "census", rounds=1, compare=False, seed=seed)
    found = {row["client"]: row["group"] for row in fit.groups}
    assert list(fit.odd) == list(advice.odd)
    assert {name: found[name] for name in advice.assignment} == advice.assignment
    assert advice.confidence < 1


def test_inputs_are_told_from_meaning():
    # Two groups with other inputs; then two groups with the same inputs and other labels.
    shift = 2.0 * (torch.arange(12) % 2)[:, None, None]
    advice = coterie.advise(labelled(EVEN, shift=shift))
    assert (advice.n_groups, advice.evidence["inputs_differ"]) == (2, True)
    assert "They differ in their inputs, and perhaps in what a label means." in str(advice)
    data = labelled(EVEN)
    for client in range(0, 12, 2):
        rows = data.rows["train"].of_clients(torch.tensor([client])).index
        data.y[rows] = (data.y[rows] + 1) % 4
    advice = coterie.advise(data)
    assert (advice.n_groups, advice.evidence["inputs_differ"]) == (2, False)
    assert "The inputs alone show no difference beyond chance" in str(advice)
    assert "does not prove that they are alike" in str(advice)
    assert "Cost: 3 exchanges" in str(advice)  # losses, inputs, columns


def test_inputs_that_differ_in_no_column_are_told_apart():
    # Two columns that are correlated in half of the clients, and anticorrelated in the others:
    # their means and variances are alike.
    draw = torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(torch.tensor([[1.0, 0.8], [0.8, 1.0]]))
    xs, ys = [], []
    for i in range(12):
        x = torch.randn(150, 2, generator=draw) @ root.T
        xs.append(x * torch.tensor([1.0, 1.0 if i % 2 else -1.0]))
        ys.append(((x[:, 0] > 0) == (i % 2 == 0)).long())
    advice = coterie.advise(from_arrays(xs, ys, test_fraction=0.0))
    assert (advice.n_groups, advice.evidence["inputs_differ"]) == (2, True)


def test_groups_of_labels():
    share = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]).repeat(6, 1)
    advice = coterie.advise(labelled(share, seed=1))
    assert (advice.kind, advice.n_groups) == ("labels", 2)
    assert advice.evidence["label_overlap"] == 0
    assert "They have almost no label in common" in str(advice)
    share = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]).repeat(6, 1)
    advice = coterie.advise(labelled(share, n=400, seed=1))
    assert (advice.kind, advice.n_groups) == ("labels", 2)
    assert "They have many labels in common" in str(advice)


def test_label_shares_client_by_client():
    torch.manual_seed(1)
    share = torch.distributions.Dirichlet(torch.ones(4)).sample((20,))
    advice = coterie.advise(labelled(share, n=300))
    assert (advice.kind, advice.n_groups) == ("client by client", 1)
    assert set(advice.assignment.values()) == {0}
    assert "every client has its own, and no groups explain them" in str(advice)


def test_inputs_client_by_client():
    shift = 2 * torch.randn(12, 1, 2, generator=torch.Generator().manual_seed(4))
    advice = coterie.advise(labelled(EVEN, n=300, shift=shift), max_groups=5)
    assert (advice.kind, advice.n_groups) == ("client by client", None)
    assert sorted(advice.assignment.values()) == list(range(12))
    assert 2 <= advice.evidence["proposal"] <= 5
    assert "no number of groups up to 5 describes them" in str(advice)


def test_own_networks_and_clients_set_aside():
    data = blobs(n_groups=2, clients_per_group=5, n=80)
    first = int(data.rows["train"].of_clients(torch.tensor([3])).index[0])
    data.x[first] = math.nan
    net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match="not finite. Its reply is left out"):
        advice = coterie.advise(data, model=net)
    assert advice.n_groups == 2
    assert data.names[3] not in advice.assignment
    assert advice.evidence["set_aside"] == [data.names[3]]
    assert data.names[3] in str(advice)


def test_regression_and_reconstruction():
    torch.manual_seed(0)
    xs = [torch.randn(100, 3) + 1 for _ in range(10)]
    ys = [x.sum(1) * (1 if i % 2 else -1) for i, x in enumerate(xs)]
    advice = coterie.advise(from_arrays(xs, ys, task="regression", test_fraction=0.0))
    assert (advice.kind, advice.n_groups) == ("meaning", 2)
    assert "without classes" in str(advice)
    xs = [torch.randn(100, 6) + i % 2 for i in range(10)]
    advice = coterie.advise(from_arrays(xs, test_fraction=0.0))
    assert (advice.kind, advice.n_groups) == ("meaning", 2)


def test_odd_clients_are_named(tmp_path):
    data = labelled(torch.full((20, 4), 0.25))
    rows = data.rows["train"].of_clients(torch.tensor([7])).index
    data.y[rows] = torch.tensor([0, 3, 2, 1])[data.y[rows]]
    advice = coterie.advise(data)
    assert (advice.kind, advice.n_groups) == ("one", 1)
    assert list(advice.odd) == [data.names[7]]
    assert "rows of class" in advice.odd[data.names[7]]
    assert data.names[7] not in advice.assignment
    assert advice.explained > 0.5
    assert advice.worth > 0
    assert "One model: the 19 other clients differ by no more than chance" in str(advice)
    assert f"1 odd client, unlike all others. {data.names[7]}: its rows" in str(advice)
    assert json.loads(advice.to_json())["odd"] == [data.names[7]]


def test_more_clients_help():
    # A difference too small to be seen between a few clients is seen between many.
    found = {}
    for m in (8, 120):
        shift = 0.35 * (torch.arange(m) % 2)[:, None, None].float()
        advice = coterie.advise(labelled(torch.full((m, 4), 0.25), n=30, shift=shift), networks=16)
        found[m] = advice.n_groups
    assert found == {8: 1, 120: 2}


def test_as_json_table_and_picture(tmp_path):
    advice = coterie.advise(blobs(n_groups=2, clients_per_group=5, n=60))
    content = json.loads(advice.to_json())
    assert content["n_groups"] == 2
    assert content["kind"] == "meaning"
    assert content["evidence"]["curves"][0]["chosen"] == 2
    assert content["text"] == str(advice)
    assert "chosen" in str(advice.curves)
    assert advice.picture(tmp_path / "evidence.png").stat().st_size > 10_000
    assert advice._repr_html_().startswith("<p>2 groups")


def test_one_client_cannot_be_compared():
    with pytest.raises(coterie.CoterieError, match="at least two clients"):
        coterie.advise(blobs(n_groups=1, clients_per_group=1))
