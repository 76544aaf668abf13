"""Pictures of mixtures are drawn, whatever the number of components."""

import pytest
import torch

from coterie.report.mixture_pictures import proportions_picture
from coterie_lab.figures import mixtures as pictures

TRUE = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.5, 0.3], [0.0, 0.3, 0.7]])


def two(values):
    return torch.stack([values[:, 0], 1 - values[:, 0]], 1).tolist()


@pytest.fixture(autouse=True)
def _drawing():
    pytest.importorskip("matplotlib")


def test_every_picture_is_written(tmp_path):
    made = [
        pictures.shares_picture(two(TRUE), {"counts": two(TRUE * 0.8)}, tmp_path / "a.png"),
        proportions_picture(
            ["x", "y", "z"], TRUE.tolist(), (TRUE * 0 + 0.03).tolist(), tmp_path / "b.png"
        ),
        pictures.eigenvalue_picture([46.0, 21.0, 1.9], [2.8, 2.7, 2.6], tmp_path / "c.png"),
        pictures.ternary_picture(TRUE.tolist(), TRUE.flip(0).tolist(), tmp_path / "d.png"),
        pictures.experts_picture([0, 5], [[[0.5, 0.1], [0.1, 0.5]]] * 2, tmp_path / "e.png"),
        pictures.samples_picture({0: torch.rand(2, 3, 1, 4, 4)}, tmp_path / "f.png"),
        pictures.samples_picture({0: torch.rand(2, 3, 3, 4, 4)}, tmp_path / "g.png"),
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_one_component_has_no_direction(tmp_path):
    path = pictures.eigenvalue_picture([1.9, 1.5], [2.8, 2.7], tmp_path / "c.png")
    assert path.exists()
