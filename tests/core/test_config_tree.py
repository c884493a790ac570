"""The config tree as a tree: copied, walked, rewritten and addressed by paths."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import pytest

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError
from tests.core.config_cases import Leaf, Node, Wide, Wrapper, tree

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
