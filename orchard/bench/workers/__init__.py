"""Programs that the benchmark starts as processes of their own; those called `peer_…` run where Orchard is not installed."""
