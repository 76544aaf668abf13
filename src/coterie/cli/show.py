"""coterie show"""

from coterie.cli.options import Folder, Json


def show(folder: Folder, json: Json = False) -> None:
    """Show a finished run: what was found, its groups, its clients.

    Example:

      coterie show runs/a
    """
    from coterie.report.cards import shown
    from coterie.running.folder import RunFolder

    target = RunFolder(folder)
    if json:
        import json as json_

        files = target.final_files()
        content = {"summary": target.summary(), **json_.loads(files["groups.json"])}
        print(json_.dumps({**content, **json_.loads(files["clients.json"])}))
        return
    print(shown(target))
