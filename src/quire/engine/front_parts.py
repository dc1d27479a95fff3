"""Builds what an engine needs for fronts on the host: bytes of KV and of inputs, rates, carrier."""

from dataclasses import dataclass

from quire.engine.front_rows import FrontRows
from quire.engine.front_speeds import measure_front_speeds
from quire.engine.front_splits import AskedParts, FrontSplits
from quire.engine.host_side import host_pool
from quire.kv.carrier import Carrier, ThreadCarrier
from quire.kv.config import KVConfig
from quire.kv.host_attention import HostAttention, can_attend_in_parts
from quire.kv.hosted import HostedFronts, can_have_front
from quire.kv.hosting import Hosting
from quire.kv.input_book import InputBook
from quire.kv.input_codec import InputCodec
from quire.kv.input_store import InputStore
from quire.kv.remaking import Remaking, can_make_again
from quire.kv.step import PagedKV
from quire.kv.stream_carrier import StreamCarrier
from quire.kv.tables import SLOTS
from quire.models.adapter import TransformersDecoder
from quire.models.loader import LoadedModel
from quire.offload.profiler import OffloadProfiler
from quire.offload.schedule.work import Sizes
from quire.plan.offload.gate import activation_gate
from quire.plan.offload.kept import kept_range
from quire.plan.sizes import parse_size
from quire.spec.pages import LaneGroup

_BLOCK_BYTES = 256 << 10  # of a layer's inputs that lie together
_LEAST_BLOCKS = 64
_LEAST_PART = 0.02  # of tokens made again, below which nothing is gained


@dataclass(frozen=True, slots=True)
class FrontParts:
    """What belongs to fronts on the host.

    Attributes:
        fronts: of all sequences.
        hosting: for steps.
        rows: who runs, as the scheduler says; None where nobody asks.
        splits: divides fronts; None where all of them is carried.
        why: what is made again or why nothing is, for people.
    """

    fronts: HostedFronts
    hosting: Hosting
    rows: FrontRows | None
    splits: FrontSplits | None
    why: str

    def totals(self) -> dict[str, int]:
        """Bytes on the host, tokens that were not carried so far: as `EngineStats` names them."""
        remaking, attention = self.hosting.remaking, self.hosting.attention
        return {
            "hosted_bytes": self.fronts.pool.used_bytes,
            "input_bytes": 0 if remaking is None else remaking.store.used_bytes,
            "made_again_tokens": 0 if remaking is None else remaking.num_made,
            "host_attended_tokens": 0 if attention is None else attention.num_attended,
        }

    def check(self) -> None:
        """Prove that every byte on the host is free or somebody's.

        Raises:
            InvariantError: one is not.
        """
        self.fronts.pool.check()
        if self.hosting.remaking is not None:
            self.hosting.remaking.store.book.check()


def build_fronts(
    model: LoadedModel, config: KVConfig, kv: PagedKV, stream_bytes: int
) -> FrontParts:
    """Divide the bytes for fronts over KV and inputs, as rates or the user say.

    Args:
        model: computes and makes again.
        config: what the user said.
        kv: whose first pages they are.
        stream_bytes: of the host.
    """
    choice = _Choice(model, config, kv)
    part, why = choice.part_and_why()
    book = choice.book(choice.input_bytes(part, stream_bytes))
    input_bytes = 0 if book is None else book.num_blocks * book.block_tokens * choice.x_bytes
    fronts = HostedFronts(kv.memory, host_pool(kv.store, choice.layout, stream_bytes - input_bytes))
    fronts.read_positions = kv.store.page_positions
    rows, remaking = None, None
    if book is not None:
        rows = FrontRows(part)
        remaking = choice.remaking(book, rows)
    attention = choice.attention(fronts)
    splits = None
    if remaking is not None or attention is not None:
        splits = choice.splits(makes=remaking is not None, attends=attention is not None)
    hosting = Hosting(
        kv.memory,
        fronts,
        choice.carrier(),
        splits=splits,
        remaking=remaking,
        remade=[group.name for group in choice.groups] if remaking is not None else (),
        attention=attention,
    )
    return FrontParts(fronts, hosting, rows, splits, why)


