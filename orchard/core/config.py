"""The config tree: what a model or a run is, before anything is built.

A `Config` is a keyword-only slotted dataclass nested in the class it builds:

    class Linear(Configurable, nn.Module):
        @config
        class Config(BaseConfig):
            in_dim: int = REQUIRED
            out_dim: int = REQUIRED

        def __init__(self, cfg: Config) -> None: ...

`cfg.build()` clones the tree, lets every parent give its children the dimensions they share (`wire`), checks that nothing
required is missing anywhere, and then builds. Techniques are rewrites of this tree, so nothing here imports torch: a tree
can be made, changed, compared, stored and shown before a single weight exists.

The pattern follows AXLearn (arXiv 2507.05411). What differs: plain dataclasses instead of attrs, and sharing dimensions is
a step of its own (`wire`) instead of a side effect of building, so that a completed tree can be read without building it.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from orchard.core.errors import ConfigError

T = TypeVar("T", bound=type)
C = TypeVar("C", bound="Config")
Where = str | Callable[[str, "Config"], bool] | None


class _Unfilled(ConfigError):
    """A required field was used before it was filled. `complete` catches this, to name all missing fields at once."""


def _refuse(*_: Any) -> Any:
    raise _Unfilled("a required field was read before it was filled", hint="wire() or build() the tree first")


class _Required:
    """A field that somebody (usually the parent) has to fill before building. Nothing can be computed with it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "REQUIRED"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copy, pickle and notebooks probe for
            raise AttributeError(name)
        return _refuse()

    __setattr__ = __bool__ = __iter__ = __len__ = __getitem__ = __index__ = __int__ = __float__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse

    def __copy__(self) -> _Required:
        return self

    def __deepcopy__(self, memo: Any) -> _Required:
        return self


REQUIRED: Any = _Required()


@dataclass_transform(kw_only_default=True)
def config(cls: T) -> T:
    """The one decorator for configs: a keyword-only, slotted dataclass. A mistyped field raises at once."""
    taken = inspect.get_annotations(cls).keys() & (vars(Config).keys() | {"kind"})  # `kind` is written by to_dict
    if taken:
        raise TypeError(f"{cls.__qualname__}: fields may not be called {sorted(taken)}")
    made = cast(T, dataclasses.dataclass(kw_only=True, slots=True, repr=False)(cls))
    # Slots need a second class; without this, super() in its methods would still look for the first.
    for method in vars(made).values():
        if "__class__" in getattr(getattr(method, "__code__", None), "co_freevars", ()):
            method.__closure__[method.__code__.co_freevars.index("__class__")].cell_contents = made
    return made


