"""A draft's folder: bitwise there and back, and every folder that is not exactly one is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import tiny_draft
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, tiny_model
from torch import Tensor

from fastgrpo.models.draft import DraftModel

SOME_IDS = [4, 5, 9, 30, 31, 77, 99]
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model("llama")


def saved(folder: Path, target: Any, **options: Any) -> DraftModel:
    draft = tiny_draft(target, **options)
    draft.save_pretrained(folder)
    return draft


def change_weights(folder: Path, change: Callable[[State], Any]) -> None:
    state = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"vocabulary": SOME_IDS, "qk_norm": True}], ids=["full", "reduced"])
def test_there_and_back(tmp_path: Path, target: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    draft = saved(tmp_path, target, dtype=dtype, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = DraftModel.from_pretrained(tmp_path)
    before, after = draft.state_dict(), again.state_dict()
    assert list(before) == list(after)
    assert set(load_file(tmp_path / "model.safetensors")) == set(before)
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype, key
        assert torch.equal(tensor, after[key]), key
    assert torch.equal(again.ids, draft.ids)
    assert not again.training
    tokens, hidden = torch.tensor([[7, 8]]), torch.randn(1, 2, 32).to(dtype)
    outputs = [
        one.layer(tokens, hidden, torch.tensor([[3, 4]]), lambda query, keys, values: query.flatten(2))
        for one in (draft, again.bind(target))
    ]
    assert torch.equal(*outputs)


def test_the_config_is_flat_and_says_whose_draft_it_is(tmp_path: Path, target: Any) -> None:
    draft = saved(tmp_path, target, vocabulary=SOME_IDS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {key for key, value in config.items() if isinstance(value, dict)} == {"rope_parameters"}
    expected = {
        "architectures": ["DraftModel"],
        "model_type": "fastgrpo_eagle3",
        "dtype": "float32",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": len(SOME_IDS),
        "feature_layers": [1, 2],
        "qk_norm": False,
        "target_hidden_size": 32,
        "target_num_layers": 3,
        "target_model_type": "llama",
        "target_name": "",
    }
    assert {key: config[key] for key in expected} == expected
    again = DraftModel.from_pretrained(tmp_path).config
    assert again.feature_layers == draft.config.feature_layers == (1, 2)
    assert again.rope_parameters == draft.config.rope_parameters


def test_the_precision_can_be_chosen_and_the_map_stays_whole(tmp_path: Path, target: Any) -> None:
    saved(tmp_path, target, vocabulary=SOME_IDS)
    draft = DraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert draft.lm_head.weight.dtype == torch.bfloat16
    assert draft.ids.tolist() == SOME_IDS


def drop(key: str) -> Callable[[State], Any]:
    return lambda state: state.pop(key)


def put(key: str, *shape: int) -> Callable[[State], Any]:
    return lambda state: state.update({key: torch.zeros(shape)})


def shift(at: int, by: int) -> Callable[[State], Any]:
    return lambda state: state["d2t"][at].add_(by)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop("norm.weight"), "missing: norm.weight"),
        (drop("midlayer.hidden_norm.weight"), "missing: midlayer.hidden_norm.weight"),
        (put("embed_tokens.weight", VOCAB_SIZE, 32), "unexpected: embed_tokens.weight"),
        (put("midlayer.self_attn.q_proj.bias", 32), "unexpected: midlayer.self_attn.q_proj.bias"),
        (put("lm_head.weight", 5, 32), r"of another shape: lm_head.weight \(5, 32\), not \(7, 32\)"),
        (put("fc.weight", 32, 96), r"of another shape: fc.weight \(32, 96\), not \(32, 64\)"),
        (drop("d2t"), "proposes 7 of 100 tokens, but its map d2t is missing"),
        (drop("t2d"), "missing: t2d"),
        (shift(-1, 1), "d2t maps to token 100, but the target's tokens are 0 to 99"),
        (shift(0, -5), "d2t maps to token -1"),
        (shift(0, 1), "d2t maps to token 5 and then to 5"),
        (shift(1, 5), "d2t maps to token 10 and then to 9"),
        (shift(2, 1), "t2d does not mark the tokens that d2t maps to"),
        (lambda state: state["d2t"].zero_(), "t2d does not mark"),  # what a map forgotten at export looks like
    ],
)
def test_weights_that_are_not_the_configs_are_refused(
    tmp_path: Path, target: Any, change: Callable[[State], Any], reason: str
) -> None:
    saved(tmp_path, target, vocabulary=SOME_IDS)
    change_weights(tmp_path, change)
    with pytest.raises(ValueError, match=reason):
        DraftModel.from_pretrained(tmp_path)


def test_a_map_beside_a_full_vocabulary_is_refused(tmp_path: Path, target: Any) -> None:
    saved(tmp_path, target)
    change_weights(tmp_path, lambda state: state.update(d2t=torch.zeros(VOCAB_SIZE, dtype=torch.long)))
    with pytest.raises(ValueError, match="unexpected: d2t"):
        DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', but a draft's config says 'fastgrpo_eagle3'"),
        ({"norm_before_residual": True}, "a draft's config has no norm_before_residual"),
        ({"feature_layers": None}, r"feature_layers is \[\]"),
        ({"hidden_size": None}, "hidden_size is 0"),
        ({"rope_parameters": None}, "must name a rope_theta"),
        ({"draft_vocab_size": 9}, "of another shape: d2t"),
        ({"qk_norm": True}, "missing: midlayer.self_attn.k_norm.weight, midlayer.self_attn.q_norm.weight"),
    ],
)
def test_configs_that_are_not_the_weights_are_refused(
    tmp_path: Path, target: Any, changes: dict[str, Any], reason: str
) -> None:
    saved(tmp_path, target, vocabulary=SOME_IDS)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=reason):
        DraftModel.from_pretrained(tmp_path)


class _Runs:
    """Something that writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickled_weights_are_read_as_tensors_only(tmp_path: Path, target: Any) -> None:
    draft = saved(tmp_path, target)
    (tmp_path / "model.safetensors").unlink()
    torch.save(draft.state_dict(), tmp_path / "pytorch_model.bin")
    again = DraftModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in draft.state_dict().items())
    mark = tmp_path / "ran"
    torch.save({**draft.state_dict(), "fc.weight": _Runs(mark)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"the draft .* code beside the tensors; none of it was run"):
        DraftModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="weights_only=False would run code"):
        DraftModel.from_pretrained(tmp_path, weights_only=False)
    assert not mark.exists()
