"""The loop of `quire batch`: runs input lines without a record and writes their records.

Imports torch through the engine: the command imports this module when it runs.
"""

from collections.abc import Callable, Iterator

from quire.api.llm import LLM
from quire.batch.lines import BatchError, BatchLine, BatchTask, parse_line
from quire.batch.records import BatchTally, Record, error_record
from quire.batch.requests import LineResult, RecordFormat, record_of, requests_of
from quire.cli.batch_files import BatchOutput, RecordGroups
from quire.cli.drive import ClientJob, Driver
from quire.errors import RequestError

WINDOW_PER_RUNNING = 4


class BatchRun:
    """Runs the lines of an input file that have no record yet."""

    def __init__(
        self, llm: LLM, task: BatchTask, output: BatchOutput, on_step: Callable[[BatchTally], None]
    ) -> None:
        self._llm, self._task, self._output = llm, task, output
        self._lines: dict[int, BatchLine] = {}
        self._parts: dict[int, dict[int, LineResult]] = {}
        self._groups = RecordGroups(output)
        self._form = RecordFormat(model=llm.model.name, with_prompt=task.with_prompt)
        self.tally = BatchTally()
        self._driver = Driver(
            llm,
            window=WINDOW_PER_RUNNING * llm.engine.schedule_config.max_num_seqs,
            on_step=lambda: self._after_step(on_step),
        )

    def run(self) -> BatchTally:
        for job, result in self._driver.run(self._jobs()):
            line = self._lines[job.key]
            parts = self._parts.setdefault(job.key, {})
            parts[job.part] = result
            if len(parts) == len(line.prompts):
                del self._lines[job.key], self._parts[job.key]
                results = [parts[number] for number in sorted(parts)]
                record, output = record_of(line, results, self._form)
                if output is not None and line.options.get("record_evictions"):
                    trace = self._llm.engine.eviction_trace(output.request_id)
                    record["evictions"] = [retained.as_dict() for retained in trace]
                self._put(record)
        self._output.flush()
        return self.tally

    def _jobs(self) -> Iterator[ClientJob]:
        with self._task.source.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if not raw.strip() or number in self._output.completed:
                    continue
                try:
                    line = parse_line(raw, number, self._task.form)
                    jobs = self._jobs_of(line, self._output.seed_of(number, raw))
                except BatchError as error:
                    self._put(error_record(error.head, str(error)))
                except RequestError as error:
                    self._put(error_record(line.head, str(error)))
                else:
                    self._lines[number] = line
                    yield from jobs

    def _jobs_of(self, line: BatchLine, seed: int) -> list[ClientJob]:
        requests = requests_of(line, self._task.sampling, seed)
        return [
            ClientJob(key=line.head.number, part=part, request=request, messages=line.messages)
            for part, request in enumerate(requests)
        ]

    def _put(self, record: Record) -> None:
        self.tally.add(record)
        self._groups.put(record)

    def _after_step(self, on_step: Callable[[BatchTally], None]) -> None:
        self._groups.flush_if_due()
        on_step(self.tally)
