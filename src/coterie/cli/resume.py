"""coterie resume"""

from coterie.cli.options import Folder


def resume(folder: Folder) -> None:
    """Continue a run that was stopped, with exactly the results of a run that was not.

    Example:

      coterie resume runs/a
    """
    from coterie import fitted
    from coterie.running.build import build
    from coterie.running.folder import RunFolder

    target = RunFolder(folder)
    description = target.description()
    ready = build({k: v for k, v in description.items() if isinstance(v, dict)})
    fit = fitted.resume_run(ready, folder, progress=True)
    print(f"\n{fit}")
