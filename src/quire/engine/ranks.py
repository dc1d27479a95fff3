"""Opens an engine whose model is divided over several processes (tensor parallelism).

rank 0 (this process)   start ranks ─ load part ─ build engine ─ calls
ranks from 1 on         `python -m quire.engine.rank_process` ─ load part ─ build engine ─ obey
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, QuireError, RankFailed
from quire.layout.options import require_type
from quire.models.loader import LoadedModel, load_model
from quire.parallel.group import TensorGroup, open_group
from quire.parallel.lockstep import DEFAULT_TIMEOUT_S, Leader, Lockstep
from quire.parallel.processes import Channel, RankProcesses, Report
from quire.scheduler.schedule_config import ScheduleConfig

MAX_RANKS = 64
_LOADED = "loaded"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Options of an engine with several ranks; equal on all ranks."""

    size: int
    timeout_s: float = DEFAULT_TIMEOUT_S  # that a rank waits for the others within a step
    model: str | Path
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    verify: bool = True
    model_impl: str = "auto"
    weight_codec: str = "auto"
    max_model_len: int | None = None  # None: the model's context
    kv: KVConfig
    schedule: ScheduleConfig
    return_memory: bool = False  # see `Engine`

    def __post_init__(self) -> None:
        require_type("tensor_parallel_size", self.size, int)
        if not 2 <= self.size <= MAX_RANKS:
            raise ConfigError(
                f"expected tensor_parallel_size (--tensor-parallel-size) from 1 to {MAX_RANKS}, "
                f"got {self.size}"
            )
        if not self.timeout_s > 0:
            raise ConfigError(f"expected tensor_parallel_timeout above 0 s, got {self.timeout_s:g}")

    def device_of(self, rank: int) -> torch.device:
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if not name.startswith("cuda"):
            return torch.device(name)
        first = torch.device(name).index or 0
        count = torch.cuda.device_count()
        if first + self.size > count:
            raise ConfigError(
                f"expected {self.size} CUDA devices from cuda:{first} on, one for each rank, but "
                f"torch found {count}; lower --tensor-parallel-size, or use --device cpu"
            )
        return torch.device("cuda", first + rank)


@dataclass(frozen=True, slots=True)
class RankStart:
    """First message to a rank: what to run."""

    options: RankOptions
    folder: Path  # temporary, of all ranks
    threads: int


def open_ranks(options: RankOptions) -> Engine:
    """Start the other ranks, load the model on all of them, and build their engines."""
    options.device_of(options.size - 1)  # before processes are started
    threads = max(1, torch.get_num_threads() // options.size)
    torch.set_num_threads(threads)  # the ranks share the cores
    processes = RankProcesses("quire.engine.rank_process", options.size)
    try:
        start = RankStart(options, processes.folder, threads)
        for channel in processes.channels:
            channel.send(start)
        _meet_all(processes.channels)  # all have imported their modules
        lockstep = Leader(processes, options.timeout_s)
        group = _group(start, 0, lambda: _meet_all(processes.channels))
        engine = open_rank(options, 0, group, lockstep)
        _meet_all(processes.channels)  # all engines are built
    except BaseException as error:
        found = processes.failure(error) if isinstance(error, RankFailed) else None
        processes.close()
        if found is not None:
            raise found from error
        raise
    logger.info("%d ranks, processes %s", options.size, processes.process_ids)
    return engine


def open_rank(options: RankOptions, rank: int, group: TensorGroup, lockstep: Lockstep) -> Engine:
    """Load this rank's part of the model and build its engine."""
    model: LoadedModel = load_model(
        options.model,
        dtype=options.dtype,
        device=str(options.device_of(rank)),
        trust_remote_code=options.trust_remote_code,
        verify=options.verify,
        model_impl=options.model_impl,
        weight_codec=options.weight_codec,
        group=group,
    )
    if options.max_model_len is not None:
        model = model.with_max_model_len(options.max_model_len)
    return Engine(
        model,
        options.kv,
        options.schedule,
        return_memory=options.return_memory,
        lockstep=lockstep,
    )


def join_group(start: RankStart, rank: int, channel: Channel) -> TensorGroup:
    """Connect a rank from 1 on to the others."""
    meet_leader(channel)
    return _group(start, rank, lambda: meet_leader(channel))


def _group(start: RankStart, rank: int, meet: Callable[[], None]) -> TensorGroup:
    options = start.options
    device = options.device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return open_group(
        rank,
        options.size,
        device,
        rendezvous=start.folder / "rendezvous",
        timeout_s=options.timeout_s,
        meet=meet,
    )


def meet_leader(channel: Channel) -> None:
    """Tell rank 0 that this rank is ready, and wait until all ranks are."""
    channel.send(_LOADED)
    channel.receive()


def _meet_all(channels: Sequence[Channel]) -> None:
    for channel in channels:
        message = channel.receive()
        if isinstance(message, Report):
            error = message.error
            raise error if isinstance(error, QuireError) else RankFailed(str(error))
    for channel in channels:
        channel.send(_LOADED)
