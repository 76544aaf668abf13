"""coterie resume"""

from coterie.cli.options import Folder, Trust


def resume(folder: Folder, trust: Trust = None) -> None:
    """Continue a run that was stopped, with exactly the results of a run that was not.

    Example:

      coterie resume runs/a
    """
    from coterie import fitted

    fit = fitted.resume(folder, trust=trust or (), progress=True)
    print(f"\n{fit}")
