"""A kernel gives the verdict that its law gives for the same uniforms; run by test_kernels.py in its own process."""

from dataclasses import replace

import pytest
import torch
from diversed.runtime.sampling import Sampling, probabilities
from diversed.verifier import METHODS
from diversed.verifier.enumerate_laws import paths
from diversed.verifier.kernels import NAMES, verify
from diversed.verifier.kernels.cuts import cut, greedy_cut
from diversed.verifier.relax import relax, substitutions
from diversed.verifier.tree import topology

from .support import kernels
from .support.kernels import CHAIN, SHAPES, TREE, Case, at_every_step, disagreement, random_case

NAN, INF = float("nan"), float("inf")
TREES = [name for name in NAMES if SHAPES[name] == TREE]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if kernels.DEVICE == "cpu":
        kernels.quickened(monkeypatch)


@pytest.mark.parametrize("vocabulary, batch", [(1, 1), (7, 3), (257, 1), (1271, 1)])
@pytest.mark.parametrize("method", NAMES)
def test_a_kernel_gives_the_verdict_of_its_law(method, vocabulary, batch):
    assert disagreement(random_case(method, vocabulary, batch)) == ""


@pytest.mark.parametrize("method", NAMES)
def test_a_kernel_changes_its_verdict_where_its_law_has_a_step(method):
    # rows for which every node may be the last one, and every residual has several tokens
    assert disagreement(at_every_step(small_tree(method), nodes=(0, 1))) == ""


@pytest.mark.parametrize("method", ["univer", "rrsw"])
def test_siblings_with_one_token_are_one_sibling(method):
    case = small_tree(method)
    tokens = torch.tensor([[0, case.tokens[0, 1], case.tokens[0, 2], case.tokens[0, 2]]])
    assert disagreement(at_every_step(replace(case, tokens=tokens), nodes=(1,))) == ""


def small_tree(method: str) -> Case:
    """A chain of two, or one child and below it two: there the mass that arrives is less than 1.

    Recursive rejection refuses either of the two at times; the transport's fixed child is worth more than its draft.
    """
    parents = CHAIN if SHAPES[method] == CHAIN else (-1, 0, 1, 1)
    case = random_case(method, 5, 1, parents, weight=0.2)
    target, draft = case.target * 0, case.draft * 0
    target += torch.tensor([0.1, 0.15, 0.25, 0.26, 0.24]).log()
    draft += torch.tensor([0.4, 0.2, 0.2, 0.09, 0.11]).log()
    tokens = [0, 1, 0] if parents == CHAIN else [0, 1, 0, 2] if method in ("rrsw", "traversal") else [0, 1, 3, 0]
    return replace(case, target=target, draft=draft.nan_to_num(-INF), tokens=torch.tensor([tokens]))


@pytest.mark.parametrize("method", ["token", "univer", "rrsw"])
def test_tokens_beside_the_edge_of_a_tile_are_found(method):
    # tiles have 512 tokens here; all mass lies on the four tokens around an edge
    case = random_case(method, 1030, 1, (-1, 0), seed=2)
    edge = torch.arange(1030).sub(511.5).abs() > 2
    case = replace(case, target=case.target.masked_fill(edge, -INF), draft=case.draft.masked_fill(edge, -INF))
    assert disagreement(at_every_step(replace(case, tokens=torch.tensor([[0, 512]])), nodes=(0, 1))) == ""


@pytest.mark.parametrize("method", NAMES)
def test_hard_rows_are_verified_as_the_law_does(method):
    assert disagreement(hard_rows(method)) == ""


def hard_rows(method: str) -> Case:
    """One request each of: tied logits, -inf logits, a one-hot target, a one-hot draft, equal rows, absent children, a
    child that a float32 row has and nothing that it leaves.
    """
    case = random_case(method, 5, 7, seed=3)
    target, draft, tokens, weight = case.target.clone(), case.draft.clone(), case.tokens.clone(), case.weight.clone()
    inner = draft[:, :, :1] > -INF
    target[0], draft[0] = target[0].round(), draft[0].round()
    target[1, :, 1:3] = -INF
    draft[1, :, 2:4] = -INF
    target[2, :, 1:] = -INF
    draft[3, :, 1:] = -INF
    draft[4] = torch.where(inner[4], target[4], -INF)
    tokens[:4, 1:] = torch.randint(0, 5, tokens[:4, 1:].shape, generator=torch.Generator().manual_seed(0))
    # the first child of the root is absent, and so is all below it
    tokens[5, [node for node in range(1, len(case.parents)) if node == 1 or case.parents[node] == 1]] = -1
    row, almost = torch.tensor([[0.0, -INF, -INF, -INF, -INF], [0.0, -17.3, -INF, -INF, -INF]])
    target[6], draft[6], weight[6] = row, torch.where(inner[6], almost, -INF), 0
    tokens[6, 1:] = torch.tensor([1 if parent == node - 1 else -1 for node, parent in enumerate(case.parents)][1:])
    return replace(case, target=target, draft=draft, tokens=tokens, weight=weight)


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("method", NAMES)
def test_the_ends_of_the_blend_are_exact_verification_and_the_draft_itself(method, weight):
    case = random_case(method, 7, 2, weight=weight, seed=4)
    assert disagreement(case) == ""
    if weight == 1 and method in ("token", "block"):
        assert case.verdict().accepted.tolist() == [2, 2]


