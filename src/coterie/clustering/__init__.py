"""Functions for clustering; inputs and outputs are tensors or arrays.

Import from the modules: `labels` (numbering and means), `kmeans`, `hierarchical` (Ward),
`choose_k` (how many clusters), `matching` (clusters to models), `evidence` (where a new row
belongs, and whether it belongs anywhere); for components inside the data: `lloyd` (k-means with
randomness from a key), `overlap` (balls that overlap), `ward` (merges of components that clients
share). Everything is computed in float64 on the CPU.
"""
