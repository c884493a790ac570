"""Makes hostile chat templates: from a grammar of expressions and statements that reach for what is expensive or
forbidden, from hand-written attacks, and by damaging real templates.
"""

from __future__ import annotations

import random
import re

REAL = [
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nHi"
    "<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 1) %}{{ raise_exception("
    "'Roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ m['content'] | trim + eos_token }}{% endif %}{% endfor %}",
    "{%- set ns = namespace(seen=false, last=messages|length - 1) -%}{%- for m in messages[::-1] %}{%- set i = (messages"
    "|length - 1) - loop.index0 %}{%- if m.role == 'user' and not m.content.startswith('<tool>') %}{%- set ns.last = i %}"
    "{%- endif %}{%- endfor %}{%- for m in messages %}{%- set c = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "<|{{ m.role }}|>{{ c }}{%- if m.tool_calls %}{%- for t in m.tool_calls %}{{ t | tojson(indent=2) }}{%- endfor %}"
    "{%- endif %}{%- endfor %}{{ strftime_now('%d %b %Y') }}{{ tools | tojson }}",
    "{% macro show(x, n=1) %}{% for k, v in x.items() %}{{ k }}: {{ v if v is string else show(v, n + 1) }}{% endfor %}"
    "{% endmacro %}{% for t in tools %}{{ show(t) }}{% endfor %}{% generation %}{{ messages[-1].content }}{% endgeneration %}",
]

