"""Plans: a model as a flat list of steps that one native call runs."""
