"""coterie place"""

from coterie.cli.options import Data, Folder, Json, Trust, print_json


def place(folder: Folder, data: Data, trust: Trust = None, json: Json = False) -> None:
    """Find the group of a new client, and say whether it fits any group.

    Rows without the label column are placed by their inputs, if these tell the group.

    Example:

      coterie place runs/a --data new-site.csv
    """
    from coterie.fitted import load

    spot = load(folder, trust=trust or ()).place(str(data))
    if json:
        content = spot._asdict()
        if content.pop("candidates"):  # none: placed by labels, or in no group
            content |= {"candidates": spot.candidates, "needs_labels": spot.needs_labels}
        print_json(content)
    else:
        print(f"{data.stem}: {spot}")
