"""`python -m benchmarks server-load`: thousands of streaming clients of `quire serve`.

    round 1 | idle | round 2 | idle | round 3 | idle
                 ^              ^              ^      resident bytes, KV bytes of requests

A client is finished, disconnected by itself, refused with status 429 or 503, or lost. Lost clients
are faults: no response, an error, a stream without its end, or a wrong number of tokens.
"""

import asyncio
import json
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Annotated

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.common.server import Server, served
from benchmarks.common.streams import DONE, OK, Response, stream

_REFUSED = (429, 503)
WORDS = ("the", "sea", "was", "calm", "a", "small", "boat", "came", "home", "with", "fish")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The load.

    Attributes:
        clients: clients of each round, which all connect within `within_s`.
        rounds: number of rounds.
        disconnecting: fraction of the clients that disconnect after a random number of events.
        prompt_words: most words of a prompt; each has at least one.
        new_tokens: most tokens of an output; each has at least two.
        within_s: seconds in which the clients connect.
        kv_memory: KV memory of the server.
        max_num_queued_reqs: limit of waiting requests of the second server, which refuses others.
        patience_s: seconds after which a client without an end of its stream is lost.
        seed: random seed.
    """

    clients: int = 1_000
    rounds: int = 3
    disconnecting: float = 0.1
    prompt_words: int = 48
    new_tokens: int = 48
    within_s: float = 1.0
    kv_memory: str = "64MiB"
    max_num_queued_reqs: int = 200
    patience_s: float = 240.0
    seed: int = 0


QUICK_LOAD = LoadConfig(clients=40, rounds=2, new_tokens=8, kv_memory="4MiB", max_num_queued_reqs=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    """What one client sends.

    Attributes:
        body: JSON body of the request.
        starts_s: seconds after the start of the round.
        leaves_after: number of events after which the client disconnects; None: it stays.
    """

    body: dict[str, object]
    starts_s: float
    leaves_after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientResult:
    """What one client received.

    Attributes:
        outcome: finished, disconnected (by the client), refused (status 429 or 503), or lost.
        status: HTTP status; 0: no response.
        tokens: tokens of the usage, or events if the client disconnected.
        ttft_s: seconds from sending the request to the first event; None: no event.
        e2e_s: seconds from sending the request to the last event.
        problem: description of a lost request.
    """

    outcome: str
    status: int = 0
    tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFound:
    """Measurements of a round.

    Attributes:
        clients: results of its clients.
        seconds: from the first connection to the end of the last stream.
        rss_bytes: resident memory of the server after the round.
        requests_bytes: KV bytes of requests after the round: 0 if the pool is empty.
        peak_bytes: most KV bytes in use since the start of the server.
    """

    clients: Sequence[ClientResult]
    seconds: float
    rss_bytes: int
    requests_bytes: int
    peak_bytes: int

    @property
    def outcomes(self) -> Counter[str]:
        """Number of clients by outcome."""
        return Counter(client.outcome for client in self.clients)

    @property
    def ttfts_s(self) -> list[float]:
        """Times to first token, in order."""
        return sorted(c.ttft_s for c in self.clients if c.ttft_s is not None)

    @property
    def tokens(self) -> int:
        """Generated tokens of finished clients."""
        return sum(client.tokens for client in self.clients if client.outcome == "finished")


def plans(config: LoadConfig, number: int) -> list[ClientPlan]:
    """Plans of the clients of one round; `disconnecting` of them leave early."""
    rng = random.Random(f"{config.seed}-{number}")
    leaving = set(rng.sample(range(config.clients), round(config.disconnecting * config.clients)))
    return [_plan(config, rng, leaves=client in leaving) for client in range(config.clients)]


def _plan(config: LoadConfig, rng: random.Random, *, leaves: bool) -> ClientPlan:
    tokens = rng.randint(2, config.new_tokens)
    words = " ".join(rng.choices(WORDS, k=rng.randint(1, config.prompt_words)))
    body = {"prompt": f"<|doc|>{words}", "max_tokens": tokens, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.8}
    body |= {"seed": rng.getrandbits(32)}
    return ClientPlan(
        body=body,
        starts_s=rng.uniform(0, config.within_s),
        leaves_after=rng.randint(1, max(1, tokens // 2)) if leaves else None,
    )


async def _all(server: Server, config: LoadConfig, number: int) -> list[ClientResult]:
    zero_s = perf_counter()
    clients = (run_client(server.url, p, zero_s, config.patience_s) for p in plans(config, number))
    return await asyncio.gather(*clients)


async def run_client(url: str, plan: ClientPlan, zero_s: float, patience_s: float) -> ClientResult:
    """Send the request, read its stream, and disconnect when the plan says so."""
    await asyncio.sleep(max(0.0, zero_s + plan.starts_s - perf_counter()))
    try:
        response = await asyncio.wait_for(stream(url, plan.body, plan.leaves_after), patience_s)
        return judged(response, plan)
    except TimeoutError:
        return ClientResult(outcome="lost", problem=f"no end within {patience_s:g} s")
    except (OSError, ValueError) as error:
        return ClientResult(outcome="lost", problem=f"{type(error).__name__}: {error}")


def judged(response: Response, plan: ClientPlan) -> ClientResult:
    """What became of a client."""
    status = response.status
    if status != OK:
        outcome = "refused" if status in _REFUSED else "lost"
        return ClientResult(outcome=outcome, status=status, problem=f"status {status}")
    events = list(response.events())
    ttft_s = events[0][0] - response.sent_s if events else None
    found = [json.loads(event) for _, event in events if event != DONE]
    for event in found:
        if "error" in event:
            return ClientResult(outcome="lost", status=status, problem=str(event["error"]))
    if response.has_left:
        return ClientResult(outcome="disconnected", status=status, tokens=len(found), ttft_s=ttft_s)
    usages = [event["usage"]["completion_tokens"] for event in found if event.get("usage")]
    tokens = usages[-1] if usages else 0
    ends, expected = bool(events) and events[-1][1] == DONE, plan.body["max_tokens"]
    if not ends or tokens != expected:
        problem = f"{tokens} of {expected} tokens, {'' if ends else 'no '}[DONE]"
        return ClientResult(outcome="lost", status=status, problem=problem)
    e2e_s = events[-1][0] - response.sent_s
    return ClientResult(
        outcome="finished", status=status, tokens=tokens, ttft_s=ttft_s, e2e_s=e2e_s
    )


def run_round(server: Server, config: LoadConfig, number: int) -> RoundFound:
    """Run the clients of one round, and read the server's memory when it is idle again."""
    started_s = perf_counter()
    clients = asyncio.run(_all(server, config, number))
    seconds = perf_counter() - started_s
    memory = server.wait_until_idle()["memory"]
    return RoundFound(
        clients=clients,
        seconds=seconds,
        rss_bytes=server.rss_bytes(),
        requests_bytes=memory["requests_bytes"],
        peak_bytes=memory["peak_bytes"],
    )


