import pytest
import torch

from coterie.clustering import silhouette as module
from coterie.clustering.silhouette import silhouette


def test_silhouette_worked_by_hand():
    # a = 1 for all; b = 9.5, 8.5, 8.5, 9.5; alone would count 0.
    points = torch.tensor([[0.0], [1.0], [9.0], [10.0]])
    expected = (8.5 / 9.5 + 7.5 / 8.5) / 2
    assert silhouette(points, torch.tensor([0, 0, 1, 1])) == pytest.approx(expected)
    # {0}: 0; {1}: 0; 9: a 1, b 8; 10: a 1, b 9.
    expected = (7 / 8 + 8 / 9) / 4
    assert silhouette(points, torch.tensor([0, 1, 2, 2])) == pytest.approx(expected)


def test_silhouette_of_many_points_is_sampled_and_repeatable(monkeypatch):
    corners = torch.tensor([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0], [8.0, 8.0]])
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    points, labels = corners.repeat(100, 1) + 2 * noise, torch.arange(4).repeat(100)
    exact = silhouette(points, labels)
    monkeypatch.setattr(module, "SILHOUETTE_ROWS", 200)
    sampled = silhouette(points, labels)
    assert sampled == silhouette(points, labels) != exact
    assert sampled == pytest.approx(exact, abs=0.1)  # 200 scores of deviation 0.3: 5 errors
