"""The clocks of every benchmark: eager calls, CUDA graphs, host time, and the bandwidth of a plain copy.

A `Call` runs once and returns what it computed; nothing here looks at the result.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}  # of one buffer: far beyond any cache


def elapsed_ms(run: Call, device: torch.device) -> float:
    """Milliseconds of what `run` does or enqueues, waited for: events on a GPU, the wall on a CPU."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def eager_ms(call: Call, device: torch.device, calls: int = 20, repeats: int = 3) -> float:
    """Milliseconds per call of `calls` back-to-back calls, median over repeats."""

    def several():
        for _ in range(calls):
            call()

    return statistics.median(elapsed_ms(several, device) for _ in range(repeats)) / calls


def host_windows_us(call: Call, calls: int = 20, seconds: float = 0.05) -> list[float]:
    """Microseconds until a call returns, the GPU left to work: the median of each window of `calls` calls, for as many windows as fit into
    `seconds`, at least five. The device is drained between windows, so that its queue never fills."""
    windows = []
    end = time.perf_counter() + seconds
    while len(windows) < 5 or time.perf_counter() < end:
        torch.cuda.synchronize()
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        windows.append(1e6 * statistics.median(times))
    torch.cuda.synchronize()
    return windows


def host_us(call: Call, calls: int = 20, seconds: float = 0.05) -> float:
    """The least of `host_windows_us`: what a call costs the host where nothing else slows the machine."""
    return min(host_windows_us(call, calls, seconds))


def graph_ms(calls: Sequence[Call], estimate_ms: float, replays: int = 5, target_ms: float = 8.0) -> float:
    """GPU milliseconds per call, median over replays of one CUDA graph that makes the calls in turn, again and again.

    The graph holds 10 to 200 calls, about target_ms of work by the estimate. Results of the last len(calls) calls stay alive, so that
    calls on different inputs write different memory."""
    rounds = max(1, round(min(max(target_ms / estimate_ms, 10), 200) / len(calls)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    alive: deque[object] = deque(maxlen=len(calls))
    with torch.cuda.stream(side):  # torch.cuda.graph would also collect garbage and empty the allocator's cache each time
        graph.capture_begin()
        try:
            for _ in range(rounds):
                for call in calls:
                    alive.append(call())
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    device = torch.device("cuda")
    return statistics.median(elapsed_ms(graph.replay, device) for _ in range(replays)) / (rounds * len(calls))


def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes per second, read plus written, of copying a buffer of `size` bytes (default 2 GiB on a GPU, 64 MiB on a CPU).

    The copy kernel at its best tile on a GPU, torch's copy on a CPU."""
    x = torch.zeros((COPY_BYTES[device.type] if size is None else size) // 4, dtype=torch.int32, device=device)
    y = torch.empty_like(x)
    copies: list[Call] = [lambda: y.copy_(x)]
    if device.type == "cuda":
        from openkda.portable.copy import TILES, copy

        copies = [lambda tile=tile: copy(x, y, *tile) for tile in TILES]
    for run in copies:
        run()
    return 2e3 * x.nbytes / min(eager_ms(run, device, calls=4, repeats=7) for run in copies)
