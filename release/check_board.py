"""Runs every query of the Grafana board and of the alerts in Prometheus, against a server.

    quire serve quire-tiny --port 8000 &
    python release/check_board.py http://127.0.0.1:8000

It needs the program `prometheus` (Debian package of this name). It sends requests to the server
while Prometheus scrapes it, then expects data from every query of the board. The last line is one
JSON object.
"""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
BOARD = DEPLOY / "grafana" / "dashboards" / "quire.json"
LOAD_S = 45.0
VARIABLES = {"$__rate_interval": "30s", "$model": ".*"}


def queries() -> dict[str, str]:
    """Expressions of the board by panel and legend, without its variables."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    found = {}
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            found[f"{panel['title']}: {target['legendFormat']}"] = expression
    return found


def metric_names(text: str) -> set[str]:
    """Names of Quire's metrics in an expression, without the suffixes of histograms."""
    names = set(re.findall(r"\bquire_[a-z_]+", text))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def main(base_url: str) -> int:
    """Run the check; the exit status is 1 if a query has no data."""
    with TemporaryDirectory() as folder:
        port = _free_port()
        config = Path(folder) / "prometheus.yml"
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
        host = urllib.parse.urlsplit(base_url).netloc
        text = text.replace("quire:8000", host).replace("5s", "1s")
        config.write_text(text.replace("alerts.yml", str(DEPLOY / "prometheus" / "alerts.yml")))
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
            try:
                _load(base_url)
                counts = {name: _count(port, expression) for name, expression in queries().items()}
            finally:
                running.terminate()
    for name, count in counts.items():
        sys.stdout.write(f"{count:4} series  {name}\n")
    empty = [name for name, count in counts.items() if not count]
    sys.stdout.write(json.dumps({"queries": len(counts), "without_data": empty}) + "\n")
    return int(bool(empty))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _load(base_url: str) -> None:
    ends_s = time.monotonic() + LOAD_S
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: _client(base_url, number, ends_s), range(8)))


def _client(base_url: str, number: int, ends_s: float) -> None:
    body = {"prompt": "Once upon a time there was " * 8, "max_tokens": 8 + number}
    request = urllib.request.Request(
        f"{base_url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    while time.monotonic() < ends_s:
        urllib.request.urlopen(request).read()


def _count(port: int, expression: str) -> int:
    """Number of time series that a query returns with a value that is a number."""
    query = urllib.parse.urlencode({"query": expression})
    url = f"http://127.0.0.1:{port}/api/v1/query?{query}"
    found = json.loads(urllib.request.urlopen(url).read())
    return sum(series["value"][1] != "NaN" for series in found["data"]["result"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