class Configurable:
    """Base of everything built from a config. Ties the nested `Config` to the class that it builds."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.partition(".")[0] == "torch":  # made of one of ours, to share a model out: it builds nothing
            return
        nested = cls.__dict__.get("Config")
        if nested is not None:
            if "__dataclass_fields__" not in vars(nested):
                raise TypeError(f"{cls.__qualname__}.Config needs the decorator @config")
            if "builds" in vars(nested):
                raise TypeError(
                    f"{cls.__qualname__} needs a Config of its own: this one builds {nested.builds.__name__}"
                )
            nested.builds = cls
        elif getattr(getattr(cls, "Config", None), "builds", None) is not None:
            raise TypeError(
                f"{cls.__qualname__} needs a Config of its own: an inherited one would build its base class"
            )


class Config:
    """Base of all configs."""

    __slots__ = ()
    builds: ClassVar[Any] = None

    # Building -----------------------------------------------------------------------------------------------------

    def wire(self) -> None:
        """Give the children the dimensions they share with this node. Runs parents first. Override where needed."""

    def complete(self: C) -> C:
        """A copy of the tree with every shared dimension filled in, checked for anything still missing."""
        tree = self.clone()
        unwired = _wire_all(tree, "")
        missing = [path for path, value in _leaves(tree) if value is REQUIRED]
        if missing:
            # Below a node that could not be wired it is not known what it would have filled: name its own fields only.
            known = [path for path in missing if not any(_below(path, node) for node in unwired)]
            from orchard.core.config_text import fold_paths

            names = ", ".join(fold_paths(known or missing))
            raise ConfigError(f"{_name(self)}: required fields are missing: {names}", hint="set them before build()")
        if unwired:
            where = unwired[0] or "the root"
            raise ConfigError(f"{_name(self)}: {where} was wired before what it needs", hint="fill it from above")
        return tree

    def build(self, **runtime: Any) -> Any:
        """Complete a copy of this tree and build the object it describes. `runtime` goes to the constructor."""
        if self.builds is None:
            raise ConfigError(f"{type(self).__qualname__} belongs to no class", hint="nest it in the class it builds")
        clash = {field.name for field in dataclasses.fields(self)} & runtime.keys()  # type: ignore[arg-type]
        if clash:
            raise ConfigError(f"{_name(self)}.build: {sorted(clash)} are config fields", hint="set them on the config")
        return self.builds(self.complete(), **runtime)

    # Copying ------------------------------------------------------------------------------------------------------

    def clone(self: C, **changes: Any) -> C:
        """A deep copy with some fields replaced (values are copied too: two trees never share a node)."""
        fields = {name: _copy(value) for name, value in _items(self)}
        _check_names(type(self), changes)
        fields.update({name: _copy(value) for name, value in changes.items()})
        return type(self)(**fields)

    def derive(self, kind: type[Configurable] | type[Config], **changes: Any) -> Any:
        """A config of another kind that keeps every field both kinds have; `changes` come last.

        Fields that are added to both kinds later survive a replacement written today. A child that does not fit the new
        kind (a Linear where it has a GroupedLinear) is derived too.
        """
        target: Any = kind if issubclass(kind, Config) else getattr(kind, "Config")  # noqa: B009
        _check_names(target, changes)
        wanted = {field.name: field for field in dataclasses.fields(target)}
        shared = {name: _fit(value, wanted[name]) for name, value in _items(self) if name in wanted}
        return target(**{**shared, **{name: _copy(value) for name, value in changes.items()}})

    # Walking and rewriting ----------------------------------------------------------------------------------------

    def walk(self) -> Iterator[tuple[str, Config]]:
        """Every config of the tree with its path, parents first. The root's path is the empty string."""
        yield from _walk(self, "")

    def find(self, kind: type[Configurable] | type[C], where: Where = None) -> list[tuple[str, Any]]:
        """All nodes of a kind, optionally filtered by path pattern or predicate. A kind without a config of its own (an
        abstract `Policy` or `Format`) finds every config that builds one."""
        return [(path, node) for path, node in self.walk() if _is(node, kind) and _matches(where, path, node)]

    def rewrite(self: C, kind: type, fn: Callable[[Any], Any], where: Where = None) -> C:
        """A new tree in which `fn(node)` stands for every node of `kind`. Children are rewritten before their parents,
        and what `fn` returns is not visited again, so a rewrite may wrap the node it replaces.

        `where` is a path pattern (`"layers[*].mlp"`, `*` matches anything but `[` and `]` are literal) or a predicate
        `(path, node) -> bool`. A rewrite that finds nothing is an error: silence would hide a typing mistake.
        """
        count = 0

        def visit(value: Any, path: str) -> Any:
            nonlocal count
            if isinstance(value, Config):
                new = type(value)(**{name: visit(child, _join(path, name)) for name, child in _items(value)})
                if _is(value, kind) and _matches(where, path, value):
                    count += 1
                    return _copy(fn(new))  # a node that `fn` returns twice must not stand in two places
                return new
            return _map(value, path, visit)

        tree = visit(self, "")
        if not count:
            place = f" at {where!r}" if isinstance(where, str) else ""
            raise ConfigError(f"rewrite found no {_kind_name(kind)}{place}", hint="print the tree with describe()")
        return cast(C, tree)

    def get(self, path: str) -> Any:
        """The value at a path such as `layers[3].mlp.hidden_dim`."""
        return _get(self, path)

    def set(self: C, path: str, value: Any) -> C:
        """A copy of the tree with one value replaced, by path. Unknown names raise with the nearest ones."""
        tree = self.clone()
        parent_path, leaf = _split(path)
        parent: Any = _get(tree, parent_path) if parent_path else tree
        if leaf.startswith("["):
            if isinstance(parent, tuple):
                raise ConfigError(f"{parent_path} is a tuple", hint="set the whole of it")
            parent[_index(parent, leaf[1:-1], path)] = _copy(value)
        else:
            _check_node(parent, parent_path, path)
            _check_names(type(parent), {leaf: value}, prefix=parent_path)
            setattr(parent, leaf, _copy(value))
        return tree

    # Reading ------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """The tree as indented text; runs of equal list items are folded."""
        from orchard.core.config_text import describe

        return describe(self)

    def to_dict(self) -> dict[str, Any]:
        from orchard.core.config_text import to_dict

        return to_dict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Any:
        from orchard.core.config_text import from_dict

        return from_dict(data)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in _items(self))
        return f"{_name(self)}({fields})"


BaseConfig = Config
"""The name to inherit from where the nested class is itself called `Config`."""


