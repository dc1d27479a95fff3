"""Start `quire serve` and use it with the client of OpenAI.

pip install "quire-llm[serve]" openai
python examples/serve_openai.py [MODEL]
"""

import socket
import subprocess
import sys
import time
from urllib.request import urlopen

from openai import OpenAI


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(address: str, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            with urlopen(f"{address}/ready", timeout=5):
                return
        except OSError:  # no connection while the model is loaded
            time.sleep(0.2)
    raise SystemExit("the server did not start; its messages are above")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "quire-tiny"
    port = free_port()
    command = [sys.executable, "-m", "quire", "serve", model, "--port", str(port)]
    with subprocess.Popen([*command, "--kv-memory", "64MiB"]) as server:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", server)
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="not-needed")
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
