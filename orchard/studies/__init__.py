"""Studies: one file for each published system. Its claim, a run that can refute it, a Report."""

from orchard.studies.harness import Outcome, available, card, results_folder, study

__all__ = ["Outcome", "available", "card", "results_folder", "study"]
