"""Heads that see the classes of tokens, and heads that start from a rule."""

import json
from itertools import product

import pytest
import torch
from diversed import cli, decode, load_bundle, load_pair
from diversed.data.traces import read_manifest, read_shards, write_manifest, write_shard
from diversed.export.bundle_writer import write_bundle
from diversed.export.card import make_card
from diversed.files import write_object
from diversed.runtime.relaxer import Relaxer, load_relaxer
from diversed.runtime.sampling import Sampling
from diversed.runtime.vocabulary import token_table
from diversed.train.objectives import judge
from diversed.verifier.features import FEATURES, logit_features
from diversed.verifier.head import KINDS, WeightHead
from diversed.verifier.law import DraftTree
from diversed.verifier.offsets import offset
from diversed.verifier.relax import Believed, parse
from diversed.verifier.token_features import COUNT, NAMES, TokenTable

from .support.models import tiny_pair, tokenizer
from .test_graphs import VOCAB, requests, same
from .test_graphs import make_engine as engine_of

STRINGS = ["</s>", " the", "The", "the", "7", "71", " 7", "1,000", "+", "<=", ".", "…", " ", "\n\n", "ing", " Ann", "(", "#!", "", "x2", "Ö", "'s", "72"]
CLASS = ["special", "word", "piece", "piece", "number", "number", "number", "number", "operator", "operator", "punctuation",
         "punctuation", "space", "space", "piece", "word", "symbol", "symbol", "space", "piece", "piece", "piece", "number"]  # fmt: skip


def plain(ours, theirs, before):
    """What TokenTable.features says, by strings."""
    numbers = [float(name == CLASS[token]) for token in (ours, theirs, before) for name in NAMES]
    one, other = STRINGS[ours].strip(), STRINGS[theirs].strip()
    same = ours == theirs
    return numbers + [
        float(same),
        float(not same and one.casefold() == other.casefold()),
        float(CLASS[ours] == CLASS[theirs] == "number"),
        float(not same and bool(one) and bool(other) and (one.startswith(other) or other.startswith(one))),
    ]


@pytest.fixture(scope="module")
def table():
    return TokenTable.of(STRINGS, special=[0])


def test_classes_are_those_of_the_strings(table):
    assert [NAMES[kind] for kind in table.kind.tolist()] == [*CLASS, "special"]


def test_features_of_every_three_tokens_are_those_of_their_strings(table):
    size = len(STRINGS)
    for before in (0, 1, 4, 12):
        pairs = torch.tensor(list(product(range(size), repeat=2)))
        rows = torch.eye(size)[pairs]  # the arg max of a row is the token
        found = table.features(rows[:, 1], rows[:, 0], torch.full((len(pairs),), before))
        expected = [plain(ours, theirs, before) for ours, theirs in pairs.tolist()]
        assert torch.equal(found, torch.tensor(expected)) and found.shape[1] == COUNT


@pytest.mark.parametrize("size", [1, 2, 5])
def test_small_vocabularies_and_any_shape_will_do(size):
    table = TokenTable.of(STRINGS[3 : 3 + size])
    rows = torch.rand(2, 3, size).softmax(-1)
    assert table.features(rows, rows, torch.full((2, 3), -1)).shape == (2, 3, COUNT)
    assert TokenTable.of([]).kind.shape == (1,)


def test_ids_beyond_the_vocabulary_are_special(table):
    """Engines pad the rows of a model."""
    rows = torch.eye(len(STRINGS) + 5)
    found = table.features(rows[[-1]], rows[[-5]], torch.tensor([len(STRINGS) + 2]))
    expected = [float(name == "special") for _ in range(3) for name in NAMES]
    assert found[0, : 3 * len(NAMES)].tolist() == expected


def test_the_table_of_a_tokenizer_knows_its_marks_of_spaces_and_what_it_lacks():
    table = token_table(load_pair("sums-target", "sums-draft").tokenizer, 2000)
    assert {NAMES[kind] for kind in table.kind.tolist()} >= {"number", "operator", "word", "special"}
    assert NAMES[table.kind[1999]] == "special", "no token of the tokenizer"
    words = token_table(tokenizer(9), 9)
    assert [NAMES[kind] for kind in words.kind.tolist()] == ["piece", "special", *["piece"] * 7, "special"]
    assert words.sha256 == token_table(tokenizer(9), 9).sha256 != token_table(tokenizer(9), 8).sha256


