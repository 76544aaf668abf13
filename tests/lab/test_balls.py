"""Pictures of mosaic are written, and say what is there."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from PIL import Image

from coterie.algorithms import Mosaic
from coterie.core.errors import ConfigError
from coterie.data.mixture import mixture_tight
from coterie_lab.figures.balls import (
    _spread,
    balls_animation,
    balls_picture,
    convergence_picture,
    path_picture,
)
from coterie_lab.figures.frames import watch


@pytest.fixture(scope="module")
def watched():
    data = mixture_tight(3, 3, 2, 40, 8.0, 2, 3, seed=1)
    return (*watch(Mosaic(n_components="facts", covariance="tied", rounds=3, refine=1), data), data)


def test_a_frame_after_each_exchange(watched):
    frames, state, data = watched
    titles = [frame.title for frame in frames]
    assert titles[-4:] == ["merge", "feedback 1", "feedback 2", "refinement 1"]
    assert titles[0] == "round 1"
    assert (frames[0].radii > 0).any()
    assert (frames[0].group == -1).all()
    assert len(frames[-1].merged) == len(state.groups.n) == 3
    assert len(frames[0].centres) == int(data.client_facts["n_components"].sum())


def test_moments_are_chosen_from_every_stage(watched):
    titles = [frame.title for frame in _spread(watched[0], 6)]
    assert titles[0] == "round 1"
    assert {"merge", "feedback 2", "refinement 1"} <= set(titles)


@pytest.mark.slow
def test_pictures_are_written(watched, tmp_path):
    frames, state, data = watched
    picture = balls_picture(frames, tmp_path / "balls.png", data.x.numpy())
    assert Image.open(picture).size[0] > 800
    moving = Image.open(balls_animation(frames, tmp_path / "balls.gif"))
    assert moving.n_frames == len(frames)
    path = path_picture(state.curve.numpy(), tmp_path / "path.png")
    assert Image.open(path).size == (750, 420)
    curves = {"8 apart": 0.5 ** np.arange(9.0), "8 apart, alone": 0.1 ** np.arange(9.0)}
    assert Image.open(convergence_picture(curves, tmp_path / "rates.png")).size == (750, 440)


def test_many_features_are_projected(tmp_path):
    data = mixture_tight(3, 3, 5, 40, 8.0, 2, 3, seed=1)
    frames, _ = watch(Mosaic(n_components="facts", covariance="tied", rounds=2, refine=1), data)
    assert balls_picture(frames, tmp_path / "balls.png").exists()


def test_without_a_path_there_is_no_picture(tmp_path):
    with pytest.raises(ConfigError, match="The curve is empty"):
        path_picture(np.zeros((0, 3)), tmp_path / "path.png")
