"""How a static batch is run by an engine: its rows are read together and decode together."""

from quire.scheduler.schedule_config import ScheduleConfig


def static_schedule(rows: int, prompt_tokens: int) -> ScheduleConfig:
    """A schedule under which rows that come together are read together and decode together.

    Reserved admission: who enters has room to its end, and nobody is ever preempted.
    """
    return ScheduleConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=max(2_048, rows * prompt_tokens),
        chunk_tokens=max(2_048, prompt_tokens),
        admission="reserved",
        low_watermark=1.0,
    )
