"""Folders and files that load_model cannot use: whatever the foreign parser raises, the error says what to do."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import tiny_draft
from tiny import tiny_checkpoint, tiny_model
from tiny_gguf import write_gguf

from fastgrpo.models.draft import DraftModel
from fastgrpo.models.foreign import foreign
from fastgrpo.models.loading import load_model


class Code:
    """Runs when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


def rewrite(file: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-100])


def config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Code(folder / "ran")}, folder / "pytorch_model.bin")


def as_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    settings = {"base_model_name_or_path": str(folder / "base"), "peft_type": "LORA", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("sound"), "llama")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("model.safetensors"), r"model\.safetensors is cut short.*Copy it there again.*model\.save_pretrained"),
        (rewrite("model.safetensors", b""), r"model\.safetensors is cut short"),
        (rewrite("model.safetensors", b"x" * 999), r"model\.safetensors is cut short"),
        (config(intermediate_size=48), r"in another shape \(first: .*down_proj\.weight \(32, 64\), not \(32, 48\)\)"),
        (config(num_attention_heads=5), r"could not be loaded: .*hidden size \(32\) is not a multiple"),
        (config(hidden_size="64"), r"could not be loaded: .*'hidden_size' expected int, got str"),
        (config(model_type="nothing"), r"`nothing`.*Install a transformers that knows it, or correct model_type"),
        (rewrite("config.json", "{"), r"config\.json is no JSON"),
        (rewrite("tokenizer.json", "{"), r"tokenizer of .*tokenizer\.json is no JSON.*tokenizer\.save_pretrained"),
        (rewrite("tokenizer.json", "{}"), r"tokenizer of .* could not be loaded.*tokenizer\.save_pretrained"),
        (rewrite("tokenizer_config.json", "[]"), r"tokenizer_config\.json holds a list"),
        (rewrite("chat_template.jinja", "{% for x in %}"), r"chat template of .* could not be loaded: TemplateSyntax"),
        (pickled, r"code beside the tensors; none of it was run\. Copy"),
        (as_adapter, r"check base_model_name_or_path in its adapter_config\.json"),
    ],
)
def test_a_damaged_folder(sound: Path, tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load_model(tmp_path, device="cpu")
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_template_that_wants_other_messages_is_sound(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    rewrite("chat_template.jinja", "{{ raise_exception('the first message must be of the system') }}")(folder)
    load_model(folder, device="cpu")


def test_a_damaged_copy_of_our_own_says_to_delete_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGRPO_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "own.gguf")
    load_model(tmp_path / "own.gguf", device="cpu")
    (folder,) = (tmp_path / "cache").glob("own-*")
    cut("model.safetensors")(folder)
    with pytest.raises(ValueError, match=rf"our own converted copy: delete the folder {folder}, and it is made again"):
        load_model(tmp_path / "own.gguf", device="cpu")


@pytest.mark.parametrize("size", [4, 20, 3000])
def test_a_short_gguf_file(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGRPO_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "own.gguf")
    rewrite("own.gguf", (tmp_path / "own.gguf").read_bytes()[:size])(tmp_path)
    with pytest.raises(ValueError, match=r"own\.gguf' could not be read by transformers.*if it is whole"):
        load_model(tmp_path / "own.gguf", device="cpu")


def test_a_damaged_draft(tmp_path: Path) -> None:
    tiny_draft(tiny_model("llama")).save_pretrained(tmp_path)
    cut("model.safetensors")(tmp_path)
    with pytest.raises(ValueError, match=rf"the draft {tmp_path} cannot be read: .*Get it again, or save it anew"):
        DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "error", [KeyError("x"), RecursionError(), pickle.PickleError(), type("New", (Exception,), {})()]
)
def test_whatever_comes_out_is_explained(error: Exception) -> None:
    with pytest.raises(ValueError, match="explained") as caught, foreign(lambda _: ValueError("explained")):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [ImportError("pip install it"), MemoryError(), KeyboardInterrupt()])
def test_what_is_no_fault_of_a_file_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, foreign(lambda _: ValueError("explained")):
        raise error
    assert caught.value is error
