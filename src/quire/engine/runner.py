"""The model runner: runs the tokens of a step through the decoder with paged attention.

A step larger than a batch runs as several batches. With a fixed number of rows, every batch is
padded to that number, and the tokens of a request are split between batches.

Batches with a fixed number of rows: requests are split, and the last batch is padded.

tokens of a step     a a a a a a a b c c c        4 rows per batch
batches              a a a a | a a a b | c c c .  . is padding: computed and discarded
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.engine.decode_graphs import DecodeGraphs, decode_rows
from quire.kernels.backend import AttentionMath, HeadBuffers
from quire.kernels.device_copies import to_device
from quire.kv.flat_batch import WHOLE_STEP, Scoring, StepPart
from quire.kv.paged_kv import PagedKV
from quire.kv.step import LastStep, StepAttention
from quire.models.base import (
    AttentionCall,
    Batch,
    ChainedAttention,
    Decoder,
    LayerByLayer,
    PagedAttention,
    SequenceStates,
    TokenByToken,
)
from quire.models.drafted import DraftedDecoder
from quire.plan.weights import MAX_BATCHES
from quire.sampling.logits import StepLogits
from quire.sampling.pending_tokens import InputTokens, PendingTokens
from quire.sampling.pooling import StepHidden, pooled_rows
from quire.scheduler.lanes import LayerPrefill
from quire.scheduler.request import Request
from quire.scheduler.step import StepPlan, StepSize, StepTimes


class StepBridge:
    """Adapter between a decoder's layers and the attention of a step.

    Args:
        step: attention of the step.
        hidden_rows: rows of the batch whose hidden states are needed; None: none.
    """

    takes_rope = True

    def __init__(self, step: StepAttention, hidden_rows: Tensor | None = None) -> None:
        self._step = step
        self.hidden_rows = hidden_rows
        self.hidden_states = torch.empty(0)

    def note_hidden_states(self, states: Tensor) -> None:
        self.hidden_states = states

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._step.attend(call.layer, call.math, query, key, value, call.rotary, call.rope)

    @property
    def states(self) -> SequenceStates[Any]:
        return self._step.states

    def chain(self, layers: Sequence[AttentionMath], heads: HeadBuffers) -> list[object] | None:
        return self._step.chain(layers, heads)

    @property
    def wants_residual_similarity(self) -> bool:
        """Whether any row records the residual cosine similarity of attention."""
        return self._step.wants_residual_similarity

    def begin_layer(self, layer: int) -> None:
        self._step.begin_layer(layer)

    @property
    def wants_inputs(self) -> bool:
        return self._step.wants_inputs

    def note_input(self, layer: int, inputs: Tensor) -> None:
        self._step.note_input(layer, inputs)

    def note_residual_similarity(self, layer: int, cosines: Tensor) -> None:
        self._step.note_residual_similarity(layer, cosines)


class ByLayerBridge(StepBridge):
    """Attention of a chunk of prompts that are computed layer by layer.

    The slots of a layer are allocated when its first chunk begins. `computed` has the tokens that
    each request of the chunk has before it.
    """

    wants_residual_similarity = wants_inputs = False  # of budgets that need the whole prompt

    def __init__(
        self,
        prefill: LayerPrefill,
        computed: dict[Request, int],
        attention: Callable[..., StepAttention],
        hidden_rows: Tensor | None = None,
    ) -> None:
        self._prefill, self._computed, self._attention = prefill, computed, attention
        self.hidden_rows, self.hidden_states = hidden_rows, torch.empty(0)

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._prefill.begin(call.layer, self._computed)
        self._step = self._attention(layer=call.layer)
        return super().attend(call, query, key, value)

    def chain(self, layers: Sequence[AttentionMath], heads: HeadBuffers) -> None:
        return None

    def begin_layer(self, layer: int) -> None:
        return None


def _kind(request: Request) -> tuple[int, bool]:
    """Requests of different kinds never share a forward."""
    return request.spec.rope_variant, request.spec.pre_rope


@dataclass(frozen=True, slots=True)
class RowPart:
    """Consecutive tokens of a request in a batch."""

    request: Request
    done: int  # the request's tokens in earlier batches of the step
    tokens: int  # the request's tokens in this batch
    later: int  # slots for the request's tokens in later batches of the step, scoring included
    scored: list[int] | None = None  # tokens of a scoring pass; None: tokens of the request
    begins: bool = False  # whether they are the first of their pass


def in_parts(
    rows: Sequence[tuple[Request, int]],
    batch_tokens: int,
    ends: Callable[[Request], Sequence[int]] = lambda _: (),
    scoring: Mapping[Request, int] = MappingProxyType({}),
) -> list[list[RowPart]]:
    """Split a step into full batches, in the planned order of rows.

    A batch also ends where a request has one of its `ends` tokens. `scoring` has the slots of a
    scoring pass after the tokens.
    """
    batches: list[list[RowPart]] = [[]]
    left = batch_tokens
    for request, tokens in rows:
        done, before = 0, request.progress.num_computed
        stops = [end - before for end in ends(request) if 0 < end - before < tokens]
        while done < tokens:
            if not left:
                batches.append([])
                left = batch_tokens
            count = min(left, min((stop for stop in stops if stop > done), default=tokens) - done)
            later = tokens - done - count + scoring.get(request, 0)
            batches[-1].append(RowPart(request, done, count, later))
            done, left = done + count, 0 if done + count in stops else left - count
    return batches


def outputs_apart(batches: list[list[RowPart]]) -> list[list[RowPart]]:
    """Split chunks with output tokens of requests with sparse attention, which are recomputed.

    Each such token is a row of its own in a batch after that of its chunk, and reads the pages that
    it has read as an output.
    """
    found: list[list[RowPart]] = []
    for batch in batches:
        own, singles = list[RowPart](), list[list[RowPart]]()
        for row in batch:
            before = row.request.progress.num_computed + row.done
            head = max(0, min(row.tokens, len(row.request.prompt_token_ids) - before))
            if row.request.spec.sparse is None or row.tokens == 1 or head == row.tokens:
                own.append(row)
                continue
            if head:
                own.append(replace(row, tokens=head, later=row.later + row.tokens - head))
            for number in range(head, row.tokens):
                if number - head == len(singles):
                    singles.append([])
                later = row.later + row.tokens - number - 1
                one = replace(row, done=row.done + number, tokens=1, later=later)
                singles[number - head].append(one)
        found += [batch for batch in (own, *singles) if batch]
    return found


def scoring_parts(
    request: Request, tokens: int, slots: int, batch_tokens: int
) -> Iterator[list[RowPart]]:
    """Yield the batches of a scoring pass, whose chunks use the same slots one after the other.

    Each has tokens of one request only, so that its sums do not depend on other requests.

    Args:
        request: the request.
        tokens: its tokens in earlier batches of the step, after which the pass begins.
        slots: slots of the pass.
        batch_tokens: most tokens of a batch.
    """
    for number, chunk in enumerate(request.spec.scoring_token_ids):
        for start in range(0, len(chunk), batch_tokens):
            ids = chunk[start : start + batch_tokens]
            later, begins = slots - start - len(ids), not (number or start)
            yield [RowPart(request, tokens + start, len(ids), later, ids, begins)]


def padded(numbers: list[int], length: int) -> list[int]:
    """Pad a list with zeros at the end."""
    return numbers + [0] * (length - len(numbers))


class PaddedBridge:
    """Attention for the first rows of a batch; padding rows are neither computed nor stored."""

    def __init__(self, bridge: PagedAttention, num_tokens: int) -> None:
        self._bridge, self._num_tokens = bridge, num_tokens

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = slice(self._num_tokens)
        if self._num_tokens == len(query):
            return self._bridge.attend(call, query, key, value)
        found = self._bridge.attend(call, query[own], key[own], value[own])
        out = found.new_zeros(len(query), *found.shape[1:])
        out[own] = found
        return out

    @property
    def states(self) -> TokenByToken:
        return TokenByToken(self._bridge.states)  # type: ignore[attr-defined]

    @property
    def hidden_rows(self) -> Tensor | None:
        return getattr(self._bridge, "hidden_rows", None)

    def note_hidden_states(self, states: Tensor) -> None:
        self._bridge.note_hidden_states(states)  # type: ignore[attr-defined]

    def chain(self, layers: Sequence[AttentionMath], heads: HeadBuffers) -> Sequence[object] | None:
        if not isinstance(self._bridge, ChainedAttention):
            return None
        return self._bridge.chain(layers, heads.first(self._num_tokens))


def joined(results: list[StepLogits | StepHidden]) -> list[StepLogits | StepHidden]:
    """Concatenate the logits of each request: a scored prompt may span several batches."""
    by_request: dict[int, list[StepLogits]] = {}
    for result in results:
        if isinstance(result, StepLogits):
            by_request.setdefault(id(result.request), []).append(result)
    hidden = [result for result in results if isinstance(result, StepHidden)]
    return hidden + [
        _concatenated(parts) if len(parts) > 1 else parts[0] for parts in by_request.values()
    ]


def _concatenated(parts: Sequence[StepLogits]) -> StepLogits:
    logits = torch.cat([part.logits for part in parts])
    return replace(parts[0], batch=logits, first_row=0, num_rows=len(logits))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A batch of a step, ready for the decoder."""

    batch: Batch
    wanted: list[tuple[Request, int, int]]  # (request, first position, rows) of the needed logits
    pooled: list[tuple[Request, int, int]]  # the same of the needed hidden states
    bridge: StepBridge  # has the hidden states after the forward

    def results(self, logits: Tensor) -> list[StepLogits | StepHidden]:
        results: list[StepLogits | StepHidden] = []
        first = 0
        for request, position, count in self.pooled:
            states = self.bridge.hidden_states[first : first + count]
            results.append(StepHidden(request, position, states))
            first += count
        first = 0
        for request, position, count in self.wanted:
            results.append(StepLogits(request, position, logits, first, count))
            first += count
        return results


