"""Mathematics of clustering: tensors in, tensors out.

Import from the modules: `labels` (numbering and means), `kmeans`, `hierarchical` (Ward),
`choose_k` (how many clusters), `matching` (clusters to models), `evidence` (where a new row
belongs, and whether it belongs anywhere); of components inside the data: `mixtures` (one client's),
`overlap` (balls of uncertainty), `merging` (how many groups), `pooling` (their moments), `privacy`,
`central`. Everything is computed in float64 on the CPU.
"""
