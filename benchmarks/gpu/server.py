"""The server end to end on the device: its start, and its throughput over HTTP beside that of the same requests offline.

    python -m benchmarks.gpu.server SHAPE [--streams 64 256] [--api-processes 6] [--clients 4] [--folder DIR] [-- FLAGS…]

SHAPE is one of `onward.bench.model_shapes`. The requests are those of the workload "256" (or as many as there are streams),
each streamed over a connection of its own. Clients are processes of their own; throughput is all tokens over the time from
the first request to the last event. FLAGS go to `onward serve`. With a folder, a checkpoint of random numbers is written
there (unless there is one) and served; without, weights are made on the device.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import count
from pathlib import Path

from benchmarks.harness.stream_load import StreamClient, dechunked
from onward.bench.model_shapes import SHAPES, write_checkpoint, write_config, write_tokenizer
from onward.bench.offline import OfflineBenchRequest, shifted, workload_256

START_LIMIT_S = 180.0
STREAM_LIMIT_S = 180.0


def message_of(port: int, request: OfflineBenchRequest, seed: int) -> bytes:
    body = json.dumps(
        {
            "model": "m", "prompt": request.prompt, "max_tokens": request.num_output_tokens, "ignore_eos": True,
            "temperature": 0.6, "seed": seed, "stream": True, "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


def check_answer(parts: list[bytes], request: OfflineBenchRequest) -> int:
    """How many tokens came, by the server's count and by the events' own."""
    text = dechunked(b"".join(parts).partition(b"\r\n\r\n")[2])
    usage = json.loads(text.rpartition(b"data: {")[2].partition(b"\n")[0].join([b"{", b""]))["usage"]
    assert usage["completion_tokens"] == request.num_output_tokens, usage
    assert text.endswith(b"data: [DONE]\n\n")
    return usage["completion_tokens"]


async def load(port: int, requests: list[OfflineBenchRequest], shift: int) -> tuple[float, float, int]:
    """Begin and end on the system's clock, and tokens."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(StreamClient, "127.0.0.1", port))[1] for _ in requests]
    messages = [message_of(port, one, shift) for one in requests]
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    began_s = time.time()
    answers = await asyncio.gather(
        *(client.ask(message, STREAM_LIMIT_S) for client, message in zip(clients, messages, strict=True))
    )
    ended_s = time.time()
    num_tokens = sum(check_answer(parts, one) for parts, one in zip(answers, requests, strict=True))
    for client in clients:
        client.close()
    return began_s, ended_s, num_tokens


def client_main(port: int, streams: int, number: int, of: int, shift: int) -> None:
    import uvloop

    requests = shifted(workload_256(streams), shift, 1 << 30)[number::of]
    print(json.dumps(uvloop.run(load(port, requests, shift))), flush=True)


def run_clients(port: int, streams: int, num_clients: int, shift: int) -> float:
    """Tokens per second."""
    command = [sys.executable, "-m", "benchmarks.gpu.server", "--client"]
    children = [
        subprocess.Popen(
            [*command, *map(str, (port, streams, number, num_clients, shift))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(num_clients)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    told = [json.loads(child.communicate()[0]) for child in children]
    began_s, ended_s = min(one[0] for one in told), max(one[1] for one in told)
    return sum(one[2] for one in told) / (ended_s - began_s)


def start_server(folder: Path, port: int, flags: list[str]) -> tuple[subprocess.Popen, float]:
    """The process, and how long it took until it was healthy."""
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "onward.cli.main", "serve", str(folder), "--port", str(port), "--device", "cuda"]
    command += ["--served-model-name", "m"]
    server = subprocess.Popen([*command, *flags])
    while time.perf_counter() - began_s < START_LIMIT_S and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                if answer.status == 200:
                    return server, time.perf_counter() - began_s
        except OSError:
            time.sleep(0.02)
    raise SystemExit("the server did not start")


def main() -> None:
    if "--client" in sys.argv:
        client_main(*map(int, sys.argv[sys.argv.index("--client") + 1 :]))
        return
    ours, flags = sys.argv[1:], []
    if "--" in ours:
        ours, flags = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--streams", nargs="*", type=int, default=[64, 256])
    parser.add_argument("--api-processes", type=int, default=6)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runs", type=int, default=2, help="counted, after one that is not [%(default)s]")
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args(ours)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if args.folder is None:
            write_config(folder, args.shape)
            flags = ["--load-format", "dummy", *flags]
        elif not (folder / "config.json").exists():
            began_s = time.perf_counter()
            write_checkpoint(folder, args.shape)
            print(f"checkpoint written in {time.perf_counter() - began_s:.0f} s", flush=True)
        write_tokenizer(folder, SHAPES[args.shape]["vocab_size"])
        server, ready_s = start_server(folder, args.port, ["--api-processes", str(args.api_processes), *flags])
        print(f"{args.shape}: ready {ready_s:.1f} s after its start", flush=True)
        try:
            shift = count(1)  # no run finds another one's prompts in the prefix cache
            for streams in args.streams:
                run_clients(args.port, streams, args.clients, next(shift))
                rates = [run_clients(args.port, streams, args.clients, next(shift)) for _ in range(args.runs)]
                runs = ", ".join(f"{rate:.0f}" for rate in rates)
                print(
                    f"{args.shape}, {streams} streams over HTTP: {statistics.median(rates):.0f} tok/s ({runs})",
                    flush=True,
                )
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
