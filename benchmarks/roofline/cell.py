"""One cell of the roofline benchmark: steps of one model, measured in one process.

The C extension chooses its instruction set when it is loaded, so every cell has its own process:
`python -m benchmarks.roofline.cell JSON` prints the cell as JSON.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import torch

from benchmarks.common.models import SHAPES, random_model
from benchmarks.roofline.measured import (
    DECODE,
    ENGINE,
    PREFILL,
    SAMPLING,
    Cell,
    StepMeasure,
    floor_s,
)
from benchmarks.roofline.parts import Storage, TimedDecoder, TimedSampler, step_costs, storage_of
from benchmarks.roofline.rates import (
    PRODUCTS,
    QUICK_PRODUCTS,
    RateProbe,
    Rates,
    loaded_path,
    median_rates,
)
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.adapter import TransformersDecoder
from quire.models.native.decoder import NativeDecoder
from quire.plan.roofline import PartCost, RowTokens
from quire.profile.ceilings import LARGE_BUFFER_BYTES
from quire.scheduler.schedule_config import ScheduleConfig

_SPARE_PROMPTS = 3  # prefilled prompts of earlier rounds that the prefix cache still holds


@dataclass(frozen=True, slots=True, kw_only=True)
class CellConfig:
    """Configuration of a cell.

    Attributes:
        model: a name in SHAPES.
        implementation: auto, native or transformers.
        weight_codec, kv_codec: as in `load_model` and `KVConfig`.
        rows: sequences of the decode steps.
        prompt_tokens: tokens of each prompt.
        prefill_tokens: tokens of the prefill step.
        steps: decode steps of a round, for each number of rows.
        rounds: measured rounds.
        threads: of torch; 0: unchanged.
        products: (rows, inner, columns) of the products that measure the rates.
    """

    model: str = "125m"
    implementation: str = "auto"
    weight_codec: str = "auto"
    kv_codec: str = "none"
    rows: tuple[int, ...] = (1, 4, 8, 16, 32)
    prompt_tokens: int = 512
    prefill_tokens: int = 2_048
    steps: int = 12
    rounds: int = 5
    threads: int = 0
    products: tuple[tuple[int, int, int], ...] = field(default=PRODUCTS)

    @property
    def fresh_prompts(self) -> int:
        """Prompts of the prefill step."""
        return max(1, self.prefill_tokens // self.prompt_tokens)


QUICK_CELL = CellConfig(
    model="tiny",
    rows=(1, 4),
    prompt_tokens=40,
    prefill_tokens=160,
    steps=4,
    rounds=2,
    products=QUICK_PRODUCTS,
)


@dataclass(frozen=True, slots=True)
class _Step:
    rows: list[RowTokens]
    sampled_rows: int
    seconds: dict[str, float]

    @property
    def whole_s(self) -> float:
        return sum(self.seconds.values())


class CellBench:
    """A model and its engine.

    Args:
        config: configuration.
    """

    def __init__(self, config: CellConfig) -> None:
        self.config = config
        if config.threads:
            torch.set_num_threads(config.threads)
        model = random_model(
            SHAPES[config.model](),
            dtype=torch.bfloat16,
            impl=config.implementation,
            codec=config.weight_codec,
        )
        assert isinstance(model.decoder, TransformersDecoder), "on a CPU"
        self.implementation = (
            "native" if isinstance(model.decoder, NativeDecoder) else "transformers"
        )
        self._model, self._timed = model, TimedDecoder(model.decoder)
        self._engine = Engine(
            replace(model, decoder=self._timed),
            KVConfig(memory=self._kv_bytes(), codec=config.kv_codec),
            ScheduleConfig(
                max_num_seqs=max(*config.rows, config.fresh_prompts),
                max_num_batched_tokens=config.prefill_tokens,
                chunk_tokens=config.prefill_tokens,
                low_watermark=1.0,
            ),
        )
        self._sampler = TimedSampler(self._engine.sampling_step.sampler)
        self._engine.sampling_step.sampler = self._sampler
        self.storage: Storage = storage_of(self._engine)
        self._probe = RateProbe(
            self.storage.arithmetics,
            min(LARGE_BUFFER_BYTES, model.weight_bytes),
            config.products,
        )
        self._random = random.Random(0)
        self._prompts = [self._prompt() for _ in range(max(config.rows))]

    def run(self) -> Cell:
        """Run a warm-up round and the measured rounds."""
        config, rounds = self.config, []
        for i in range(config.rounds + 1):
            rates, steps = self._probe.measure(), self._round()
            if i:
                rounds.append((rates, steps))
        rates = median_rates(found for found, _ in rounds)
        kinds = list(rounds[0][1])
        return Cell(
            model=config.model,
            instruction_set=loaded_path(),
            implementation=self.implementation,
            weight_codec=config.weight_codec,
            kv_codec=config.kv_codec,
            weight_bytes=self._model.weight_bytes,
            rates=rates,
            steps=tuple(
                self._measure(*kind, [(found, steps[kind]) for found, steps in rounds])
                for kind in kinds
            ),
        )

    def _kv_bytes(self) -> int:
        config = self.config
        tokens = max(config.rows) * (config.prompt_tokens + config.steps + 32)
        tokens += _SPARE_PROMPTS * (config.fresh_prompts + 1) * (config.prompt_tokens + 32)
        return self._model.spec.kv_bytes_per_token(2) * tokens

    def _prompt(self) -> list[int]:
        vocab_size, tokens = self._model.spec.vocab_size, self.config.prompt_tokens
        return [self._random.randrange(vocab_size) for _ in range(tokens)]

    def _round(self) -> dict[tuple[str, int], list[_Step]]:
        """Run one prefill step, and decode steps for each number of rows."""
        fresh = [self._prompt() for _ in range(self.config.fresh_prompts)]
        prefill = [
            step
            for step in self._run(fresh, new_tokens=2)
            if all(row.new == len(fresh[0]) for row in step.rows)
        ]
        found = {(PREFILL, len(fresh)): prefill[:1]}
        for rows in self.config.rows:
            steps = self._run(self._prompts[:rows], new_tokens=self.config.steps + 2)
            found[DECODE, rows] = [
                step for step in steps if [row.new for row in step.rows] == [1] * rows
            ]
        return found

    def _run(self, prompts: list[list[int]], *, new_tokens: int) -> Iterator[_Step]:
        """Run prompts; yield the steps after which all are still running."""
        options = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            self._engine.submit(GenerationRequest(prompt, options))
        while self._engine.has_work:
            step = self._step()
            if step is not None and len(step.rows) == len(prompts):
                yield step

    def _step(self) -> _Step | None:
        """Run one step; None if a request ended in it, because its row is no longer visible."""
        running = self._engine.scheduler.running
        before = {r.request_id: r.progress.num_computed for r in running}
        self._timed.reset()
        self._sampler.taken_s = 0.0
        started_s = time.perf_counter()
        deltas = self._engine.step()
        whole_s = time.perf_counter() - started_s
        if any(delta.finish_reason is not None for delta in deltas):
            return None
        rows = [
            RowTokens(new=r.progress.num_computed - known, before=known)
            for r in self._engine.scheduler.running
            if r.progress.num_computed > (known := before.get(r.request_id, 0))
        ]
        times_s = self._timed.seconds | {SAMPLING: self._sampler.taken_s}
        times_s[ENGINE] = whole_s - sum(times_s.values())
        return _Step(rows, sum(bool(delta.token_ids) for delta in deltas), times_s)

    def _measure(
        self, kind: str, rows: int, rounds: list[tuple[Rates, list[_Step]]]
    ) -> StepMeasure:
        """Median step of the median round, and the median ratio of a round's step and floor."""
        found = [(rates, _median_step(steps)) for rates, steps in rounds]
        arithmetic = self.storage.arithmetic
        ratios = [
            step.whole_s / floor_s(self._costs(step), arithmetic, rates) for rates, step in found
        ]
        step = _median_step([step for _, step in found])
        return StepMeasure(
            kind=kind,
            rows=rows,
            tokens=sum(row.new for row in step.rows),
            steps=sum(len(steps) for _, steps in rounds),
            costs=self._costs(step),
            arithmetic=arithmetic,
            seconds=step.seconds,
            over_floor=statistics.median(ratios),
        )

    def _costs(self, step: _Step) -> tuple[PartCost, ...]:
        spec = self._model.spec
        return step_costs(spec, self.storage, step.rows, sampled_rows=step.sampled_rows)


def _median_step(steps: list[_Step]) -> _Step:
    return sorted(steps, key=lambda step: step.whole_s)[(len(steps) - 1) // 2]


def main(text: str) -> None:
    """Measure the cell of a JSON object and print it as one line of JSON."""
    fields = json.loads(text)
    fields["products"] = tuple(tuple(shape) for shape in fields["products"])
    fields["rows"] = tuple(fields["rows"])
    print(json.dumps(asdict(CellBench(CellConfig(**fields)).run())))


if __name__ == "__main__":
    main(sys.argv[1])
