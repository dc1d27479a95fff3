"""Every refusal that a body can cause names a field: every call sets `param`."""

import ast
from pathlib import Path

import quire

SOURCE = Path(quire.__file__).parent
MODULES = (
    *("config/sampling_params.py", "config/sampling_params.py", "config/sampling_params.py"),
    *("engine/input_processor.py", "eviction/eviction_rules.py", "scheduler/request.py"),
    *("scheduler/peaks.py", "tenancy/accounts.py", "models/tokenizer.py"),
    *sorted(str(path.relative_to(SOURCE)) for path in (SOURCE / "serve").glob("*.py")),
)
WITHOUT_A_FIELD = {
    "tenancy/accounts.py": 2,  # the tenant follows from the API key
    "serve/streaming.py": 1,  # several options together leave no token
    "serve/fields.py": 1,  # too many unknown fields: no single field
}


def calls_without_a_field(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name)]
    refusals = [call for call in named if call.func.id in ("RequestError", "NeverFits")]
    return [c.lineno for c in refusals if "param" not in {word.arg for word in c.keywords}]


def test_every_refusal_names_a_field():
    without = {name: calls_without_a_field(SOURCE / name) for name in MODULES}

    found = {name: len(lines) for name, lines in without.items() if lines}
    assert found == WITHOUT_A_FIELD, without