@pytest.mark.parametrize("features", KINDS)
@pytest.mark.parametrize("width", [0, 3])
def test_a_head_reads_the_parts_of_its_name_in_order(features, width):
    torch.manual_seed(1)
    head = WeightHead(features, 4, 5, width)
    for parameter in head.parameters():
        parameter.data.normal_()
    given = {"hidden": torch.randn(7, 9), "logits": torch.randn(7, len(FEATURES)), "tokens": torch.randn(7, COUNT)}
    head.standardise(given["logits"], given["hidden"])
    inputs = torch.cat([given[part] for part in KINDS[features]], -1)
    expected = head.net((inputs - head.mean) / head.std).squeeze(-1)
    assert torch.equal(head(given["logits"], given["hidden"], given["tokens"]), expected)
    normed = (inputs - head.mean) / head.std
    assert "tokens" not in KINDS[features] or torch.equal(normed[:, -COUNT:], given["tokens"])
    for part in KINDS[features]:
        with pytest.raises(ValueError, match="was called without them"):
            head(**(given | {part: None}))


def random_rows(count, vocab=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([0.3, 1.0, 3.0]).repeat(count)[:count, None]
    one, noise = torch.randn(2, count, vocab, generator=generator)
    draft, target = (scale * one).softmax(-1), (scale * (one + 0.7 * noise)).softmax(-1)
    return draft, target


def tree_of(draft, target):
    """A tree of one node for every pair of rows."""
    tokens = torch.zeros(len(draft), 1, dtype=torch.long)
    return DraftTree(tokens, (-1,), draft.unsqueeze(1), target.unsqueeze(1))


OFFSETS = ["divergence:0.2", "divergence:0.2,0.5", "divergence:1,1", "divergence:0.3,0", "regret:0.4", "regret:2"]


@pytest.mark.parametrize("rule", OFFSETS)
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(), Sampling(0.5)])
def test_an_untrained_head_with_an_offset_is_the_rule(rule, sampling):
    """Where the rule decides for the whole context: divergence at every temperature, regret at 0."""
    if rule.startswith("regret") and not sampling.greedy:
        pytest.skip("above temperature 0 regret decides token by token")
    draft, target = random_rows(300)
    head = WeightHead("logits", offset=rule)
    believed = Believed(target.unsqueeze(1), draft.unsqueeze(1))
    if sampling.greedy:
        rows = [torch.nn.functional.one_hot(row.argmax(-1), 6).float() for row in (draft, target)]
    else:
        rows = [row.pow(1 / sampling.temperature) for row in (draft, target)]
        rows = [row / row.sum(-1, keepdim=True) for row in rows]
    tree = tree_of(*rows)
    weigh = lambda draft, target, hidden: head.weight(draft, target)  # noqa: E731
    learned = Relaxer(parse("learned;blend=choice"), weigh, sampling=sampling)
    found = learned(tree, believed=believed).tree.target
    expected = Relaxer(parse(rule), sampling=sampling)(tree, believed=believed).tree.target
    torch.testing.assert_close(found, expected)
    if rule != "divergence:0.3,0":
        moved = (expected != tree.target).any(-1).float().mean()
        assert 0.02 < moved < 0.98


def test_an_offset_is_the_margin_of_the_rule_in_nats():
    draft, target = random_rows(50)
    features = logit_features(draft, target)
    kl = (target * (target.log() - draft.log())).sum(-1)
    top = target.amax(-1).log()
    torch.testing.assert_close(offset("divergence:0.4")(features), (0.4 - kl).minimum(torch.tensor(0.9).log() - top))
    lost = top - target.gather(-1, draft.argmax(-1, keepdim=True)).squeeze(-1).log()
    torch.testing.assert_close(offset("regret:0.4")(features), 0.4 - lost)


@pytest.mark.parametrize("rule", ["ensemble:0.3", "typical:0.1,0.2", "none", "nonsense", "divergence", "divergence:-1", "regret:1;budget=2"])
def test_a_rule_without_a_criterion_is_no_offset(rule):
    with pytest.raises(ValueError):
        WeightHead("logits", offset=rule)


