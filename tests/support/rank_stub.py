"""A process that stands in for a rank: does what its first message says."""

import os
import signal
import socket
import sys
import time

from quire.errors import ConfigError, RankFailed
from quire.parallel.processes import Report, channel_of


def main() -> None:
    channel = channel_of(socket.socket(fileno=int(sys.argv[1])), "rank 0")
    rank = int(sys.argv[2])
    channel.send("started")
    message = channel.receive()
    if message == "exit":
        os._exit(7)
    if message == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if message == "refuse":
        channel.send(12)
        channel.send(Report(ConfigError("expected another option"), is_first=True))
        return
    if message == "raise":
        channel.send(Report("ValueError: a reason", is_first=True))
        return
    if message == "follow":
        channel.send(Report("a collective failed", is_first=False))
        return
    if message == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        channel.send("ready")
        time.sleep(600)
    channel.send((rank, message))
    try:
        channel.receive()
    except RankFailed:
        return


if __name__ == "__main__":
    main()
