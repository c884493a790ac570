"""Text as a reader would take it, whatever was done to hide it from a program.

Words are folded to plain lower-case letters (compatibility forms, accents, invisible characters, letters of other alphabets
that look Latin). What is left of disguises (`b0mb`, `b o m b`, `b.o.m.b`, `boooomb`, `b*mb`) is undone only where a known
word comes out, so that `covid19`, `c4` and `a b c` stay what they are. Text in base64 is read as well.
"""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Collection
from itertools import product

WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
# Cyrillic, Greek and other letters that pass for Latin ones, after lower-casing.
_LOOKALIKES = (
    "аa вb еe ёe кk мm нh оo пn рp сc тt уy хx іi їi јj ѕs ԁd ԛq ԝw һh ьb з3 "
    "αa βb γy εe ηn ιi κk νv οo ρp τt υu χx ωw μu "
    "ıi ɑa ɡg ɩi ʀr ʟl ɴn ʜh ʙb ᴀa ᴇe ᴏo øo łl đd ßs"
)
_TABLE = str.maketrans({pair[0]: pair[1] for pair in _LOOKALIKES.split()})
_ESCAPES = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|%([2-7][0-9a-fA-F])|&#(\d{2,4});")
_LEET = {"0": "o", "1": "il", "3": "e", "4": "a", "5": "s", "6": "g", "7": "t", "8": "b", "9": "g", "@": "a", "$": "s"}
_LEET |= {"!": "i", "|": "il", "+": "t", "(": "c", "<": "c", "€": "e", "£": "l", "*": "aeiou", "#": "aeiou", "¡": "i"}
_RAW = re.compile(r"\S+")
# Single letters with gaps of one kind between them: "b o m b", "b-o-m-b", "b . o . m . b".
_SPACED = re.compile(r"(?<![^\W_])(?:[^\W_](?P<gap>[\s.\-_*~|/,]{1,3}))(?:[^\W_](?P=gap)){1,80}[^\W_](?![^\W_])")
_BASE64 = re.compile(r"[A-Za-z0-9+/\-_]{16,}={0,2}")
_LONGEST_BASE64 = 4_096
_LONGEST_WORD = 20
MOST_TRIES = 64


def fold(text: str) -> str:
    """Plain lower-case text: compatibility forms, escapes, invisible characters, accents and look-alikes are undone."""
    if text.isascii():
        return _ESCAPES.sub(_unescape, text).lower() if ("\\" in text or "%" in text or "&" in text) else text.lower()
    text = unicodedata.normalize("NFKD", _ESCAPES.sub(_unescape, text)).replace("’", "'").casefold()
    kept = (character for character in text if unicodedata.category(character) not in ("Mn", "Me", "Cf"))
    return "".join(kept).translate(_TABLE)


def _unescape(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    return chr(int(digits, 16) if digits else int(match[4]))


def words_of(text: str, known: Collection[str]) -> list[str]:
    """The words of a text with disguises undone; `known` are the words that a disguise may hide."""
    folded = fold(text)
    if len(folded) > 4:
        folded = _SPACED.sub(lambda match: _join(match, known), folded)
    words: list[str] = []
    for chunk in _RAW.findall(folded):
        found = WORD.findall(chunk)
        if len(found) == 1 and found[0].replace("'", "").isalpha() and not _stretched(found[0]):
            core = chunk.strip(".,;:!?\"'()[]{}…-—")
            if core == found[0] or core.replace("'", "") == found[0].replace("'", ""):
                words.append(found[0].replace("'", ""))
                continue
        words.extend(undisguise(chunk, found, known))
    return words


def plain_words(text: str) -> list[str]:
    """The words without any step against disguises: only to measure what those steps are worth."""
    return [word.replace("'", "") for word in WORD.findall(text.lower())]


def undisguise(chunk: str, found: list[str], known: Collection[str]) -> list[str]:
    """The words in a chunk without spaces that is not a plain word."""
    plain = [word.replace("'", "") for word in found]
    core = chunk.strip(".,;:?\"'[]{}…")
    if plain and all(word in known for word in plain):
        return plain
    letters = re.sub(r"[^a-z0-9]", "", core)
    if len(letters) > 2 and letters in known:  # ki-ll, bo.mb
        return [letters]
    if len(core) <= _LONGEST_WORD and re.search(r"[a-z]", core):
        for candidate in _readings(core.strip("!)(-_")), _readings(core):
            for reading in candidate:
                if reading in known and reading not in plain:
                    return [reading]
    return [_squeeze(word, known) if _stretched(word) else word for word in plain]


def _readings(core: str) -> list[str]:
    """What a chunk may say when its digits and signs stand for letters; none where it has no such signs."""
    choices, count = [], 1
    for character in core:
        letters = _LEET.get(character, character)
        if not (letters.isalpha() or letters.isdigit()):
            continue
        count *= len(letters)
        choices.append(letters)
    if count > MOST_TRIES or not choices or "".join(choices) == core:
        return []
    readings = ["".join(letters) for letters in product(*choices)]
    return [form for reading in readings for form in (reading, _single(reading))]


def _stretched(word: str) -> bool:
    return any(a == b == c for a, b, c in zip(word, word[1:], word[2:]))


def _single(word: str) -> str:
    return re.sub(r"(.)\1{2,}", r"\1", word)


def _squeeze(word: str, known: Collection[str]) -> str:
    """`kiiilll` → `kill`: runs of three letters or more count as one or as two."""
    once, twice = _single(word), re.sub(r"(.)\1{2,}", r"\1\1", word)
    ends = re.sub(r"(.)\1{2,}$", r"\1\1", word)
    mixed = _single(ends)
    return next((form for form in (twice, once, mixed) if form in known), once)


def _join(match: re.Match[str], known: Collection[str]) -> str:
    """Letters with gaps between them as the words that they spell; the text as it was where they spell none."""
    letters = "".join(character for character in match[0] if character.isalnum())
    if letters in known:
        return f" {letters} "
    for form in (letters, *_readings(letters)[:8]):
        parts = split_words(form, known)
        if parts and max(map(len, parts)) > 2:
            return f" {' '.join(parts)} "
    return match[0]


def split_words(letters: str, known: Collection[str]) -> list[str]:
    """Letters without gaps as words: as few as can be, known ones where there are any; none where most are unknown."""
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # cost, where the last word begins, letters in known words
    for end in range(1, len(letters) + 1):
        cost, start, covered = best[end - 1]
        found = (cost + 4, end - 1, covered)
        for start in range(max(0, end - _LONGEST_WORD), end):
            word = letters[start:end]
            if word in known or word in ("a", "i"):
                cost, _, covered = best[start]
                if cost + 3 < found[0]:
                    found = (cost + 3, start, covered + len(word))
        best.append(found)
    if best[-1][2] < 0.6 * len(letters):
        return []
    words, end = [], len(letters)
    while end:
        start = best[end][1]
        words.append(letters[start:end])
        end = start
    return words[::-1]


def hidden_texts(text: str) -> list[str]:
    """Readable text that is hidden in base64."""
    texts = []
    for match in _BASE64.findall(text):
        coded = match.rstrip("=").replace("-", "+").replace("_", "/")[:_LONGEST_BASE64]
        coded = coded[: len(coded) - len(coded) % 4] if len(coded) % 4 == 1 else coded
        try:
            plain = base64.b64decode(coded + "=" * (-len(coded) % 4), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            continue
        if plain.isprintable() and sum(character.isalpha() or character == " " for character in plain) > 0.8 * len(
            plain
        ):
            texts.append(plain)
    return texts
