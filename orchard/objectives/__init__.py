"""Objectives: what training minimises. Each is `(model, batch) → Loss`, pure, built from a config."""

from orchard.objectives.aggregate import Aggregate, Baseline, GroupNormal, LeaveOneOut
from orchard.objectives.base import LanguageModel, Objective
from orchard.objectives.classify import Classify
from orchard.objectives.collected import WithCollected, with_collected
from orchard.objectives.distill import Distill, TopScores
from orchard.objectives.lm import NextToken
from orchard.objectives.logprobs import row_log_probs, token_log_probs
from orchard.objectives.mirror import MirrorDescent
from orchard.objectives.policy import PolicyGradient
from orchard.objectives.preference import Preference

__all__ = [
    "Aggregate",
    "Baseline",
    "Classify",
    "Distill",
    "GroupNormal",
    "LanguageModel",
    "LeaveOneOut",
    "MirrorDescent",
    "NextToken",
    "Objective",
    "PolicyGradient",
    "Preference",
    "TopScores",
    "WithCollected",
    "row_log_probs",
    "token_log_probs",
    "with_collected",
]