@pytest.mark.parametrize("dtype, temperature", [(torch.bfloat16, 0.3), (torch.float16, 2.0), (torch.bfloat16, 0)])
@pytest.mark.parametrize("method", ["block", "univer"])
def test_half_precision_logits_at_every_temperature(method, dtype, temperature):
    case = random_case(method, 40, 1, dtype=dtype, sampling=Sampling(temperature), seed=5)
    assert disagreement(case) == ""


FILTERS = [Sampling(0.7, top_k=3), Sampling(1.3, top_p=0.6), Sampling(min_p=0.2), Sampling(1, 4, 0.7, 0.1)]


@pytest.mark.parametrize("sampling", FILTERS)
@pytest.mark.parametrize("method", ["block", "greedy_tree"])
def test_filters_keep_what_the_sampler_kept_ties_included(method, sampling):
    case = random_case(method, 20, 1, dtype=torch.bfloat16, sampling=sampling, seed=6)
    # few distinct logits: every edge of a filter lies within a tie
    case = replace(case, target=case.target.round(), draft=case.draft.round())
    assert disagreement(case) == ""


@pytest.mark.parametrize("sampling", [*FILTERS, Sampling(0), Sampling(3, top_p=0.95), Sampling(0.3, top_p=0.5)])
@pytest.mark.parametrize("grid", [1, 8, 2**20])
def test_three_numbers_a_row_say_what_a_filter_kept(sampling, grid):
    logits = (torch.randn(200, 300, generator=torch.Generator().manual_seed(7)) * 3 * grid).round() / grid
    kept = probabilities(logits, sampling) > 0
    for rows in [cut(logits, kept)] + [greedy_cut(logits)] * (sampling.temperature == 0):
        edge, low, last = rows.unsqueeze(-1).unbind(-2)
        assert torch.equal((logits > edge) | ((logits >= low) & (torch.arange(300) <= last)), kept)


def test_a_row_that_was_not_run_is_not_cut():
    logits = torch.tensor([[-INF, -INF], [NAN, 1], [INF, 1]])
    assert torch.equal(cut(logits, logits > INF), torch.full((3, 3), -INF))
    assert torch.equal(greedy_cut(logits), torch.full((3, 3), -INF))


@pytest.mark.parametrize("method", ["block", "univer"])
def test_a_kernel_reads_no_entry_outside_its_rows(method):
    case = random_case(method, 257, 2, seed=8, weight=1.0)
    wide = torch.full((2, *case.target.shape[:2], 300), NAN)
    wide[..., :257] = torch.stack([case.target, case.draft])
    ran = [node for node in range(len(case.parents)) if node in case.parents]
    # the leaves, all of them last, are not even given: what lies there in memory is no row of the draft
    wide[1, :, len(ran) :] = 0
    strided = replace(case, target=wide[0][..., :257], draft=wide[1][:, : len(ran), :257])
    assert not strided.target.is_contiguous() and ran == list(range(len(ran))) and len(ran) < len(case.parents)
    one, other = case.verdict(), strided.verdict()
    assert torch.equal(one.verdict.node, other.verdict.node) and torch.equal(one.verdict.token, other.verdict.token)
    assert disagreement(case) == ""


@pytest.mark.parametrize("method", NAMES)
def test_a_tree_of_one_node_emits_its_row(method):
    assert disagreement(random_case(method, 7, 2, (-1,), seed=9)) == ""


@pytest.mark.parametrize("method", TREES)
def test_a_chain_is_a_tree_for_tree_methods(method):
    assert disagreement(random_case(method, 7, 1, (-1, 0, 1, 2), seed=10)) == ""


