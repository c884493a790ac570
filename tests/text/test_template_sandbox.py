"""Model templates: what they may do works as elsewhere, what they may not do is refused with a typed error."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import transformers.utils.chat_template_utils as hugging_face

from orchard.core.errors import TemplateError
from orchard.text import Message, render
from orchard.text.limits import Limits
from tests.text.chat_styles import STYLES

MESSAGES = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yes\nno", "name": "bot"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"é": {"type": "number"}}}}}]

HARMLESS = [
    *STYLES.values(),
    "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ 'é<>&' | tojson }}",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}!{% endif %}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content | trim | upper }}{% else %}none{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}",
    "{% macro show(m, mark='*') %}{{ mark ~ m.role }}{% endmacro %}{{ show(messages[0]) }}{{ show(messages[1], mark='-') }}",
    "{% for m in messages %}{{ m.content.split('\n')[-1].strip().replace('n', 'N') }}{{ m.get('name', 'nobody') }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{% set text %}a{{ 1 + 2 * 3 }}{% endset %}{{ text }}{{ '%s-%03d' % ('x', 7) }}{{ '{}:{a}'.format(1, a=2) }}",
    "{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 10 }}{{ 1 - 3 }}{{ 1 / 4 }}{{ 'a' * 3 }}{{ [1] + [2] }}{{ 'a' + 'b' ~ 1 }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages[0].items() | list }}{{ messages[::-1][0].role }}{{ messages[1:] | length }}",
    "{{ (1, 2)[0] }}{{ {'a': [1]}['a'][0] }}{{ {'a': 1}.keys() | list }}{{ 'abc'[1:] }}{{ 'abc'[-1] }}",
    "{% for key, value in tools[0].function.items() %}{{ key }}={{ value }};{% endfor %}{{ tools | first | length }}",
    "{{ missing }}{{ missing is defined }}{{ missing | default('x') }}{{ none is none }}{{ 'a' in 'abc' }}{{ 3 is odd }}",
    "{% generation %}kept{% endgeneration %}{{ range(3) | list }}{{ range(1, 9, 3) | sum }}{{ [3, 1, 2] | sort | first }}",
    "{%- if tools is not none and tools | length > 0 -%} yes {%- endif -%}{# a remark #}\n  {% if true %}  \n x{% endif %}\n",
    "{{ messages[0].content if messages[0].content is string else '' }}{{ bos_token + eos_token }}{{ add_generation_prompt }}",
    "{% filter upper %}abc{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}",
    "{{ 'a-b_c'.partition('-')[2].title() }}{{ 'ab'.startswith('a') }}{{ ' x '.lstrip() }}{{ 'aXb'.lower() | capitalize }}",
    "{{ 123456789 }}{{ -5 | abs }}{{ 1.0 }}{{ true }}{{ none }}{{ [1, 'a', none] }}{{ 10 ** 20 }}",
]


@pytest.mark.parametrize("template", HARMLESS)
def test_harmless_templates_render_as_in_the_transformers_package(template: str) -> None:
    variables: dict[str, Any] = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    compiled = hugging_face._compile_jinja_template(template)
    expected = compiled.render(messages=MESSAGES, tools=TOOLS, **variables)
    assert render(template, messages=MESSAGES, tools=TOOLS, **variables) == expected


def test_messages_and_extra_variables() -> None:
    template = "{{ messages[0].content }}{{ enable_thinking }}{{ messages[0].name }}"
    assert render(template, messages=[Message("user", "a")], enable_thinking=False) == "aFalse"
    assert render("{{ strftime_now('%Y') }}", messages=[]) == time.strftime("%Y")
    with pytest.raises(TemplateError, match="object"):
        render("x", messages=[], thing=object())


FORBIDDEN = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.x }}",
    "{{ (messages | attr('__class__')).x }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({}) }}",
    "{{ (1).to_bytes(5, 'big') }}",
    "{{ '{0.__class__}'.format(1) }}{{ '{0.__class__.x}'.format(1) }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ namespace.mro() }}",
    "{{ self._TemplateReference__context.x }}",
    "{{ lipsum() }}",
    "{{ cycler('a') }}",
    "{{ messages | random }}",
    "{{ messages | pprint }}",
    "{% include 'a' %}",
    "{% import 'a' as b %}",
    "{% from 'a' import b %}",
    "{% extends 'a' %}",
    "{% autoescape true %}x{% endautoescape %}",
    "{{ strftime_now('%99999d') }}",
    "{{ messages[0].content() }}",
    "{{ 'x'() }}",
    "{% do messages %}",
    "{{",
    "{% for %}",
    "{{ 1 / 0 }}",
    "{{ nothing.at.all }}",
    "{{ 'a' | nosuch }}",
]

EXPENSIVE = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ [1] * 10 ** 9 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'a'.center(10 ** 9) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 999999999) }}",
    "{{ ('%s' * 9999) % (('x' * 9999,) * 9999) }}",
    "{{ ('x' * 9999).replace('x', 'y' * 9999) }}",
    "{{ ('x' * 9999) | replace('x', 'y' * 9999) }}",
    "{{ ('x' * 9999).join(['a'] * 9999) }}",
    "{{ (['a'] * 9999) | join('x' * 9999) }}",
    "{{ ('a\n' * 9999) | indent('x' * 9999) }}",
    "{{ ('\t' * 9999).expandtabs(9999) }}",
    "{{ [1] | batch(999999999, 0) | list }}",
    "{{ [1] | slice(999999999) | list }}",
    "{{ 1.5 | round(999999999, 'ceil') }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ range(10 ** 9) }}",
    "{{ ('a' * 999999) | list }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "{% for i in range(99999) %}{% set x %}{{ 'a' * 9999 }}{% endset %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% set a = [1] %}" + "{% set a = [a, a] %}" * 40 + "{{ a }}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% set ns = namespace(a=3) %}{% for i in range(60) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "{% set x = 'a' * 3000000 %}" + "".join(f"{{% set x{i} = x[{i}:] %}}" for i in range(100)),
    "{{ " + "(" * 1000 + "1" + ")" * 1000 + " }}",
    "{{ 1" + " + 1" * 1000 + " }}",
    "{{ a }}" * 5000,
    "{{ 0x" + "f" * 5000 + " }}",
    "{{ " + "9" * 5000 + " }}",
    "x" * 300_000,
    "{{ ([[1, 2]] * 40000) | sum(start=[]) | length }}",
    "{{ ('\"' * 4000000) | tojson }}",
    "{{ ['😀' * 2000000] | tojson(ensure_ascii=true) }}",
    "{{ ('😀' * 2000000) | urlencode }}",
    "{{ ([range(99999)] * 9999) | map('list') | list }}",
    "{% set ns = namespace(a=1) %}{% for i in range(99) %}{% set ns.a = [ns.a] %}{% endfor %}",
    "{{ -10 ** 15 | orchard_fixed }}{% set x = 'a' * 3000000 %}"
    + "".join(f"{{% set x{i} = x ~ {i} %}}" for i in range(40)),
]


@pytest.mark.parametrize("template", [*FORBIDDEN, *EXPENSIVE], ids=lambda template: template[:40])
def test_refused(template: str) -> None:
    gc.disable()  # collecting what thousands of other tests left takes a second by itself, and counts as ours
    try:
        started = time.thread_time()
        with pytest.raises(TemplateError) as caught:
            render(template, messages=MESSAGES)
        assert time.thread_time() - started < 1.0
    finally:
        gc.enable()
    assert caught.value.hint


def test_printing_a_namespace_shows_nothing_of_it() -> None:
    assert render("{% set ns = namespace(a=1) %}{% set ns.me = ns %}{{ ns }}", messages=[]) == "<namespace>"
    assert render("{{ range }}{{ namespace }}{{ dict }}", messages=[]) == "<range><namespace><dict>"


def test_long_conversations_are_not_refused() -> None:
    """Limits are against growth, not against size: a large input may be written out."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": "wörd 😀 " * 800} for i in range(500)]
    generous = Limits(seconds=20)
    for template in STYLES.values():
        text = render(template, messages=messages, bos_token="<s>", eos_token="</s>", limits=generous)
        assert text.count("wörd 😀") == 400_000
    as_json = render("{{ messages | tojson }}", messages=messages)
    assert as_json.count("wörd 😀") == 400_000
    large = render("{{ messages[0].content | upper }}", messages=[{"role": "user", "content": "a" * 6_000_000}])
    assert len(large) == 6_000_000


def test_templates_cannot_see_each_other() -> None:
    assert render("{% set range = 5 %}{% set namespace = 6 %}{{ range }}", messages=[]) == "5"
    assert render("{{ range(2) | list }}", messages=[]) == "[0, 1]"
