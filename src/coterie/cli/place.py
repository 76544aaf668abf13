"""coterie place"""

from coterie.cli.options import Data, Folder, Json, Trust


def place(folder: Folder, data: Data, trust: Trust = None, json: Json = False) -> None:
    """Find the group of a new client, and say whether it fits any group.

    Example:

      coterie place runs/a --data new-site.csv
    """
    from coterie.fitted import load

    spot = load(folder, trust=trust or ()).place(str(data))
    if json:
        import json as json_

        print(json_.dumps(spot._asdict()))
    else:
        print(f"{data.stem}: {spot}")
