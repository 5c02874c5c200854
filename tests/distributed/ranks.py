"""Run functions in several processes that form a process group, one for each rank, for one test after another.

The processes are started once, since importing takes longer than any test here. A rank that fails, or is late, ends
them all, and the test sees the trace of each.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

START_S = 120.0
"""The seconds that starting may take, including imports."""
OTHERS_S = 3.0
"""The seconds that other ranks get after one has failed; mostly they wait for it in vain."""


class RankFailedError(AssertionError):
    """An error for a function that raised on a rank, or didn't finish in time."""


@dataclass(eq=False)
class Ranks:
    """Processes that form a process group.

    Attributes:
        backend: ``gloo`` for ranks on the CPU, ``nccl`` for a GPU each.
        world: how many.
        limit_s: seconds that a function may take.
    """

    backend: str
    world: int = 2
    limit_s: float = 180.0
    _processes: list[Any] = field(default_factory=list)
    _tasks: list[Any] = field(default_factory=list)
    _answers: Any = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank at once; what each returned, in order.

        Args:
            function: of a module that can be imported; it, its arguments and its result are pickled.

        Raises:
            RankFailedError: with the trace of each rank that raised, and the names of those that were not done.
        """
        if not self._processes:
            self._start()
        for tasks in self._tasks:
            tasks.put((function, args, kwargs))
        return self._collect(function.__name__, self.limit_s)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        self._answers = context.Queue()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # inherited, and read when torch is imported there
        try:
            for rank in range(self.world):
                self._tasks.append(context.Queue())
                settings = (rank, self.world, self.backend, str(meeting), self._tasks[-1], self._answers)
                self._processes.append(context.Process(target=_serve, args=settings, daemon=True))
                self._processes[-1].start()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        self._collect("starting", START_S)

    def _collect(self, what: str, limit_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        until = monotonic() + limit_s
        while len(results) + len(failures) < self.world:
            try:
                rank, failure, result = self._answers.get(timeout=max(0.0, min(0.5, until - monotonic())))
            except queue.Empty:
                if monotonic() >= until or not all(process.is_alive() for process in self._processes):
                    break
                continue
            if failure is None:
                results[rank] = result
            else:
                failures[rank] = failure
                until = min(until, monotonic() + OTHERS_S)
        if len(results) == self.world:
            return [results[rank] for rank in range(self.world)]
        missing = [rank for rank in range(self.world) if rank not in results and rank not in failures]
        ended = {rank: self._processes[rank].exitcode for rank in missing}
        self.stop()
        message = [f"rank {rank}:\n{failure}" for rank, failure in sorted(failures.items())]
        message += [
            f"rank {rank}: " + (f"not done after {limit_s:g} s" if code is None else f"its process ended with {code}")
            for rank, code in ended.items()
        ]
        raise RankFailedError(f"{what} on {self.world} ranks ({self.backend}):\n" + "\n".join(message))

    def stop(self) -> None:
        """End the processes. The next :meth:`run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._tasks = [], []


def _serve(rank: int, world: int, backend: str, meeting: str, tasks: Any, answers: Any) -> None:
    """Run a rank: join the group, then run each function that comes."""
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        of_ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in of_ranks.items()})  # as torchrun does
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # which accelerate asks for, and nobody calls
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=START_S)
        )
        answers.put((rank, None, None))
    except Exception:  # noqa: BLE001 - whatever it is, the test shows it
        answers.put((rank, traceback.format_exc(), None))
        return
    while True:
        function, args, kwargs = tasks.get()
        try:
            answers.put((rank, None, function(*args, **kwargs)))
        except Exception:  # noqa: BLE001 - as above
            answers.put((rank, traceback.format_exc(), None))
