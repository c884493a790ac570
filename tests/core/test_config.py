"""The config tree: how it is built, and the rules for writing configs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import field
from typing import Any

import pytest

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError
from tests.core.config_cases import Leaf, Node, Wide, Wrapper, tree

# Building -------------------------------------------------------------------------------------------------------------


def test_build_wires_parents_first_and_leaves_the_config_alone() -> None:
    cfg = tree().clone(dim=16)
    node = cfg.build()
    assert node.config.right.half == 4 and node.config.right.layers[0].dim == 4
    assert node.left.config.dim == 8 and node.config.named["a"].dim == 8 and node.config.pair[0].dim == 8
    assert cfg.left.dim is REQUIRED and cfg.half is REQUIRED  # the tree that was built is a copy


def test_complete_twice_is_complete_once() -> None:
    once = tree().clone(dim=16).complete()
    assert once.complete() == once


def test_everything_missing_is_named_at_once() -> None:
    cfg = Wrapper.Config(dim=4, inner=Node.Config(left=Wrapper.Config(), right=Wide.Config(width=REQUIRED)))
    cfg = cfg.set("inner.layers", [Wrapper.Config(), Leaf.Config(name=REQUIRED)])
    with pytest.raises(ConfigError) as caught:
        cfg.complete()
    message = str(caught.value)
    for path in ("inner.left.inner", "inner.right.width", "inner.layers[0].inner", "inner.layers[1].name"):
        assert path in message
    assert "inner.dim" not in message and "half" not in message  # what wire() fills is not missing
    assert caught.value.hint


def test_a_wire_that_computes_with_a_missing_field_still_gets_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        Node.Config(layers=[Leaf.Config(), Wrapper.Config()]).complete()
    message = str(caught.value)
    assert "dim" in message and "half" in message
    assert "left.dim" not in message  # the node could not be wired, so what it would have filled is not blamed


@pytest.mark.parametrize(
    "use",
    [
        bool,
        len,
        iter,
        int,
        float,
        lambda x: x * 2,
        lambda x: 2 * x,
        lambda x: x < 1,
        lambda x: x >= 1,
        lambda x: x % 2,
        lambda x: x // 2,
        lambda x: x[0],
        lambda x: x.store,
        lambda x: setattr(x, "dim", 4),
    ],
)
def test_a_required_field_cannot_be_computed_with(use: Any) -> None:
    with pytest.raises(ConfigError, match="before it was filled"):
        use(REQUIRED)


def test_a_wire_that_reads_what_is_filled_only_later_is_refused() -> None:
    class Hasty(Configurable):
        @config
        class Config(BaseConfig):
            dim: int = 8
            double: int = 0
            node: BaseConfig = field(default_factory=Node.Config)

            def wire(self) -> None:
                self.node.dim = self.dim  # type: ignore[attr-defined]
                self.double = self.node.half * 2  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match="wired before"):
        Hasty.Config().complete()


def test_runtime_arguments_reach_the_constructor_but_may_not_shadow_fields() -> None:
    assert Leaf.Config(dim=1).build(device="there").device == "there"
    with pytest.raises(ConfigError, match=r"\['width'\] are config fields"):
        Leaf.Config(dim=1).build(width=3)


def test_a_config_without_a_class_cannot_be_built() -> None:
    @config
    class Loose(BaseConfig):
        x: int = 1

    with pytest.raises(ConfigError, match="belongs to no class"):
        Loose().build()


# Rules for writing configs --------------------------------------------------------------------------------------------


def test_a_mistyped_attribute_raises() -> None:
    cfg = Leaf.Config(dim=1)
    with pytest.raises(AttributeError):
        cfg.widht = 5
    with pytest.raises(TypeError):
        Leaf.Config(widht=5)
    with pytest.raises(TypeError):
        Leaf.Config(1)  # keyword-only


@pytest.mark.parametrize("name", ["build", "walk", "get", "set", "find", "builds", "kind", "to_dict", "complete"])
def test_reserved_field_names_are_refused(name: str) -> None:
    body = {"__annotations__": {name: "int"}, "__module__": __name__, "__qualname__": "Bad"}
    with pytest.raises(TypeError, match=name):
        config(type("Bad", (BaseConfig,), body))


def test_a_subclass_needs_its_own_config() -> None:
    with pytest.raises(TypeError, match="Config of its own"):

        class Sub(Leaf):
            pass

    with pytest.raises(TypeError, match="Config of its own"):

        class Thief(Configurable):
            Config = Leaf.Config

    assert Leaf.Config.builds is Leaf


def test_a_config_needs_the_decorator() -> None:
    with pytest.raises(TypeError, match="@config"):

        class Plain(Configurable):
            class Config(Leaf.Config):
                extra: int = 1


def test_super_works_in_a_config_that_inherits() -> None:
    class Sub(Node):
        @config
        class Config(Node.Config):
            third: int = REQUIRED

            def wire(self) -> None:
                super().wire()
                self.third = self.dim // 3

    cfg = Sub.Config(dim=12).complete()
    assert (cfg.half, cfg.third, cfg.left.dim) == (6, 4, 6)
    assert Sub.Config.builds is Sub and Node.Config.builds is Node


def test_importing_the_config_tree_pulls_no_torch() -> None:
    code = "import sys, orchard.core.config, orchard.core.config_text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
