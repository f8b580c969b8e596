"""Answers as people's models write them: the number and the program that are read out of them."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from diversed.data import sandbox
from diversed.data.code_answers import HERE, program
from diversed.data.final_number import final_number, readable
from diversed.data.scores import SCORES, missing, words
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.tokenizers import DefaultTokenizer

CASES = Path(__file__).parent / "cases"
TESTS = "assert square_perimeter(10)==40\nassert square_perimeter(5)==20\nassert square_perimeter(4)==16"
HEAD = '''from typing import List


def has_close(numbers: List[float], threshold: float) -> bool:
    """ Check if any two numbers are closer than threshold.
    >>> has_close([1.0, 2.0], 0.5)
    False
    """
'''
CHECK = """def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0], 0.3) == True
    assert candidate([1.0, 2.0, 3.9, 4.0], 0.05) == False
"""
REFERENCES = {"mbpp": TESTS, "humaneval": f"{HEAD}{HERE}{CHECK}\n\ncheck(has_close)\n"}


def rows(name):
    lines = [json.loads(line) for line in (CASES / name).read_text(encoding="utf-8").splitlines()]
    return [pytest.param(row, id=row.get("what") or f"{row['text'][-24:]!r}-{i}") for i, row in enumerate(lines)]


@pytest.mark.parametrize("row", rows("numbers.jsonl"))
def test_a_number_is_read_as_a_person_reads_it(row):
    assert SCORES["final_number"].function(row["text"], row["reference"]) == row["right"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 3.5 million.", 3500000),
        ("So \\boxed{\\frac{3}{4}}", "3/4"),
        ("\\boxed{3\\frac{1}{2}}", "7/2"),
        ("#### 1 1/2", "3/2"),
        ("2 x 10^3", 2000),
        ("3 \\times 10^{4}", 30000),
        ("Therefore, the answer is 42. Let me know if you have other questions, or 2 more.", 42),
        ("The final answer is $\\boxed{18}$.", 18),
        ("the answer is \\[18\\]", 18),
        ("\\boxed{\\$25.00}", 25),
        ("\\boxed{25\\text{ dollars}}", 25),
        ("\\boxed{x = 5}", 5),
        ("Ответ: 25", 25),
        ("\u0909\u0924\u094d\u0924\u0930 \u0967\u096e", 18),
        ("\u0627\u0644\u0625\u062c\u0627\u0628\u0629 \u0661\u0668", 18),
        ("10 000", 10000),
        ("1,00,000", 100000),
        ("Total cost: $12.50 + $7.50 = $20.00 for 3 people.", 20),
        ("He walks 6 miles in 2 hours", 6),
        ("He'll be 30 years old in 5 years.", 30),
        ("The answer is 5^2 = 25", 25),
        ("thinking of 5</think>\n\n7", 7),
        ("<think>5 5 5", None),
        ("-.5", "-1/2"),
        ("1/0", None),
        ("### Final Answer\n\n**18**", 18),
        ("9" * 5000, None),
    ],
)
def test_other_ways_of_writing_a_number(text, number):
    assert final_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    "reference", ["12:30", "\\frac{\\sqrt{3}}{2}", "2x+1", "3/4/2020", "x^2", "(3, 4)", "\\pi", "none", "", "3+4i"]
)
def test_a_reference_that_would_be_read_in_part_is_refused(reference):
    assert not readable(reference)
    assert missing("final_number", reference)


@pytest.mark.parametrize("piece", ["9", "1,", "(", "#### ", "1 ", "\\boxed{", "answer is\n", "<think>", "=", "1/", "**1", "- "])
def test_reading_a_long_text_takes_no_more_than_a_second(piece):
    """20,000 repetitions take milliseconds; a quadratic search took 8 s."""
    began = time.process_time()
    final_number(piece * 20000)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("row", rows("code_answers.jsonl"))
def test_the_block_counts_that_defines_what_the_tests_call(row):
    assert sandbox.passes(*program(row["text"], REFERENCES[row["task"]])) == bool(row["right"])


SOLUTION = "def square_perimeter(a):\n    return 4 * a"


@pytest.mark.parametrize(
    "text",
    [
        f"~~~python\n{SOLUTION}\n~~~",
        f"<think>```python\nprint(1)\n```</think>\n```python\n{SOLUTION}\n```",
        f"First try:\n```python\ndef square_perimeter(a):\n    return 0\n```\nBetter:\n```python\n{SOLUTION}\n```",
        f"```python\n{SOLUTION}\n```\nUsage:\n```python\nprint(square_perimeter(3))\n```",
        "```python\nimport math\n\ndef four():\n    return 4\n```\nthen\n```python\ndef square_perimeter(a):\n    return four() * a\n```",
        f"Here is the function:\n\n{SOLUTION}\n\nIt multiplies the side by four.",
        f"```python\n{SOLUTION}\n\nprint(square_per",
        f"{SOLUTION}\n<|im_end|>",
        "1. The plan:\n   ```python\n   def square_perimeter(a):\n       return 4 * a\n   ```",
        "```python\nsquare_perimeter = lambda a: 4 * a\n```",
        "```\nclass Square:\n    def side(self, a):\n        return 4 * a\n\nsquare_perimeter = Square().side\n```",
    ],
)
def test_other_answers_that_hold_a_right_program(text):
    assert sandbox.passes(*program(text, TESTS))


@pytest.mark.parametrize("text", ["", "I cannot do that.", "```python\n```", "```", "`" * 5000, "def " * 5000, "(" * 5000, "\x00"])
def test_other_answers_that_hold_none(text):
    assert not sandbox.passes(*program(text, TESTS))


LANGUAGES = {
    "Chinese": "今天天气很好，我们去公园散步吧。",
    "Japanese": "今日はとても天気がいいので、公園を散歩しましょう。",
    "Thai": "วันนี้อากาศดีมาก",
    "Korean": "오늘은 날씨가 아주 좋습니다.",
    "Russian": "Сегодня очень хорошая погода.",
    "Greek": "Ο καιρός είναι πολύ καλός σήμερα.",
    "Arabic": "الطقس جميل جدا اليوم.",
    "Hebrew": "מזג האוויר יפה מאוד היום.",
    "Hindi": "आज मौसम बहुत अच्छा है।",
    "Tamil": "இன்று வானிலை மிகவும் நன்றாக உள்ளது.",
    "German": "Für größere Häuser müssen Bürger höhere Gebühren zahlen.",
    "Vietnamese": "Hôm nay thời tiết rất đẹp.",
    "Khmer": "ថ្ងៃនេះអាកាសធាតុល្អណាស់",
    "Georgian": "დღეს ძალიან კარგი ამინდია.",
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("score", ["rouge1", "rouge2", "rougeL", "bleu"])
def test_a_reference_agrees_with_itself_in_every_script_and_not_with_another(language, score):
    text = LANGUAGES[language]
    assert not missing(score, text)
    assert SCORES[score].function(text, text) == pytest.approx(1)
    other = LANGUAGES["Greek" if language != "Greek" else "Russian"]
    assert SCORES[score].function(other, text) < 0.2
    half = text[: len(text) // 2]
    assert 0 < SCORES["rouge1"].function(half, text) < 1


def test_an_umlaut_does_not_cut_a_word():
    assert words("Für Häuser, naïve_cafés") == ["für", "häuser", "naïve", "cafés"]


@pytest.mark.parametrize(("score", "reference"), [("rouge1", "!!!"), ("rouge2", "one"), ("rougeL", "👍"), ("bleu", " ")])
def test_a_reference_that_could_never_score_is_refused(score, reference):
    assert missing(score, reference)


@given(st.text(alphabet=st.characters(max_codepoint=127), max_size=80))
def test_words_of_ascii_are_those_of_rouge_score(text):
    assert words(text) == DefaultTokenizer(use_stemmer=True).tokenize(text)
