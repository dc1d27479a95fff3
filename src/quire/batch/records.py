"""The records of `quire batch` for outputs and errors, and their tally."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.batch.lines import BatchLine, LineHead
from quire.config.generation_request import echoed_options

if TYPE_CHECKING:
    from quire.sampling.outputs import Choice, RequestOutput

Record = dict[str, Any]

USAGE = (
    *("prompt_tokens", "completion_tokens", "cached_tokens"),
    *("evictions", "evicted_tokens", "recomputed_tokens"),
)
"""Numbers in the `usage` of a record that a run sums; other servers report some of them."""


@dataclass(slots=True)
class BatchTally:
    """Tally of the records of a run."""

    completed: int = 0  # including error records
    errors: int = 0
    usage: Counter[str] = field(default_factory=Counter)  # what records report of `USAGE`
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        self.completed += 1
        self.errors += is_error(record)
        self.finish_reasons[finish_reason(record)] += 1
        body = record["response"]["body"] if "response" in record else record
        usage = body.get("usage") or {}
        usage = (usage.get("prompt_tokens_details") or {}) | usage
        for name in USAGE:
            if usage.get(name) is not None:
                self.usage[name] += int(usage[name])


def finish_reason(record: Record) -> str:
    """Finish reason of the first choice of a record; "error" for an error record."""
    if record["error"] is not None:
        return "error"
    if "response" not in record:
        return str(record["finish_reason"])
    choices = record["response"]["body"].get("choices") or [{}]
    return str(choices[0].get("finish_reason") or "stop")


def output_record(
    line: BatchLine, output: "RequestOutput", *, model: str, with_prompt: bool = False
) -> Record:
    """Build the record of a line with an output."""
    if output.error is not None:
        return error_record(line.head, output.error)
    if line.head.kind != "plain":
        return _openai_record(line.head, 200, _body(line, output, model), None)
    requested: Record = {}
    if with_prompt:
        requested = {"messages": line.messages} if line.messages else {"prompt": line.prompt}
    return {
        "id": _name(line.head),
        "line": line.head.number,
        **requested,
        "text": output.text,
        "finish_reason": output.finish_reason,
        **_all_texts(output),
        **echoed_options(line.options),
        "usage": output.usage.as_dict(),
        "error": None,
    }


def _all_texts(output: "RequestOutput") -> Record:
    if len(output.choices) == 1:
        return {}
    return {"choices": [{"text": c.text, "finish_reason": c.finish_reason} for c in output.choices]}


def error_record(head: LineHead, message: str) -> Record:
    """Build the record of a line that failed."""
    if head.kind != "plain":
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return _openai_record(
            head, 400, {"error": error}, {"code": "invalid_request", "message": message}
        )
    return {
        "id": _name(head),
        "line": head.number,
        "text": None,
        "finish_reason": "error",
        "usage": None,
        "error": message,
    }


def moved_record(record: Record, head: LineHead) -> Record:
    """A record of a line that has another number now; its texts stay."""
    old, new = record["line"], head.number
    if "response" not in record:
        is_numbered = record["id"] == f"line-{old}" and head.name is None
        return record | {"line": new, "id": _name(head) if is_numbered else record["id"]}
    response = dict(record["response"])
    if response["request_id"] == f"req_{old}":  # else the server's
        response["request_id"] = f"req_{new}"
    for prefix in ("cmpl", "chatcmpl"):
        if response["body"].get("id") == f"{prefix}-{old}":
            response["body"] = response["body"] | {"id": f"{prefix}-{new}"}
    return record | {"line": new, "id": f"batch_req_{new}", "response": response}


def is_error(record: Record) -> bool:
    """Whether a record is an error record."""
    return record["error"] is not None


def _name(head: LineHead) -> str:
    return head.name if head.name is not None else f"line-{head.number}"


def _openai_record(head: LineHead, status: int, body: Record, error: Record | None) -> Record:
    return {
        "id": f"batch_req_{head.number}",
        "line": head.number,
        "custom_id": head.name,
        "response": {"status_code": status, "request_id": f"req_{head.number}", "body": body},
        "error": error,
    }


def _body(line: BatchLine, output: "RequestOutput", model: str) -> Record:
    head = line.head
    chat = head.kind == "chat"
    usage = output.usage
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{head.number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(choice, chat=chat) for choice in output.choices],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            **usage.extensions(),
        },
        **echoed_options(line.options),
    }


def _choice(choice: "Choice", *, chat: bool) -> Record:
    record: Record = {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "logprobs": None,
    }
    if chat:
        record["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
    else:
        record["text"] = choice.text
    return record
