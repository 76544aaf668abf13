"""Real federations through Flower: the app, the server, nodes and their workers, a trial at home.

DIR/pyproject.toml, app/     a Flower app made from a run file (`coterie deploy init`)
DIR/run/                     the server's run folder, as of any run
DIR/state/                   of a federation on this machine (`coterie deploy up`): certificates,
                             keys, the SuperLink's database, logs, process numbers, nodes
"""