def trained(tmp_path, *words):
    folder = tmp_path / "traces"
    if not folder.exists():
        gather = ["gather", "--out", str(folder), "--prompts", "24", "--samples", "2", "--max_new_tokens", "48", "--hidden", "true"]
        assert cli.main([*gather, "--go_on", "true"]) == 0
    out = tmp_path / ("train-" + "-".join(words).replace(":", "").replace("+", "-"))
    options = ["--model.objective", "attribution", "--trainer.max_epochs", "3", "--model.lr", "0.02", *words]
    assert cli.main(["train", "--data.traces", str(folder), "--out", str(out), *options]) == 0
    bundle = tmp_path / f"bundle{out.name}"
    assert cli.main(["export", "--train", str(out), "--out", str(bundle)]) == 0
    return bundle


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("heads")


CHOSEN = [
    ("--model.features", "logits+tokens", "--model.offset", "divergence:0.3"),
    ("--model.features", "tokens"),
    ("--model.features", "logits+tokens+hidden", "--model.width", "4"),
]


@pytest.mark.parametrize("words", CHOSEN)
def test_from_traces_to_texts_with_the_weights_of_the_loop(place, words):
    """The weight that a text's statistics report is that of the head on a teacher-forced pass of its own."""
    pair = load_pair("sums-target", "sums-draft")
    bundle = trained(place, *words)
    loaded = load_bundle(bundle, pair.target, pair.draft)
    assert loaded.card.token_table == token_table(pair.tokenizer, pair.vocab).sha256
    prompt = pair.tokenizer("Ann has 12 pears. She finds 4 more")["input_ids"]
    (done,) = decode(pair, [prompt], relaxation=str(bundle), method="token", draft_length=3, max_new_tokens=24, seeds=[3])
    tokens = torch.tensor([prompt + done.tokens])
    with torch.no_grad():
        outs = [model.module(tokens, output_hidden_states=True) for model in (pair.draft, pair.target)]
    rows = [out.logits[:, len(prompt) - 1 : -1].float().softmax(-1) for out in outs]
    hidden = torch.cat([out.hidden_states[-1][:, len(prompt) - 1 : -1] for out in outs], -1)
    table = token_table(pair.tokenizer, pair.vocab)
    weight = loaded.head.weight(*rows, hidden if loaded.head.needs_hidden else None, before=tokens[:, len(prompt) - 1 : -1], table=table)
    # Positions of bonus tokens have no weight; in a chain the loop reports those where the draft ran.
    assert done.weight_count > 0
    relaxer = load_relaxer(str(bundle), pair, Sampling())
    tree = DraftTree(tokens[:, len(prompt) - 1 : -1], tuple(range(-1, weight.shape[1] - 1)), *rows)
    parts = hidden.split([pair.draft.hidden_size, pair.target.hidden_size], -1)
    torch.testing.assert_close(relaxer.weight(tree, parts), weight)


@pytest.mark.parametrize("words", CHOSEN[:2])
def test_the_compiled_step_agrees_with_the_loop(place, words):
    bundle = trained(place, *words)
    pair = load_pair("sums-target", "sums-draft")
    prompt = pair.tokenizer("Ann has 12 pears. She finds 4 more")["input_ids"]
    shape = {"relaxation": str(bundle), "draft_length": 2, "max_new_tokens": 12, "seeds": [3]}
    (eager,), (compiled,) = (decode(pair, [prompt], compile=compiled, **shape) for compiled in (False, True))
    assert eager.tokens == compiled.tokens and eager.weight_sum == pytest.approx(compiled.weight_sum, abs=1e-4)


@pytest.mark.parametrize("method", ["token", "block", "univer", "gbv"])
def test_the_static_step_knows_the_tokens_before(method):
    pair = tiny_pair(VOCAB)
    table = token_table(pair.tokenizer, pair.vocab)
    torch.manual_seed(0)
    head = WeightHead("logits+tokens", offset="divergence:0.5")
    head.net.weight.data.normal_()
    engine = engine_of(pair, method)
    weigh = lambda draft, target, hidden, before: head.weight(draft, target, None, 0.5, before, table)  # noqa: E731
    engine.relaxer = Relaxer(parse("learned"), weigh, needs_tokens=True, sampling=engine.sampling)
    same(engine.run(requests(), 3, static=True), engine.run(requests(), 3))


