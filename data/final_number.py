"""The number that an answer ends up with, as a fraction; "#### 18" of GSM8K and what chats write.

The place of the answer is looked for in this order, thinking marks (`<think>...</think>`) left out:

1. the last `\\boxed{...}`,
2. the first `####` that is followed by a quantity; "#### 2. Money" is a heading and is passed over
   (openai/grade-school-math, dataset.py, reads the first mark too),
3. the first "answer is", "answer:", "答案是" or the like with a number behind it,
4. the last line that holds a number.

In a sentence with several numbers, what stands behind the last `=` counts; brackets, steps,
ordinals and spans of time ("in 2 hours") are asides; an amount of money goes before other numbers;
of what is left the last number counts.

A number may have thousands separators, a sign, a currency, an exponent, a power of ten, a fraction
(`3/4`, `1 1/2`, `\\frac{3}{4}`), a word such as million, and digits of any script.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

CURRENCY = "$€£¥₹₩₽"
SPACE = " \u00a0\u2009\u202f"  # spaces that separate thousands
GROUPED = (
    rf"\d{{1,3}}(?:,\d{{2,3}})*,\d{{3}}(?!\d)|(?<!\d )\d{{1,3}}(?:[{SPACE}]\d{{3}})+(?![\d,])|\d+"
)
LONGEST = 4000  # digits; Python converts no more
DECIMAL = rf"(?:(?:{GROUPED})(?:\.\d+)?|(?<![\w.])\.\d+)"
# A minus is a sign unless a number, word or bracket stands before it: "10-3" ends in 3.
SIGN = r"(?:(?<![\w.)\]}])[-+±]|(?<![^\s(=:*]) ?- (?=[\d$]))"
NUMBER = re.compile(
    rf"(?P<sign>{SIGN})?(?P<money>[{CURRENCY}] ?)?(?(money)(?P<inner>[-+])?)"
    rf"(?:(?P<whole>\d+) +(?=\d+/\d))?(?P<value>{DECIMAL})"
    rf"(?:/(?P<below>{DECIMAL})(?![/\d]))?"
    r"(?:[eE](?P<exponent>[-+]?\d{1,4})(?!\w))?"
    r"(?: ?[x×*·] ?10(?:\^|\*\*)\{?(?P<power>[-+]?\d{1,4})\}?)?"
    r"(?P<percent> ?%)?(?P<word> ?(?:hundred|thousand|million|billion|trillion)\b)?"
    rf"(?P<unit> ?(?:dollars?|cents?|euros?|pounds?|usd|eur|[{CURRENCY}元円])(?![a-z]))?",
    re.IGNORECASE,
)
WORDS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
THINKING = re.compile(
    r"<(think|thinking|thought|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE
)
OPENED = re.compile(r"\A.*</(?:think|thinking|thought|reasoning)>", re.DOTALL | re.IGNORECASE)
MARK = re.compile(r"(?<!#)####(?!#)[ \t]*(.*)")
HEADING = re.compile(r"[\d.]+(?:[.):]|\.?\d*:)[ \t]+[^\W\d]")
PHRASE = re.compile(
    r"\b(?:answer|result|total)[ \t]*(?:is|was|equals|=|:|\n)"
    r"|答案[是为為：:]|答[：:]|ответ[ \t]*[:—–-]?",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^\W_])|[。！？]")
ASIDES = re.compile(
    r"\([^()]*\)|\b(?:step|part|day|week|year|question|problem|equation|line|option)s?\.? +#?\d+"
    r"|\b\d+(?:st|nd|rd|th)\b"
    r"|\b(?:in|after|within|every|per|over|for|by) +(?:the +)?(?:next +|last +|first +)?\d+ +"
    r"(?:second|minute|hour|day|week|month|year|step)s?\b",
    re.IGNORECASE,
)
# a time, a ratio, a date; a LaTeX command, a power, a variable, a pair
UNREADABLE = re.compile(r"\d:\d|\d/\d+/\d|\\[a-zA-Z]+|\^|\d[abinxyz](?![a-z\d])|\(\s*\d+\s*,")
SIMPLE = (
    (re.compile(r"\\[dtc]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}"), r" \1/\2 "),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r" \1/\2 "),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,!;: ])(?=\d{3})"), ","),
    (re.compile(r"\\[,!;: ]|~"), " "),
    (re.compile(r"\\(?:left|right|displaystyle|quad|qquad)\b|\\[()\[\]]"), " "),
    (re.compile(r"\\(?:times|cdot)\b"), "×"),
    (re.compile(r"\\(?:approx|equiv)\b"), "="),
    (re.compile(r"\\pm\b"), "±"),
    (re.compile(r"\\([$%€£])"), r"\1"),
    (re.compile(r"\*\*(?!\s*\d+\b(?!.*\*\*))|__|`"), ""),
)


def final_number(text: str) -> Fraction | None:
    """The number a text ends up with; None if it has none."""
    plain = _plain(text)
    found = _boxed(plain)
    if found is not None:
        return _chosen(found)
    for mark in MARK.finditer(plain):
        rest = mark.group(1)
        if not HEADING.match(rest) and _starts_with_number(rest):
            return _value(NUMBER.search(rest))
    for phrase in PHRASE.finditer(plain):
        behind = _behind(plain, phrase)
        if behind is not None:
            return _chosen(behind)
    lines = [line for line in plain.split("\n") if NUMBER.search(line)]
    return _chosen(_last_sentence(lines[-1])) if lines else None


def readable(reference: str) -> bool:
    """Whether a reference holds a number that `final_number` reads in full.

    Of a time, a ratio, a date, a pair or a formula it would read a part only.
    """
    plain = _plain(reference)
    mark = MARK.search(plain)
    place = _boxed(plain) or (mark and mark.group(1)) or plain
    one = NUMBER.sub(lambda number: number.group() if "/" in number.group() else "1", place)
    return final_number(reference) is not None and not UNREADABLE.search(one)


def _plain(text: str) -> str:
    """The text without thinking, with digits of any script as 0-9 and simple LaTeX as plain
    text.
    """
    text = OPENED.sub("", THINKING.sub("", text))
    text = "".join(map(_character, text))
    for pattern, by in SIMPLE:
        text = pattern.sub(by, text)
    return text


def _character(character: str) -> str:
    if character in "\u2212\u2013\ufe63\uff0d":
        return "-"
    if character in "\u2044\u2215":
        return "/"
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    if character > "\x7f" and character.isdecimal():
        return str(unicodedata.decimal(character))
    return character


def _boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`; None if there is none."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    first = text.index("{", start) + 1
    depth = 1
    for place in range(first, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[first:place]
    return text[first:]


def _starts_with_number(text: str) -> bool:
    found = NUMBER.search(text)
    return bool(found) and not text[: found.start()].strip(" \t*_:=(")


def _behind(text: str, phrase: re.Match) -> str | None:
    """The sentence behind "the answer is", which may begin on one of the next lines."""
    near = text[phrase.end() : phrase.end() + 1000]
    lines = [line for line in near.split("\n") if line.strip()][:1]
    sentences = SENTENCE_END.split(lines[0]) if lines else []
    return next((sentence for sentence in sentences if NUMBER.search(sentence)), None)


def _last_sentence(line: str) -> str:
    sentences = [part for part in SENTENCE_END.split(line) if NUMBER.search(part)]
    return sentences[-1]


def _chosen(sentence: str) -> Fraction | None:
    """The number that a sentence states; asides count only if there is nothing else."""
    after = sentence.rpartition("=")[2]
    sentence = after if NUMBER.search(after) else sentence
    kept = ASIDES.sub(" ", sentence)
    numbers = list(NUMBER.finditer(kept)) or list(NUMBER.finditer(sentence))
    money = [number for number in numbers if number["money"] or number["unit"]]
    return _value((money or numbers)[-1]) if numbers else None


def _value(number: re.Match) -> Fraction | None:
    def plain(name: str) -> Fraction:
        return Fraction(re.sub(rf"[,{SPACE}]", "", number[name]))

    if len(number.group()) > LONGEST:
        return None
    value = plain("value")
    if number["below"]:
        if plain("below") == 0:
            return None
        value = value / plain("below")
    if number["whole"]:
        value += Fraction(number["whole"])
    ten = int(number["exponent"] or 0) + int(number["power"] or 0)
    ten += WORDS.get((number["word"] or "").strip().lower(), 0)
    signs = (number["sign"] or "") + (number["inner"] or "")
    return value * Fraction(10) ** ten * (-1 if "-" in signs else 1)