ATTACKS = [
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(35) }}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for x in [1] recursive %}{% if loop.depth < 4 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "{% set a = [1] %}{% for i in range(40) %}{% set a = [a, a] %}{% endfor %}{{ a }}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a|length }}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a == ns.a }}",
    "{% set ns = namespace() %}{% set ns.me = ns %}{% set ns.l = [ns, ns] %}{{ ns }}{{ ns.l }}{{ ns | tojson }}",
    "{% set ns = namespace(a=2) %}{% for i in range(999) %}{% set ns.a = ns.a * ns.a %}{% endfor %}{{ ns.a }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages.__class__.__base__ }}{{ raise_exception.__globals__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ ('{0.__class__}' | attr('format'))(messages) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ namespace.__init__ }}{{ namespace().__class__ }}{{ dict.mro() }}{{ range.__call__ }}",
    "{{ loop }}{% for i in [1] %}{{ loop._iterator }}{{ loop.__class__ }}{{ loop }}{% endfor %}",
    "{% macro f() %}{{ caller }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, a=3) }}{{ f._func }}{{ f }}",
    "{{ '%s' * 99999 % (messages,) }}",
    "{{ ('%(a)s' * 90000) % {'a': 'x' * 90000} }}",
    "{{ '{0}' * 9999 }}{{ ('{0}' * 9999).format('x' * 99999) }}",
    "{{ '%*d' % (999999999, 1) }}{{ '%.999999999f' % 1.0 }}{{ '{:.{}f}'.format(1.5, 999999999) }}",
    "{{ 'a'.join(['b' * 99999] * 9999) }}{{ ('b' * 99999).join(range(9999) | map('string') | list) }}",
    "{{ ('a' * 99999).replace('', 'b' * 99999) }}{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ ('\\t' * 99999).expandtabs(99999) }}{{ 'a'.zfill(999999999) }}{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a'.translate({97: 'b' * 999999}) }}{{ 'a'.encode().hex() }}{{ (1).to_bytes(999999999, 'big') }}",
    "{{ ('a ' * 999999).split() | length }}{{ ('a\\n' * 999999).splitlines() | length }}{{ ('a' * 2000000) | list }}",
    "{{ 'a\\n' * 9999 | indent(99999) }}{{ ('a\\n' * 9999) | indent('b' * 99999) }}{{ 'a' | indent(-5) }}",
    "{{ [1] | batch(999999999, 0) | list }}{{ [1] | slice(999999999) | list }}{{ 1.5 | round(999999999, 'ceil') }}",
    "{{ 'a' | center(999999999) }}{{ '%s' | format('x' * 999999) }}{{ 'abc' | truncate(-99999999) }}",
    "{{ [[1]] * 99999 | sum(start=[]) }}{{ ([[1, 2]] * 40000) | sum(start=[]) | length }}{{ ('1' * 9999) | int }}",
    "{{ messages | tojson(indent=999999999) }}{{ range(99999) | list | tojson(indent=16) }}{{ ('\"' * 999999) | tojson }}",
    "{{ 10 ** 10 ** 10 }}{{ 2 ** -99999999 }}{{ 9.9 ** 999 }}{{ -1 ** 0.5 }}{{ (-8) ** (1 / 3) }}",
    "{{ range(10 ** 12) }}{{ range(99999) | list | length }}{{ range(0, 10, 0) }}{{ range('a') }}{{ range(-5, 10 ** 30) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "{% for i in range(99999) if false %}{% endfor %}" * 200,
    "{% for i in range(99999) %}{% set x %}{{ 'a' * 9999 }}{% endset %}{% endfor %}",
    "{% for a in range(99) %}" * 19 + "x" + "{% endfor %}" * 19,
    "{% for a in range(2) %}" * 25 + "x" + "{% endfor %}" * 25,
    "{% set x = 'a' * 3000000 %}" + "".join(f"{{% set x{i} = x[{i}:] %}}" for i in range(200)),
    "{% set x = 'é' * 3000000 %}" + "".join(f"{{% set x{i} = x + '😀' %}}" for i in range(200)),
    "{% filter upper %}{{ 'ß' * 4000000 }}{% endfilter %}{{ ('ﬃ' * 2000000) | upper | upper }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% from 'x' import y %}",
    "{% extends messages %}",
    "{% autoescape true %}{{ '<' * 3000000 }}{% endautoescape %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% call(x) f() %}{% endcall %}",
    "{{ strftime_now('%999999999d') }}{{ strftime_now('%' * 99) }}{{ strftime_now('é' * 99) }}{{ strftime_now(5) }}",
    "{{ raise_exception(messages) }}",
    "{{ lipsum(n=99999) }}{{ messages | random }}{{ messages | pprint }}{{ 'a.b' * 99999 | urlize }}",
    "{{ orchard_tick }}{{ -5 | orchard_tick }}{{ 5 | orchard_write }}{{ ['a'] | orchard_concat }}{{ 'a' | orchard_fixed }}",
    "{{ -999999999 | orchard_tick }}{{ -999999999999 | orchard_fixed }}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "{{ -999999999999 | orchard_fixed }}{% set x = 'é' * 4000000 %}"
    + "".join(f"{{% set x{i} = x + '😀' %}}" for i in range(99)),
    "{{ [-99999999999] | map('orchard_fixed') | list }}{% set x = 'é' * 4000000 %}{% set y = [x, x ~ 1, x ~ 2, x ~ 3, x ~ 4] %}",
    "{{ ('ab ' * 1300000) | wordcount }}",
    "{{ ('ab ' * 1300000) | title | length }}",
    "{{ ('😀' * 4000000) | urlencode | length }}",
    "{{ ('<' * 4000000) | e | length }}",
    "{{ ('\"' * 4000000) | tojson | length }}",
    "{{ ('😀' * 4000000) | tojson(ensure_ascii=true) | length }}",
    "{{ ['😀' * 60000] * 60 | tojson(ensure_ascii=true) | length }}",
    "{{ ('a' * 4000000) | slice(3) | list | length }}",
    "{{ ('a' * 4000000) | join('b') | length }}",
    "{{ 'b'.join('a' * 4000000) | length }}",
    "{{ ('a' * 4000000) | map('upper') | list | length }}",
    "{{ ('a' * 4000000) | max }}{{ ('a' * 4000000) | sort | first }}",
    "{{ [range(99999)] * 9999 | map('list') | list | length }}",
    "{{ ([range(99999)] * 9999) | map('list') | list | length }}",
    "{% set ns = namespace(a=range(90000) | list) %}{% for i in range(900) %}{% set ns.a = [ns.a] %}{% endfor %}"
    "{{ ns.a | tojson(indent=16) }}",
    "{{ [['😀' * 1000000] * 3] | tojson(ensure_ascii=true) | length }}{{ {'a': '\"' * 4000000} | tojson | length }}",
    "{% set ns = namespace(a=1) %}{% for i in range(99999) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
    "{{ messages.append(1) }}{{ messages.clear() }}{{ messages[0].update({'a': 1}) }}{{ messages[0].pop('role') }}",
    "{% set messages[0].role = 'x' %}{% set loop.x = 1 %}{% set a.b = 2 %}",
    "{{ 0x" + "f" * 50000 + " }}",
    "{{ " + "9" * 50000 + " }}",
    "{{ 1e" + "9" * 5000 + " }}",
    "{{ ''" + " ~ 'a'" * 2500 + " }}",
    "{{ 1" + " + 1" * 2500 + " }}",
    "{{ a" + ".b" * 2500 + " }}",
    "{{ messages" + "[0]" * 1800 + " }}",
    "{{ 'a'" + " | upper" * 2500 + " }}",
    "{{ " + "not " * 5500 + "a }}",
    "{{ " + "-" * 5500 + "1 }}",
    "{{ " + "(" * 2500 + "1" + ")" * 2500 + " }}",
    "{{ " + "[" * 2500 + "]" * 2500 + " }}",
    "{{ " + "f(" * 2500 + ")" * 2500 + " }}",
    "{{ " + "{1:" * 1500 + "1" + "}" * 1500 + " }}",
    "{{ " + "a if b else " * 1200 + "c }}",
    "{{ [" + "1," * 2900 + "] }}",
    "{{ {" + ",".join(f"{i}: {i}" for i in range(1400)) + "} }}",
    "{% if a %}" * 1500,
    "{% if a %}" * 700 + "{% endif %}" * 700,
    "{% if a %}x" + "{% elif b %}y" * 1400 + "{% endif %}",
    "{% macro a() %}" * 50 + "x" + "{% endmacro %}" * 50,
    "{% set a = 1 %}" * 990,
    "".join(f"{{% set v{i} = {i} %}}" for i in range(990)),
    "{{ a }}" * 1990,
    "{{a" * 2000,
    "{#" * 50000,
    "{# " + "#" * 200000,
    "{% raw %}" + "{% endra" * 20000,
    "{{ '" + "\\'" * 50000,
    "{{ '" + "a" * 200000 + "' }}",
    "{% " + "-" * 100000,
    "{{" + " " * 200000 + "}}",
    "\n" * 200000 + "{{ a }}",
    "   \n" * 50000 + "{% set a = 1 %}",
    "{%- set a = 1 -%}" + " \n\t" * 60000 + "{%- set a = 1 -%}",
    "x" * 300000,
    "\x00{{ '\\u0000' }}\ud800",
    "{{ '\\ud800' }}{{ '\\ud800' | tojson }}{{ '\\ud800' * 5 }}",
]

