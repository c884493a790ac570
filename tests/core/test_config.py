"""The config tree: building, copying, rewriting and addressing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import field
from typing import Any

import pytest

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError


class Leaf(Configurable):
    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        width: int = 4
        name: str = "leaf"

    def __init__(self, cfg: Config, *, device: str = "here") -> None:
        self.config = cfg
        self.device = device


class Wide(Configurable):
    """Shares dim, width and name with Leaf, and has one field of its own."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        width: int = 8
        name: str = "wide"
        extra: int = 1

    def __init__(self, cfg: Config) -> None:
        self.config = cfg


class Wrapper(Configurable):
    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        inner: BaseConfig = REQUIRED

        def wire(self) -> None:
            self.inner.dim = self.dim  # type: ignore[attr-defined]

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        self.inner = cfg.inner.build()


class Node(Configurable):
    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        half: int = REQUIRED
        left: BaseConfig = field(default_factory=Leaf.Config)
        right: BaseConfig | None = None
        layers: list[BaseConfig] = field(default_factory=list)
        named: dict[str, BaseConfig] = field(default_factory=dict)
        pair: tuple[Any, ...] = ()

        def wire(self) -> None:
            self.half = self.dim // 2
            for child in (self.left, self.right, *self.layers, *self.named.values(), *self.pair):
                if isinstance(child, BaseConfig):
                    child.dim = self.half  # type: ignore[attr-defined]

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        self.left = cfg.left.build()
        self.layers = [layer.build() for layer in cfg.layers]


def tree() -> Any:
    return Node.Config(
        layers=[Leaf.Config(width=i) for i in range(3)],
        named={"a": Leaf.Config(name="in a dict")},
        pair=(Leaf.Config(), 7),
        right=Node.Config(layers=[Leaf.Config()]),
    )


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


# Copying --------------------------------------------------------------------------------------------------------------


def nodes(cfg: Any) -> set[int]:
    return {id(node) for _, node in cfg.walk()}


def test_no_two_trees_share_a_node() -> None:
    first, leaf = tree(), Leaf.Config()
    second, third = first.clone(left=leaf), first.set("left", leaf)
    fourth = first.rewrite(Leaf, lambda node: node)
    fifth = first.derive(Node)
    trees = [first, second, third, fourth, fifth]
    assert sum(len(nodes(one)) for one in trees) == len(set().union(*map(nodes, trees)))
    assert id(leaf) not in nodes(second) | nodes(third)
    second.layers.append(leaf)
    second.named["a"].name = "changed"
    assert first == tree() == fourth == fifth


def test_a_rewrite_that_returns_one_object_twice_puts_copies() -> None:
    shared = Wide.Config()
    new = tree().rewrite(Leaf, lambda _: shared)
    assert len(nodes(new)) == sum(1 for _ in new.walk())
    assert id(shared) not in nodes(new)


def test_clone_replaces_fields_and_refuses_unknown_ones() -> None:
    assert Leaf.Config(dim=3).clone(width=9) == Leaf.Config(dim=3, width=9)
    with pytest.raises(ConfigError) as caught:
        Leaf.Config().clone(widht=9)
    assert "width" in caught.value.hint


def test_derive_keeps_shared_fields_and_changes_win() -> None:
    leaf = Leaf.Config(dim=3, width=5, name="kept")
    assert leaf.derive(Wide) == Wide.Config(dim=3, width=5, name="kept", extra=1)
    assert leaf.derive(Wide.Config, width=6, extra=2) == Wide.Config(dim=3, width=6, name="kept", extra=2)
    assert Wide.Config(dim=1, extra=9).derive(Leaf) == Leaf.Config(dim=1, width=8, name="wide")
    with pytest.raises(ConfigError, match="has no field"):
        leaf.derive(Wide, inner=1)


def test_derive_makes_children_fit_the_new_kind_but_leaves_sockets_alone() -> None:
    leaf = Leaf.Config(dim=3, width=5, name="kept")
    old = OneLeaf.Config(child=leaf, socket=leaf)
    new = old.derive(OneWide)
    assert new.child == Wide.Config(dim=3, width=5, name="kept")
    assert new.socket == leaf


class OneLeaf(Configurable):
    @config
    class Config(BaseConfig):
        child: Leaf.Config = field(default_factory=Leaf.Config)
        socket: BaseConfig = field(default_factory=Leaf.Config)


class OneWide(Configurable):
    @config
    class Config(BaseConfig):
        child: Wide.Config = field(default_factory=Wide.Config)
        socket: BaseConfig = field(default_factory=Wide.Config)


# Walking and rewriting ------------------------------------------------------------------------------------------------


def test_walk_visits_parents_first_with_paths() -> None:
    paths = [path for path, _ in tree().walk()]
    assert paths[0] == ""
    assert set(paths[1:]) == {
        *("left", "right", "right.left", "right.layers[0]", "named[a]", "pair[0]"),
        *("layers[0]", "layers[1]", "layers[2]"),
    }
    assert paths.index("right") < paths.index("right.left")
    assert all(tree().get(path) == node for path, node in tree().walk() if path)


