"""`python -m benchmarks NAME`: measurements behind the numbers in the documents.

With `--json` each prints one JSON object on standard output. The wheel does not contain them.
"""

from collections.abc import Callable
from typing import Any

import typer

from benchmarks.batch_max.command import batch_max
from benchmarks.cluster.command import cluster
from benchmarks.differences import differences
from benchmarks.eviction import eviction
from benchmarks.gpu.command import gpu
from benchmarks.invariant import invariant
from benchmarks.kvcrush import kvcrush
from benchmarks.kvpress.command import kvpress
from benchmarks.memory.command import memory
from benchmarks.offload.command import offload
from benchmarks.peers.command import peers
from benchmarks.quant.command import quant
from benchmarks.rebatch.command import rebatch
from benchmarks.roofline.command import roofline
from benchmarks.throughput.command import throughput
from benchmarks.weights import weights
from quire.cli.command import register
from quire.cli.main import QuireGroup

app = typer.Typer(
    name="python -m benchmarks",
    cls=QuireGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Benchmarks of Quire; --json prints one JSON object on standard output.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, Callable[..., Any]] = {
    "throughput": throughput,
    "peers": peers,
    "roofline": roofline,
    "kvpress": kvpress,
    "memory": memory,
    "cluster": cluster,
    "batch-max": batch_max,
    "eviction": eviction,
    "invariant": invariant,
    "differences": differences,
    "kvcrush": kvcrush,
    "quant": quant,
    "weights": weights,
    "rebatch": rebatch,
    "offload": offload,
    "gpu": gpu,
}
for _name, _command in _COMMANDS.items():
    register(app, _command, _name)


if __name__ == "__main__":
    app()