class Runner:
    """Computes the logits of step plans."""

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        times: StepTimes,
        step: StepSize,
        *,
        fixed_rows: int | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._graphs = graphs
        self._decoder, self._kv, self._times = decoder, kv, times
        self._last, self._last_draft = LastStep(), LastStep()
        self._step, self._fixed_rows = step, fixed_rows

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[StepLogits | StepHidden]:
        """Run a step's tokens through the model.

        Returns:
            For each request that needs logits: those of its last token if it has no uncomputed
            tokens left, or of all its tokens if it needs prompt log-probabilities. For a request
            with `pooling`, hidden states instead.
        """
        self._propose(plan)
        results: list[StepLogits | StepHidden] = []
        by_layer = {} if plan.by_layer is None else plan.by_layer.tokens
        planned = [
            (request, tokens)
            for request, tokens in zip(plan.requests, plan.tokens, strict=True)
            if request not in by_layer
        ]
        for kind in sorted({_kind(request) for request, _ in planned}):
            rows = [(request, tokens) for request, tokens in planned if _kind(request) == kind]
            results += self._run_rope_variant(rows, kind[0], plan)
        if plan.by_layer is not None:
            results += self._run_by_layer(plan.by_layer)
        return results

    def _propose(self, plan: StepPlan) -> None:
        """Compute the proposed tokens of a draft model, one of each request after the other.

        The step then computes both models for all its tokens, so that the draft model's KV stays
        that of the same tokens whether they are proposed or not.
        """
        decoder = self._decoder
        if not isinstance(decoder, DraftedDecoder):
            return
        drafted = [request for request in plan.requests if request.draft_token_ids]
        most = self._fixed_rows or self._step.batch_tokens
        for kind in sorted({_kind(request) for request in drafted}):
            of_kind = [request for request in drafted if _kind(request) == kind]
            for start in range(0, len(of_kind), most):
                self._propose_together(decoder, of_kind[start : start + most], kind[0])

    def _propose_together(
        self, decoder: DraftedDecoder, requests: Sequence[Request], variant: int
    ) -> None:
        for place in range(max(len(request.draft_token_ids) for request in requests)):
            rows = [request for request in requests if place < len(request.draft_token_ids)]
            parts = [
                RowPart(request, place, 1, len(request.draft_token_ids) - place) for request in rows
            ]
            batch = self._prepare(parts, WHOLE_STEP, InputTokens(None), last=self._last_draft).batch
            tokens = decoder.draft_logits(batch, variant).argmax(dim=-1).tolist()
            for request, token in zip(rows, tokens, strict=False):  # without padding
                request.draft_token_ids[place] = token

    def _run_by_layer(self, prefill: LayerPrefill) -> list[StepLogits | StepHidden]:
        """Compute prompts in chunks, one layer of all chunks after the other."""
        rows, started_s = list(prefill.tokens.items()), time.perf_counter()
        chunk, scoring = prefill.chunk_tokens, prefill.scoring
        parts = in_parts(rows, chunk, prefill.snapshot_ends, scoring)
        for request, slots in scoring.items():
            parts += scoring_parts(request, prefill.tokens[request], slots, chunk)
        prepared = [self._prepare(part, WHOLE_STEP, InputTokens(None), prefill) for part in parts]
        self._times.prepare_s += time.perf_counter() - started_s
        logits = self._forward([p.batch for p in prepared], rows[0][0].spec.rope_variant)
        prefill.end()
        results = (part.results(own) for part, own in zip(prepared, logits, strict=True))
        return joined([result for of_part in results for result in of_part])

    def _run_rope_variant(
        self, rows: list[tuple[Request, int]], variant: int, plan: StepPlan
    ) -> list[StepLogits | StepHidden]:
        pending = plan.pending
        assert pending is None or isinstance(pending, PendingTokens)
        started_s = time.perf_counter()
        parts = self._parts(rows, plan.scoring)
        if self._graphs is not None and not plan.scoring:
            found = self._replay(self._graphs, parts, variant, pending)
            if found is not None:
                return found
        whole = len(parts)
        parts = outputs_apart(parts)
        is_split = self._fixed_rows is not None or len(parts) > whole
        most = 1 if is_split and not self._step.shares_layers else MAX_BATCHES
        turns = [parts]
        if len(parts) > whole and self._kv.offload is not None:
            turns = [[part] for part in parts]  # parts of a row use the same staging pages
        self._times.prepare_s += time.perf_counter() - started_s
        results: list[StepLogits | StepHidden] = []
        for turn in turns:
            started_s, count = time.perf_counter(), min(len(turn), MAX_BATCHES)
            prepared = [
                self._prepare(part, StepPart(n, count), InputTokens(pending))
                for n, part in enumerate(turn)
            ]
            self._times.prepare_s += time.perf_counter() - started_s
            for start in range(0, len(prepared), most):
                together = prepared[start : start + most]
                logits = self._forward([p.batch for p in together], variant)
                for done, own in zip(together, logits, strict=True):
                    results += done.results(own)
        most = self._fixed_rows or self._step.batch_tokens
        for request, tokens in rows:
            slots = plan.scoring.get(request)
            for scored in scoring_parts(request, tokens, slots, most) if slots else ():
                self._forward([self._prepare(scored, WHOLE_STEP, InputTokens(None)).batch], variant)
        return joined(results) if is_split else results

    def _replay(
        self,
        graphs: DecodeGraphs,
        parts: list[list[RowPart]],
        variant: int,
        pending: PendingTokens | None,
    ) -> list[StepLogits | StepHidden] | None:
        """Run a step as a graph; None if it must run without one."""
        logits = None
        if len(parts) == 1 and all(map(_only_decodes, parts[0])):
            requests = [row.request for row in parts[0]]
            starts = [request.progress.num_computed for request in requests]
            inputs = InputTokens(pending)
            for request, start in zip(requests, starts, strict=True):
                inputs.add(request, start, 1)
            batch = decode_rows([request.memory.row for request in requests], inputs, starts)
            logits = graphs.run(batch, variant)
        if logits is None:
            graphs.note_other()
            return None
        return [
            StepLogits(request, starts[first], logits, first, count)
            for request, first, count in _wanted_rows(parts[0])
        ]

    def _parts(
        self, rows: list[tuple[Request, int]], scoring: Mapping[Request, int]
    ) -> list[list[RowPart]]:
        if self._fixed_rows is not None:
            return in_parts(rows, self._fixed_rows, scoring=scoring)
        offload = self._kv.offload
        key = (lambda _: None) if offload is None else offload.batch_key
        batches = in_batches(rows, self._step.batch_tokens, lambda r: key(r.memory.row))
        return [
            [RowPart(request, 0, tokens, scoring.get(request, 0)) for request, tokens in batch]
            for batch in batches
        ]

    def _forward(self, batches: list[Batch], variant: int) -> list[Tensor]:
        if len(batches) > 1:
            assert isinstance(self._decoder, LayerByLayer), "several batches need layer-by-layer"
            return self._decoder.forward_together(batches, rope_variant=variant)
        (one,) = batches
        ids, positions, samples = one.token_ids, one.positions, one.sample_rows
        return [self._decoder.forward(ids, positions, samples, one.attention, rope_variant=variant)]

    def _prepare(
        self,
        rows: list[RowPart],
        part: StepPart,
        inputs: InputTokens,
        prefill: LayerPrefill | None = None,
        last: LastStep | None = None,
    ) -> _Prepared:
        rows.sort(key=lambda row: row.tokens != 1)  # decode rows before prefill rows
        logical: list[int] = []
        for row in rows:
            start = row.request.progress.num_computed + row.done
            if row.scored is None:
                inputs.add(row.request, start, row.tokens)
            else:
                inputs.token_ids += row.scored
            logical += range(start, start + row.tokens)
        # RoPE is the identity at position 0: pages store pre-RoPE keys
        pre_rope = rows[0].request.spec.pre_rope
        positions = logical if self._kv.rotated and not pre_rope else [0] * len(logical)
        wanted = list(_wanted_rows(rows))
        attention = partial(
            StepAttention,
            self._kv,
            np.array([row.request.memory.row for row in rows], dtype=np.int64),
            np.array([row.tokens for row in rows], dtype=np.int32),
            np.array([row.later for row in rows], dtype=np.int32),
            part,
            pre_rope=pre_rope,
            scoring=None if rows[0].scored is None else Scoring(begins=rows[0].begins),
            sparse=[row.request.spec.sparse if _decodes_output(row) else None for row in rows],
            last=LastStep() if prefill is not None or rows[0].scored else last or self._last,
        )
        pooled = list(_pooled_rows(rows))
        hidden_rows = self._on_device(_flat(pooled)) if pooled else None
        if prefill is None:
            bridge = StepBridge(attention(), hidden_rows)
        else:
            own = (row for row in rows if row.scored is None)
            before = {row.request: row.request.progress.num_computed + row.done for row in own}
            bridge = ByLayerBridge(prefill, before, attention, hidden_rows)
        return _Prepared(
            self._batch(inputs, positions, _flat(wanted), bridge),
            [(request, logical[first], count) for request, first, count in wanted],
            [(request, logical[first], count) for request, first, count in pooled],
            bridge,
        )

    def _on_device(self, numbers: list[int]) -> Tensor:
        return to_device(np.array(numbers, dtype=np.int64), self._decoder.device)

    def _batch(
        self,
        inputs: InputTokens,
        positions: list[int],
        sample_rows: list[int],
        bridge: PagedAttention,
    ) -> Batch:
        token_ids = inputs.token_ids
        if self._fixed_rows is not None:
            bridge = PaddedBridge(bridge, len(token_ids))
            token_ids, positions = (padded(x, self._fixed_rows) for x in (token_ids, positions))
            sample_rows = padded(sample_rows, self._fixed_rows) if sample_rows else []
        numbers = np.array(token_ids + positions + sample_rows, dtype=np.int64)
        on_device = to_device(numbers, self._decoder.device)
        rows = len(token_ids)
        inputs.write_pending(on_device[:rows])
        return Batch(on_device[:rows], on_device[rows : 2 * rows], on_device[2 * rows :], bridge)


