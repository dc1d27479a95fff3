"""One case of the fuzz: a model, an engine's options, requests. Plain JSON values throughout."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCase:
    """One request.

    Attributes:
        priority, tenant, evict: arguments of `Engine.submit`.
        cancel_step: the request is cancelled before this step; None: it is not cancelled.
    """

    prompt: tuple[int, ...]  # token ids
    params: Mapping[str, object]  # arguments of `SamplingParams`
    step: int = 0  # the request is submitted before this step
    priority: int = 0
    tenant: str = "default"
    evict: str | None = None
    cancel_step: int | None = None
    cancel_index: int | None = None  # only this answer is cancelled; None: all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine in little memory, and its requests.

    Attributes:
        room, host_room, stream_room: KV memory, swap memory and offload memory, in units of the
            most bytes that one of the requests holds in an ample memory.
        weights: `stay=N` offloads the weights of all layers but N; a weight codec such as int8;
            "" for plain weights.
        tiers: of cached prefixes: disk, remote. The requests run twice, the second time in a new
            engine over the same tiers.
        preempt_steps: before each of these steps a running request is preempted: with the most
            evictions, or the fewest if `preempt_whole`.
    """

    seed: int  # the case was drawn from it
    model: str  # an architecture of `zoo`, `*3` behind it for three times its layers, or quire-tiny
    exact: bool  # products are computed in float64 and rounded once (`exact_products`)
    poison: bool  # memory that is not in use is overwritten after every step
    room: float
    host_room: float = 0.0
    stream_room: float = 0.0
    weights: str = ""
    tiers: tuple[str, ...] = ()
    preempt_steps: tuple[int, ...] = ()
    preempt_whole: bool = False
    tokenizer: bool = False  # the model has one, of single bytes
    kv: Mapping[str, object]  # options of `KVConfig` but for the three memories
    schedule: Mapping[str, object]  # options of `ScheduleConfig`
    requests: tuple[RequestCase, ...]  # in the order of their names, r0, r1 and so on

    @property
    def evict_texts(self) -> list[str]:
        default = str(self.kv.get("evict", "full"))
        return [default if r.evict is None else r.evict for r in self.requests]

    @property
    def under_pressure(self) -> bool:
        return any("when=pressure" in text for text in self.evict_texts)

    @property
    def lossy(self) -> bool:
        return self.kv.get("codec", "none") != "none"

    @property
    def approximate(self) -> bool:
        """Whether options change the mathematics of the KV, or codes amplify its rounding.

        Activations in codes lose precision. CPU attention rounds its sums differently, and codes
        of later tokens amplify that.
        """
        input_codec = self.kv.get("offload_activation_codec", "none") != "none"
        host = self.kv.get("offload_cpu_attention", "off") != "off"
        return input_codec or (self.lossy and host)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(text: str) -> Case:
    values = json.loads(text)
    requests = tuple(
        RequestCase(**{**request, "prompt": tuple(request["prompt"])})
        for request in values.pop("requests")
    )
    for name in ("tiers", "preempt_steps"):
        values[name] = tuple(values.get(name, ()))
    return Case(**values, requests=requests)
