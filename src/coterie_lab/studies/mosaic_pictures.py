"""Draw a run of mosaic in two dimensions: balls by round (PNG, GIF) and the path of merges."""

from pathlib import Path

from coterie.algorithms import Mosaic
from coterie.data.mixture import mixture_tight
from coterie_lab.figures.balls import balls_animation, balls_picture, path_picture
from coterie_lab.figures.frames import watch
from coterie_lab.studies.common import options


def main() -> None:
    parser = options(__doc__, 1)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the pictures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    data = mixture_tight(6, 5, 2, 120, 5.0, 2, 4, seed=3)
    frames, state = watch(Mosaic(n_components="facts", covariance="tied"), data)
    samples = data.x.numpy()
    for path in (
        balls_picture(frames, arguments.out / "mosaic-balls.png", samples),
        balls_animation(frames, arguments.out / "mosaic-balls.gif", samples),
        path_picture(state.curve.numpy(), arguments.out / "mosaic-path.png"),
    ):
        print(path)


if __name__ == "__main__":
    main()
