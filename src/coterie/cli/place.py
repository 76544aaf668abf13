"""coterie place"""

from coterie.cli.options import Data, Folder, Json, Trust


def place(folder: Folder, data: Data, trust: Trust = None, json: Json = False) -> None:
    """Find the group of a new client, and say whether it fits any group.

    Rows without the label column are placed by their inputs, if these tell the group.

    Example:

      coterie place runs/a --data new-site.csv
    """
    from coterie.fitted import load

    spot = load(folder, trust=trust or ()).place(str(data))
    if json:
        import json as json_

        content = spot._asdict()
        if not content.pop("candidates"):  # placed by labels, or in no group
            print(json_.dumps(content))
        else:
            more = {"candidates": list(spot.candidates), "needs_labels": spot.needs_labels}
            print(json_.dumps(content | more))
    else:
        print(f"{data.stem}: {spot}")
