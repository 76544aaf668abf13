"""Real federations with Flower: the app, the server, nodes and workers, and a local trial.

DIR/pyproject.toml, app/     a Flower app made from a run file (`coterie deploy init`)
DIR/run/                     the run folder of the server
DIR/state/                   files of a federation on this machine (`coterie deploy up`):
                             certificates, keys, the SuperLink's database, logs, process ids, nodes
"""