def run_load(config: LoadConfig) -> PartResult:
    """Run all rounds on a server without a limit of the queue, then one on a server with one."""
    memory = ("--kv-memory", config.kv_memory, "--no-access-log")
    with served(memory) as server:
        rounds = [run_round(server, config, number) for number in range(config.rounds)]
    with served((*memory, "--max-num-queued-reqs", str(config.max_num_queued_reqs))) as server:
        limited = run_round(server, config, config.rounds)
    return PartResult(
        claims=claims(rounds, limited),
        tables=(_table(config, rounds, limited),),
        raw={
            "rounds": [_numbers(found) for found in (*rounds, limited)],
            "problems": problems([*rounds, limited]),
        },
    )


def problems(rounds: Sequence[RoundFound]) -> dict[str, int]:
    """Number of lost clients by what happened to them."""
    lost = (c.problem for found in rounds for c in found.clients if c.outcome == "lost")
    return dict(Counter(lost).most_common(20))


def claims(rounds: Sequence[RoundFound], limited: RoundFound) -> Numbers:
    """Clients lost, KV bytes left, growth of resident memory and times to first token."""
    every = [*rounds, limited]
    ttfts_s = sorted(s for found in rounds for s in found.ttfts_s)
    return {
        "server_load_clients": sum(len(found.clients) for found in every),
        "server_load_lost": sum(found.outcomes["lost"] for found in every),
        "server_load_disconnected": sum(found.outcomes["disconnected"] for found in every),
        "server_load_refused": limited.outcomes["refused"],
        "server_load_kv_bytes_left": max(found.requests_bytes for found in every),
        "server_load_rss_growth": rounds[-1].rss_bytes / rounds[0].rss_bytes - 1,
        "server_load_ttft_p50_s": statistics.median(ttfts_s),
        "server_load_ttft_p99_s": percentile(ttfts_s, 0.99),
        "server_load_limited_ttft_p99_s": percentile(limited.ttfts_s, 0.99),
        "server_load_tokens_per_s": sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds),
        "server_load_kv_peak_bytes": max(found.peak_bytes for found in rounds),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of values in order; 0 without values."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _numbers(found: RoundFound) -> dict[str, object]:
    return {
        "outcomes": dict(found.outcomes),
        "seconds": found.seconds,
        "tokens": found.tokens,
        "rss_bytes": found.rss_bytes,
        "requests_bytes": found.requests_bytes,
        "peak_bytes": found.peak_bytes,
        "ttft_p50_s": percentile(found.ttfts_s, 0.5),
        "ttft_p99_s": percentile(found.ttfts_s, 0.99),
    }


