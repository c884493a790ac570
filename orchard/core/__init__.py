"""What everything else stands on: configs, contexts, reports, errors, seeds, progress."""