@pytest.mark.parametrize("method", ["rrsw", "traversal"])
def test_paths_with_distinct_beginnings_are_a_tree(method):
    case = random_case(method, 7, 2, paths(3, 2), seed=11)
    case.tokens[:, 1:4] = torch.tensor([[3, 0, 5], [1, 2, 6]])
    assert disagreement(case) == ""


@pytest.mark.parametrize("method", NAMES)
def test_the_deepest_trees_are_walked_in_the_order_of_the_law(method):
    parents = (-1, 0, 1, 2) if SHAPES[method] == CHAIN else (-1, 0, 0, 1, 2, 2, 4)
    # close rows: almost all is accepted, so that stops are deep
    case = random_case(method, 4, 2, parents, seed=12, spread=0.3)
    assert disagreement(case) == ""


def test_a_request_with_unsound_numbers_has_no_verdict_and_spoils_no_other():
    case = random_case("univer", 7, 9, (-1, 0, 0), seed=13, weight=0.5)
    target, draft, tokens, weight = (x.clone() for x in (case.target, case.draft, case.tokens, case.weight))
    target[0, 0, 3], target[1, 2, 6], target[2, 1] = NAN, INF, -INF
    draft[3, 0, 0] = NAN
    weight[4, 1], weight[5, 0], tokens[6, 2] = NAN, 1.5, 7
    # an absent node may hold anything
    tokens[7, 1], target[7, 1], weight[7, 1] = -1, NAN, NAN
    found = replace(case, target=target, draft=draft, tokens=tokens, weight=weight).verdict()
    node, token = found.verdict.node.tolist(), found.verdict.token.tolist()
    assert node[:7] == token[:7] == found.accepted.tolist()[:7] == [-1] * 7
    assert min(node[7:] + token[7:]) >= 0


@pytest.mark.parametrize("method", NAMES)
def test_substitutions_are_those_of_the_relaxation_on_the_accepted_path(method):
    case = random_case(method, 7, 2, seed=14)
    found, tree = case.verdict(), case.tree()
    wanted = substitutions(tree, relax(tree, "learned", case.weight.double()))
    for row, stop in enumerate(found.verdict.node.tolist()):
        while stop >= 0:
            assert abs(found.substitutions[row, stop].item() - wanted[row, stop].item()) < 1e-6  # float32 rows
            stop = case.parents[stop]
    assert found.accepted.tolist() == [topology(case.parents).depths[node] for node in found.verdict.node.tolist()]


def test_the_operation_obeys_torch_and_compiles_whole():
    case = random_case("token", 7, 2, (-1, 0), seed=15)
    given = [x.to(kernels.DEVICE) for x in (case.target, case.draft, case.tokens, case.weight, case.uniform)]
    target, draft, tokens, weight, uniform = given
    arguments = ("token", target, draft, tokens, [-1, 0], weight, uniform, 1.0, None, None)
    torch.library.opcheck(torch.ops.diversed.verify, arguments)

    def step(target, draft, tokens, weight, uniform):
        found = METHODS["token"].kernel(target * 1, draft, tokens, (-1, 0), weight, uniform)
        return found.verdict.token + 1, found.substitutions

    token, cost = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    found = case.verdict()
    assert torch.equal(token, found.verdict.token + 1) and torch.equal(cost, found.substitutions)


def test_methods_name_their_kernels():
    assert [name for name, entry in METHODS.items() if entry.kernel] == [name for name in METHODS if name in NAMES]


def test_what_a_kernel_refuses_it_answers_with_a_sentence(monkeypatch):
    case = random_case("block", 7, 2)
    for changes, sentence in (
        ({"method": "token", "uniform": case.uniform[:, :1]}, "`uniform` must be \\[2, 2\\]"),
        ({"draft": case.draft[..., :6]}, "`draft` must be \\[2, 3, 7\\] on .* beside `target`"),
        ({"target": case.target.double()}, "`target` must hold float32, bfloat16 or float16"),
        ({"target": case.target.transpose(1, 2).contiguous().transpose(1, 2)}, "each row in one piece"),
        ({"parents": (-1, 0, 0)}, "one child a node"),
        ({"parents": (-1, 1, 0)}, "`parents` must be 3 ints"),
    ):
        with pytest.raises(ValueError, match=sentence):
            replace(case, **changes).verdict()
    with pytest.raises(ValueError, match="must have a kernel .token, block"):
        verify("gbv", case.target, case.draft, case.tokens, case.parents, case.weight, case.uniform)
    monkeypatch.setattr("diversed.verifier.kernels.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="`kernel` needs triton, which is not installed"):
        case.verdict()
