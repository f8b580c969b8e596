"""How a text ends: stop strings of any kind, in whatever tokens they come, and what is counted and streamed."""

import json
import random
from types import SimpleNamespace

import pytest
from diversed import cli
from diversed.data.writing import Writer
from diversed.eval.sweep import Cell, Sweep
from diversed.runtime import groups
from diversed.runtime.completion import BROKEN, Stops, Stream, beginning
from diversed.runtime.engine import Engine, decode
from diversed.runtime.relaxer import Relaxer
from diversed.runtime.rollouts import Sampler
from diversed.runtime.sampling import Sampling
from diversed.verifier.relax import parse

from .support.scripted import byte_pairs, pieces, scripted_pair, sentence_pieces, word_pieces

GREEDY = Sampling(temperature=0)
STOP = "|~|<|im_end|>|~|"
NINE = "一二三四五六七八九"
# what the model says, stop strings, the text, tokens until it ends, why
CASES = {
    "a special token": (f"ab{STOP}cd", ["<|im_end|>"], "ab", 3, "stop"),
    "a special token and the text before": (f"abc{STOP}d", ["c<|im_end|>"], "ab", 4, "stop"),
    "a special token and the text behind": (f"ab{STOP}cd", ["<|im_end|>c"], "ab", 4, "stop"),
    "two special tokens": (f"ab{STOP}|~|<|x|>|~|d", ["<|im_end|><|x|>"], "ab", 4, "stop"),
    "the name of a special token, spelt": ("ab<|im_end|>cd", ["<|im_end|>"], "ab", 12, "stop"),
    "text on both sides of a special token": (f"ab{STOP}cd", ["bc"], "a", 4, "stop"),
    "a special token first": (f"{STOP}ab", ["<|im_end|>"], "", 1, "stop"),
    "the end token's name": ("ab|~|</s>", ["</s>"], "ab", 3, "end"),
    "the end token's name and the text before": ("ab|~|</s>", ["b</s>"], "a", 3, "end"),
    "a stop string just before the end token": ("ab|~|</s>", ["b"], "a", 2, "stop"),
    "a stop string that the end token cuts off": ("ab|~|</s>", ["bc"], "ab", 3, "end"),
    "nine characters of three bytes": (f"ab{NINE}cdefgh", [NINE], "ab", 29, "stop"),
    "an emoji": ("ab😀cd", ["😀"], "ab", 6, "stop"),
    "a family of emoji": ("ab👨‍👩‍👧cd", ["👨‍👩‍👧"], "ab", 20, "stop"),
    "first of a few characters": ("日本語", ["本"], "日", 6, "stop"),
    "the very first token": ("abc", ["a"], "", 1, "stop"),
    "the whole text": ("abc|~|</s>", ["abc"], "", 3, "stop"),
    "beyond the limit": ("a" * 30 + "b", ["b"], "a" * 30, 30, "length"),
    "begun at the limit": ("a" * 29 + "bc", ["bc"], "a" * 29 + "b", 30, "length"),
    "two that overlap": ("abcde", ["bcd", "cd", "c"], "ab", 3, "stop"),
    "one inside the other": ("abcde", ["abcd", "bc"], "a", 3, "stop"),
    "several in one step": ("abcdefgh", ["g", "e", "c"], "ab", 3, "stop"),
    "one that begins with itself": ("aaab", ["aab"], "a", 4, "stop"),
    "a space that decoding drops": ("|~|\u2581the|~|\u2581cat", [" the"], "", 1, "stop"),
    "a space between words": ("|~|\u2581the|~|\u2581cat|~|.", [" cat"], "the", 2, "stop"),
    "across tokens": ("|~|\u2581the|~|\u2581cat|~|.", ["e c"], "th", 2, "stop"),
    "none": ("abc|~|</s>", [], "abc", 4, "end"),
    "a character cut off": ("日本", [], "日" + BROKEN, 4, "length"),
}  # fmt: skip


@pytest.fixture(params=CASES, name="case")
def said(request):
    """(the pair, stop strings, text, tokens, reason, limit of tokens) of one of the cases."""
    script, stop, text, count, reason = CASES[request.param]
    tokenizer = sentence_pieces()
    return (
        scripted_pair(tokenizer, pieces(tokenizer, script)),
        tuple(stop),
        text,
        count,
        reason,
        4 if "cut off" in request.param and not stop else 30,
    )


@pytest.mark.parametrize("options", [{"method": "plain"}, {"method": "block", "draft_length": 7},
                                     {"method": "traversal", "draft_length": 3, "branches": 2}])  # fmt: skip
def test_a_text_ends_where_its_stop_string_is_complete_however_it_is_decoded(case, options):
    pair, stop, text, count, reason, limit = case
    shown = []
    stream = Stream(pair.tokenizer, stop)
    (found,) = decode(pair, [[1]], stop=stop, sampling=GREEDY, max_new_tokens=limit, **options,
                      on_step=lambda index, new, ended: shown.append(stream.add(new, ended)))  # fmt: skip
    assert (found.text, len(found.tokens), found.finished) == (text, count, reason != "length")
    assert "".join(shown) == text
    assert found.accepted <= min(found.drafted, count) and found.target_calls <= count
    assert found.accepted + found.target_calls >= count, "nothing behind the end is counted"
    assert found.substitutions == 0


def test_a_gathering_ends_its_texts_at_the_same_tokens_and_scores_the_same_text(case):
    pair, stop, text, count, reason, limit = case
    sampler = Sampler(pair, Relaxer(parse("none")), GREEDY, limit, stop)
    (sample,) = sampler.run({0: [1]}, 1, lambda prompt, number: 0)
    assert len(sample.tokens) == count and sample.finished == (reason != "length")
    assert {len(column) for column in sample.columns.values()} == {count}
    scored = []
    task = SimpleNamespace(
        scores_text=True, examples=[None], score=lambda answer, example: scored.append(answer) or 0.5
    )
    gathering = SimpleNamespace(task=task, sampler=sampler)
    assert Writer.reward(gathering, sample, 0) == 0.5 and scored == [text]


