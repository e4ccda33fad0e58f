"""Which shapes of a pass give the same bits: one row's logits in passes of many shapes, compared bit for bit.

A sequence is continued by the same real tokens in passes that differ in rows, tokens a row, length of the neighbours,
and the row's place among them; so is a prompt in prefills that differ. The answers belong to this machine, this torch
and this number of threads. Nothing here decides anything: the records are what a shape-invariant mode is built from.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.evidence.machine import Report
from fastgrpo.evidence.workload import as_run, text_stream
from fastgrpo.models.cache import Prefix, RaggedCache
from fastgrpo.models.target import Target, open_target

_DISTINCT_NEIGHBOURS = 3  # what neighbours say cannot matter, only that they are there; so few are run and repeated


@dataclass(frozen=True)
class Shape:
    """One way to run `queries` tokens of a row at a time in a pass of `rows` rows.

    place: the row's index in the pass. longer: how many tokens the neighbours' contexts are longer than the row's; for
    a pass of one row, how many slots the pass looks past the row's end. repeated: neighbours are copies of the row.
    """

    rows: int
    queries: int = 1
    place: int = 0
    longer: int = 0
    repeated: bool = False


# Grouped by what is asked: rows, place, tokens a row, span.
SHAPES = (
    Shape(2, repeated=True),  # the reference: a single row, repeated so that no pass has a single token
    Shape(1),
    Shape(2),
    Shape(8),
    Shape(32),
    Shape(8, place=7),
    Shape(32, place=31),
    Shape(1, queries=5),
    Shape(2, queries=5),
    Shape(8, queries=5),
    Shape(32, queries=5),
    Shape(8, queries=5, place=7),
    Shape(1, longer=7),
    Shape(1, longer=100),
    Shape(2, longer=7),
    Shape(2, longer=100),
    Shape(8, longer=7),
    Shape(8, longer=100),
    Shape(8, queries=5, longer=100),
    Shape(32, longer=100),
)


@dataclass(frozen=True)
class Record:
    """How the logits of one shape compare with the reference's.

    law: letters; records of one path, dtype and kind with the same letter are equal bit for bit. max_abs: the largest
    absolute difference of a logit from the reference's. flips: positions whose most likely token differs, of `steps`.
    """

    path: str
    dtype: str
    kind: str
    shape: str
    equal: bool
    law: str
    max_abs: float
    flips: int
    steps: int


@dataclass(frozen=True)
class InvarianceSettings:
    """dtype: the precision of the passes; auto is float32 and bfloat16, one after the other. context: tokens before
    the ones whose logits are compared."""

    model: str = "smollm2-135m"
    dtype: str = "auto"
    context: int = 64
    threads: int | None = None


def invariance_bench(
    settings: InvarianceSettings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    note: Callable[[str], None],
) -> Report:
    """Measure every path and precision that applies, with a `note` of each as it is done."""
    names = ("float32", "bfloat16") if settings.dtype == "auto" else (settings.dtype,)
    stream = text_stream(settings.context + max(settings.context, 100) + 16, tokenizer)
    paths = (True, False) if type(open_target(model)) is not type(open_target(model, lean=False)) else (False,)
    records: list[Record] = []
    for name in names:
        for lean in paths:
            records += measure(model, stream, dtype=getattr(torch, name), lean=lean, context=settings.context)
            note(f"{records[-1].path}, {name}: done")
    return Report(
        "invariance",
        as_run(settings, model) | {"dtype": ",".join(names)},
        render(records),
        [asdict(record) for record in records],
    )


def measure(
    model: nn.Module,
    stream: Sequence[int],
    *,
    dtype: torch.dtype,
    lean: bool,
    context: int = 64,
    steps: int = 5,
    shapes: Sequence[Shape] = SHAPES,
) -> list[Record]:
    """Compare `shapes` (the first is the reference), then shapes of prefill, for one path and precision of `model`.

    stream: token ids of real text, cut into contexts of `context` tokens; `steps`: tokens that every shape runs, a
    multiple of each shape's `queries`. Raises ValueError where the stream is too short for that.
    """
    furthest = max([shape.longer for shape in shapes] + [context])
    needed = context + furthest + steps + _DISTINCT_NEIGHBOURS
    if len(stream) < needed:
        raise ValueError(f"the text has {len(stream)} tokens, and these shapes need {needed}: give more text.")
    target = open_target(model, dtype=dtype, lean=lean)
    path = type(target).__name__.removesuffix("Target")
    precision = str(dtype).removeprefix("torch.")
    with target.session():
        run = _Run(target, stream)
        decoding = [(_describe(shape), run.decode(context, steps, shape)) for shape in shapes]
        prefills = run.prefills(context)
    return [
        *_compare(decoding, path, precision, "decode"),
        *_compare(prefills, path, precision, "prefill"),
    ]


def _describe(shape: Shape) -> str:
    parts = [f"{shape.rows} x {shape.queries}"]
    if shape.repeated:
        parts.append("same row repeated")
    if shape.place:
        parts.append("last row")
    if shape.longer:
        parts.append(f"{'neighbours' if shape.rows > 1 else 'span'} {shape.longer} longer")
    return ", ".join(parts)


class _Run:
    """The passes over one open target. Prompts are run once, alone, so that shapes start from the same cache."""

    def __init__(self, target: Target, stream: Sequence[int]):
        self.target, self.stream = target, stream
        self._prefixes: dict[tuple[int, ...], Prefix] = {}

    def _prefix(self, text: Sequence[int]) -> Prefix:
        key = tuple(text)
        if key not in self._prefixes:
            self._prefixes[key] = self.target.prefill([text])[1][0]
        return self._prefixes[key]

    def _members(self, context: int, steps: int, shape: Shape) -> list[tuple[Sequence[int], Prefix]]:
        """The text and the prefix of every row of the pass."""
        row = self.stream[: context + steps]
        own = (row, self._prefix(row[:context]))
        length = context + (shape.longer if shape.rows > 1 else 0)
        texts = [self.stream[1 + i : 1 + i + length + steps] for i in range(min(_DISTINCT_NEIGHBOURS, shape.rows - 1))]
        others = [own] if shape.repeated else [(text, self._prefix(text[:length])) for text in texts]
        filled = [others[i % len(others)] for i in range(shape.rows - 1)]
        return [*filled[: shape.place], own, *filled[shape.place :]]

    def decode(self, context: int, steps: int, shape: Shape) -> Tensor:
        """The logits of the row under test, (steps, vocab), by passes of the given shape."""
        members = self._members(context, steps, shape)
        device = self.target.layout.device
        cache = RaggedCache(self.target.layout, shape.rows, context + steps + shape.longer)
        for index, (_, prefix) in enumerate(members):
            cache.place(prefix, index, 1)
        lengths = torch.tensor([prefix.length for _, prefix in members], device=device)
        logits = []
        for step in range(0, steps, shape.queries):
            tokens = [text[prefix.length + step : prefix.length + step + shape.queries] for text, prefix in members]
            positions = lengths[:, None] + torch.arange(step, step + shape.queries, device=device)
            span = int(positions.max()) + 1 + (shape.longer if shape.rows == 1 else 0)
            out = self.target.decode(torch.tensor(tokens, device=device), positions, cache, min(span, cache.capacity))
            logits.append(out[shape.place].clone())
        return torch.cat(logits)

    def prefills(self, context: int) -> list[tuple[str, Tensor]]:
        """The logits after a prompt's last token, (1, vocab), by prefills of different company."""
        prompt = self.stream[:context]
        same, longer = self.stream[1 : 1 + context], self.stream[1 : 1 + 2 * context]
        companies = [
            ("alone", [prompt], 0),
            ("2 of one length", [prompt, same], 0),
            ("8 of one length", [prompt] + [same] * 7, 0),
            ("8 of one length, last row", [same] * 7 + [prompt], 7),
            ("next to one twice as long", [prompt, longer], 0),
        ]
        logits = [(name, self.target.prefill(texts)[0][place, None].clone()) for name, texts, place in companies]
        for name, queries in (("its last token by a pass of 1 x 1", 1), ("its last 5 tokens by a pass of 1 x 5", 5)):
            logits.append((name, self.decode(context - queries, queries, Shape(1, queries))[-1:]))
        return logits


