"""Training: optimisers, schedules, clipping, averages of weights."""
