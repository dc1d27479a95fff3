"""Table of docs/serving.md: what large bodies of one tenant cost the server and the other tenant.

A server of quire-tiny has two tenants with keys. One sends a large body to `/tokenize`; the other
sends short completions meanwhile. Then bodies of 8 MiB are parsed while `/health` is requested
again and again: its slowest response bounds the time in which the event loop is blocked. The last
line of output is one JSON object.
"""

import http.client
import json
import statistics
import tempfile
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep

from benchmarks.common.server import Server, served
from quire.cli.report import envelope
from quire.errors import ConfigError

SENDER, OTHER = "sk-sender-00000000", "sk-other-000000000"
_SHORT = json.dumps({"prompt": "Once upon a time", "max_tokens": 4, "model": "quire-tiny"}).encode()
_PATIENCE_S = 120.0
_POLL_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimitsConfig:
    """Configuration of all measurements.

    Attributes:
        refused_bytes: size of a body over the server's limit.
        accepted_bytes: size of each of three bodies below the limit.
        parsed_bytes: size of the bodies that are parsed while `/health` is requested.
        repeats: rounds of all cases.
    """

    refused_bytes: int = 10_800_000
    accepted_bytes: int = 6_750_000
    parsed_bytes: int = (8 << 20) - 1_024
    repeats: int = 5