def _table(config: LoadConfig, rounds: Sequence[RoundFound], limited: RoundFound) -> Table:
    names = [*(f"{number + 1}" for number in range(len(rounds))), "with a limited queue"]
    rows = tuple(_row(*pair) for pair in zip(names, (*rounds, limited), strict=True))
    return Table(
        name="server_load",
        caption=f"{config.clients:,} streaming clients, of which {config.disconnecting:.0%} "
        "disconnect",
        columns=(
            *("Round", "Finished", "Disconnected", "Refused", "Lost", "TTFT p50 (s)"),
            *("TTFT p99 (s)", "Tokens/s", "RSS (B)", "KV bytes left"),
        ),
        rows=rows,
    )


def _row(name: str, found: RoundFound) -> tuple[Cell, ...]:
    outcomes = found.outcomes
    return (
        name,
        *(outcomes[kind] for kind in ("finished", "disconnected", "refused", "lost")),
        percentile(found.ttfts_s, 0.5),
        percentile(found.ttfts_s, 0.99),
        found.tokens / found.seconds,
        found.rss_bytes,
        found.requests_bytes,
    )


def server_load(
    *,
    clients: Annotated[
        int | None, typer.Option(min=10, help="Streaming clients at once; default: 1,000.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Rounds of all clients; default: 3.")
    ] = None,
    out: Out = None,
    quick: Annotated[bool, typer.Option("--quick", help="40 clients. No claims.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve quire-tiny to many streaming clients at once, a tenth of which disconnect.

    Counts finished, disconnected, refused and lost clients, and reports times to first token, the
    KV bytes that are left after each round, and the growth of the server's resident memory. The
    last round is sent to a server with a limited queue, which refuses clients.
    """
    config = QUICK_LOAD if quick else LoadConfig()
    config = replace(config, clients=clients or config.clients, rounds=rounds or config.rounds)
    made = {"load": run_load}
    run_command("server-load", made, "", config, asdict(config), out, quick=quick, as_json=as_json)
