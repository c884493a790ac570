"""Frozen dataclasses whose making costs next to nothing.

`@dataclass(frozen=True)` writes source text for six methods and compiles each, about a millisecond for every class: more than
all other work of importing a module of plain values. `@frozen` gives the same methods as ordinary functions over the fields.
Such a class is a dataclass to `fields`, `replace`, `asdict` and type checkers. Making one is slower by about a microsecond, so
use it for values that are few, in modules that every start imports.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen(cls: type[T]) -> type[T]:
    """A frozen dataclass with `__init__`, `__repr__`, `__eq__` and `__hash__`, each over all fields."""
    cls.__doc__ = cls.__doc__ or cls.__name__  # or `dataclass` writes one, slowly
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    names = tuple(field.name for field in dataclasses.fields(made))
    known = frozenset(names)
    defaults: dict[str, Any] = {}
    factories: dict[str, Any] = {}
    for field in dataclasses.fields(made):
        if field.kw_only or not (field.init and field.compare and field.repr):
            raise TypeError(f"{cls.__name__}.{field.name}: @frozen knows plain fields only")
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            factories[field.name] = field.default_factory
    check = getattr(made, "__post_init__", None)

    def init(self: Any, *given: Any, **named: Any) -> None:
        values = dict(zip(names, given))
        if not given and named.keys() == known:
            values = named
        elif len(given) > len(names) or not values.keys().isdisjoint(named):
            raise TypeError(f"{cls.__name__}() has arguments too many, or one twice")
        else:
            values = defaults | values | named
            for name in factories.keys() - values.keys():
                values[name] = factories[name]()
        if values.keys() != known:
            wrong = ", ".join(sorted(values.keys() ^ known))
            raise TypeError(f"{cls.__name__}() lacks arguments, or knows none of this name: {wrong}")
        self.__dict__.update(values)
        if check is not None:
            check(self)

    def values_of(self: Any) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in names])

    def equal(self: Any, other: object) -> bool:
        return values_of(self) == values_of(other) if other.__class__ is self.__class__ else NotImplemented

    def text(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    methods = {"__init__": init, "__eq__": equal, "__hash__": lambda self: hash(values_of(self)), "__repr__": text}
    for name, method in (methods | {"__setattr__": _refuse_set, "__delattr__": _refuse_delete}).items():
        setattr(made, name, method)
    return made


def _refuse_set(self: Any, name: str, value: Any) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(self: Any, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
