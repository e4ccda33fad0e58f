"""The law of what the engine emits with speculation on, over four tokens: enumerated, counted, told from wrong ones.

`test_verification` enumerates the walk alone. Here everything takes part: draft model, trees, cache, sampler, rounds.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from reference_sampling import truncated_law
from tiny import tiny_model
from torch import Tensor

from fastgrpo.models.cache import RaggedCache
from fastgrpo.models.draft import DraftModel
from fastgrpo.speculation import batch
from fastgrpo.speculation.batch import LiveBatch
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.policy import make_policy
from fastgrpo.speculation.proposers import DraftProposer
from fastgrpo.speculation.requests import Rollout
from fastgrpo.speculation.sampling import Samples, SamplingParams
from fastgrpo.speculation.tree import Tree
from fastgrpo.speculation.verification import Walk

VOCAB, LENGTH = 4, 4
PROMPT = [2, 3, 0, 1, 1, 2]
TEXTS = list(itertools.product(range(VOCAB), repeat=LENGTH))
LAWS = {
    "plain": SamplingParams(),
    "cool, top-p": SamplingParams(temperature=0.7, top_p=0.9),
    "top-k": SamplingParams(temperature=1.5, top_k=3),
}
SHAPES = {
    "chain": {"spec_depth": 3},
    "tree": {"spec_depth": 3, "spec_width": 2, "spec_nodes": 6},
    "wide": {"spec_depth": 2, "spec_width": 3},
}


@functools.cache
def model() -> Any:
    return tiny_model("llama", vocab_size=VOCAB, seed=3)


def engine_with(shape: str) -> Engine:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draft = DraftModel.for_target(model(), vocabulary=[0, 2, 3])
    return Engine(model(), slots=4000, proposer=DraftProposer(draft), policy=make_policy("fixed", **SHAPES[shape]))


@functools.cache
def law_of_texts(name: str) -> Tensor:
    """The probability of every text of LENGTH tokens, (4 ** LENGTH,) float64, by the model's own forward."""
    with torch.no_grad():
        logits = model()(torch.tensor([[*PROMPT, *text[:-1]] for text in TEXTS])).logits[:, len(PROMPT) - 1 :]
    weights = []
    for text, rows in zip(TEXTS, logits, strict=True):
        steps = zip(text, rows, strict=True)
        weights.append(math.prod(float(truncated_law(row, LAWS[name])[token]) for token, row in steps))
    return torch.tensor(weights, dtype=torch.float64)


# --- every draw that the target can make ------------------------------------------------------------------------------


def all_draws(monkeypatch: pytest.MonkeyPatch, shape: str) -> Rollout:
    """One row for every text: row u is made to draw the digits of u, wherever its walk has come to.

    Noise keys become (uid, position) as they are, so that a draw knows whose it is and where; its log-prob is that of
    the forced token by the logits that the engine hands to its sampler, in whatever context those were computed.
    """

    def keys(seed: int, uids: Tensor, positions: Tensor) -> Tensor:
        return torch.stack([uids, positions], dim=-1)

    def forced(logits: Tensor, params: SamplingParams, keys: Tensor) -> Samples:
        places = (keys[:, 1] - len(PROMPT)).clamp(max=LENGTH - 1)  # of what is drawn behind the end nothing is kept
        tokens = keys[:, 0] // VOCAB ** (LENGTH - 1 - places) % VOCAB
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return Samples(tokens, logprobs, None)

    monkeypatch.setattr(batch, "row_keys", keys)
    monkeypatch.setattr(batch, "sample", forced)
    arguments: dict[str, Any] = {"group_size": len(TEXTS), "max_new_tokens": LENGTH, "stop_token_ids": ()}
    return engine_with(shape).generate([PROMPT], LAWS["plain"], **arguments)


def enumerated(rollout: Rollout) -> Tensor:
    assert [tuple(c.token_ids) for c in rollout.completions] == TEXTS
    return torch.tensor([c.logprobs for c in rollout.completions]).double().sum(1).exp()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_enumerated_law_is_the_models(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = all_draws(monkeypatch, shape)
    law = enumerated(rollout)
    torch.testing.assert_close(law, law_of_texts("plain"), rtol=1e-4, atol=1e-7)
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    assert rollout.stats.accepted > len(TEXTS) / 4, "the drafts were never right, so nothing was tested"


def test_an_accepted_path_that_is_left_where_it_was_written_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RaggedCache, "move_slots", lambda self, sources, targets: None)
    law = enumerated(all_draws(monkeypatch, "tree"))
    assert float((law - law_of_texts("plain")).abs().sum()) / 2 > 0.01


# --- draws by the noise -----------------------------------------------------------------------------------------------


def score(rollout: Rollout, law: Tensor) -> float:
    """The normal score of the chi-square of the rollout's texts against a law; infinite for what the law excludes.

    Cells that expect fewer than ten are thrown together.
    """
    places = torch.tensor([TEXTS.index(tuple(c.token_ids)) for c in rollout.completions])
    counts = torch.bincount(places, minlength=len(TEXTS)).double()
    if counts[law == 0].any():
        return math.inf
    expected = law * len(places)
    rare = expected < 10
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(counts) - 1
    ratio = float(((counts - expected) ** 2 / expected).sum()) / df
    return (ratio ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def drawn(shape: str, law: str, rows: int = 4000) -> Rollout:
    return engine_with(shape).generate(
        [PROMPT], LAWS[law], group_size=rows, max_new_tokens=LENGTH, stop_token_ids=(), seed=5
    )


@pytest.mark.parametrize(
    ("shape", "law"), [("chain", "plain"), ("tree", "plain"), ("tree", "cool, top-p"), ("wide", "top-k")]
)
def test_texts_follow_the_models_law(shape: str, law: str) -> None:
    rollout = drawn(shape, law)
    assert rollout.stats.accepted > 500
    assert score(rollout, law_of_texts(law)) < 5
    assert score(rollout, law_of_texts("top-k" if law == "plain" else "plain")) > 10, "another law is told apart"


def trusting_walk(self: LiveBatch, tree: Tree, logits: Tensor, lengths: Tensor) -> tuple[Tensor, Walk]:
    """Takes the first drafted token as it is, without asking the target, and draws behind it."""
    index = torch.arange(len(lengths))
    first = torch.stack([tree.tokens[:, 1].double(), torch.zeros(len(lengths)).double()])
    second = self._draw(logits[:, 1], index, self._keys(index, lengths + 2))
    emitted = torch.stack([first, second], dim=2)
    path = torch.tensor([0, 1]).expand(len(lengths), 2)
    return emitted, Walk(emitted[0].long(), torch.full((len(lengths),), 2), path)


def test_a_verifier_that_trusts_the_draft_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveBatch, "_walk", trusting_walk)
    assert score(drawn("chain", "plain"), law_of_texts("plain")) > 10


def test_noise_that_serves_two_positions_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    once = batch.row_keys
    monkeypatch.setattr(batch, "row_keys", lambda seed, uids, positions: once(seed, uids, positions // 2))
    assert score(drawn("chain", "plain"), law_of_texts("plain")) > 10
