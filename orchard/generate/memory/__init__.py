"""Long conversations in fixed memory: one sequence's keys and values under a budget of slots."""
