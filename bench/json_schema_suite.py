"""The JSON Schema Test Suite (draft 2020-12) against the grammars that schemas become.

For every schema of the suite: it is refused by name, or it is made into a grammar. Every instance of one that is made is fed
to the grammar byte by byte: a valid one must be accepted in one of its compact spellings (keys in any order, since a grammar
fixes one; numbers without an exponent or as written), an invalid one rejected in all of them. A schema that is refused because
no value can be valid must have no valid instance. `format.json` is read with formats as notes, as that file asks for; all other
files with formats that are held to, among them the optional ones.

A few formats are narrower than their standards on purpose (`json_schema_formats.NARROWER`): valid instances that they do not
let through are counted apart and listed. Texts with half a surrogate pair cannot be written at all and are left out.

The suite is not part of this repository. `--suite DIR` names a folder with `draft2020-12` in it; `--fetch` takes it from the
source package of jsonschema 4.26.0 by pip, into the folder for downloads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

from rich.console import Console

from orchard.core.report import Bound, Claim, Report, Value
from orchard.generate.errors import UnsupportedSchema
from orchard.generate.json_schema import schema_grammar
from orchard.generate.json_schema.document import parts_of
from orchard.generate.json_schema.formats import NARROWER
from orchard.generate.json_schema.keywords import KNOWN
from orchard.generate.json_schema.lexer import limits
from orchard.generate.json_schema.numbers import decimal

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "results" / "bench" / "json_schema_suite.json"
PACKAGE = "jsonschema==4.26.0"
MOST_SPELLINGS = 2000
CLAIMS = [
    Claim("invalid", "no invalid instance is accepted", "invalid accepted", Bound("==", 0)),
    Claim("valid", "no valid instance is rejected, but for narrower formats", "valid rejected", Bound("==", 0)),
    Claim(
        "ignored", "no keyword of a schema that is made into a grammar is ignored", "keywords ignored", Bound("==", 0)
    ),
    Claim("named", "every refusal names a keyword of the schema", "refused without a name", Bound("==", 0)),
]


def fetched(folder: Path) -> Path:
    """The suite out of the package's source, unpacked into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "draft2020-12").is_dir():
        with tempfile.TemporaryDirectory() as place:
            command = ["pip", "download", PACKAGE, "--no-binary", ":all:", "--no-deps", "-q", "-d", place]
            subprocess.run([sys.executable, "-m", *command], check=True)
            with tarfile.open(next(Path(place).glob("*.tar.gz"))) as package:
                for member in package.getmembers():
                    _, found, name = member.name.partition("/json/tests/draft2020-12/")
                    if found and member.isfile():
                        target = folder / "draft2020-12" / Path(name)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        data = package.extractfile(member)
                        target.write_bytes(data.read() if data else b"")
    return folder


