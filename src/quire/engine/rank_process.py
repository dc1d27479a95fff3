"""The process of a rank from 1 on; its arguments are the number of a socket and the rank.

It makes the calls that rank 0 sends until rank 0 closes the channel.
"""

import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import traceback
from typing import cast

import torch

from quire.engine.core import Engine
from quire.engine.ranks import RankStart, join_group, meet_leader, open_rank
from quire.errors import QuireError, RankFailed
from quire.parallel.lockstep import Follower
from quire.parallel.processes import Channel, Report, channel_of

logger = logging.getLogger(__name__)


def main(socket_number: int, rank: int) -> int:
    """Run a rank with the socket to rank 0; return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: rank 0 may drain
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    channel = channel_of(socket.socket(fileno=socket_number), "rank 0")
    try:
        start = cast(RankStart, channel.receive())
        torch.set_num_threads(start.threads)
        follower = Follower(channel, start.options.size)
        group = join_group(start, rank, channel)
        engine = open_rank(start.options, rank, group, follower)
        meet_leader(channel)
        make_calls(engine, follower)
    except RankFailed as error:
        logger.error("rank %d ends: %s", rank, error)
        return _report(channel, Report(str(error), is_first=False))
    except QuireError as error:
        return _report(channel, Report(_sendable(error), is_first=True))
    except BaseException as error:  # noqa: BLE001 - rank 0 raises it
        traceback.print_exc()
        return _report(channel, Report(f"{type(error).__name__}: {error}", is_first=True))
    return 0


def make_calls(engine: Engine, follower: Follower) -> None:
    """Make the calls of rank 0 until rank 0 closes its engine, or ends."""
    while True:
        try:
            name, arguments = follower.next_call()
        except RankFailed:
            return
        try:
            getattr(engine, name)(*arguments)
        except RankFailed:
            raise
        except Exception:
            if name == "step":
                raise
            logger.debug("rank 0 refuses the same call", exc_info=True)


def _report(channel: Channel, report: Report) -> int:
    """Send the last message of this rank; return its exit status."""
    try:
        channel.send(report)
    except RankFailed:
        logger.debug("rank 0 has ended")
    return 1


def _sendable(error: QuireError) -> QuireError | str:
    """Return an error, or its text if rank 0 could not unpickle it."""
    try:
        pickle.loads(pickle.dumps(error))
    except (TypeError, AttributeError, pickle.PicklingError):
        return f"{type(error).__name__}: {error}"
    return error


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not blocked by threads that wait for other ranks
