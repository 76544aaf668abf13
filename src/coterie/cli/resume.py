"""coterie resume"""

from coterie.cli.options import Folder, Track, Trust, as_options


def resume(folder: Folder, trust: Trust = None, track: Track = None) -> None:
    """Continue a run that was stopped, with exactly the results of a run that was not.

    Examples:

      coterie resume runs/a

      coterie resume runs/a --track mlflow
    """
    from coterie import fitting

    fit = fitting.resume(folder, trust=trust or (), progress=True, track=track)
    print(as_options(f"\n{fit}"))