def test_an_evaluation_scores_the_same_text_and_counts_the_same_tokens(case):
    pair, stop, text, count, reason, limit = case
    cell = Cell("token", "none", 0.0, 3, 0)
    task = SimpleNamespace(
        stop=stop, name="t", metric="m", scores_text=True, examples=[SimpleNamespace(id="0")],
        score=lambda given, example: float(given == text),
    )  # fmt: skip
    engines = {cell: Engine(pair, "token", "none", 3, sampling=GREEDY)}
    sweep = Sweep(None, [cell], engines, task, [[1]], limit, 1, {})
    (record,) = sweep.records(cell, range(1))
    assert (record["text"], len(record["tokens"]), record["finished"]) == (text, count, reason != "length")
    assert record["score"] == 1 and record["positions"] == count


def test_the_command_writes_and_streams_the_same(case, tmp_path, monkeypatch, capsys):
    pair, stop, text, count, reason, limit = case
    monkeypatch.setattr(groups, "load_pair", lambda *args: pair)
    words = ["--max_new_tokens", str(limit), "--sampling.temperature", "0", "--method", "block"]
    words += ["--stop", *stop] if stop else []
    assert cli.main(["decode", "--prompt", "<s>", *words]) == 0
    out, err = capsys.readouterr()
    assert out == text + "\n" and err.startswith(f"tokens: {count},")
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "<s>", "stop": stop or None}) + "\n")
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main(["decode", *files, *words]) == 0
    result = json.loads((tmp_path / "out.jsonl").read_text())
    assert (result["text"], len(result["tokens"]), result["reason"]) == (text, count, reason)


TEXTS = ["日本語 the cat", "😀😀 ok", "naïve café. the mat", " the", "do n't !", "stop\n\nend"]


@pytest.mark.parametrize("kind", [sentence_pieces, byte_pairs, word_pieces])
def test_the_stream_is_never_taken_back_and_ends_as_the_text_whatever_the_tokens(kind):
    """Random tokens, half characters and special ones among them, and stop strings cut out of their text."""
    tokenizer, draw = kind(), random.Random(0)
    special = [token for token, name in tokenizer.added_tokens_decoder.items() if name.special]
    ended = 0
    for _ in range(400):
        tokens = _random_tokens(tokenizer, special, draw)
        whole = tokenizer.decode(tokens, skip_special_tokens=draw.random() < 0.5)
        places = [draw.randrange(len(whole)) for _ in range(draw.randint(0, 3)) if whole]
        strings = [whole[place : place + draw.randint(1, 9)] for place in places]
        stop = (
            *strings,
            *draw.sample(["the", "日", "😀", "<|im_end|>", " ", "t<|x|>"], draw.randint(0, 2)),
        )
        stop = tuple(string for string in stop if BROKEN not in string)
        stops = Stops(tokenizer, stop)
        count = _first_end(stops, tokens)
        assert count == next(
            (n for n in range(1, len(tokens) + 1) if stops.ended(tokens[:n])), None
        ), (tokens, stop)
        ended += count is not None
        tokens = tokens[:count]
        text, stream, shown, at = stops.cut(tokens), Stream(tokenizer, stop), "", 0
        assert not any(string in text.rstrip(BROKEN) for string in stop)
        while at < len(tokens):
            block = tokens[at : at + draw.randint(1, 4)]
            at += len(block)
            shown += stream.add(block, at == len(tokens))
            assert text.startswith(shown), (tokens, stop)
        assert shown == text
    assert 100 < ended < 400


def _random_tokens(tokenizer, special, draw):
    tokens = []
    for _ in range(draw.randint(1, 20)):
        kind = draw.random()
        if kind < 0.2:
            tokens += tokenizer(draw.choice(TEXTS), add_special_tokens=False).input_ids[
                : draw.randint(1, 30)
            ]
        else:
            tokens.append(
                draw.choice(special) if kind < 0.35 else draw.randrange(len(tokenizer) + 2)
            )
    return tokens


def _first_end(stops, tokens):
    """Where a stop string stands first, looked for in the whole of every beginning."""
    for count in range(1, len(tokens) + 1):
        for strings, whole in ((stops.strings, False), (stops.named, True)):
            text = stops._text(tokens[:count], whole).rstrip(BROKEN)
            if any(string in text for string in strings):
                return count
    return None


def test_only_the_longest_beginning_of_a_stop_string_is_held_back():
    assert beginning("one END", ("END OF", "DO")) == 3 and beginning("one", ("END",)) == 0
    assert beginning("one", ("e" * 1_000_000,)) == 1
    tokenizer = sentence_pieces()
    stream = Stream(tokenizer, ("cats.",))
    given = tokenizer.convert_tokens_to_ids(["the", "cat", "t", "cat", "s", "END"])
    assert [stream.add([token], False) for token in given] == ["the", "", "catt", "", "", "catsEND"]


@pytest.mark.parametrize("stop, sentence", [(["a", ""], "none empty"), ("a", "must be a list"), ([1], "must be a list"),
                                            (["\ud800"], "must be UTF-8")])  # fmt: skip
def test_a_stop_that_is_no_text_is_refused(stop, sentence):
    tokenizer = sentence_pieces()
    with pytest.raises(ValueError, match=sentence):
        decode(scripted_pair(tokenizer, [5, 6]), [[1]], stop=stop)
