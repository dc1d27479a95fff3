"""Commands of programs that measure a server, and what their results must show."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.tasks import write_tasks

SCRIPTS = Path(__file__).parent / "scripts"
REQUESTS = 48
MODEL = "quire-tiny"
Numbers = dict[str, int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program with its own command line.

    Attributes:
        arguments: arguments after the Python of the environment, for (URL, model folder, output).
        read: reads the folder of the output; fails if the program did not work.
    """

    environment: str  # name of its environment
    arguments: Callable[[str, str, Path], Sequence[str]]
    read: Callable[[Path], Numbers]


def _vllm(url: str, folder: str, out: Path) -> Sequence[str]:
    return (
        *(str(SCRIPTS / "vllm_bench.py"), "--backend", "openai", "--base-url", url),
        *("--model", MODEL, "--tokenizer", folder, "--dataset-name", "random"),
        *("--random-input-len", "64", "--random-output-len", "32", "--ignore-eos"),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", "8", "--num-warmups", "8"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--save-result", "--result-dir", str(out), "--result-filename", "vllm.json"),
    )


def _read_vllm(out: Path) -> Numbers:
    found = json.loads((out / "vllm.json").read_text(encoding="utf-8"))
    assert (found["completed"], found["failed"]) == (REQUESTS, 0), found
    assert found["total_output_tokens"] == REQUESTS * 32, found
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def _guidellm(url: str, folder: str, out: Path) -> Sequence[str]:
    return (
        *("-m", "guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=8"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={folder}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"),
        *("--output", f"kind=json,path={out / 'guidellm.json'}"),
    )


def _read_guidellm(out: Path) -> Numbers:
    [found] = json.loads((out / "guidellm.json").read_text(encoding="utf-8"))["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
    means = {
        name: metrics[name]["successful"]["mean"]
        for name in ("time_to_first_token_ms", "time_per_output_token_ms", "request_latency")
    }
    means["output_tokens_per_second"] = metrics["output_tokens_per_second"]["total"]["mean"]
    return {"completed": totals["successful"], "failed": totals["errored"], **means}


def _lm_eval(kind: str, path: str, tasks: str) -> Callable[[str, str, Path], Sequence[str]]:
    def arguments(url: str, folder: str, out: Path) -> Sequence[str]:
        options = f"model={MODEL},base_url={url}{path},num_concurrent=4,max_length=2048"
        options += f",tokenizer={folder}"
        chat = ("--apply_chat_template",) if "chat" in kind else ()
        return (
            *("-m", "lm_eval", "run", "--model", kind, "--model_args", options, *chat),
            *("--tasks", tasks, "--include_path", write_tasks(out / "tasks")),
            *("--output_path", str(out / f"{kind}.json")),
        )

    return arguments


def _read_lm_eval(kind: str) -> Callable[[Path], Numbers]:
    def read(out: Path) -> Numbers:
        [file] = out.glob(f"{kind}*.json")
        results = json.loads(file.read_text(encoding="utf-8"))["results"]
        return {
            f"{task} {metric}": value
            for task, found in results.items()
            for metric, value in found.items()
            if isinstance(value, int | float)
        }

    return read


_COMPLETIONS, _CHATS = "local-completions", "local-chat-completions"
PROGRAMS = {
    "vllm-bench": Program(environment="vllm", arguments=_vllm, read=_read_vllm),
    "guidellm": Program(environment="tools", arguments=_guidellm, read=_read_guidellm),
    f"lm-eval {_COMPLETIONS}": Program(
        environment="tools",
        arguments=_lm_eval(
            _COMPLETIONS, "/v1/completions", "quire_pairs,quire_pairs_choice,quire_perplexity"
        ),
        read=_read_lm_eval(_COMPLETIONS),
    ),
    f"lm-eval {_CHATS}": Program(
        environment="tools",
        arguments=_lm_eval(_CHATS, "/v1/chat/completions", "quire_pairs"),
        read=_read_lm_eval(_CHATS),
    ),
}
