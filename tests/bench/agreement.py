"""Two independent clients on one running server, in alternation: our load generator and vLLM's own bench client.

python -m tests.bench.agreement URL MODEL AIPERF PYTHON TOKENIZER; prints the ratio of medians of single-stream and of
total tok/s and exits with 1 when one lies outside 0.97 to 1.03. PYTHON: interpreter of an environment with vLLM.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from rigctl.bench.load import Generator, parameters
from rigctl.contract.sweep import Workload
from rigctl.supervisor.engine_client import Engine
from tests.bench.ceiling import specification, workload

ALLOWED = (0.97, 1.03)
QUESTIONS = ("What is a token?", "Name three rivers.", "Why is the sky blue?", "Count to ten.")


def prompts(count: int, mark: str) -> list[str]:
    """The same for both clients, never twice."""
    return [f"{mark} {number}. {QUESTIONS[number % len(QUESTIONS)]}" for number in range(count)]


@dataclass(frozen=True)
class VllmBench:
    """vLLM's own client. python: of an environment with vLLM."""

    python: str
    url: str
    model: str
    tokenizer: str

    def measure(self, workload: Workload, texts: Sequence[str]) -> dict[str, float]:
        """Tok/s of all streams and median milliseconds of an answer, as `vllm bench serve` reports them."""
        code = (
            "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
            "p = argparse.ArgumentParser(); add_cli_args(p); main(p.parse_args())"
        )
        with tempfile.TemporaryDirectory() as directory:
            data = Path(directory) / "prompts.jsonl"
            data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
            command = [self.python, "-c", code, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
            command += ["--base-url", self.url, "--model", self.model, "--tokenizer", self.tokenizer]
            command += ["--dataset-name", "custom", "--dataset-path", str(data), "--skip-chat-template"]
            command += ["--disable-shuffle", "--custom-output-len", str(workload.output_tokens)]
            command += ["--num-prompts", str(workload.requests), "--max-concurrency", str(workload.concurrency)]
            command += [
                "--extra-body",
                json.dumps({k: v for k, v in parameters(workload).items() if k != "max_tokens"}),
            ]
            command += [
                "--save-result",
                "--result-dir",
                directory,
                "--result-filename",
                "result.json",
                "--disable-tqdm",
                "--percentile-metrics",
                "e2el",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            try:
                result = json.loads((Path(directory) / "result.json").read_text())
            except OSError:
                raise SystemExit(f"vllm bench failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}") from None
        if result["completed"] != workload.requests:
            raise SystemExit(f"vllm bench: {result['completed']} of {workload.requests} requests were answered")
        return {"output_tok_s": result["output_throughput"], "e2e_ms": result["median_e2el_ms"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name in ("url", "model", "aiperf", "python", "tokenizer"):
        parser.add_argument(name)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=32, help="of a round, eight a stream at least")
    arguments = parser.parse_args()
    port = urlsplit(arguments.url).port
    if port is None:
        parser.error("the URL needs a port")
    generator = Generator(arguments.aiperf, 600)
    theirs_client = VllmBench(arguments.python, arguments.url, arguments.model, arguments.tokenizer)
    ratios = {}
    # One stream is compared by whole answers: what lies between two requests is the client's, and on two cores that the
    # engine fills, so is when a client gets to look at a token (vLLM 0.32.0 on CPU).
    for name, concurrency in (("single stream", 1), ("peak", arguments.concurrency)):
        requests = max(arguments.requests, 8 * concurrency)
        load = workload(concurrency, requests, arguments.tokens)
        ours, theirs = [], []
        for number in range(arguments.rounds + 1):
            with tempfile.TemporaryDirectory() as directory:
                texts = prompts(requests, f"A{number}")
                engine = Engine(specification(port, arguments.model))
                measured, _ = generator.measure(load, engine, texts, Path(directory) / "r")
            other = theirs_client.measure(load, prompts(requests, f"V{number}"))
            if number:  # the first pair warms both up
                single = concurrency == 1
                ours.append(1000 * load.output_tokens / measured.e2e_ms.p50 if single else measured.output_tok_s)
                theirs.append(1000 * load.output_tokens / other["e2e_ms"] if single else other["output_tok_s"])
        ratios[name] = median(ours) / median(theirs)
        rounded = [[round(value, 1) for value in values] for values in (ours, theirs)]
        print(f"{name}: aiperf {rounded[0]}, vllm bench {rounded[1]} tok/s, ratio {ratios[name]:.3f}", flush=True)
    return 0 if all(ALLOWED[0] <= ratio <= ALLOWED[1] for ratio in ratios.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