# Expressions by the kind of value they give, so that most templates get past type errors and do some work.
# In these, T, N and L stand for an expression giving a text, a number or a list, and a raised dot for a space.
_TEXTS = """
'a' '' '%s' '{}' '<|im_end|>' '😀' 'a,b' bos_token messages[0].content messages[1]['content'] messages[-1].role
'x'*99999 (T+T) (T~T) (T~N) (T~L) (T*N) (T%(N,)) (N~L) (T|upper) (T|trim) (T|title) (T|center(N)) (T|indent(N))
(T|replace(T,T)) (L|join(T)) (T|format(T)) (T|truncate(N)) (T|urlencode) (T|e) (T|string) (N|string) (L|string)
(L|tojson) (L|tojson(indent=N)) (T|tojson) (T|default(T)) (T).upper() (T).strip(T) (T).replace(T,T) (T).center(N)
(T).ljust(N) (T).zfill(N) (T).expandtabs(N) (T).join(['a']*N) (T).format(T,N,a=L) (T).split(T)[0] (T).partition(T)[2]
(T).title() (T)[N:] (T)[::-1] (T)[:N] (T|first) (T|reverse) (T·if·N·else·T) strftime_now('%Y') (L|first|string)
(L|map('string')|join) (T|list|join(T)) namespace(a=T).a dict(a=T).a ('%s'*N|format(T)) (T·or·T) (T|lower|safe)
"""
_NUMBERS = """
0 1 -1 3 9 99 999 99999 999999999 1.5 1e308 2**64 true messages|length (N+N) (N-N) (N*N) (N/N) (N//N) (N%N) (N**N)
(-N) (T|length) (L|length) (L|count) (N|abs) (N|int) (T|int) (T|float) (N|round) (N|round(N)) ([N,N]|max) ([N,N]|sum)
(T|wordcount) (T).count(T) (T).find(T) (N·if·T·else·N) (T==T) (L==L) (T·in·T) (T·in·L) (N<N) (not·T) (T·is·defined)
(N·is·divisibleby(3)) (T·is·string) (L·is·iterable) (L).index(1) (T).startswith(T) (range(N)|sum) (N·and·N)
"""
_LISTS = """
messages tools [1,2] (1,2) range(9) range(99999) range(N) messages[1:] [messages]*9 [T,N] [L,L] [L,L,L,L] (L+L) (L*N)
([T]*N) ([L]*N) (L)[N:] (L)[::-1] (L|list) (L|reverse) (L|sort) (L|unique) (T|list) (T).split() (T).split(T)
(T).splitlines() (L|map('string')|list) (L|select|list) (L|reject|list) (messages|map(attribute='role')|list)
(messages|selectattr('role')|list) (messages|groupby('role')) (L|batch(3)|list) (L|batch(N,T)|list) (L|slice(N)|list)
(L|slice(3)) messages[0].items() messages[0].keys() (tools[0]|dictsort) (tools[0]|items|list) (L|map('upper'))
(L|map('length')|list) (L·if·N·else·L) (L|map('tojson')|list) (L|string|list) (T).partition(T) (T).rsplit(T,N)
{'k':L,'j':T} {T:L}|items
"""
_ODD = """
a loop self undefined_thing x y f loop.index ns ns.a caller varargs super joiner() cycler lipsum namespace() namespace
namespace(T) T.__class__ L.__class__.__mro__ (T|attr('__class__')) (L|map('attr','__class__')|list)
(L|map(attribute='__class__')|list) T.encode() T.translate({}) L.pop() L.append(1) T.__init__.__globals__
messages.clear() (T|xmlattr) (T|pprint) (L|random) (T|striptags) (N|filesizeformat) (T|nosuchfilter) (L|sum(start=[]))
(L|map('nosuch')|list) (T|wordwrap(1)) (T|urlize) T.format_map({}) T.maketrans(T,T) dict.mro() N.real N.to_bytes(9,T)
raise_exception(T) f(T) x(L) loop(L) range(N,N,N) dict(T) dict(L) strftime_now(T) (L|tojson(separators=L))
(T|int(base=N)) (L|join(L)) (T|replace(L,N)) T[L] L[T] (N|list) T.x
"""
_KINDS = {"T": _TEXTS.split(), "N": _NUMBERS.split(), "L": _LISTS.split()}
_CHEAP = {
    "T": ["'a'", "bos_token", "messages[1].content"],
    "N": ["3", "99", "-1", "99999"],
    "L": ["messages", "[1,2]", "range(9)"],
}
_LOOPS = "messages tools range(9) range(99999) messages[::-1] messages|list [1,2,3] messages[0].items() 'abc' tools[0]"
_BLOCK_FILTERS = "upper trim indent indent(99) center(9999) tojson length list e replace('a','b'*99) format(1) nosuch"
_SLOT = re.compile(r"\b[TNL]\b")


