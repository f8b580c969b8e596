"""Labels of contexts: the tokens per step of every tree shape against enumeration over the same models."""

import math
import sys

import pytest
import torch
from diversed.runtime.sampling import Sampling
from diversed.runtime.shape_network import row_scalars
from diversed.runtime.shapes import parse_shape
from diversed.selector.labels import Labeller, Labelling, read_labels, write_labels
from diversed.selector.supertree import Supertree
from diversed.verifier import METHODS
from diversed.verifier.enumerate_laws import Pair, mean_length
from diversed.verifier.law import DraftTree
from diversed.verifier.relax import relax
from diversed.verifier.tree import chain

from .support.models import rows_after, tiny_pair

SHAPES = ["1", "2", "3", "2x1", "2x1+1", "2x2", "3x1"]
NAMES = ("token", "block", "specinfer", "kseq", "traversal", "gbv", "univer")
VOCAB = 4


def labeller(**options) -> Labeller:
    given = {"methods": list(NAMES), "shapes": SHAPES, "every": 4, "trees": 2, "unit": 2} | options
    own = {name: given.pop(name) for name in ("max_new_tokens", "rows") if name in given}
    return Labeller(tiny_pair(VOCAB, end=False), Sampling(), Labelling(**given), **{"max_new_tokens": 12} | own)


def enumerated(pair, context: list[int], relaxation: str) -> tuple[Pair, Pair]:
    """All rows after a context; in the second pair a row as a leaf has it, the target's own."""
    draft, target = (
        torch.stack(list(rows_after(model, context, 4, VOCAB).values())) for model in (pair.draft, pair.target)
    )
    tokens = torch.zeros(len(draft), 1, dtype=torch.long)
    relaxed = relax(DraftTree(tokens, (-1,), draft[:, None], target[:, None]), relaxation).target[:, 0]
    return Pair(draft, relaxed, 4)


@pytest.mark.parametrize("relaxation", ["none", "ensemble:0.4"])
def test_the_mean_over_supertrees_is_the_exact_tokens_per_step_of_every_method_and_shape(relaxation):
    """One root, 3,000 supertrees: five standard errors of a mean whose summands lie in [1, depth + 1]."""
    made = labeller(relaxation=relaxation, trees=3000, rows=3000, max_new_tokens=6, every=8)
    found = made.run({0: [2, 3, 2]}, seed=1)
    sampler = labeller(relaxation=relaxation, max_new_tokens=6, every=8).run({0: [2, 3, 2]}, seed=1)
    assert found["length"].tolist() == [3] == sampler["length"].tolist()
    context = text_of(made, [2, 3, 2])[:4]
    pair = enumerated(made.pair, context, relaxation)
    for m, name in enumerate(NAMES):
        for a, shape in enumerate(map(parse_shape, SHAPES)):
            value = found["efficiency"][0, m, a].item()
            if shape.paths > 1 and name in ("token", "block"):
                assert value == 0
                continue
            drafting = METHODS[name].drafting
            parents = chain(shape.length) if shape.paths == 1 else shape.grow(drafting).parents
            exact = 1 + mean_length(METHODS[name].law, pair, drafting, parents)
            assert value == pytest.approx(exact, abs=5 * shape.depth / 2 / math.sqrt(3000)), (name, str(shape))


def gate(tokenizer):
    """A gate given as code: the draft's share is .4 everywhere."""
    return lambda draft, target, hidden: torch.full(draft.shape[:-1], 0.4)


def test_with_a_gate_the_labels_are_those_of_the_relaxed_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "gates", sys.modules[__name__])
    ours, theirs, exact = (
        labeller(relaxation=relaxation).run({0: [2, 3, 2], 5: [3, 1]}, seed=2)["efficiency"]
        for relaxation in ("gates:gate", "ensemble:0.4", "none")
    )
    torch.testing.assert_close(ours, theirs)
    assert ours.shape == exact.shape and ours.sum() > exact.sum()


def text_of(made, prompt):
    from diversed.runtime.rollouts import Sampler

    sampler = Sampler(made.pair, made.relaxer, made.sampling, made.max_new_tokens)
    return prompt + sampler.run({0: prompt}, 1, lambda *_: 1 << 44)[0].tokens


def test_contexts_hold_what_both_models_say_there():
    made = labeller()
    found = made.run({0: [2, 3, 2]}, seed=1)
    text = text_of(made, [2, 3, 2])
    assert found["length"].tolist() == [3, 7, 11]
    for place, at in enumerate(found["length"].tolist()):
        with torch.no_grad():
            target, draft = (
                model.module(torch.tensor([text[: at + 1]]), output_hidden_states=True)
                for model in (made.pair.target, made.pair.draft)
            )
        for name, out, position in (
            ("target_before", target, -2),
            ("draft_before", draft, -2),
            ("draft_root", draft, -1),
        ):
            torch.testing.assert_close(
                found[name][place], out.hidden_states[-1][0, position].half(), atol=5e-3, rtol=5e-3
            )
        rows = [out.logits[0, position].softmax(-1)[None] for out, position in ((target, -2), (draft, -2), (draft, -1))]
        torch.testing.assert_close(found["scalars"][place], row_scalars(*rows)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafting", ["paths", "without_replacement", "greedy"])
def test_every_shape_is_a_part_of_the_supertree(drafting):
    chains = ["4"] if drafting == "paths" else []
    shapes = tuple(map(parse_shape, ["3x2", "2x3", "4x1+2", "2x2+1", *chains]))
    supertree = Supertree(drafting, shapes)
    for shape in shapes:
        nodes = supertree.part(shape)
        parents = tuple(nodes.index(supertree.topology.parents[node]) if node else -1 for node in nodes)
        assert parents == shape.grow(drafting).parents and len(set(nodes)) == len(nodes)
    covered = {node for shape in shapes for node in supertree.part(shape)}
    assert covered == set(range(supertree.topology.nodes))


def test_labelling_continues_with_the_same_bytes_and_refuses_other_settings(tmp_path, monkeypatch):
    prompts = [[2, 3, number % VOCAB] for number in range(5)]

    def run(folder, **options):
        return write_labels(tmp_path / folder, labeller(**options), prompts, {"task": "words"})

    class Killed(Exception):
        pass

    whole, label = run("whole"), Labeller.run

    def killed(made, chosen, seed):
        if 4 in chosen:
            raise Killed
        return label(made, chosen, seed)

    monkeypatch.setattr(Labeller, "run", killed)
    with pytest.raises(Killed):
        run("part")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="incomplete"):
        read_labels(tmp_path / "part")
    run("part")
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "part").iterdir()
    }
    labels, manifest = read_labels(whole)
    assert labels["prompt"].unique().tolist() == [0, 1, 2, 3, 4] and manifest["shapes"][0] == "1"
    with pytest.raises(ValueError, match="was begun with trees 2, now it is 3"):
        run("whole", trees=3)
    with pytest.raises(ValueError, match="was begun with prompts_sha256 "):
        write_labels(whole, labeller(), [[3, 2, 2], *prompts[1:]], {"task": "words"})
    (whole / "shard-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="missing or damaged; run `diversed select` again"):
        read_labels(whole)
    run("whole")
    assert torch.equal(read_labels(whole)[0]["efficiency"], labels["efficiency"])
