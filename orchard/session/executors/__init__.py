"""What can answer a turn: a model on this machine, an endpoint on another, a script in a test."""