def _expression(rng: random.Random, depth: int = 0, kind: str = "") -> str:
    kind = kind or rng.choice("TTNL")
    if depth > 4:
        return rng.choice(_CHEAP[kind])
    shape = rng.choice(_ODD.split()) if rng.random() < 0.015 else rng.choice(_KINDS[kind])
    filled = _SLOT.sub(lambda slot: _expression(rng, depth + 1 + (rng.random() < 0.5), slot[0]), shape)
    return filled.replace("·", " ")


def _statement(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth > 4 or kind < 0.4:
        return "{{ " + _expression(rng, rng.randint(0, 4)) + " }}"
    body = "".join(_statement(rng, depth + 1) for _ in range(rng.randint(1, 3)))
    if kind < 0.6:
        extra = rng.choice(["", "", " recursive", f" if {_expression(rng, 3)}"])
        middle = rng.choice(["", "", "{% continue %}", "{% break %}", "{{ loop(messages) }}", "{% else %}z"])
        over = rng.choice(_LOOPS.split()) if rng.random() < 0.5 else _expression(rng, 2, "L")
        return f"{{% for x in {over}{extra} %}}{body}{middle}{{% endfor %}}"
    if kind < 0.7:
        return f"{{% if {_expression(rng)} %}}{body}{{% else %}}{_statement(rng, depth + 1)}{{% endif %}}"
    if kind < 0.8:
        return "{% set " + rng.choice(["x", "y", "ns.a", "f", "a"]) + f" = {_expression(rng)} %}}{body}"
    if kind < 0.85:
        return f"{{% macro f(a, b={_expression(rng, 3)}) %}}{body}{{% endmacro %}}{{{{ f({_expression(rng, 3)}) }}}}"
    if kind < 0.9:
        return f"{{% set y %}}{body}{{% endset %}}"
    if kind < 0.94:
        return f"{{% filter {rng.choice(_BLOCK_FILTERS.split())} %}}{body}{{% endfilter %}}"
    if kind < 0.97:
        return f"{{% with x = {_expression(rng)} %}}{body}{{% endwith %}}"
    return rng.choice([f"{{% generation %}}{body}{{% endgeneration %}}", f"{{% call f(1) %}}{body}{{% endcall %}}"])


def _damaged(rng: random.Random, text: str) -> str:
    for _ in range(rng.choice([1, 1, 2, 3, 12])):
        at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        to = min(to, at + 30)
        text = rng.choice(
            [
                lambda a, b, t: t[:a] + t[b:],
                lambda a, b, t: t[:a] + t[a:b] * rng.choice([2, 2, 3, 50, 500]) + t[b:],
                lambda a, b, t: (
                    t[:a]
                    + rng.choice(["{{", "}}", "{%", "%}", "'", '"', "(", ")", "|", "**", "\x00", "\u202e", "😀"])
                    + t[a:]
                ),
                lambda a, b, t: t[:a] + _expression(rng, 3) + t[a:],
                lambda a, b, t: t[:a] + _statement(rng, 3) + t[a:],
                lambda a, b, t: t[:a] + "".join(chr(rng.randrange(0xD800)) for _ in range(5)) + t[b:],
                lambda a, b, t: (
                    t[:a] + rng.choice(["99999999", "range(99999)", "*99999", "__class__", "messages"]) + t[b:]
                ),
            ]
        )(at, to, text)
    return text


def make_template(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        head = "{% set ns = namespace(a=1) %}" if rng.random() < 0.5 else ""
        return head + "".join(_statement(rng, rng.randint(0, 4)) for _ in range(rng.choice([1, 1, 1, 2, 5])))
    if kind < 0.65:
        return _damaged(rng, rng.choice(REAL))
    if kind < 0.8:
        return _damaged(rng, rng.choice([attack for attack in ATTACKS if len(attack) < 5000]))
    if kind < 0.9:
        return "".join(rng.choice(ATTACKS) for _ in range(rng.randint(1, 2)))
    return "".join(rng.choice([_statement(rng), rng.choice(REAL)]) for _ in range(rng.randint(1, 30)))
