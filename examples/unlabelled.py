"""Unlabelled samples in several places: how many kinds are there, and who holds which?"""

import coterie
from coterie.data import mixture_tight

# Eight clients; five kinds of samples, of which each client holds two to four.
data = mixture_tight(n_clients=8, n_clusters=5, d=5, n=100, separation=8.0, fewest=2, most=4)
fit = coterie.fit(data, "mosaic", compare=False)
found = fit.summary
print(f"{found['components']} kinds of samples were found; the truth is 5.")
print(fit.groups)