def test_the_card_says_what_the_head_reads_and_starts_from(place):
    bundle = trained(place, *CHOSEN[0])
    page = (bundle / "README.md").read_text()
    assert "numbers computed from both rows and the classes of the most likely tokens" in page
    assert "it corrects the rule `divergence:0.3`" in page
    assert json.loads((bundle / "card.json").read_text())["head"]["offset"] == "divergence:0.3"


def test_a_tokens_head_learns_what_rows_cannot_tell():
    """Harm is: the target's token is a number. The numbers of the rows are noise."""
    generator = torch.Generator().manual_seed(0)
    table = TokenTable.of(STRINGS)
    rows = torch.rand(2, 400, len(STRINGS), generator=generator).pow(4)
    draft, target = rows / rows.sum(-1, keepdim=True)
    harm = (table.kind[target.argmax(-1)] == NAMES.index("number")).float()
    before = torch.zeros(400, dtype=torch.long)
    inputs = {"logits": logit_features(draft, target), "tokens": table.features(draft, target, before)}
    loss = {}
    for features in ("logits", "tokens", "logits+tokens"):
        torch.manual_seed(0)
        head = WeightHead(features)
        head.standardise(inputs["logits"], None)
        steps = torch.optim.Adam(head.parameters(), lr=0.05)
        for _ in range(300):
            steps.zero_grad()
            batch = {"harm": harm[None], "mask": torch.ones(1, 400, dtype=torch.bool)}
            value = judge(head(**inputs)[None], batch) / 400
            value.backward()
            steps.step()
        loss[features] = float(value)
    assert loss["tokens"] < 0.1 and loss["logits+tokens"] < 0.1 < 0.5 < loss["logits"]


def test_older_traces_and_other_tokenizers_are_refused(place, tmp_path, capsys):
    bundle = trained(place, *CHOSEN[1])
    manifest = read_manifest(place / "traces")
    entries = []
    for index, shard in enumerate(read_shards(place / "traces")):
        del shard.columns["token_features"]
        entries.append(write_shard(tmp_path / "old", index, shard))
    write_manifest(tmp_path / "old", manifest | {"shards": entries})
    capsys.readouterr()
    words = ["train", "--data.traces", str(tmp_path / "old"), "--trainer.max_epochs", "1", "--model.objective", "attribution"]
    assert cli.main([*words, "--out", str(tmp_path / "a"), "--model.features", "tokens"]) == 2
    assert "holds no classes of tokens, which this head reads" in capsys.readouterr().err
    assert cli.main([*words, "--out", str(tmp_path / "b")]) == 0
    card = json.loads((bundle / "card.json").read_text())
    del card["crc32"]
    write_object(bundle / "card.json", card | {"token_table": "f" * 64})
    try:
        pair = load_pair("sums-target", "sums-draft")
        with pytest.raises(ValueError, match="was trained with another tokenizer"):
            load_relaxer(str(bundle), pair, Sampling())
    finally:
        write_object(bundle / "card.json", card)


def test_a_head_is_refitted_only_from_one_with_its_offset(place, tmp_path, capsys):
    trained(place, *CHOSEN[0])
    start = next(path for path in place.iterdir() if path.name.startswith("train-") and "divergence" in path.name)
    words = ["train", "--data.traces", str(place / "traces"), "--trainer.max_epochs", "1", "--model.objective", "attribution"]
    words += ["--model.features", "logits+tokens", "--model.start", str(start)]
    assert cli.main([*words, "--out", str(tmp_path / "a")]) == 2
    assert "is a head with offset divergence:0.3, the head to train has none" in capsys.readouterr().err
    assert cli.main([*words, "--model.offset", "divergence:0.3", "--out", str(tmp_path / "b")]) == 0


def test_bundles_of_before_load_and_say_no_offset(tmp_path):
    head = WeightHead("logits")
    manifest = {role: {"name": role, "hash": "a", "hidden_size": 4} for role in ("target", "draft")}
    manifest |= {"tokenizer": "", "vocab": 7, "sampling": vars(Sampling()), "task": "t", "relaxation": "none"}
    bundle = write_bundle(tmp_path / "b", head, make_card(head, {"manifest": manifest, "traces_sha256": "d"}, 5, 0.0))
    card = json.loads((bundle / "card.json").read_text())
    for values, name in ((card, "token_table"), (card["head"], "offset"), (card, "crc32")):
        values.pop(name)
    write_object(bundle / "card.json", card)
    assert load_bundle(bundle).head.offset == ""