def _compare(results: Sequence[tuple[str, Tensor]], path: str, dtype: str, kind: str) -> list[Record]:
    reference = results[0][1]
    laws: list[Tensor] = []
    records = []
    for shape, logits in results:
        law = next((i for i, known in enumerate(laws) if torch.equal(known, logits)), len(laws))
        if law == len(laws):
            laws.append(logits)
        records.append(
            Record(
                path=path,
                dtype=dtype,
                kind=kind,
                shape=shape,
                equal=law == 0,
                law=string.ascii_uppercase[law],
                max_abs=float((logits.double() - reference.double()).abs().max()),
                flips=int((logits.argmax(-1) != reference.argmax(-1)).sum()),
                steps=len(logits),
            )
        )
    return records


def render(records: Sequence[Record]) -> str:
    """A table, one line a record."""
    lines = [f"{'path':<12}{'dtype':<10}{'kind':<9}{'shape':<40}{'bits':<11}{'max abs diff':>12}{'flips':>7}"]
    for r in records:
        bits = f"{r.law} {'equal' if r.equal else 'differ'}"
        lines.append(
            f"{r.path:<12}{r.dtype:<10}{r.kind:<9}{r.shape:<40}{bits:<11}{r.max_abs:>12.3g}{f'{r.flips}/{r.steps}':>7}"
        )
    return "\n".join(lines)
