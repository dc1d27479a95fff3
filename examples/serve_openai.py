"""Start `quire serve` and use it with the client of OpenAI.

pip install "quire-llm[serve]" openai
python examples/serve_openai.py [MODEL]
"""

import subprocess
import sys

from openai import OpenAI


def url_of(server: "subprocess.Popen[str]") -> str:
    """Return the URL that the server prints when it accepts requests."""
    assert server.stdout is not None, "the output is a pipe"
    for line in server.stdout:
        print(line, end="", flush=True)
        if line.startswith("Serving "):
            return line.split()[-1]
    raise SystemExit("the server did not start; its messages are above")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "quire-tiny"
    command = [sys.executable, "-m", "quire", "serve", model, "--kv-memory", "64MiB"]
    command += ["--port", "0"]  # a free one
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            client = OpenAI(base_url=url_of(server), api_key="not-needed")
            served = client.models.list().data[0].id
            stream = client.completions.create(
                model=served,
                prompt="Once upon a time there was",
                max_tokens=40,
                temperature=0.8,
                seed=1,
                stream=True,
            )
            for chunk in stream:
                print(chunk.choices[0].text if chunk.choices else "", end="", flush=True)
            print()
            scored = client.completions.create(
                model=served, prompt="One, two, three,", max_tokens=1, temperature=0, logprobs=3
            )
            print(scored.choices[0].logprobs.top_logprobs[0])
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