def spellings(value: Any) -> Iterator[str]:
    """Compact spellings of a value: keys in every order, whole numbers and fractions without an exponent."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        yield json.dumps(value, ensure_ascii=False)
    elif isinstance(value, int | Decimal):
        plain = decimal(Fraction(value))
        yield plain
        if str(value) != plain:
            yield str(value)
    elif isinstance(value, list):
        for items in product(*(list(islice(spellings(item), 24)) for item in value)):
            yield f"[{','.join(items)}]"
    else:
        for order in permutations(value.items()):
            keys = [json.dumps(key, ensure_ascii=False) for key, _ in order]
            for values in product(*(list(islice(spellings(item), 24)) for _, item in order)):
                yield "{" + ",".join(f"{key}:{text}" for key, text in zip(keys, values, strict=True)) + "}"


class Follower:
    """Says whether a grammar accepts a text, byte by byte."""

    def __init__(self, grammar: str) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self.matcher = LLMatcher(LLTokenizer("byte", slices=[]), grammar, log_level=0, limits=limits())
        if self.matcher.is_error():
            raise RuntimeError(self.matcher.get_error())

    def accepts(self, text: str) -> bool:
        matcher = self.matcher.deep_copy()
        spelled = list(text.encode())
        return matcher.try_consume_tokens(spelled) == len(spelled) and matcher.is_accepting()


def unknown_keywords(part: Any) -> int:
    if not isinstance(part, dict):
        return 0
    own = sum(keyword not in KNOWN and not keyword.startswith("x-") for keyword in part)
    return own + sum(unknown_keywords(inner) for _, inner in parts_of(part))


def mentions(schema: Any, keyword: str) -> bool:
    return keyword == "schema" or f'"{keyword}"' in json.dumps(schema, default=str)


def run(suite: Path) -> tuple[Counter[str], dict[str, list[str]]]:
    """Counts, and the cases behind them."""
    counts: Counter[str] = Counter()
    cases: dict[str, list[str]] = {"refused": [], "wrong": [], "narrower": []}
    for path in sorted((suite / "draft2020-12").rglob("*.json")):
        name = path.relative_to(suite / "draft2020-12").as_posix().removesuffix(".json")
        for group in json.loads(path.read_text(), parse_float=Decimal):
            check(f"{name}: {group['description']}", group, name, counts, cases)
    return counts, cases


def check(title: str, group: dict[str, Any], name: str, counts: Counter[str], cases: dict[str, list[str]]) -> None:
    tests, schema = group["tests"], group["schema"]
    counts["schemas"] += 1
    counts["instances"] += len(tests)
    try:
        source = json.dumps(schema, default=lambda number: float(number))
        grammar = schema_grammar(source, formats="ignore" if name == "format" else "assert")
    except UnsupportedSchema as error:
        impossible = error.message.endswith("no value can be valid")
        if impossible and not any(test["valid"] for test in tests):
            counts["schemas that nothing can match"] += 1
            counts["instances right"] += len(tests)
            return
        if impossible:
            counts["valid rejected"] += sum(test["valid"] for test in tests)
            cases["wrong"].append(f"{title}: said to be impossible")
        counts["refused"] += 1
        counts["instances refused"] += len(tests)
        counts[f"refused for {error.keyword}"] += 1
        counts["refused without a name"] += not mentions(schema, error.keyword)
        cases["refused"].append(f"{title}: {error}")
        return
    counts["enforced"] += 1
    counts["keywords ignored"] += unknown_keywords(schema)
    follower = Follower(grammar)
    for test in tests:
        try:
            texts = list(islice(spellings(test["data"]), MOST_SPELLINGS))
            "".join(texts).encode()
        except UnicodeEncodeError:
            counts["instances left out"] += 1
            continue
        accepted = [text for text in texts if follower.accepts(text)]
        if bool(accepted) == test["valid"]:
            counts["instances right"] += 1
        elif test["valid"] and name.startswith("optional/format/") and schema.get("format") in NARROWER:
            counts["valid left out by a narrower format"] += 1
            cases["narrower"].append(f"{title}: {test['description']}: {texts[0]}")
        else:
            counts["valid rejected" if test["valid"] else "invalid accepted"] += 1
            cases["wrong"].append(f"{title}: {test['description']}: {(accepted or texts)[0]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="a folder with draft2020-12 in it")
    parser.add_argument("--fetch", type=Path, metavar="DIR", help="take the suite from the package index into DIR")
    parser.add_argument("--out", type=Path, default=TARGET, help="where the Report goes")
    options = parser.parse_args(arguments)
    if options.suite is None and options.fetch is None:
        parser.error("say where the suite is (--suite), or where to put it (--fetch)")
    started = time.perf_counter()
    counts, cases = run(options.suite if options.suite is not None else fetched(options.fetch))
    for metric in ("invalid accepted", "valid rejected", "keywords ignored", "refused without a name", "refused"):
        counts[metric] += 0
    whole = [name for name in counts if not name.startswith("refused for ")]
    values = {name: Value(counts[name]) for name in whole}
    made = counts["enforced"] + counts["schemas that nothing can match"]
    values["coverage"] = Value(round(made / max(counts["schemas"], 1), 4), note="schemas enforced, of all")
    values["instance coverage"] = Value(round(counts["instances right"] / max(counts["instances"], 1), 4))
    report = Report.record(
        "bench",
        "json-schema-suite",
        values=values,
        claims=CLAIMS,
        series={
            "refused for": [
                [name.removeprefix("refused for "), n] for name, n in counts.most_common() if name not in whole
            ],
            **cases,
        },
        wall_time=round(time.perf_counter() - started, 3),
        notes=[f"{PACKAGE}, json/tests/draft2020-12 with its optional files"],
    )
    report.save(options.out)
    Console().print(report.table())
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