def in_batches(
    rows: list[tuple[Request, int]],
    batch_tokens: int,
    batch_key: Callable[[Request], int | None] = lambda _: None,
) -> list[list[tuple[Request, int]]]:
    """Split a step into batches without splitting rows.

    Rows keep their planned order: a row may read KV that an earlier row of the step writes. Rows
    that share offloaded pages follow the first of them: such pages are written and not published.
    """
    batches: list[list[tuple[Request, int]]] = [[]]
    of_key: dict[int, list[tuple[Request, int]]] = {}
    left = batch_tokens
    for request, tokens in rows:
        key = batch_key(request)
        if key is not None and key in of_key:
            of_key[key].append((request, tokens))
            left -= tokens * (of_key[key] is batches[-1])
            continue
        if tokens > left and batches[-1]:
            batches.append([])
            left = batch_tokens
        batches[-1].append((request, tokens))
        left -= tokens
        if key is not None:
            of_key[key] = batches[-1]
    return batches


def _decodes_output(row: RowPart) -> bool:
    """Whether the row computes one token of the output, not of the prompt."""
    computed = row.request.progress.num_computed + row.done
    return row.tokens == 1 and row.scored is None and computed >= len(row.request.prompt_token_ids)


def _only_decodes(row: RowPart) -> bool:
    request = row.request
    plain = request.params.pooling is None and not request.draft_token_ids
    return row.tokens == 1 and plain and not request.spec.pre_rope


def _wanted_rows(rows: list[RowPart]) -> Iterator[tuple[Request, int, int]]:
    """Yield (request, first row of the flat batch, rows) of the needed logits."""
    start = 0
    for row in rows:
        request = row.request
        if row.scored is not None:
            continue
        if request.scores_prompt or request.draft_token_ids:
            yield request, start, row.tokens
        elif row.done + row.tokens == request.num_uncomputed and request.params.max_tokens:
            yield request, start + row.tokens - 1, 1
        start += row.tokens


def _pooled_rows(rows: list[RowPart]) -> Iterator[tuple[Request, int, int]]:
    """Yield (request, first row of the flat batch, rows) of the needed hidden states."""
    start = 0
    for row in rows:
        request, pooling = row.request, row.request.params.pooling
        if pooling is not None and row.scored is None:
            first = request.progress.num_computed + row.done
            found = pooled_rows(pooling, first, row.tokens, len(request.prompt_token_ids))
            if found:
                yield request, start + found.start, len(found)
        start += row.tokens


def _flat(wanted: list[tuple[Request, int, int]]) -> list[int]:
    return [row for _, first, count in wanted for row in range(first, first + count)]