def _name(cfg: Config) -> str:
    return cfg.builds.__name__ if cfg.builds is not None else type(cfg).__name__


def _kind_name(kind: type) -> str:
    builds = getattr(kind, "builds", None)
    return builds.__name__ if builds is not None else kind.__name__


def _is(node: Config, kind: type) -> bool:
    if issubclass(kind, Config):
        return isinstance(node, kind)
    nested = getattr(kind, "Config", None)
    if nested is not None:
        return isinstance(node, nested)
    return node.builds is not None and issubclass(node.builds, kind)


def _items(cfg: Config) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(cfg):  # type: ignore[arg-type]
        yield field.name, getattr(cfg, field.name)


def _map(value: Any, path: str, fn: Callable[[Any, str], Any]) -> Any:
    """Rebuild a container by applying `fn` to its items; anything else is itself."""
    if isinstance(value, (list, tuple)):
        return type(value)(fn(item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(value, dict):
        return {key: fn(item, f"{path}[{key}]") for key, item in value.items()}
    return value


def _copy(value: Any, path: str = "") -> Any:
    return value.clone() if isinstance(value, Config) else _map(value, path, _copy)


def _fit(value: Any, field: dataclasses.Field[Any]) -> Any:
    """A copy of `value` for a field of another kind. A field declared as BaseConfig is a socket and takes any config."""
    socket = not isinstance(field.type, str) or "BaseConfig" in field.type
    if isinstance(value, Config) and not socket and field.default_factory is not dataclasses.MISSING:
        usual = type(field.default_factory())
        if issubclass(usual, Config) and not isinstance(value, usual):
            return value.derive(usual)
    return _copy(value)


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        yield from ((_join(path, name), child) for name, child in _items(value))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{path}[{key}]", item) for key, item in value.items())


def _walk(value: Any, path: str) -> Iterator[tuple[str, Config]]:
    if isinstance(value, Config):
        yield path, value
    for child_path, child in _children(value, path):
        yield from _walk(child, child_path)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    children = list(_children(value, path))
    if not children and not isinstance(value, (Config, list, tuple, dict)):
        yield path, value
    for child_path, child in children:
        yield from _leaves(child, child_path)


def _wire_all(value: Any, path: str) -> list[str]:
    """Wire parents before children; the paths of nodes that could not be wired because they lack something."""
    unwired = []
    if isinstance(value, Config):
        try:
            value.wire()
        except _Unfilled:
            unwired.append(path)
    for child_path, child in _children(value, path):
        unwired += _wire_all(child, child_path)
    return unwired


def _below(path: str, node: str) -> bool:
    """Whether a field belongs to a child of `node`, and not to `node` itself."""
    inside = path.startswith((f"{node}.", f"{node}[")) if node else True
    return inside and "." in path[len(node) :].lstrip(".")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _matches(where: Where, path: str, node: Config) -> bool:
    if where is None:
        return True
    if callable(where):
        return where(path, node)
    return fnmatch.fnmatchcase(path, where.replace("[", "[[]"))


def _check_names(kind: type, changes: Mapping[str, Any], prefix: str = "") -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or known
            builds = getattr(kind, "builds", None)
            label = builds.__name__ if builds is not None else kind.__name__
            raise ConfigError(f"{label} has no field {_join(prefix, name)!r}", hint="did you mean " + " or ".join(near))


def _check_node(parent: Any, parent_path: str, path: str) -> None:
    if not isinstance(parent, Config):
        raise ConfigError(f"nothing at {path!r}", hint=f"{parent_path or 'the root'} is {parent!r}")


def _split(path: str) -> tuple[str, str]:
    if path.endswith("]") and "[" in path:
        at = path.rindex("[")
        return path[:at], path[at:]
    head, _, leaf = path.rpartition(".")
    return head, leaf


def _index(container: Any, key: str, path: str) -> Any:
    if isinstance(container, dict) and key in container:
        return key
    if (
        isinstance(container, (list, tuple))
        and key.removeprefix("-").isdecimal()
        and -len(container) <= int(key) < len(container)
    ):
        return int(key)
    size = len(container) if isinstance(container, (list, tuple, dict)) else 0
    raise ConfigError(f"nothing at {path!r}", hint=f"it has {size} items")


def _get(value: Any, path: str) -> Any:
    head, leaf = _split(path)
    parent = _get(value, head) if head else value
    if leaf.startswith("["):
        return parent[_index(parent, leaf[1:-1], path)]
    _check_node(parent, head, path)
    _check_names(type(parent), {leaf: None}, prefix=head)
    return getattr(parent, leaf)