def test_find_by_kind_path_and_predicate() -> None:
    cfg = tree()
    assert len(cfg.find(Leaf)) == 8 and len(cfg.find(Leaf.Config)) == 8
    assert [path for path, _ in cfg.find(Leaf, "layers[*]")] == ["layers[0]", "layers[1]", "layers[2]"]
    assert [path for path, _ in cfg.find(Leaf, "*layers[0]")] == ["right.layers[0]", "layers[0]"]
    assert [path for path, _ in cfg.find(Leaf, lambda path, node: node.width == 2)] == ["layers[2]"]
    assert [path for path, _ in cfg.find(BaseConfig, "right")] == ["right"]


def test_brackets_in_a_pattern_are_literal() -> None:
    cfg = tree()
    assert [path for path, _ in cfg.find(Leaf, "layers[1]")] == ["layers[1]"]
    assert not cfg.find(Leaf, "layers[12]")  # a character class would match layers1 or layers2, never this


def test_rewrite_by_kind_pattern_and_predicate() -> None:
    cfg = tree()
    assert {node.width for _, node in cfg.rewrite(Leaf, lambda n: n.clone(width=99)).find(Leaf)} == {99}
    one = cfg.rewrite(Leaf, lambda n: n.derive(Wide), where="layers[1]")
    assert [type(layer).builds for layer in one.layers] == [Leaf, Wide, Leaf] and one.layers[1].width == 1
    some = cfg.rewrite(Leaf, lambda n: n.derive(Wide), where=lambda path, n: path.startswith("right"))
    assert [path for path, _ in some.find(Wide)] == ["right.left", "right.layers[0]"]
    assert cfg == tree()


def test_rewrite_wraps_without_running_forever_and_children_come_first() -> None:
    wrapped = tree().rewrite(Leaf, lambda n: Wrapper.Config(inner=n), where="layers[*]")
    assert [path for path, _ in wrapped.find(Leaf, "layers*")] == [f"layers[{i}].inner" for i in range(3)]
    seen = []

    def wrap(node: Any) -> Any:
        seen.append(len(node.find(Wrapper)))
        return Wrapper.Config(inner=node)

    nested = Wrapper.Config(inner=Wrapper.Config(inner=Leaf.Config())).rewrite(Wrapper, wrap)
    assert seen == [1, 3]  # the inner one first; the outer one then holds it, already wrapped
    assert len(nested.find(Wrapper)) == 4
    assert nested.set("dim", 3).complete().get("inner.inner.inner.inner").dim == 3


def test_rewrite_finds_subclasses_and_may_replace_the_root_or_remove_a_node() -> None:
    cfg = tree()
    assert isinstance(cfg.rewrite(Node, lambda n: Wide.Config(), where=""), Wide.Config)
    assert cfg.rewrite(Node, lambda n: None, where="right").right is None
    everything = cfg.rewrite(BaseConfig, lambda n: n)
    assert everything == cfg


def test_a_rewrite_that_finds_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no Wrapper"):
        tree().rewrite(Wrapper, lambda n: n)
    with pytest.raises(ConfigError, match=r"no Leaf at 'layer\[\*\]'"):
        tree().rewrite(Leaf, lambda n: n, where="layer[*]")


# Paths ----------------------------------------------------------------------------------------------------------------


def test_get_and_set_by_path() -> None:
    cfg = tree()
    assert cfg.get("layers[2].width") == 2 and cfg.get("layers[-1].width") == 2
    assert cfg.get("named[a].name") == "in a dict" and cfg.get("pair[1]") == 7 and cfg.get("right.layers[0].width") == 4
    new = cfg.set("right.layers[0].width", 5).set("layers[-1]", Wide.Config()).set("named[a].name", "b").set("dim", 2)
    assert new.right.layers[0].width == 5 and isinstance(new.layers[2], Wide.Config)
    assert new.named["a"].name == "b" and new.dim == 2 and new.set("pair[0].width", 1).pair[0].width == 1
    assert cfg == tree()


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("layerz", "layers"),
        ("right.lef", "left"),
        ("layers[0].widht", "width"),
        ("layers[3]", "3 items"),
        ("layers[x]", "3 items"),
        ("layers[--1]", "3 items"),
        ("layers[²]", "3 items"),
        ("named[b]", "1 items"),
        ("dim.x", "dim"),
        ("dim[0]", "0 items"),
        ("right.right.left", "right"),
        ("", ""),
        ("layers[0", "layers"),
    ],
)
def test_wrong_paths_raise_with_a_hint_and_never_anything_else(path: str, hint: str) -> None:
    for call in (lambda: tree().get(path), lambda: tree().set(path, 1)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.hint and hint in caught.value.hint


def test_a_tuple_is_set_whole() -> None:
    with pytest.raises(ConfigError, match="pair is a tuple"):
        tree().set("pair[1]", 8)
    assert tree().set("pair", (1, 2)).pair == (1, 2)
