"""The one place where a model's chat template is rendered. `render` gives text or raises `TemplateError`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchard.core.errors import OrchardError, TemplateError
from orchard.text.limits import DEFAULT_LIMITS, Budget, Limits, too_much, use_budget
from orchard.text.messages import Message

if TYPE_CHECKING:
    from jinja2 import Template

_HINT = "the model's chat template is broken, or not meant for such messages; pass a template of your own"


def render(
    template: str,
    *,
    messages: Sequence[Message | Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    limits: Limits = DEFAULT_LIMITS,
    **extra: Any,
) -> str:
    """Render a chat template with the variables that Hugging Face chat templates expect."""
    variables = chat_variables(messages, tools, add_generation_prompt, bos_token, eos_token, extra)
    return render_compiled(_cached(template, limits), variables, limits)


def chat_variables(
    messages: Sequence[Message | Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    bos_token: str,
    eos_token: str,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    dicts = [message.to_dict() if isinstance(message, Message) else message for message in messages]
    given = {"messages": dicts, "tools": list(tools) if tools is not None else None, **extra}
    fixed = {"add_generation_prompt": add_generation_prompt, "bos_token": bos_token, "eos_token": eos_token}
    return plain(given) | fixed


def plain(value: Any, level: int = 0) -> Any:
    """A copy made of JSON types only, so that a template never holds a live object."""
    if level > 60:
        raise TemplateError("messages or tools are nested too deeply", hint="pass flatter data")
    if isinstance(value, Mapping):
        return {str(key): plain(item, level + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, level + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    raise TemplateError(
        f"a template variable holds a {type(value).__name__}", hint="pass texts, numbers, lists and dicts only"
    )


def compile_template(
    source: str, limits: Limits = DEFAULT_LIMITS, marker: Callable[[str], str] | None = None
) -> Template:
    """Parse, check, rewrite, compile. `marker` may change the template's own texts."""
    from orchard.text.rewrite import Rewriter, check_tree
    from orchard.text.sandbox import TemplateSandbox

    if len(source) > limits.template_chars:
        raise too_much(f"is longer than {limits.template_chars:,} characters")
    with template_errors():
        environment = TemplateSandbox()
        tokens = (kind for _, kind, _ in environment.lexer.tokeniter(source, None) if kind != "whitespace")
        for count, _ in enumerate(tokens):
            if count >= limits.template_tokens:
                raise too_much(f"has more than {limits.template_tokens:,} parts")
        tree = environment.parse(source)
        check_tree(tree, limits)
        tree = Rewriter(marker).visit(tree)
        tree.set_environment(environment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's remarks on the generated code are of no use to anyone
            code = environment.compile(tree)
        return environment.template_class.from_code(environment, code, environment.globals, None)


@lru_cache(maxsize=32)
def _cached(source: str, limits: Limits) -> Template:
    return compile_template(source, limits)


def render_compiled(template: Template, variables: dict[str, Any], limits: Limits = DEFAULT_LIMITS) -> str:
    """Run a template within its limits."""
    with template_errors(), use_budget(Budget(limits, variables)) as account:
        parts: list[str] = []
        length = 0
        for part in template.generate(variables):
            length += len(part)
            if length > account.max_output:
                raise too_much(f"writes more than {account.max_output:,} characters")
            account.tick()
            parts.append(part)
        return "".join(parts)


@contextmanager
def template_errors() -> Iterator[None]:
    """Whatever goes wrong while compiling or running a template is a `TemplateError`."""
    try:
        yield
    except OrchardError:
        raise
    except RecursionError as error:
        raise too_much("is nested too deeply") from error
    except MemoryError as error:
        raise too_much("needs too much memory") from error
    except Exception as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        detail = str(error)[:300] or type(error).__name__
        raise TemplateError(f"the chat template failed{where}: {detail}", hint=_HINT) from error
