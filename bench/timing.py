"""Device time and wall time of a call, and the ceilings of the card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 256 << 20


class Stopwatch:
    """Device time: replays of a CUDA graph of the call, timed by events, with L2 flushed before.

    ``flush`` "write" leaves the cache full of lines that still have to be written back, "read" full
    of clean ones.
    """

    def __init__(self, repeats: int = 30, flush: str = "write") -> None:
        self.repeats = repeats
        self.junk = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self.clean = torch.zeros_like(self.junk) if flush == "read" else None

    def flush(self) -> None:
        self.junk.zero_()
        if self.clean is not None:
            self.clean.max()

    def device_ms(self, call: Callable[[], Any], repeats: int | None = None) -> tuple[float, bool]:
        """(median ms, whether of a graph); a call that cannot be captured is timed as it is."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph, captured = torch.cuda.CUDAGraph(), True
        try:
            with torch.cuda.graph(graph):
                kept = call()  # noqa: F841  outputs must outlive the replays
            run: Callable[[], Any] = graph.replay
        except Exception:
            torch.cuda.synchronize()
            run, captured = call, False
        run()
        marks = []
        for _ in range(repeats or self.repeats):
            self.flush()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in marks), captured

    def wall_us(self, call: Callable[[], Any]) -> float:
        """Time per eager call, many in a row: of the host or of the device, whichever is slower."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(self.repeats):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / self.repeats * 1e6

    def kernels_us(self, call: Callable[[], Any], repeats: int = 15) -> float:
        """Time in the call's own kernels, start to end by the profiler, with L2 flushed before.

        What a stopwatch of events reads has the launch in it, some 4 us of an empty kernel.
        """
        from torch.profiler import ProfilerActivity, profile

        def seen(run: Callable[[], Any]) -> list[tuple[str, float]]:
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
                for _ in range(repeats):
                    self.flush()
                    run()
                    torch.cuda.synchronize()
            return [(event.name, event.device_time_total) for event in profiler.events()]

        for _ in range(3):
            call()
        flushing = {name for name, _ in seen(lambda: None)}
        times: dict[str, list[float]] = {}
        for name, us in seen(call):
            if name not in flushing:
                times.setdefault(name, []).append(us)
        return sum(statistics.median(of) * round(len(of) / repeats) for of in times.values())

    def ceilings(self) -> dict[str, float]:
        """What the card reaches: copies (read + written), bf16 products, one tiny kernel."""
        source = torch.zeros(1 << 29, dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        copy_ms, _ = self.device_ms(lambda: torch.add(source, 1, out=target), 15)
        copied = 2 * source.numel() * source.element_size()
        a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
        gemm_ms, _ = self.device_ms(lambda: a @ b, 15)
        tiny = torch.zeros(32, device="cuda")
        tiny_ms, _ = self.device_ms(lambda: tiny.add_(1))
        tiny_kernel_us = self.kernels_us(lambda: tiny.add_(1))
        return {
            "copy_TBps": round(copied / copy_ms / 1e9, 3),
            "bf16_gemm_TFLOPs": round(2 * 8192**3 / gemm_ms / 1e9, 1),
            "tiny_kernel_us": round(tiny_ms * 1e3, 2),
            "tiny_kernel_by_profiler_us": round(tiny_kernel_us, 2),
        }
