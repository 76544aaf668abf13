"""Statistics behind advice, verdict and placement: tensors in, plain results out.

Import from the modules: `summaries` (what one client computes), `replication` (what differs between
clients beyond chance), `grouping` (how many groups, members, odd clients), `placing` (newcomers and
drift), `gains` (intervals of what one strategy gains over another), `recommend` (which strategy to
use), `why` (in what groups differ). Nothing here knows a client, a federation or a file.
Everything is computed in float64 on the CPU.
"""