class _Choice:
    """What of fronts is made again and what is attended to on the host, at most.

    Args:
        model: computes and makes again.
        config: what the user said.
        kv: whose first pages they are.
    """

    def __init__(self, model: LoadedModel, config: KVConfig, kv: PagedKV) -> None:
        self._model, self._config, self._kv = model, config, kv
        self.layout = kv.memory.layout
        self._staged = [g for g in self.layout.groups if can_have_front(g)]
        alone = [g for g in self._staged if g.name not in kv.kept]
        self.groups = [g for g in alone if can_make_again(g)]
        self._in_parts = [g.name for g in alone if can_attend_in_parts(g)]
        self._layers = sorted(layer for g in self.groups for layer in g.layers if layer)
        kv_bytes = max(map(_layer_bytes, self._staged))
        self._codec = InputCodec(config.input_codec, model.spec.hidden_size, model.decoder.dtype)
        self._sizes = Sizes(kv_bytes=kv_bytes, x_bytes=self._codec.row_bytes)
        self._profiler: OffloadProfiler | None = None
        self._makes = False

    @property
    def x_bytes(self) -> int:
        """Bytes of a token's inputs, all layers together."""
        return int(self._sizes.x_bytes) * len(self._layers)

    def part_and_why(self) -> tuple[float, str]:
        """Part of a sequence's tokens whose inputs are kept; 0 for none."""
        asked, decoder = self._config.recompute_part, self._model.decoder
        if asked == 0:
            return 0.0, "KV alone is transferred: --stream-recompute off"
        if any(group.lanes_per_layer > 1 for group in self._staged):
            return 0.0, "KV alone is transferred: each KV head keeps tokens of its own"
        if not self.groups:
            return 0.0, "KV alone is transferred: slots of this codec are not written one by one"
        gate = activation_gate(
            self._model.spec,
            kv_value_bytes=self._sizes.kv_bytes / self._model.spec.kv_values_per_layer_token,
            x_value_bytes=self._codec.row_bytes / self._codec.hidden,
        )
        if asked is None and not gate.pays:
            return 0.0, gate.reason
        if self._model.weights is not None:
            return 0.0, "KV alone is transferred: weights are brought too (--weights-memory)"
        if not isinstance(decoder, TransformersDecoder):
            return 0.0, "KV alone is transferred: this decoder makes none again"
        why_not = decoder.prepare_recomputation()
        if why_not is not None:
            return 0.0, f"KV alone is transferred: {why_not}"
        self._makes = True
        if asked is not None:
            return asked, f"{asked:.2g} of it is made again from activations, as asked"
        rates = self._rates().speeds.rates(self._sizes, rows=1, tokens=0)
        tokens = self._model.spec.max_positions
        part = kept_range(rates, tokens, tokens).x_until / tokens
        said = f"making KV again takes {rates.recompute_ratio:.2g}x what carrying it does"
        if part < _LEAST_PART:
            return 0.0, f"{said}: KV alone is transferred"
        return part, f"{gate.reason}; {said}: at most {part:.2g} of it is"

    def input_bytes(self, part: float, stream_bytes: int) -> int:
        """Bytes of the host for inputs, so that they end with those for KV."""
        kv_bytes = sum(_layer_bytes(g) * len(g.layers) for g in self._staged)
        return int(stream_bytes * part * self.x_bytes / (part * self.x_bytes + kv_bytes))

    def book(self, input_bytes: int) -> InputBook | None:
        """Blocks of inputs; None where not one is held."""
        page, tokens = self._config.page_tokens, input_bytes // max(1, self.x_bytes)
        wanted = min(_BLOCK_BYTES // int(self._sizes.x_bytes), tokens // _LEAST_BLOCKS)
        block = max(page, wanted // page * page)
        return InputBook(tokens // block, block, page) if tokens >= block else None

    def remaking(self, book: InputBook, rows: FrontRows) -> Remaking:
        """What makes keys and values again."""
        decoder = self._model.decoder
        assert isinstance(decoder, TransformersDecoder), "asked before"
        inputs = InputStore(book, self._layers, self._codec, decoder.device)
        return Remaking(decoder, inputs, rows, decoder.device)

    def attention(self, fronts: HostedFronts) -> HostAttention | None:
        """What attends on the host; None for nothing. A device that is the host gains nothing."""
        part, kv = self._config.host_attention_part, self._kv
        here = self._model.decoder.device.type == "cpu"
        if not self._in_parts or part == 0 or (part is None and here):
            return None
        return HostAttention(kv.memory, kv.store, kv.coded, fronts, self._in_parts)

    def splits(self, *, makes: bool, attends: bool) -> FrontSplits:
        """What divides fronts."""
        token_bytes = SLOTS * int(self._sizes.x_bytes) * max(1, len(self.groups))
        room = parse_size(self._config.scratch) // token_bytes
        asked = AskedParts(
            made=self._config.recompute_part if makes else 0.0,
            most_made=room if makes else 0,
            host=self._config.host_attention_part if attends else 0.0,
        )
        page_tokens = self._config.page_tokens
        return FrontSplits(self._rates(), self._sizes, page_tokens=page_tokens, asked=asked)

    def carrier(self) -> Carrier:
        """Who copies."""
        device = self._model.decoder.device
        return StreamCarrier(device) if device.type == "cuda" else ThreadCarrier()

    def _rates(self) -> OffloadProfiler:
        if self._profiler is None:
            decoder, layer = self._model.decoder, self._staged[0].layers[-1]
            speeds = measure_front_speeds(decoder, layer, makes=self._makes)
            self._profiler = OffloadProfiler(speeds)
        return self._profiler


def _layer_bytes(group: LaneGroup) -> int:
    return group.page_class.slot_bytes * group.lanes_per_layer