QUICK_BODY_LIMITS = BodyLimitsConfig(
    refused_bytes=9_000_000, accepted_bytes=200_000, parsed_bytes=200_000, repeats=1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Large bodies that are sent at once.

    Attributes:
        body: the body.
        bodies: number of requests.
        key: API key; "": none.
        status: expected status.
    """

    body: bytes
    bodies: int
    key: str
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFound:
    """One round of a case.

    Attributes:
        response_s: seconds until the last response; 0 without a body.
        other_s: longest latency of a short completion of the other tenant meanwhile.
        resident_bytes: resident memory of the server afterwards.
    """

    response_s: float
    other_s: float
    resident_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases, and print the claims."""
    quick = _parse(arguments).quick
    config = QUICK_BODY_LIMITS if quick else BodyLimitsConfig()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(f'sender = "{SENDER}"\nother = "{OTHER}"\n', encoding="utf-8")
        with served(["--tenant-keys", str(keys), "--no-access-log", "--no-verify"]) as server:
            idle = idle_rounds(server, config.repeats)
            rounds: dict[str, list[CaseFound]] = {name: [] for name in cases(config)}
            for _ in range(config.repeats):
                for name, case in cases(config).items():
                    rounds[name].append(measured(server, case))
            parsed = {
                name: [slowest_health(server, path, body) for _ in range(config.repeats)]
                for name, (path, body) in parsed_bodies(config.parsed_bytes).items()
            }
    cases_found = {"idle": idle, **rounds}
    arms: dict[str, object] = {name: [*map(asdict, one)] for name, one in cases_found.items()}
    found = claims(cases_found, parsed)
    print(json.dumps(envelope("body limits", found, arms | parsed, asdict(config), quick=quick)))


def claims(
    rounds: Mapping[str, Sequence[CaseFound]], parsed: Mapping[str, Sequence[float]]
) -> dict[str, int | float]:
    """Medians over the rounds; the resident memory is the largest one."""
    numbers: dict[str, int | float] = {}
    for name, found in rounds.items():
        numbers[f"{name}_response_s"] = statistics.median(one.response_s for one in found)
        numbers[f"{name}_other_s"] = statistics.median(one.other_s for one in found)
        numbers[f"{name}_resident_bytes"] = max(one.resident_bytes for one in found)
    for name, seconds in parsed.items():
        numbers[f"{name}_health_s"] = statistics.median(seconds)
    numbers["slowest_health_s"] = max(map(statistics.median, parsed.values()))
    return numbers


# ---- bodies --------------------------------------------------------------------------------------


def cases(config: BodyLimitsConfig) -> dict[str, Case]:
    """The rows of the table."""
    refused, accepted = (
        json.dumps({"prompt": "a" * size}).encode()
        for size in (config.refused_bytes, config.accepted_bytes)
    )
    return {
        "no_key": Case(body=refused, bodies=1, key="", status=401),
        "too_large": Case(body=refused, bodies=1, key=SENDER, status=413),
        "three_bodies": Case(body=accepted, bodies=3, key=SENDER, status=400),
    }


def parsed_bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Paths and bodies of about this size, which need the most parsing and validation."""
    numbers, strings, prompts = (_list_of(item, size) for item in ("1", '""', "[1]"))
    message = f'{{"role": "user", "content": {numbers}}}'
    completion = '{"model": "quire-tiny", '
    return {
        "token_ids": ("/v1/completions", f'{completion}"prompt": {numbers}}}'.encode()),
        "prompts": ("/v1/completions", f'{completion}"prompt": {prompts}}}'.encode()),
        "allowed": (
            "/v1/completions",
            f'{completion}"prompt": "a", "allowed_token_ids": {strings}}}'.encode(),
        ),
        "content": ("/v1/chat/completions", f'{{"messages": [{message}]}}'.encode()),
    }


def _list_of(item: str, size: int) -> str:
    """JSON list of equal items, of about this size."""
    return f"[{f'{item},' * (size // (len(item) + 1) - 64)}{item}]"


# ---- measurements --------------------------------------------------------------------------------


def idle_rounds(server: Server, repeats: int) -> list[CaseFound]:
    """Short completions without a large body, after two that warm the server up."""
    latencies = [completed(server) for _ in range(2 + repeats)][2:]
    resident_bytes = server.rss_bytes()
    return [
        CaseFound(response_s=0.0, other_s=one, resident_bytes=resident_bytes) for one in latencies
    ]


def measured(server: Server, case: Case) -> CaseFound:
    """Send the bodies of a case at once, and short completions of the other tenant meanwhile."""
    with ThreadPoolExecutor(case.bodies) as pool:
        sent = [pool.submit(_send_case, server, case) for _ in range(case.bodies)]
        latencies = repeated(lambda: completed(server), sent)
        response_s = max(one.result() for one in sent)
    return CaseFound(
        response_s=response_s, other_s=max(latencies), resident_bytes=server.rss_bytes()
    )


def repeated(measure: Callable[[], float], sent: Sequence["Future[float]"]) -> list[float]:
    """Measurements that begin before all requests have ended; at least one."""
    found = [measure()]
    while wait(sent, timeout=0).not_done:
        found.append(measure())
    return found


def slowest_health(server: Server, path: str, body: bytes) -> float:
    """Longest latency of `/health` while the server handles a body."""
    done = threading.Event()
    connection = http.client.HTTPConnection(*server.address, timeout=_PATIENCE_S)
    health_seconds(connection)

    def send() -> None:
        status, _ = send_body(server, path, body, SENDER)
        done.set()
        if not 400 <= status < 500:
            raise ConfigError(f"expected the status of a refused body, got {status}")

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        found = [health_seconds(connection)]
        while not done.is_set():
            found.append(health_seconds(connection))
            sleep(_POLL_S)
        sent.result()
    connection.close()
    return max(found)


def health_seconds(connection: http.client.HTTPConnection) -> float:
    """Latency of `/health` over an open connection."""
    started_s = perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    return perf_counter() - started_s


def completed(server: Server) -> float:
    """Latency of a short completion of the other tenant."""
    status, seconds = send_body(server, "/v1/completions", _SHORT, OTHER)
    if status != 200:
        raise ConfigError(f"expected status 200 of the other tenant's request, got {status}")
    return seconds


def _send_case(server: Server, case: Case) -> float:
    status, seconds = send_body(server, "/tokenize", case.body, case.key)
    if status != case.status:
        raise ConfigError(f"expected status {case.status} of the large body, got {status}")
    return seconds


def send_body(server: Server, path: str, body: bytes, key: str) -> tuple[int, float]:
    """Status and latency of a request; a server may respond before it has read the body."""
    started_s = perf_counter()
    connection = http.client.HTTPConnection(*server.address, timeout=_PATIENCE_S)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    connection.putrequest("POST", path)
    for name, value in (headers | ({"Authorization": f"Bearer {key}"} if key else {})).items():
        connection.putheader(name, value)
    try:
        connection.endheaders()
        connection.send(body)
    except (BrokenPipeError, ConnectionResetError):
        pass  # refused: the response is there
    response = connection.getresponse()
    seconds = perf_counter() - started_s
    response.read()
    connection.close()
    return response.status, seconds


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small bodies, no claims")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
