"""The laboratory: published tables, public data sets, benchmarks and studies.

It imports the library `coterie`, never the other way. The library finds it through the entry points
`coterie.plugins` (data sets and networks by name) and `coterie.commands` (`coterie reproduce`,
`coterie bench`, `coterie data`).
"""
