"""Bad input to the engine: each fault is named, with the rule and the remedy."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tiny import VOCAB_SIZE, tiny_config, tiny_model

from fastgrpo.models.target import longest_text, open_target
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.requests import make_requests
from fastgrpo.speculation.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[5], []]}, "prompt 1 has no tokens"),
        ({"prompts": [[5], [7, VOCAB_SIZE]]}, f"prompt 1 holds token id {VOCAB_SIZE}, but the model knows 0 to 99"),
        ({"prompts": [[-1, 5]]}, "prompt 0 holds token id -1"),
        ({"prompts": [5, 6]}, "prompt 0 is 5, but must be a list of token ids"),
        ({"prompts": ["text", "text"]}, "prompt 0 is 'text', but must be a list of token ids"),
        ({"prompts": [[5], [5.7]]}, "a token of prompt 1 is 5.7, but must be a whole number"),
        ({"group_size": 0}, "group_size is 0, but must be a whole number of at least 1"),
        ({"group_size": 2.0}, "group_size is 2.0"),
        ({"max_new_tokens": 0}, "max_new_tokens of row 0 is 0, but must be a whole number of at least 1"),
        ({"max_new_tokens": [4, -3]}, "max_new_tokens of row 1 is -3"),
        ({"max_new_tokens": True}, "max_new_tokens of row 0 is True"),
        ({"max_new_tokens": [4]}, "max_new_tokens has 1 values for 2 rows"),
        ({"max_new_tokens": []}, "max_new_tokens has 0 values for 2 rows"),
        ({"max_new_tokens": 1023}, r"row 1 may reach 2 prompt tokens \+ 1023 new ones, and .* 1024 positions"),
        ({"uids": [1, 2, 3]}, "uids has 3 values for 2 rows"),
        ({"uids": [1, 1.5]}, "uid of row 1 is 1.5"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, but must be a list of token ids"),
        ({"prompts": None}, "prompts is None, but must be a list of prompts"),
        ({"prompts": {5: [5]}}, "prompts is {5: .5.}, but must be a list of prompts"),
        ({"prompts": torch.tensor([5, 6])}, r"prompt 0 is tensor\(5\), but must be a list of token ids"),
        ({"prompts": [iter([5])]}, "prompt 0 is .*, but must be a list of token ids"),
        ({"max_new_tokens": "8"}, "max_new_tokens of row 0 is '8', but must be a whole number"),
        ({"max_new_tokens": torch.tensor(2.0)}, r"max_new_tokens of row 0 is tensor\(2.\), but must be a whole number"),
        ({"uids": 5}, "uids is 5, but must be a list with one value per row"),
        ({"first_uid": None}, "first_uid is None, but must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5, but must be a whole number"),
        ({"sampling": None}, r"sampling is None, but must be a SamplingParams: SamplingParams\(\) has defaults"),
        ({"feature_layers": None}, r"feature_layers is None, but must be a list of layers: \(\) for none"),
    ],
)
def test_bad_requests_are_named(arguments: dict, message: str) -> None:
    arguments = {"prompts": [[5], [6, 7]], "sampling": GREEDY, "max_new_tokens": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model("llama")).generate(**arguments)


@pytest.mark.parametrize("slots", [0, -1, 2.5, True])
def test_bad_slots_are_refused(slots: object) -> None:
    with pytest.raises(ValueError, match=f"slots is {slots}, but must be a whole number of at least 1"):
        Engine(tiny_model("llama"), slots=slots)


def test_passes_run_in_a_floating_point_type() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.int8, but passes run in a floating-point type"):
        Engine(tiny_model("llama"), dtype=torch.int8)
    with pytest.raises(ValueError, match=r"dtype is 'float32', but must be a torch\.dtype"):
        Engine(tiny_model("llama"), dtype="float32")


def test_tensors_and_arrays_are_prompts_and_limits_too() -> None:
    plain = make_requests([[5, 6], [7]], 1, [3, 4], [8, 9], 0, 100, None)
    prompts = [torch.tensor([5, 6]), np.array([7])]
    assert make_requests(prompts, 1, np.array([3, 4]), torch.tensor([8, 9]), 0, 100, None) == plain


def test_frequencies_that_follow_the_longest_row_are_refused() -> None:
    config = tiny_config("llama")
    assert longest_text(config) == 1024
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert longest_text(config) == 64
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"rope_type 'dynamic'.* neighbours"):
        open_target(model)


def test_one_engine_runs_one_rollout_at_a_time() -> None:
    engine = Engine(tiny_model("llama"))
    refused: list[str] = []

    def again(_: object) -> None:
        with pytest.raises(RuntimeError, match=r"one engine runs one rollout at a time.*make another Engine") as error:
            engine.generate([[5]], GREEDY, max_new_tokens=1)
        refused.append(str(error.value))

    def elsewhere(_: object) -> None:
        thread = threading.Thread(target=again, args=(None,))
        thread.start()
        thread.join()

    expected = Engine(engine.target.decoder.base).generate([[5, 6], [7]], GREEDY, max_new_tokens=3)
    for callback in (again, elsewhere):
        rollout = engine.generate([[5, 6], [7]], GREEDY, max_new_tokens=3, on_completion=callback)
        assert rollout.completions == expected.completions  # the one that ran is unharmed, and the next may run
    assert len(refused) == 4

    def fail(_: object) -> None:
        raise KeyError("a callback's own")

    with pytest.raises(KeyError):
        engine.generate([[5]], GREEDY, max_new_tokens=1, on_completion=fail)
    assert engine.generate([[5, 6], [7]], GREEDY, max_new_tokens=3).completions == expected.completions
