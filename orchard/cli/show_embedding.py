"""What `orchard show` says of an embedding model beside the rest: what comes out of it, and how long a text may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchard.weights.folder import HFFolder


def embedding_facts(folder: HFFolder) -> dict[str, Any]:
    """`{"embedding": …}` of an open folder; nothing for a model that writes."""
    from orchard.weights.sentence import is_encoder, sentence_of

    if not is_encoder(folder.config):
        return {}
    found = sentence_of(folder)
    return {"embedding": {"dimensions": found.dim, "max_tokens": found.max_tokens, "pooling": found.pooling}}


def embedding_lines(facts: dict[str, Any]) -> dict[str, str]:
    """The same for a person, in place of what an embedding model does not have."""
    how = {"mean": "the mean of a text's tokens", "first": "a text's first token", "max": "the largest of each channel"}
    return {
        "kind": "embedding model: turns texts into vectors, and does not write",
        "dimensions": f"{facts['dimensions']:,} ({how[facts['pooling']]}, length 1)",
        "context": f"{facts['max_tokens']:,} tokens a text",
        "template": "",
    }
